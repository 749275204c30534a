"""Questions about pictures: reading words, counting shapes, reading charts; crop and zoom are tools.

Pictures and questions come from `data/pictures`, where each has one exact answer. A tool gives a new picture made from
the original, not from the last view, so that nothing is lost by looking twice:

    crop(left, top, right, bottom)     in pixels of the original
    zoom(left, top, right, bottom)     the same, each pixel as a square of 3 x 3

The split is that of the pictures' own keys: what a held-out picture shows is on no training picture.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from nanok3.data.images import pillow
from nanok3.data.pictures.document import Picture, PictureDocument, split_of
from nanok3.data.pictures.kinds import Maker, check_needs, open_kind
from nanok3.envs.environment import Result, Task
from nanok3.envs.questions import HELD_OUT, SPLITS, AnswerEnvironment, Item, answer_task
from nanok3.envs.tools import ToolError, tool

SCALE = 3
SUBJECTS = {"reading": "words", "counting": "shapes", "charts": "plots"}
"""What is asked -> the kind of picture."""
_WORDS = tuple("stock river lamp garden winter paper bridge copper music seven orange window table silver".split())

_BOX = {"left": "integer", "top": "integer", "right": "integer", "bottom": "integer"}
TOOLS = (
    tool("crop", "A part of the picture, in pixels of the original.", **_BOX),
    tool("zoom", f"A part of the picture, {SCALE} times as large.", **_BOX),
)


def png(picture: Any) -> bytes:
    held = io.BytesIO()
    picture.save(held, format="PNG")
    return held.getvalue()


class VisualEnvironment(AnswerEnvironment):
    """A picture, a question, two ways to look closer."""

    def perform(self, name: str, arguments: dict[str, Any]) -> Result:
        picture = pillow().open(io.BytesIO(self._task().pictures[0]))
        box = tuple(arguments[side] for side in _BOX)
        left, top, right, bottom = box
        width, height = picture.size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise ToolError(f"the box is {box}; the picture is {width} wide and {height} high")
        part = picture.crop(box)
        if name == "zoom":
            part = part.resize((SCALE * part.width, SCALE * part.height), pillow().Resampling.NEAREST)
        return Result(name, f"{part.width} x {part.height}", pictures=(png(part),))


def visual_task(subject: str, document: PictureDocument) -> Iterator[Task]:
    """One task for each question of a document with one picture."""
    pictures = [part for part in document.parts if isinstance(part, Picture)]
    if len(pictures) != 1 or len(pictures[0].frames) != 1:
        return
    image = png(pictures[0].frames[0])
    for question in document.questions:
        if subject == "counting" and question.field != "count":
            continue
        key = f"{document.keys} {question.text} {hashlib.blake2b(image, digest_size=8).hexdigest()}"
        task = answer_task(subject, Item(question.text, (), question.answer, key), "visual")
        yield replace(task, pictures=(image,), tools=TOOLS, budget=replace(task.budget, steps=6))


def visual_tasks(subject: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """An endless stream of questions. ImportError with the line to install where Pillow or fonts are missing."""
    if subject not in SUBJECTS:
        raise ValueError(f"subject is {subject!r}; expected one of {', '.join(SUBJECTS)}")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    kind = SUBJECTS[subject]
    check_needs(kind)
    make: Maker = open_kind(kind, _WORDS)
    side = "validation" if split == "held-out" else "train"
    number = 0
    while True:
        document = make(Random(f"{seed} {kind} {number}"))
        number += 1
        if split_of(document.keys, HELD_OUT, 0) == side:
            yield from visual_task(subject, document)
