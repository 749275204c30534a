"""The stub: replies in turn, wrong lines named, and what a grammar leaves of a script."""

from __future__ import annotations

import json

import pytest

import nanok3.serve.scripted as scripted
from nanok3.data.tokenizer import Tokenizer
from nanok3.serve.events import Answer
from nanok3.serve.protocol import read_chat
from nanok3.serve.scripted import Playback, Reply, Scripted


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer({bytes([byte]): byte for byte in range(256)})


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*lines):
        path = tmp_path / "replies.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
        return Scripted.load(path, tokenizer)

    return load


HELLO = {
    "segments": [{"text": "<|close|>", "special": False}, {"text": "hm<|close|>think<|sep|>", "special": True}],
    "delay_ms": 0,
}


def test_a_line_a_request_and_the_last_again(load):
    script = load({"ids": [1, 258]}, "", {"ids": [2], "delay_ms": 5})
    assert [script.next_reply() for _ in range(4)] == [[1, 258], [2, 258], [2, 258], [2, 258]]
    assert script.next() == Reply((2, 258), 0.005)


def test_special_is_markup_and_the_rest_is_text(load, tokenizer):
    ids = load(HELLO).next_reply()
    assert ids == [*b"<|close|>hm", 260, *b"think", 261, 258]
    assert load({"segments": []}).next_reply() == [258] == load({"ids": []}).next_reply()
    assert load({"ids": [7, tokenizer.eos_id]}).next_reply() == [7, tokenizer.eos_id]
    assert load({"segments": [{"text": "\u2028"}]}, '{"ids": [5]}').next_reply() == [*"\u2028".encode(), 258]


def test_a_script_of_an_answer_is_read(load, tokenizer):
    parts = ["think it", "<|close|>think<|sep|><|open|>response<|sep|>", "Yes.", "<|close|>response<|sep|>"]
    parts += ["", "<|close|>message<|sep|><|end_of_msg|>"]
    script = load({"segments": [{"text": part, "special": k % 2 == 1} for k, part in enumerate(parts)]})
    request = read_chat({"messages": [{"role": "user", "content": "x"}]})
    parser, playback = request.parser(tokenizer), script.play()
    events = []
    while not parser.done:
        events += parser.push(playback.next())
    found = Answer(events + parser.finish())
    assert (found.reasoning, found.content, found.problems) == ("think it", "Yes.", [])
    assert playback.next() == tokenizer.end_of_msg_id


def test_a_mask_passes_over_what_it_forbids():
    playback = Playback(Reply((5, 6, 7, 8, 9)), end=9, vocab_size=20)
    assert playback.next(lambda token: token != 5) == 6
    assert playback.next() == 7
    assert playback.next(lambda token: token in (3, 4, 9)) == 9
    assert playback.next(lambda token: token in (3, 4)) == 3
    assert playback.next(lambda token: token in (3, 9)) == 9
    assert playback.next() == 9


def test_tokens_take_their_time(monkeypatch):
    slept = []
    monkeypatch.setattr(scripted.time, "sleep", slept.append)
    playback = Playback(Reply((1, 2), delay=0.25), end=2, vocab_size=3)
    assert [playback.next(), playback.next()] == [1, 2] and slept == [0.25, 0.25]
    Playback(Reply((1,)), end=2, vocab_size=3).next()
    assert len(slept) == 2


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "no JSON: "),
        ("[" * 100_000, "no JSON: "),
        ("[]", r"it is \[\]; allowed: an object with segments or ids"),
        ({}, "both segments and ids, or neither"),
        ({"ids": [1], "segments": []}, "both segments and ids, or neither"),
        ({"ids": 1}, "ids is 1; allowed: a list"),
        ({"ids": [1, 512]}, r"ids\[1\] is 512; allowed: a token id, 0 to 511"),
        ({"ids": [True]}, r"ids\[0\] is true"),
        ({"segments": ["x"]}, r"segments\[0\] is \"x\"; allowed: an object with text and special"),
        ({"segments": [{"special": True}]}, r"segments\[0\].text is null; allowed: a string"),
        ({"segments": [{"text": "x", "special": 1}]}, r"segments\[0\].special is 1; allowed: true, false"),
        ({"ids": [1], "delay_ms": -1}, "delay_ms is -1; allowed: a number from 0 to 60000"),
        ({"ids": [1], "delay": 1}, "delay is 1; allowed: no such field; segments or ids, and delay_ms"),
    ],
)
def test_a_wrong_line_is_named(load, line, message):
    with pytest.raises(ValueError, match=rf"replies\.jsonl: line 2: .*{message}"):
        load({"ids": [1]}, line)


def test_a_wrong_file_is_named(load, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"replies\.jsonl has no lines; allowed: one reply or more"):
        load("", " ")
    with pytest.raises(ValueError, match=r"cannot read .*none\.jsonl: No such file"):
        Scripted.load(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "latin").write_bytes(b'{"ids": [1]}\xff')
    with pytest.raises(ValueError, match=r"cannot read .*latin: it is not UTF-8"):
        Scripted.load(tmp_path / "latin", tokenizer)
