"""A turn: what the parser makes of it, what counts, and what follows it."""

import json

import pytest
from playing import TOKENIZER, said

from nanok3.data.chat import OURS
from nanok3.envs.environment import Observation, Reply, Result
from nanok3.envs.tools import Call
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.turn import Turn, following
from nanok3.serve.engine import Token

THOUGHT = [5, 6, 7]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get", "arguments": {"k": 'a"b'}}}]}


def begun(ids=(), **more):
    sample = Sample(0, 0, ids=[1, 2, *ids], begins=2, places=[*range(2, 2 + len(ids))], logprobs=[-1.0] * len(ids))
    sample.versions = [0] * len(ids)
    return Turn(sample, TOKENIZER, more.get("counted", "thinking"), more.get("limit"), 1)


def say(turn, ids):
    return [turn.push(Token(token, -0.5)) for token in ids]


def test_a_turn_becomes_a_reply():
    turn = begun()
    ids = said(CALL, THOUGHT)
    assert say(turn, ids)[-1] is True, "the message has ended"
    reply = turn.reply()
    assert (reply.text, reply.thinking) == ("", TOKENIZER.decode(THOUGHT))
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("get", {"k": 'a"b'})]
    assert turn.sample.ids == [1, 2, *ids] and turn.sample.versions == [1] * len(ids) and not turn.sample.problems


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_turn_that_was_left_goes_on(cut):
    ids = said(CALL, THOUGHT)
    whole, resumed = begun(), begun(ids[:cut])
    say(whole, ids), say(resumed, ids[cut:])
    assert resumed.reply() == whole.reply() and resumed.spent == whole.spent == 3
    assert resumed.sample.versions == [0] * cut + [1] * (len(ids) - cut)


def test_what_counts_against_a_budget():
    for counted, spent in (("thinking", 3), ("output", len(said(CALL, THOUGHT)))):
        turn = begun(counted=counted, limit=spent)
        say(turn, said(CALL, THOUGHT))
        assert turn.spent == spent and not turn.over
    turn = begun(limit=2)
    assert say(turn, THOUGHT) == [False, False, True] and turn.over


def test_results_follow_in_the_order_of_the_calls():
    calls = (Call("get", '{"k": 1}'), Call("set", "no json"))
    results = (Result("get", "12"), Result("set", "error: no", error=True))
    text = TOKENIZER.decode(following(Reply("", calls), Observation(results=results), TOKENIZER, OURS))
    assert text.index('tool="get" index="1"') < text.index("12") < text.index('tool="set" index="2"')
    assert text.index('tool="set" index="2"') < text.index("error: no") and text.endswith("<|open|>think<|sep|>")
    told = following(Reply("", calls), Observation("more", results), TOKENIZER, OURS)
    assert "more" in TOKENIZER.decode(told)
