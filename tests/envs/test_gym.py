"""reasoning-gym as an optional dependency: guarded scorers, full scores only."""

from __future__ import annotations

import sys
from itertools import islice
from types import SimpleNamespace

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.gym import SETS, GymEnvironment, gym_tasks


class Rows(list):
    def score_answer(self, answer, entry):
        if answer == "raise":
            raise RuntimeError("not a number")
        return 1.0 if answer == entry["answer"] else 0.05


@pytest.fixture
def stand_in(monkeypatch):
    rows = Rows({"question": f"What is {n} + 1?", "answer": str(n + 1), "metadata": {}} for n in range(60))
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=lambda name, seed, size: rows))


def reward(task, text):
    return play(GymEnvironment(), task, scripted([Reply(text)])).reward


def test_scorers_are_guarded(stand_in):
    tasks = list(gym_tasks("chain_sum"))
    held = list(gym_tasks("chain_sum", "held-out"))
    assert len(tasks) + len(held) == 60 and held
    assert play(GymEnvironment(), tasks[0], scripted(solution(tasks[0]))).reward == 1.0
    assert reward(tasks[0], "raise") == 0.0 and reward(tasks[0], "0") == 0.0


def test_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"nanok3\[envs\]"):
        next(gym_tasks("gcd"))
    with pytest.raises(ValueError, match="set is 'game_of_life_halting'"):
        next(gym_tasks("game_of_life_halting"))


@pytest.mark.parametrize("name", SETS)
def test_the_real_sets(name):
    pytest.importorskip("reasoning_gym")
    for task in islice(gym_tasks(name, size=40), 3):
        assert play(GymEnvironment(), task, scripted(solution(task))).reward == 1.0
        assert all(reward(task, text) == 0.0 for text in ("", "garbage", "None", task.goal))
