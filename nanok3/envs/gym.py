"""Tasks of reasoning-gym 0.1.25 (Apache-2.0), where it is installed: fifteen sets with their own scorers.

A scorer is another program's code on a model's text, so it is guarded: what it raises counts as wrong, and only a full
score is a reward. Several sets give 0.01 to 0.05 for any text at all, which RL would learn. Sets are left out whose
scorer or generator is unfit: game_of_life_halting (any text scores 1), those without an answer of their own, those
that take long to build.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanok3.envs.environment import Task
from nanok3.envs.questions import AnswerEnvironment, Item, answer_task, items

SETS = (
    "chain_sum",
    "basic_arithmetic",
    "gsm_symbolic",
    "leg_counting",
    "spell_backward",
    "letter_counting",
    "word_sorting",
    "number_sorting",
    "caesar_cipher",
    "base_conversion",
    "gcd",
    "simple_equations",
    "syllogism",
    "maze",
    "mini_sudoku",
)
"""The RL list of the data specification."""
INSTALL = "pip install 'nanok3[envs]'"


def reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ImportError(f"these tasks need reasoning-gym: {INSTALL}") from None
    return reasoning_gym


def gym_tasks(name: str, split: str = "train", seed: int = 0, size: int = 2000) -> Iterator[Task]:
    """At most `size` different tasks of a set."""
    if name not in SETS:
        raise ValueError(f"set is {name!r}; expected one of {', '.join(SETS)}")
    rows = iter(reasoning_gym().create_dataset(name, seed=seed, size=size))
    entries: dict[str, dict[str, Any]] = {}

    def make(_: Any) -> Item:
        row = next(rows, None)
        if row is None:
            return Item("", (), "", "")
        entries[row["question"]] = row
        return Item(row["question"], (), str(row["answer"]), row["question"])

    for item in items(f"gym-{name}", make, split, seed):
        if item.question:
            task = answer_task(f"gym-{name}", item)
            row = entries.pop(item.question)
            yield Task(task.id, task.domain, task.goal, {}, {**task.hidden, "set": name, "entry": row}, (), task.budget)


class GymEnvironment(AnswerEnvironment):
    """The set's own scorer, guarded."""

    def _right(self, answer: str, hidden: Any) -> bool:
        scorer = reasoning_gym().create_dataset(hidden["set"], seed=0, size=1)
        try:
            return float(scorer.score_answer(answer=answer, entry=hidden["entry"])) >= 1.0
        except Exception:  # a scorer may raise anything on a text it did not expect
            return False
