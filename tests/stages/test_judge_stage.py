"""`nanok3 judge`: a file of candidates judged over HTTP in both orders, the gate, and mistakes that are told."""

from __future__ import annotations

import json

import pytest
from served import listening, served

from nanok3.cli import main
from nanok3.data.chat import answer, encode
from nanok3.data.tokenizer import train_tokenizer
from nanok3.envs.tools import schemas
from nanok3.posttrain.judge import TOOLS
from nanok3.stages.judge import JudgeArgs, read_case
from nanok3.stages.judge import main as judge

TOKENIZER = train_tokenizer([json.dumps(schemas(TOOLS))], 512 + 100)


def turn(*calls, text=""):
    """A reply of the scripted judge."""
    made = [
        {"id": str(n), "type": "function", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(calls)
    ]
    said = {"role": "assistant", "content": text, "reasoning_content": ""}
    return {"ids": encode(answer(said | ({"tool_calls": made} if made else {})), TOKENIZER)}


def run(a, b):
    """One whole run that gives A and B these points."""
    scores = [("score", {"candidate": w, "points": p, "reason": "x"}) for w, p in (("A", a), ("B", b))]
    reads = [("read", {"candidate": which}) for which in "AB"]
    return [turn(*reads, ("rubric", {"criteria": "x"}), *scores, ("scorepad", {"A": a, "B": b})), turn(text="ok")]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_orders_and_the_gate_through_http(tmp_path, capsys):
    rows = [
        {"goal": "say good", "candidates": ["good", "bad"]},
        {"goal": "say fine", "candidates": ["fine", {"text": "fine too", "tokens": 90}], "l0": 10},
    ]
    data, out = write(tmp_path / "c.jsonl", *rows), tmp_path / "v.jsonl"
    with served(*run(9, 2), *run(2, 9), tokenizer=TOKENIZER) as stub, listening(stub.app) as base:
        judge(JudgeArgs(candidates=data, base_url=base, out=out, criteria="kind"))
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [verdict["rewards"] for verdict in verdicts] == [[1.0, 0.0], [1.0, 0.0]]
    assert [verdict["too_long"] for verdict in verdicts] == [[False, False], [False, True]]
    assert "2/2 1.00 0.00*  say fine" in capsys.readouterr().out


def test_a_judge_that_leaves_out_a_step_is_said(tmp_path, capsys):
    data = write(tmp_path / "c.jsonl", {"goal": "g", "candidates": ["a", "b"]})
    with served(turn(text="A is better"), tokenizer=TOKENIZER) as stub, listening(stub.app) as base:
        judge(JudgeArgs(candidates=data, base_url=base))
    said = capsys.readouterr().out
    assert "1/1 none none" in said and "2 candidates have no verdict" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "x: line 1: no JSON"),
        ('{"candidates": ["a", "b"]}', "goal is None"),
        ('{"goal": "g", "candidates": ["a"]}', r"allowed: a list of at least two"),
        ('{"goal": "g", "candidates": ["a", 3]}', r"candidates\[1\] is 3; allowed: a string, or an object"),
        ('{"goal": "g", "candidates": ["a", {"text": "b", "tokens": -1}]}', r"candidates\[1\].tokens is -1"),
        ('{"goal": "g", "candidates": ["a", "b"], "l0": 0}', "l0 is 0; allowed: a number above 0"),
    ],
)
def test_a_wrong_line_is_named(line, message):
    with pytest.raises(ValueError, match=message):
        read_case(line, "x: line 1")


def test_mistakes_of_the_command(tmp_path, capsys):
    data = str(write(tmp_path / "c.jsonl", {"goal": "g", "candidates": ["a", "b"]}))
    assert main(["judge", "none.jsonl"]) == 2 and "no file none.jsonl" in capsys.readouterr().err
    assert main(["judge", data, "--sigma", "0"]) == 2 and "sigma is 0.0" in capsys.readouterr().err
    assert main(["judge", data, "--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert "http://127.0.0.1:9/v1 cannot be reached" in capsys.readouterr().err
    with served() as stub, listening(stub.app) as base:
        with pytest.raises(ValueError, match=r"model is 'gpt'; .* has stub"):
            judge(JudgeArgs(candidates=tmp_path / "c.jsonl", base_url=base, model="gpt"))
        with pytest.raises(ValueError, match="answers 404"):
            judge(JudgeArgs(candidates=tmp_path / "c.jsonl", base_url=f"{base}/nowhere"))
