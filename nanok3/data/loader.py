"""Endless batches from a weighted mixture, at a position that can be saved and restored to the token.

The rows of a run form one sequence, a pure function of seed, data, weights and row length. Row k comes from the
source that is furthest behind its share:

    source(k) = argmax over s of   weight_s * (k + 1) - rows taken from s before k

where a source that takes part in some rows only (`spans`: from row a to row b) has its weight there and none elsewhere.
What it leaves is shared by the others of its sort, pictures or texts, and the weights of a row add up to one. At
the start of a run pictures may have nearly all of it (`picture_lead`). Inside a
source from its own stream: an epoch is a permutation of the documents, drawn from (seed, source, epoch); consecutive
documents of it, about two million tokens, are packed into rows together, and these rows are shuffled, drawn from (seed,
source, epoch, group). Workers share the sequence: a step of w ranks takes the next w * batch_size rows, and rank r
those whose place in the step is r modulo w. So the position is the same on every rank, and a run saved by 8 workers
goes on with 3.

Rows with pictures are rows of their sources, so a mixture's share of them falls on every step alike; a row holds at
most `patches_per_row` patches (packing.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nanok3.data.packing import Batch, Piece, check_fits, collate, rows_of
from nanok3.data.prepared import TokenSource

_GROUP_TOKENS = 1 << 21
LEAD_SHARE = 0.95
"""Of pictures while they lead. Some text stays, so that it is nothing new when its own rows come (ours)."""


class _Stream:
    """The rows of one source, epoch after epoch. Its position is three numbers: epoch, group, row."""

    def __init__(self, source: TokenSource, seed: int, seq_len: int, patches_per_row: int | None) -> None:
        self.source, self.seq_len, self.patches_per_row = source, seq_len, patches_per_row
        self.key = [seed, zlib.crc32(source.name.encode())]
        self.move_to(0, 0, 0)

    def move_to(self, epoch: int, group: int, row: int) -> None:
        self.epoch, self.group, self.row = epoch, group, row
        self._shuffle_documents()
        self._pack_group()

    def _shuffle_documents(self) -> None:
        """The order of this epoch and where its groups begin."""
        self.order = np.random.default_rng([*self.key, self.epoch]).permutation(len(self.source))
        before = np.cumsum(self.source.lengths[self.order]) - self.source.lengths[self.order]
        self.starts = [*np.unique(before // _GROUP_TOKENS, return_index=True)[1].tolist(), len(self.order)]

    def _pack_group(self) -> None:
        members = self.order[self.starts[self.group] : self.starts[self.group + 1]]
        rows = rows_of(self.source, members, self.seq_len, self.patches_per_row)
        order = np.random.default_rng([*self.key, self.epoch, self.group]).permutation(len(rows))
        self.rows = [rows[number] for number in order]

    def peek(self) -> list[Piece]:
        """The pieces of the next row."""
        while self.row == len(self.rows):
            self.row, self.group = 0, self.group + 1
            if self.group + 1 == len(self.starts):
                self.epoch, self.group = self.epoch + 1, 0
                self._shuffle_documents()
            self._pack_group()
        return self.rows[self.row]

    def next(self) -> list[Piece]:
        pieces = self.peek()
        self.row += 1
        return pieces

    def position(self) -> dict[str, int]:
        """The next row's first token: epoch, group and row in the shuffled order; shard, document, offset on disk."""
        piece = self.peek()[0]
        shard, document = self.source.locate(piece.document)
        return {
            "epoch": self.epoch,
            "group": self.group,
            "row": self.row,
            "shard": shard,
            "document": document,
            "offset": piece.start,
        }


class Span(NamedTuple):
    """The rows of a run, counted over all workers, in which a source takes part."""

    begin: int = 0
    end: int | None = None


