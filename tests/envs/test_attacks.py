"""The attack suite: what earns nothing in any environment. Every kind of task of the catalogue is attacked."""

from __future__ import annotations

import importlib.util
from itertools import islice

import pytest
from sandboxed import reason

from nanok3.envs import kernel_task
from nanok3.envs.attacks import ATTACKS, right_words
from nanok3.envs.bubblewrap import Sandboxes
from nanok3.envs.catalogue import kinds
from nanok3.envs.episode import play, scripted, solution

KINDS = kinds()
FETCHED = [name for name, kind in KINDS.items() if "by pip" in kind.needs]
"""Their tests have small packages in the place of the real ones (test_coding_tasks.py, test_bfcl.py)."""
SHORT = ("empty", "repeated", "prompt copied", "empty thinking", "answer list", "verifier edited")
"""For environments where a verdict takes a good part of a second, and still fewer where it takes seconds."""
SHORTEST = ("empty", "verifier edited")


@pytest.fixture(scope="module")
def home():
    if reason is not None:
        yield None
        return
    with Sandboxes(packages=("numpy",)) as made:
        yield made


@pytest.mark.parametrize("name", [name for name in KINDS if name not in FETCHED])
def test_nothing_is_earned(name, home, monkeypatch):
    monkeypatch.setattr(kernel_task, "ROUNDS", 2)
    kind = KINDS[name]
    if kind.domain == "coding" and reason is not None:
        pytest.skip(f"no sandbox here: {reason}")
    if name.startswith("gym-") and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    slow = kind.domain == "coding"
    some = SHORTEST if name == "kernel" else SHORT
    for task in islice(kind.tasks("train", 0), 1 if slow else 2):
        for attack, replies in ATTACKS.items():
            if slow and attack not in some:
                continue
            played = play(kind.open(home), task, scripted(replies(task)))
            right = not slow and replies(task)[0].text == right_words(task)  # a sentinel may be the answer
            assert played.outcome == "done" and (played.reward == 0.0 or right), (attack, played)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in (*FETCHED, "kernel")])
def test_and_the_solution_earns_all(name, home):
    """So that the zeros above mean something."""
    kind = KINDS[name]
    if kind.domain == "coding" and reason is not None:
        pytest.skip(f"no sandbox here: {reason}")
    if name.startswith("gym-") and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    task = next(kind.tasks("train", 0))
    assert play(kind.open(home), task, scripted(solution(task))).reward == 1.0


def test_code_is_refused_without_a_sandbox():
    with pytest.raises(ImportError, match="only run in a sandbox"):
        KINDS["functions"].open(None)
