"""Office tasks: solved by their solutions, and by nothing that sprays, reports or half does."""

from __future__ import annotations

from itertools import islice

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.office import KINDS, Office, office_tasks
from nanok3.envs.tools import Call


def tasks(kind, count=5, split="train", seed=0):
    return list(islice(office_tasks(kind, split, seed), count))


@pytest.mark.parametrize("kind", KINDS)
def test_solutions_solve_and_less_does_not(kind):
    for task in tasks(kind):
        replies = solution(task)
        played = play(Office(), task, scripted(replies))
        assert played.reward == 1.0 and played.tool_errors == 0, task
        assert play(Office(), task, scripted(replies[:-2])).reward < 1.0
        extra = Reply(calls=(Call("chat_post", {"channel": "team", "text": "done everything"}),))
        assert play(Office(), task, scripted([extra, *replies])).reward == 0.0
        assert play(Office(), task, scripted([Reply("I have done all of it.")])).reward == 0.0


def test_all_numbers_to_everybody():
    task = tasks("lookup", 1)[0]
    codes = [note["body"].split()[-1].rstrip(".") for note in task.state["note"]]
    who = task.state["mail"][0]["sender"]
    sprays = [
        [Call("mail_send", {"to": who, "subject": "", "body": " ".join(codes)})],
        [Call("mail_send", {"to": who, "subject": "", "body": code}) for code in codes],
    ]
    for calls in sprays:
        assert play(Office(), task, scripted([Reply(calls=tuple(calls))])).reward == 0.0


def test_days_give_their_share():
    task = tasks("days", 1)[0]
    replies = solution(task)
    played = play(Office(), task, scripted([*replies[:2], Reply("enough")]))
    assert played.reward == 1 / len(task.hidden["wants"]) and "requests fulfilled" in played.public


def test_an_episode_goes_on_from_its_snapshot():
    task = tasks("ask", 1)[0]
    replies, first = solution(task), Office()
    first.reset(task)
    for reply in replies[:2]:
        first.step(reply)
    kept = first.snapshot()
    second = Office()
    second.reset(task)
    second.restore(kept)
    fork = second.fork()
    for reply in replies[2:]:
        seen = second.step(reply)
        assert seen == fork.step(reply)
    assert second.verdict().score == fork.verdict().score == 1.0 and first.verdict().score < 1.0
    second.restore(kept)
    assert second.snapshot() == kept


def test_streams():
    assert [t.id for t in tasks("move")] == [t.id for t in tasks("move")]
    assert not {t.id for t in tasks("move", 50)} & {t.id for t in tasks("move", 20, "held-out", 1)}
    for bad in (("nothing", "train"), ("move", "test")):
        with pytest.raises(ValueError, match="expected one of"):
            next(office_tasks(*bad))