class MixtureLoader:
    """Iterates over `Batch`es for ever. `weights` are the sources' shares of the rows and need not sum to one;
    `batch_size` is per rank; `spans` are the first row of each source and the row that ends it (None: all rows, never);
    until `reached` says that the share `picture_lead` of the run is done, 95 of 100 rows are pictures, where there are
    both pictures and texts.
    Raises ValueError for a source without anything to predict, or with pictures in documents
    longer than a row."""

    def __init__(
        self,
        sources: Sequence[TokenSource],
        weights: Sequence[int | float],
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        patches_per_row: int | None = None,
        picture_text_weight: float = 1.0,
        spans: Sequence[Span] | None = None,
        picture_lead: float = 0.0,
    ) -> None:
        _check(sources, weights, batch_size, seq_len, seed, rank, world)
        for source in sources:
            check_fits(source, seq_len)
        if patches_per_row is not None and patches_per_row < 1:
            raise ValueError(f"patches_per_row: {patches_per_row}; expected at least 1")
        self.patches_per_row, self.picture_text_weight = patches_per_row, picture_text_weight
        self.batch_size, self.seq_len, self.seed, self.rank, self.world = batch_size, seq_len, seed, rank, world
        self.weights = [weight / sum(weights) for weight in weights]
        self.spans = list(spans or [Span()] * len(sources))
        self.pictured = [source.pictures is not None for source in sources]
        self.picture_lead = picture_lead if any(self.pictured) else 0.0
        self._lead_until(math.inf if self.picture_lead else 0.0)
        self.streams = [_Stream(source, seed, seq_len, patches_per_row) for source in sources]
        self.taken = [0] * len(sources)

    def _lead_until(self, row: float) -> None:
        """Pictures lead up to a row, which is known once it is there."""
        self._lead = row
        self._stretches = _stretches(self.weights, self.spans, self.pictured, row)

    def reached(self, share: float) -> None:
        """How much of the run is done, from 0 to 1: the lead of pictures may end here."""
        if self._lead == math.inf and share >= self.picture_lead:
            self._lead_until(sum(self.taken))

    def __iter__(self) -> MixtureLoader:
        return self

    def _choose(self) -> int:
        """The source of the next row."""
        rows = sum(self.taken) + 1
        due, here = [0.0] * len(self.taken), list(self.weights)
        for begin, end, shares in (stretch for stretch in self._stretches if stretch[0] < rows):
            due, here = [d + share * (min(rows, end) - begin) for d, share in zip(due, shares, strict=True)], shares
        behind = [d - taken if share else -math.inf for d, taken, share in zip(due, self.taken, here, strict=True)]
        return behind.index(max(behind))

    @property
    def stretch(self) -> int:
        """How many times the mixture has changed before the next row: losses of two mixtures are not comparable."""
        rows = sum(self.taken)
        return sum(begin <= rows for begin, _, _ in self._stretches) - 1

    def __next__(self) -> Batch:
        mine = []
        for number in range(self.batch_size * self.world):
            chosen = self._choose()
            pieces = self.streams[chosen].next()
            self.taken[chosen] += 1
            if number % self.world == self.rank:
                mine.append((self.streams[chosen].source, pieces))
        return collate(mine, self.seq_len, self.picture_text_weight)

    def _identity(self) -> dict[str, Any]:
        """What must be the same where a position is restored."""
        with_pictures = any(stream.source.pictures for stream in self.streams)
        return {
            **({"patches_per_row": self.patches_per_row} if with_pictures else {}),
            **({"spans": [list(span) for span in self.spans]} if any(span != Span() for span in self.spans) else {}),
            **({"picture_lead": self.picture_lead} if self.picture_lead else {}),
            "seed": self.seed,
            "seq_len": self.seq_len,
            "weights": self.weights,
            "data": {stream.source.name: stream.source.digest for stream in self.streams},
        }

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, the same on every rank: numbers and strings only."""
        positions = {stream.source.name: stream.position() for stream in self.streams}
        taken = {stream.source.name: taken for stream, taken in zip(self.streams, self.taken, strict=True)}
        rows, lead = sum(self.taken), {"lead": self._lead} if 0 < self._lead < math.inf else {}
        return {"identity": self._identity(), "rows": rows, **lead, "taken": taken, "positions": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; batch size, rank and number of workers may differ. Raises ValueError if seed, row
        length, weights or data do, or if the shuffled order is not the one of the saved run (another numpy)."""
        for name, ours in self._identity().items():
            if (theirs := state["identity"].get(name)) != ours:
                raise ValueError(f"data position: {name} was {theirs}, is {ours}; cannot go on there")
        for index, stream in enumerate(self.streams):
            saved = state["positions"][stream.source.name]
            stream.move_to(saved["epoch"], saved["group"], saved["row"])
            if stream.position() != saved:
                raise ValueError(
                    f"data position: {stream.source.name} was saved at {saved}, but the order here gives "
                    f"{stream.position()} (numpy {np.__version__} shuffles differently)"
                )
            self.taken[index] = state["taken"][stream.source.name]
        self._lead_until(state.get("lead", math.inf if self.picture_lead else 0.0))


