"""`nanok3 judge`: a file of candidates judged over HTTP in both orders, the gate, and mistakes that are told."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from served import listening, served

from nanok3.cli import main
from nanok3.data.chat import answer, encode
from nanok3.data.tokenizer import train_tokenizer
from nanok3.envs.tools import schemas
from nanok3.posttrain.judge import TOOLS, ChatJudge, served_models
from nanok3.posttrain.judge import run as one_run
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


def test_mistakes_that_are_told_before_anything_is_asked(tmp_path, capsys):
    data = write(tmp_path / "c.jsonl", {"goal": "g", "candidates": ["a", "b"]})
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    for flags, message in (
        ([data, "--timeout", "1e30"], "timeout is 1e+30; it must be at most 86400 seconds"),
        ([data, "--out", tmp_path], "which is a folder; name a file"),
        ([tmp_path / "bad.jsonl"], "bad.jsonl is no UTF-8"),
        ([data, "--base-url", "nonsense"], "base_url is 'nonsense'; allowed: http://HOST:PORT/v1"),
        ([data, "--base-url", "ftp://x"], "base_url is 'ftp://x'; allowed: http://HOST:PORT/v1"),
        ([data, "--base-url", "http://[::1/v1"], "base_url: http://[::1/v1 cannot be reached"),
        ([data, "--base-url", "http://a b/v1"], "base_url: http://a b/v1 cannot be reached"),
        ([data, "--base-url", "http://"], "base_url: http:// cannot be reached"),
        ([data, "--base-url", "http://127.0.0.1:9/v1", "--api-key", "\u20ac"], "cannot be reached"),
    ):
        assert main(["judge", *map(str, flags)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("said", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\n\r\n<p>", b"HTTP/1.1 200 OK\r\n\r\n[]"])
def test_what_is_no_api_is_told(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(ValueError, match=f"^base_url: {base} (cannot be reached|answers no JSON object)"):
            served_models(base)
        thread.join()


def test_a_reply_without_a_message_is_an_error_that_says_so():
    numbers = ({"name": None, "arguments": "{}"}, {"name": "read", "arguments": 17})
    messages = [{"tool_calls": [{"function": function}]} for function in numbers] + [{"content": 5}]
    nonsense = [{"choices": [{"message": message}]} for message in messages]
    for reply in ({}, {"choices": []}, {"choices": [{"message": None}]}, {"choices": [3]}, *nonsense):
        with pytest.raises(ValueError, match=r"a reply without choices\[0\].message"):
            one_run(ChatJudge(lambda request, reply=reply: reply), "g", "a", "b")
