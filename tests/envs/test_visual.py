"""Questions about pictures, and looking closer."""

from __future__ import annotations

import io
from itertools import islice

import pytest
from PIL import Image

from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.tools import Call
from nanok3.envs.visual import SUBJECTS, VisualEnvironment, visual_tasks


@pytest.mark.parametrize("subject", SUBJECTS)
def test_answers_are_right_and_streams_deterministic(subject):
    tasks = list(islice(visual_tasks(subject), 12))
    assert [task.id for task in tasks] == [task.id for task in islice(visual_tasks(subject), 12)]
    for task in tasks:
        assert play(VisualEnvironment(), task, scripted(solution(task))).reward == 1.0
        assert play(VisualEnvironment(), task, scripted([Reply("Answer: no")])).reward == 0.0
        assert subject != "counting" or "many" in task.goal.lower()
    held = {task.pictures for task in islice(visual_tasks(subject, "held-out"), 10)}
    assert not held & {task.pictures for task in islice(visual_tasks(subject), 100)}


def test_looking_closer():
    task = next(visual_tasks("charts"))
    whole = Image.open(io.BytesIO(task.pictures[0]))
    env = VisualEnvironment()
    assert env.reset(task).pictures == task.pictures
    box = {"left": 2, "top": 3, "right": 12, "bottom": 8}
    calls = (Call("crop", box), Call("zoom", box), Call("crop", {**box, "right": 2}), Call("crop", {**box, "left": -1}))
    seen = env.step(Reply(calls=calls)).results
    crop, zoom = (Image.open(io.BytesIO(result.pictures[0])) for result in seen[:2])
    assert crop.size == (10, 5) and zoom.size == (30, 15)
    for x, y in ((0, 0), (9, 4), (5, 2)):
        assert crop.getpixel((x, y)) == whole.getpixel((x + 2, y + 3)) == zoom.getpixel((3 * x + 1, 3 * y + 2))
    assert [result.error for result in seen] == [False, False, True, True] and "wide" in seen[2].content
    kept = env.snapshot()
    env.step(Reply("Answer: x"))
    env.restore(kept)
    assert env.answer is None


def test_bad_names():
    for bad in (("nothing", "train"), ("charts", "test")):
        with pytest.raises(ValueError, match="expected one of"):
            next(visual_tasks(*bad))
