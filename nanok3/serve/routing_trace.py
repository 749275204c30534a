"""Which experts were chosen: a record of a run, compact in a file, to try memory budgets on.

    with Recorder(model) as recorder:       hears every router
        ...                                 generate, chat, evaluate
    recorder.trace(expert_bytes).save(path)
    trace = Trace.load(path)

A visit is one layer reading one chunk of tokens; what it asks for is the set of experts that its tokens chose. The file
is numpy's .npz, compressed: two bytes for each choice before that, so a token of the release takes at most 2.9 KB.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from nanok3.data.files import write_file
from nanok3.model.decoder import K3, DecoderLayer
from nanok3.model.expert_slots import Key
from nanok3.model.latent_moe import LatentMoE, Routing


@dataclass(frozen=True)
class Trace:
    """layers, tokens: of each visit; chosen: (tokens of all visits, N), visit after visit."""

    experts: int
    """Of a layer."""
    expert_bytes: int
    """Of one expert, as stored."""
    layers: NDArray[np.uint16]
    tokens: NDArray[np.uint32]
    chosen: NDArray[np.uint16]

    def visits(self) -> list[list[Key]]:
        """What each visit asks for, experts ascending."""
        ends = self.tokens.astype(np.int64).cumsum()
        parts = np.split(self.chosen, ends[:-1])
        return [
            [(layer, e) for e in np.unique(p).tolist()] for layer, p in zip(self.layers.tolist(), parts, strict=True)
        ]

    @property
    def top_k(self) -> int:
        return int(self.chosen.shape[1])

    @property
    def read(self) -> int:
        """Tokens of the run."""
        return int(self.tokens[self.layers == self.layers[0]].sum())

    @property
    def all_bytes(self) -> int:
        """Of the experts of all layers."""
        return len(np.unique(self.layers)) * self.experts * self.expert_bytes

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        file = io.BytesIO()
        np.savez_compressed(file, **vars(self))
        write_file(path, file.getvalue())

    @classmethod
    def load(cls, path: Path) -> Trace:
        """ValueError for anything that is no trace."""
        try:
            with np.load(path) as found:
                fields = {name: found[name] for name in cls.__dataclass_fields__}
            trace = cls(int(fields["experts"]), int(fields["expert_bytes"]), *list(fields.values())[2:])
            fits = trace.layers.ndim == trace.tokens.ndim == 1 and trace.layers.shape == trace.tokens.shape
            whole = trace.chosen.ndim == 2 and len(trace.chosen) == int(trace.tokens.sum()) and len(trace.layers) > 0
            sensible = fits and whole and trace.expert_bytes > 0 and int(trace.chosen.max()) < trace.experts
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile):
            sensible = False
        if not sensible:
            raise ValueError(
                f"routing_trace: {path} is no trace; `nanok3 generate MODEL --routing-trace FILE` makes one"
            )
        return trace


class Recorder:
    """Listens to the routers of a model until it is closed. Native decoding, which calls no router, steps aside."""

    def __init__(self, model: K3) -> None:
        self._experts = model.cfg.num_experts
        self._visits: list[tuple[int, NDArray[np.uint16]]] = []
        layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
        routers = [
            (layer.layer, layer.feed_forward.gate) for layer in layers if isinstance(layer.feed_forward, LatentMoE)
        ]
        if not routers:
            raise ValueError("routing_trace: the model has no routed experts")
        self._handles = [gate.register_forward_hook(self._hear(layer)) for layer, gate in routers]

    def _hear(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: object, routing: Routing) -> None:
            self._visits.append((layer, routing.chosen.cpu().numpy().astype(np.uint16)))

        return keep

    def trace(self, expert_bytes: int) -> Trace:
        """What was heard so far. ValueError where that is nothing."""
        if not self._visits:
            raise ValueError("routing_trace: nothing was read, so no expert was chosen")
        layers, chosen = zip(*self._visits)
        tokens = np.array([len(rows) for rows in chosen], dtype=np.uint32)
        return Trace(self._experts, expert_bytes, np.array(layers, dtype=np.uint16), tokens, np.concatenate(chosen))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
