"""The interface: calls that cannot be carried out are observations, snapshots are exact, forks are apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.envs.environment import Budget, Reply, Task, Verdict
from nanok3.envs.in_process import InProcess
from nanok3.envs.tools import Call, ToolError, read_arguments, shorten, tool

ADD = tool("add", "Add to the counter.", amount="integer", note_="string")
FAIL = tool("fail", "Raise.", kind={"type": "string", "enum": ["tool", "python"]})


class Counter(InProcess):
    def perform(self, name, arguments):
        if name == "fail":
            raise ToolError("no") if arguments["kind"] == "tool" else ZeroDivisionError("oh")
        self.state["count"] += arguments["amount"]
        return str(self.state["count"])

    def judge(self, hidden):
        return Verdict(float(self.state["count"] == self.task.hidden["count"]), "public")


def task(**more):
    return Task("t", "test", "Count to 5.", {"count": 0}, {"count": 5}, (ADD, FAIL), **more)


def started(**more):
    env = Counter()
    env.reset(task(**more))
    return env


def test_before_a_reset():
    with pytest.raises(ValueError, match="reset first"):
        Counter().step(Reply("x"))


def test_an_episode_by_hand():
    env = started()
    assert env.step(Reply(calls=(Call("add", '{"amount": 2}'), Call("add", {"amount": 3})))).results[1].content == "5"
    assert env.step(Reply("done")).done and env.verdict() == Verdict(1.0, "public")
    with pytest.raises(ValueError, match="over"):
        env.step(Reply("more"))


@pytest.mark.parametrize(
    "call, said",
    [
        (Call("nothing"), "no tool 'nothing'"),
        (Call("add", '{"amount": 2'), "not JSON"),
        (Call("add", "[1]"), "an object was expected"),
        (Call("add", "{}"), "amount is missing"),
        (Call("add", '{"amount": true}'), "type integer"),
        (Call("add", '{"amount": "2"}'), "type integer"),
        (Call("add", '{"amount": 2, "x": 1}'), "'x' is unknown"),
        (Call("fail", '{"kind": "other"}'), "one of tool, python"),
        (Call("fail", '{"kind": "tool"}'), "error: no"),
        (Call("fail", '{"kind": "python"}'), "ZeroDivisionError: oh"),
        (Call("add", "[" * 100_000), "not JSON"),
    ],
)
def test_a_bad_call_is_an_observation(call, said):
    env = started()
    result = env.step(Reply(calls=(call,))).results[0]
    assert result.error and said in result.content and env.errors == 1 and env.state == {"count": 0}
    assert not env.step(Reply(calls=(Call("add", '{"amount": 5}'),))).results[0].error


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.text(max_size=60))
def test_garbled_calls_never_raise(name, arguments):
    result = started().step(Reply(calls=(Call(name, arguments), Call("add", arguments)))).results
    assert result[0].error and len(result) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.text(max_size=3))
def test_truncated_arguments_never_raise(cut, tail):
    whole = json.dumps({"amount": 3, "note": "one two"})
    started().step(Reply(calls=(Call("add", whole[:cut] + tail),)))


def test_budgets():
    env = started(budget=Budget(steps=2, calls=1, characters=10))
    calls = (Call("add", {"amount": 1}), Call("add", {"amount": 1}))
    first = env.step(Reply(calls=calls))
    assert not first.done and first.results[1].error and env.state["count"] == 1
    assert len(first.results[1].content) < 50
    assert env.step(Reply(calls=calls[:1])).done
    with pytest.raises(ValueError, match="steps is 0"):
        Budget(steps=0)


def test_snapshots_are_exact_and_forks_are_apart():
    env = started()
    env.step(Reply(calls=(Call("add", {"amount": 2}),)))
    kept, fork = env.snapshot(), env.fork()
    fork.step(Reply(calls=(Call("add", {"amount": 3}),)))
    assert (fork.verdict().score, env.verdict().score) == (1.0, 0.0)
    env.step(Reply(calls=(Call("add", {"amount": 9}), Call("?"))))
    env.restore(kept)
    assert env.snapshot() == kept and env.errors == 0
    other = Counter()
    other.reset(Task("u", "test", "", {"count": 0}, {"count": 5}))
    with pytest.raises(ValueError, match="snapshot of task 't'"):
        other.restore(kept)


def test_nothing_happens_while_it_is_paused():
    env = started()
    env.pause()
    for what in (lambda: env.step(Reply("x")), env.snapshot, env.verdict, env.fork):
        with pytest.raises(ValueError, match="paused"):
            what()
    env.resume()
    assert not env.step(Reply(calls=(Call("add", {"amount": 1}),))).results[0].error


def test_the_initial_state_is_not_shared():
    one = Task("t", "test", "", {"list": [1]}, {"count": 5})
    env = Counter()
    env.reset(one)
    env.state["list"].append(2)
    assert one.state == {"list": [1]}


def test_the_chat_api_form():
    schema = ADD.schema()
    assert schema["type"] == "function" and schema["function"]["parameters"]["required"] == ["amount"]
    assert set(schema["function"]["parameters"]["properties"]) == {"amount", "note"}
    assert read_arguments(ADD, '{"amount": 1, "note": "x"}') == {"amount": 1, "note": "x"}


def test_shortened():
    assert shorten("abc", 3) == "abc" and shorten("abcdef", 4) == "ab\n[2 characters left out]\nef"
    assert shorten("abcdef", 1).endswith("f")
