"""The kernel task: right before fast, and no trick is paid."""

from __future__ import annotations

import base64
import json
from itertools import islice

import numpy as np
import pytest
from sandboxed import needs_sandbox

from nanok3.envs.bubblewrap import Sandboxes
from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.kernel_task import KERNELS, KernelEnvironment, kernel_tasks, output, source, speed_score
from nanok3.envs.tools import Call


def test_the_score_of_times():
    assert speed_score(1.0, 1.0, 0.01, 0.001) == 0 and speed_score(0.6, 1.0, 0.01, 0.001) == 0
    assert speed_score(0.1, 1.0, 0.01, 0.001) == pytest.approx(0.25)
    assert speed_score(0.01, 1.0, 0.01, 0.001) == pytest.approx(0.5)
    assert speed_score(0.0055, 1.0, 0.01, 0.001) == pytest.approx(0.75)
    assert speed_score(0.001, 1.0, 0.01, 0.001) == 1 == speed_score(0.0001, 1.0, 0.01, 0.001)
    assert speed_score(0.009, 1.0, 0.01, 0.001) == 0.5 == speed_score(5e-5, 1e-2, 5e-5, 1e-6)
    times = [speed_score(t, 1.0, 0.01, 0.001) for t in np.geomspace(0.0005, 2, 50)]
    assert times == sorted(times, reverse=True)


def test_outputs_are_read_with_care():
    good = json.dumps([[2], base64.b64encode(np.array([1.0, 2.0])).decode()]).encode()
    assert output(good).tolist() == [1.0, 2.0]
    for bad in (b"", b"{", b'["ValueError", ""]', b'[[3], "AAAA"]', b"3", b'[[1], "!"]', b"[1, 2, 3]"):
        assert output(bad) is None, bad


@pytest.mark.parametrize("name", KERNELS)
def test_slow_and_expert_agree(name):
    inputs = eval(f"lambda g: {KERNELS[name].inputs.format(n=60)}")(np.random.default_rng(1))
    found = []
    for body in (KERNELS[name].slow, KERNELS[name].expert):
        space = {}
        exec(source(name, body), space)
        found.append(space["f"](*inputs))
    assert found[0].dtype == found[1].dtype == np.float64 and found[0].shape == found[1].shape
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-9)


def test_streams():
    train = {task.id for task in islice(kernel_tasks(), 30)}
    assert len(train) == 30 and not train & {task.id for task in islice(kernel_tasks("held-out", 1), 8)}
    with pytest.raises(ValueError, match="split is 'x'"):
        next(kernel_tasks("x"))


@pytest.fixture(scope="module")
def home():
    with Sandboxes(packages=("numpy",)) as made:
        yield made


def task_of(name):
    return next(task for task in kernel_tasks() if task.hidden["kernel"] == name)


@needs_sandbox
def test_the_expert_is_paid(home):
    task = task_of("moving")
    played = play(KernelEnvironment(home), task, scripted(solution(task)))
    assert played.outcome == "done" and played.reward > 0.1, played


@needs_sandbox
@pytest.mark.parametrize(
    "body",
    [
        "global kept\n    try:\n        return kept\n    except NameError:\n        kept = SLOW\n        return kept",
        "return (EXPERT).astype(np.float32).astype(np.float64)",
        "return np.zeros(100)",
        "raise SystemExit",
        "import os\n    os._exit(0)",
    ],
)
def test_tricks_are_not_paid(home, body):
    task = task_of("product")
    slow = "np.array([[sum(r * c) for c in y.T] for r in x])"
    text = source("product", body.replace("SLOW", slow).replace("EXPERT", "x @ y"))
    calls = (Call("write_file", {"path": "kernel.py", "content": text}),)
    played = play(KernelEnvironment(home), task, scripted([Reply(calls=calls), Reply("done")]))
    assert played.outcome == "done" and played.reward == 0.0
