"""The harness: other names, forms and contexts, the same task; drawn by the group."""

from __future__ import annotations

import json

import pytest

from nanok3.envs.environment import Observation, Reply
from nanok3.envs.episode import Episode, Trajectory, play, scripted, solution
from nanok3.envs.harness import LEFT_OUT, NAMES, PROMPTS, Harness, Harnessed, draw, messages
from nanok3.envs.office import Office, office_tasks
from nanok3.envs.tools import Call


def task():
    return next(office_tasks("lookup"))


def renamed(replies, names):
    return [Reply(r.text, tuple(Call(NAMES[names](c.name), c.arguments) for c in r.calls), r.thinking) for r in replies]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("results", ["text", "json"])
def test_the_task_is_the_same(names, results):
    env = Harnessed(Office(), Harness(names=names, results=results))
    played = play(env, task(), scripted(renamed(solution(task()), names)))
    assert played.reward == 1.0
    shown = played.observations[1].results[0]
    assert shown.name == NAMES[names]("mail_list") == env.tools(task())[0].name
    assert results == "text" or set(json.loads(shown.content)) == {"result"}


def test_a_name_that_was_not_shown_is_unknown():
    env = Harnessed(Office(), Harness(names="camel"))
    env.reset(task())
    assert env.step(Reply(calls=(Call("mail_list"),))).results[0].error


def test_memory_and_order():
    env = Harnessed(Office(), Harness(memory=True))
    env.reset(task())
    calls = (Call("remember", {"text": "one"}), Call("notes_list"), Call("recall"), Call("remember", {}))
    seen = env.step(Reply(calls=calls)).results
    assert [r.name for r in seen] == ["remember", "notes_list", "recall", "remember"]
    assert seen[2].content == "one" and "title" in seen[1].content and seen[3].error
    kept, fork = env.snapshot(), env.fork()
    env.step(Reply(calls=(Call("remember", {"text": "two"}),)))
    assert fork.kept == ["one"] and env.kept == ["one", "two"]
    env.restore(kept)
    assert env.kept == ["one"] and env.snapshot() == kept
    with pytest.raises(ValueError, match="snapshot of harness"):
        Harnessed(Office(), Harness()).restore(kept)
    assert not any(tool.name == "recall" for tool in Harnessed(Office(), Harness()).tools(task()))


def test_a_helper_acts_on_the_same_state():
    helper = scripted([*solution(task())[:-1], Reply("I have answered.")])
    env = Harnessed(Office(), Harness(helper_steps=5), helper)
    played = play(env, task(), scripted([Reply(calls=(Call("delegate", {"goal": "Answer it."}),)), Reply("done")]))
    assert played.reward == 1.0 and played.observations[1].results[0].content == "I have answered."
    short = Harnessed(Office(), Harness(helper_steps=2), helper)
    played = play(short, task(), scripted([Reply(calls=(Call("delegate", {"goal": "Answer it."}),)), Reply("done")]))
    assert played.reward == 0.0 and "did not finish" in played.observations[1].results[0].content
    with pytest.raises(ValueError, match="helper_steps is 2"):
        Harnessed(Office(), Harness(helper_steps=2))


def histories(harness):
    episode = Episode(Harnessed(Office(), harness), task())
    episode.reset()
    found = [messages(harness, episode.trajectory)]
    for reply in solution(task()):
        episode.step(reply)
        found.append(messages(harness, episode.trajectory))
    return found


def test_messages_only_grow_or_leave_out():
    found = histories(Harness(prompt="careful"))
    for one, two in zip(found, found[1:]):
        assert two[: len(one)] == one
    assert found[-1][0] == {"role": "system", "content": PROMPTS["careful"]} and found[-1][1]["content"] == task().goal
    ids = [call["id"] for m in found[-1] for call in m.get("tool_calls", ())]
    assert ids == [m["tool_call_id"] for m in found[-1] if m["role"] == "tool"]
    results = [m["content"] for m in histories(Harness(prompt="none", window=2))[-1] if m["role"] == "tool"]
    assert results[:-2] == [LEFT_OUT] * (len(results) - 2) and LEFT_OUT not in results[-2:]


def test_what_the_user_says_on_the_way_is_read():
    """An environment of several turns goes on after a reply without calls."""
    played = Trajectory(task(), [Observation("first"), Observation("second"), Observation(done=True)])
    played.replies = [Reply("one"), Reply("two")]
    told = [(m["role"], m["content"]) for m in messages(Harness(prompt="none"), played)]
    assert told == [("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "two")]


def test_groups_draw_their_own():
    drawn = {group: draw(group) for group in map(str, range(60))}
    assert drawn == {group: draw(group) for group in drawn}
    assert len({harness.digest for harness in drawn.values()}) > 20 and draw("1", 1) != draw("1", 2)
    assert {h.prompt for h in drawn.values()} == set(PROMPTS) and {h.names for h in drawn.values()} == set(NAMES)
    assert all(h.helper_steps == 0 for h in drawn.values())
    assert any(draw(group, helpers=True).helper_steps for group in drawn)
