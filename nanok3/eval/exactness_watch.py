"""Which kernel an operator takes, not looked up but watched: it is run, and every device kernel that was asked is noted
with whether it answered. So a report cannot disagree with the dispatch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, no_type_check

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanok3.eval.exactness import Draw, Operator, leaf, tensors_of

KERNELS = ("nanok3.kernels.", "fla.")
"""Modules whose functions are device kernels, or stand before them."""


@dataclass(frozen=True)
class Answer:
    """A kernel that was asked, as `module.function`, and whether it took the call. Matrix products and attention that
    torch computes itself appear as `torch.name`."""

    kernel: str
    taken: bool


@contextmanager
def watch() -> Iterator[list[Answer]]:
    """Notes every kernel that the block asks, in this thread: it has taken the call if it returns tensors, and refused
    it if it returns NotImplemented. What returns anything else only prepares a call, or says whether one could be made.
    """
    answers: list[Answer] = []
    inside: list[FrameType] = []

    @no_type_check  # called for every function of the block: checking its types takes longer than the block
    def note(frame: FrameType, event: str, value: object) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event == "call" and not inside and module.startswith(KERNELS):
            inside.append(frame)
        elif event == "return" and inside and frame is inside[0]:
            inside.clear()
            if value is NotImplemented or tensors_of(value):
                answers.append(Answer(f"{module.removeprefix(KERNELS[0])}.{name}", value is not NotImplemented))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with _Products(answers):
            yield answers
    finally:
        sys.setprofile(before)


class _Products(TorchDispatchMode):
    """Notes torch's own products as they pass by."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = op._schema.name.rpartition("::")
        if space == "aten" and (name.endswith("mm") or "attention" in name):
            self.answers.append(Answer(f"torch.{name.lstrip('_')}", True))
        return op(*args, **(kwargs or {}))


def kernels_of(operator: Operator, draw: Draw, training: bool = False) -> list[Answer]:
    """What a call of `operator` with these inputs asks for, each once; nothing where torch does small change only."""
    inputs = [leaf(x) if training else x for x in operator.draw(draw)]
    with torch.set_grad_enabled(training):
        operator.run(*inputs)  # unwatched: the first call imports and builds
        with watch() as answers:
            operator.run(*inputs)
    return list(dict.fromkeys(answers))