def _stretches(
    weights: Sequence[float], spans: Sequence[Span], pictured: Sequence[bool], lead: float = 0.0
) -> list[tuple[float, float, list[float]]]:
    """Stretches of rows in which the same sources take part: begin, end, and every source's share."""
    ends = [math.inf if span.end is None else float(span.end) for span in spans]
    bounds = sorted({0.0, math.inf, lead, *(float(span.begin) for span in spans), *ends})
    found = []
    for begin, end in pairwise(bounds):
        now = _leading(weights, pictured) if begin < lead else weights
        here = [
            weight if span.begin <= begin < last else 0.0 for weight, span, last in zip(now, spans, ends, strict=True)
        ]
        if not sum(here):
            raise ValueError(f"spans: no source takes part from row {begin:.0f} on")
        found.append((begin, end, here if all(here) else _shares(now, here, pictured)))
    return found


def _leading(weights: Sequence[float], pictured: Sequence[bool]) -> list[float]:
    """The weights while pictures lead; they add up to one, as before."""
    share = sum(weight for weight, has in zip(weights, pictured, strict=True) if has)
    if not 0 < share < LEAD_SHARE:
        return list(weights)
    scales = {True: LEAD_SHARE / share, False: (1 - LEAD_SHARE) / (1 - share)}
    return [weight * scales[has] for weight, has in zip(weights, pictured, strict=True)]


def _shares(weights: Sequence[float], here: Sequence[float], pictured: Sequence[bool]) -> list[float]:
    """Of the sources that take part here. Those with pictures share what all with pictures have, and so do texts."""
    scaled = list(here)
    for group in (True, False):
        members = [number for number, has in enumerate(pictured) if has == group]
        if part := sum(here[number] for number in members):
            whole = sum(weights[number] for number in members)
            for number in members:
                scaled[number] *= whole / part
    return [weight / sum(scaled) for weight in scaled]


def _check(
    sources: Sequence[TokenSource],
    weights: Sequence[int | float],
    batch_size: int,
    seq_len: int,
    seed: int,
    rank: int,
    world: int,
) -> None:
    """Refuse what cannot give batches."""
    if not sources or len(sources) != len(weights):
        raise ValueError(f"weights: {len(weights)} for {len(sources)} sources; expected one for each of at least one")
    for source, weight in zip(sources, weights, strict=True):
        if not 0 < weight < math.inf:
            raise ValueError(f"weights: {weight} for source {source.name}; expected a positive number")
        if not (source.lengths > 1).any():
            raise ValueError(f"source {source.name}: no {source.split} document with anything to predict")
    if sum(weights) == math.inf:
        raise ValueError(f"weights: {list(weights)}; their sum is beyond the numbers of the machine")
    for name, value in {"batch_size": batch_size, "seq_len": seq_len}.items():
        if value < 1:
            raise ValueError(f"{name}: {value}; expected at least 1")
    if seed < 0:
        raise ValueError(f"seed: {seed}; expected 0 or more")
    if not 0 <= rank < world:
        raise ValueError(f"rank: {rank}; expected 0 to world - 1 = {world - 1}")
