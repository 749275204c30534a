"""Deadlines: what hangs or breaks has no reward, which is not reward 0."""

from __future__ import annotations

import threading

import pytest

from nanok3.envs.environment import Budget, InfraError, Observation, Reply, Task, Verdict
from nanok3.envs.episode import Episode, play, scripted, within
from nanok3.envs.in_process import InProcess

QUICK = Budget(steps=3, reset_seconds=0.05, step_seconds=0.05, verdict_seconds=0.05)


class Fragile(InProcess):
    """Hangs or raises at one of three places."""

    def __init__(self, place="", how="hang"):
        super().__init__()
        self.place, self.how, self.closed, self.asked = place, how, 0, 0
        self.gate = threading.Event()

    def _maybe(self, place):
        if place == self.place:
            if self.how == "raise":
                raise InfraError("the disk is gone")
            if self.how == "bug":
                raise KeyError("oops")
            self.gate.wait(5)

    def reset(self, task):
        self._maybe("reset")
        return super().reset(task)

    def step(self, reply):
        self._maybe("step")
        return super().step(reply)

    def judge(self, hidden):
        self.asked += 1
        self._maybe("verdict")
        return Verdict(float(self.answer == "yes"), "say yes")

    def close(self):
        self.closed += 1


def task():
    return Task("t", "test", "Say yes.", budget=QUICK)


@pytest.mark.parametrize("how", ["hang", "raise", "bug"])
@pytest.mark.parametrize("place", ["reset", "step", "verdict"])
def test_what_hangs_or_breaks_is_void(place, how):
    env = Fragile(place, how)
    played = play(env, task(), scripted([Reply("yes")]))
    assert played.outcome == "infra-failed" and played.reward is None and played.reason.startswith(place)
    assert env.closed == (0 if how == "hang" else 1)  # what was left behind is not touched again
    env.gate.set()


def test_a_whole_episode():
    env = Fragile()
    played = play(env, task(), scripted([Reply("yes")]))
    assert (played.outcome, played.reward, played.public) == ("done", 1.0, "say yes")
    assert (env.closed, played.calls, played.tool_errors) == (1, 0, 0)
    assert play(Fragile(), task(), scripted([])).reward == 0.0


def test_the_policys_own_failure_is_its_callers():
    env = Fragile()
    with pytest.raises(RuntimeError):
        play(env, task(), lambda trajectory: (_ for _ in ()).throw(RuntimeError("policy")))
    assert env.closed == 1


def test_within():
    assert within(1, lambda: 3, "x") == 3
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 / 0, "x")
    gate = threading.Event()
    with pytest.raises(InfraError, match=r"x was not done within 0\.01 s"):
        within(0.01, lambda: gate.wait(5), "x")
    gate.set()


def test_an_episode_pauses_between_turns():
    episode = Episode(Fragile(), task())
    episode.reset()
    assert episode.running and episode.trajectory.observations == [Observation("Say yes.")]
    kept = episode.environment.snapshot()
    episode.step(Reply("no"))
    assert not episode.running and episode.trajectory.reward == 0.0
    episode.environment.restore(kept)
    assert episode.environment.step(Reply("yes")).done and episode.environment.verdict().score == 1.0
