"""Our own generators: the working leads to the answer, and the answer is right by an independent count."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.general import KINDS, general_tasks
from nanok3.envs.questions import AnswerEnvironment


def expected(kind, goal):
    question = goal.splitlines()[0]
    quoted = re.findall(r'"([^"]*)"', question)
    if kind == "letters":
        return str(quoted[1].count(quoted[0]))
    if kind == "sums":
        return str(sum(map(int, re.findall(r"\d+", question))))
    return quoted[0][::-1] if kind == "reverse" else quoted[0]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right(kind):
    for task in islice(general_tasks(kind, "train", 3), 50):
        assert task.hidden["answer"] == expected(kind, task.goal)
        last = task.hidden["working"][-1].split(" = ")[-1]
        assert last == task.hidden["answer"] or last.endswith(" " + task.hidden["answer"]) or kind == "letters"
        assert play(AnswerEnvironment(), task, scripted(solution(task))).reward == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_deterministic_and_apart(kind):
    first = [task.id for task in islice(general_tasks(kind, "train", 0), 100)]
    assert first == [task.id for task in islice(general_tasks(kind, "train", 0), 100)]
    assert first != [task.id for task in islice(general_tasks(kind, "train", 1), 100)]
    assert not set(first) & {task.id for task in islice(general_tasks(kind, "held-out", 1), 100)}


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="kind is 'nothing'; expected one of letters"):
        general_tasks("nothing")
