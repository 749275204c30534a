"""How pictures are learned from: the tower reads the pictures of a step once, whatever text they are spliced into.

    rows  = projector(tower(pictures of all microbatches, each picture once))
    for each microbatch        loss(text with its rows in place), backward as far as the rows
    tower and projector        backward from the gradient that has gathered in the rows

A picture that is shown twice in a step is seen once, and its gradient is the sum over both places. As the tower stands
outside the microbatches, a microbatch of many pictures is no longer than one of few, and what the tower costs is
measured: it is the time of the first line and of the last. K3's report (2.4) trains pictures and text together from the
first step under one loss; that features are cut off from the microbatches is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.baselines.frame import Baseline
from nanok3.data.loader import Batch
from nanok3.data.packing import PictureId, Pictures
from nanok3.model.decoder import K3
from nanok3.model.moonvit import rows_per_item


def check_sight(model: K3 | Baseline, with_pictures: Sequence[str]) -> None:
    """ValueError where sources have pictures that the model could not see: it would learn to guess them."""
    if with_pictures and not (isinstance(model, K3) and model.cfg.has_vision):
        raise ValueError(
            f"the model has no vision tower (vt_hidden_size is null), but {', '.join(with_pictures)} of the data have "
            "pictures; take a preset with one (--preset vision-small), or data prepared without --pictures"
        )


@dataclass(frozen=True)
class Distinct:
    """The pictures of some batches, each once; `first` tells where among them a picture is."""

    pixel_values: Tensor
    grid_thw: Tensor
    first: dict[PictureId, int]


def distinct(shown: Sequence[Pictures]) -> Distinct:
    """Equal ids are the same picture."""
    values: list[Tensor] = []
    grids: list[Tensor] = []
    first: dict[PictureId, int] = {}
    for pictures in shown:
        sizes = pictures.grid_thw.prod(dim=1).tolist()
        for id, value, grid in zip(pictures.ids, pictures.pixel_values.split(sizes), pictures.grid_thw, strict=True):
            if id not in first:
                first[id] = len(values)
                values.append(value)
                grids.append(grid)
    return Distinct(torch.cat(values), torch.stack(grids), first)


def read(model: K3 | Baseline, batch: Batch) -> Tensor:
    """The last hidden states of a batch laid out as one row, pictures included; for looking at a model."""
    ids = batch.input_ids.view(1, -1)
    if batch.pictures is None:
        return model.hidden_states(ids, cu_seqlens=batch.cu_seqlens)
    assert isinstance(model, K3)
    return model.hidden_states(ids, batch.pictures.pixel_values, batch.pictures.grid_thw, batch.cu_seqlens)


class Sight:
    """The pictures of one step: `look` at its batches, ask for the `hidden` states of each, and let the tower `learn`.
    `seconds` and `patches` tell what the step took."""

    def __init__(self, model: K3 | Baseline, clock: Callable[[], float] = time.monotonic) -> None:
        self.model, self.clock = model, clock
        self.seconds, self.patches, self.pictures = 0.0, 0, 0
        self._made: Tensor | None = None

    def look(self, batches: Sequence[Batch]) -> None:
        """Run the tower over the pictures of a step."""
        self.seconds, self.patches, self.pictures, self._made = 0.0, 0, 0, None
        shown = [batch.pictures for batch in batches if batch.pictures is not None]
        if not shown:
            return
        assert isinstance(self.model, K3) and self.model.cfg.merge_kernel_size
        with self._timed():
            once = distinct(shown)
            self._made = self.model.vision(once.pixel_values, once.grid_thw)
            # The microbatches' gradients gather here, in full precision.
            self._rows = self._made.detach().float().requires_grad_()
        self._first = once.first
        self._lengths = rows_per_item(once.grid_thw, self.model.cfg.merge_kernel_size)
        self.patches, self.pictures = len(once.pixel_values), len(once.first)

    def hidden(self, batch: Batch) -> Tensor:
        """The model's last hidden states of a batch laid out as one row, its pictures in place."""
        ids = batch.input_ids.view(1, -1)
        if batch.pictures is None:
            return self.model.hidden_states(ids, cu_seqlens=batch.cu_seqlens)
        assert isinstance(self.model, K3)
        pieces = self._rows.split(self._lengths)
        features = torch.cat([pieces[self._first[id]] for id in batch.pictures.ids])
        return self.model.hidden_states(
            ids, grid_thw=batch.pictures.grid_thw, cu_seqlens=batch.cu_seqlens, features=features
        )

    def learn(self) -> None:
        """Backward through projector and tower, after the last microbatch."""
        if self._made is None:
            return
        assert self._rows.grad is not None
        with self._timed():
            self._made.backward(self._rows.grad.to(self._made.dtype))
        self._made = None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._now()
        yield
        self.seconds += self._now() - began

    def _now(self) -> float:
        device = self.model.lm_head.weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.clock()
