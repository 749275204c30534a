"""Coding tasks as data: right references, faults that show, MBPP's form."""

from __future__ import annotations

from itertools import islice

import pytest

from nanok3.envs.coding import literal
from nanok3.envs.coding_tasks import FAULTS, TEMPLATES, coding_tasks, mbpp_task


def values(files, setup, expressions):
    """The files' values without a sandbox: they are ours."""
    space = {}
    for name in ("prices.py", "shop.py", "solution.py"):
        exec(files.get(name, "").replace("from prices import total\n", ""), space)
    return [repr(eval(expression, space)) for expression in expressions]


def test_functions():
    tasks = list(islice(coding_tasks("functions"), 60))
    assert len({task.id for task in tasks}) == 60
    for task in tasks:
        code = task.hidden["solution"][0]["text"].strip("`\n")
        checks = task.hidden["checks"]
        assert values({"solution.py": code}, "", [c[0] for c in checks]) == [c[1] for c in checks]
        assert len(checks) == 8 and all(c[0] not in task.goal for c in checks[:1] if c not in task.state["examples"])
    assert len({task.goal.split("returns ")[1][:12] for task in tasks}) >= len(TEMPLATES) - 3


def test_every_fault_fails_a_hidden_check():
    faults = set()
    for task in islice(coding_tasks("repositories"), 40):
        checks = task.hidden["checks"]
        broken = values(task.state["files"], "", [c[0] for c in checks])
        assert broken != [c[1] for c in checks], task.state["files"]["prices.py"]
        good = task.hidden["solution"][1]["calls"][0][1]["content"]
        assert values({**task.state["files"], "prices.py": good}, "", [c[0] for c in checks]) == [c[1] for c in checks]
        faults.add(task.state["files"]["prices.py"].splitlines()[2])
    assert len(faults) > len(FAULTS)


def test_mbpp():
    doc = {"text": "Add.", "task_id": 3, "code": "def add(a, b):\r\n  return a + b", "test_setup_code": ""}
    task = mbpp_task(
        {**doc, "test_list": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(0, -1)==-1"]}
    )
    assert task.state["examples"] == [("add(1, 2)", "3")]
    assert [literal(wanted) for _, wanted in task.hidden["checks"]] == ["ab", -1]
    assert "\r" not in task.hidden["solution"][0]["text"]
    for odd in ("assert add(1, 2)", "assert add(1, 2) == set([3])", "x = 1", "assert", "assert 3 == add(1, 2)"):
        assert mbpp_task({**doc, "test_list": ["assert add(1, 2) == 3", "assert add(1, 2) == 3", odd]}) is None


def test_streams():
    train = {task.id for task in islice(coding_tasks("functions", "train", 0), 50)}
    assert not train & {task.id for task in islice(coding_tasks("functions", "held-out", 1), 20)}
    for bad in (("nothing", "train"), ("functions", "test")):
        with pytest.raises(ValueError, match="expected one of"):
            next(coding_tasks(*bad))
