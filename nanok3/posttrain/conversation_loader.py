"""Endless batches of conversations, at a position that can be saved and restored to the row.

An epoch is a permutation of the conversations, drawn from (seed, epoch); some hundred neighbours at a time are packed
into rows together, so that no two epochs have the same rows, and the rows are shuffled. The position is two numbers,
epoch and row. It has the interface of `data.loader.MixtureLoader`, for the same training loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nanok3.data.packing import Batch, Piece
from nanok3.posttrain.conversations import Conversations

GROUP = 256
"""Conversations that are packed together."""


class ConversationLoader:
    """Iterates over `Batch`es for ever."""

    def __init__(self, source: Conversations, batch_size: int, seq_len: int, seed: int = 0) -> None:
        if not len(source):
            raise ValueError("data: there are no conversations")
        self.source, self.batch_size, self.seq_len, self.seed = source, batch_size, seq_len, seed
        self.streams = [self]
        self.stretch = 0  # one mixture from beginning to end
        self.digest = source.digest
        self._move_to(0, 0)

    def reached(self, share: float) -> None:
        """Conversations have no schedule of their own."""

    def _move_to(self, epoch: int, row: int) -> None:
        self.epoch, self.row = epoch, row
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.source)).tolist()
        groups = [order[at : at + GROUP] for at in range(0, len(order), GROUP)]
        rows = [row for group in groups for row in self.source.pack(group, self.seq_len)]
        self.rows = [rows[number] for number in random.permutation(len(rows))]

    def _next_row(self) -> list[Piece]:
        if self.row == len(self.rows):
            self._move_to(self.epoch + 1, 0)
        self.row += 1
        return self.rows[self.row - 1]

    def __iter__(self) -> ConversationLoader:
        return self

    def __next__(self) -> Batch:
        return self.source.batch([self._next_row() for _ in range(self.batch_size)], self.seq_len)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        return {"data": self.digest, "seed": self.seed, "seq_len": self.seq_len, "epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. ValueError if the data, the seed or the length of a row differ."""
        for name, ours in (("data", self.digest), ("seed", self.seed), ("seq_len", self.seq_len)):
            if state[name] != ours:
                raise ValueError(f"data position: {name} was {state[name]}, is {ours}; cannot go on there")
        self._move_to(state["epoch"], state["row"])
