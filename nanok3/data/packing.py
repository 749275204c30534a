"""Documents of any length -> rows of one length, never across a boundary.

A document of n ids gives n - 1 predictions: input i predicts id i + 1, so its last id, `[EOS]`, is only a target.
Its predictions are cut into consecutive pieces of T; the last piece is what is left. Full pieces are rows of their
own. The others share rows, the longest that fits first; where none fits, the longest is cut to fill the row, unless
less than T / 16 is free, which is padded:

    row = [piece | piece | ... | padding]     every piece starts fresh; cu_seqlens tells the model where

A piece cut by a row's end keeps its last target, the next id of the same document. Padding has no target. This is
ours; the report does not say how K3's documents were packed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from nanok3.data.prepared import TokenSource

NO_TARGET = -100
"""The target of a position without loss, as in torch.nn.functional.cross_entropy."""


class Piece(NamedTuple):
    """Predictions `start` to `start + length` of one document."""

    document: int
    start: int
    length: int


class Segment(NamedTuple):
    """Where a run of tokens of a batch comes from: source, document, and the offset of its first token."""

    source: str
    document: int
    offset: int


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens. `cu_seqlens` bounds the segments, counted over the rows laid end to end (0 to B * T);
    `ids` names the document behind each segment, None for padding."""

    input_ids: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    cu_seqlens: Int[Tensor, " bounds"]
    ids: list[Segment | None]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        return Batch(self.input_ids.to(device), self.targets.to(device), self.cu_seqlens.to(device), self.ids)


def _pieces(document: int, tokens: int, seq_len: int) -> Iterator[Piece]:
    for start in range(0, tokens - 1, seq_len):
        yield Piece(document, start, min(seq_len, tokens - 1 - start))


def _length(piece: Piece) -> int:
    return piece.length


def _take(pool: list[Piece], free: int, least: int) -> Piece | None:
    """Remove from the pool, sorted by length, the longest piece that fits; or, if none does and `least` is free,
    the front of the longest, whose rest stays."""
    fit = bisect_right(pool, free, key=_length)
    if fit:
        return pool.pop(fit - 1)
    if not pool or free < least:
        return None
    document, start, length = pool.pop()
    insort(pool, Piece(document, start + free, length - free), key=_length)
    return Piece(document, start, free)


def pack(documents: Iterable[tuple[int, int]], seq_len: int) -> list[list[Piece]]:
    """Rows of at most `seq_len` predictions from (document, tokens) pairs; every prediction is in one row. All
    rows but the last are filled to 15/16 or more."""
    pieces = [piece for document, tokens in documents for piece in _pieces(document, tokens, seq_len)]
    rows = [[piece] for piece in pieces if piece.length == seq_len]
    pool = sorted((piece for piece in pieces if piece.length < seq_len), key=_length)
    while pool:
        row: list[Piece] = []
        free = seq_len
        while free and (piece := _take(pool, free, max(1, seq_len // 16))):
            row.append(piece)
            free -= piece.length
        rows.append(row)
    return rows


def collate(rows: Sequence[tuple[TokenSource, list[Piece]]], seq_len: int) -> Batch:
    """Rows of pieces, each row from one source, as a batch."""
    pad = rows[0][0].pad_id
    inputs = np.full((len(rows), seq_len), pad, np.int64)
    targets = np.full((len(rows), seq_len), NO_TARGET, np.int64)
    bounds: list[int] = [0]
    ids: list[Segment | None] = []
    for number, (source, pieces) in enumerate(rows):
        at = 0
        for document, start, length in pieces:
            tokens = source.tokens(document, start, start + length + 1)
            inputs[number, at : at + length] = tokens[:-1]
            targets[number, at : at + length] = tokens[1:]
            at += length
            bounds.append(number * seq_len + at)
            ids.append(Segment(source.name, document, start))
        if at < seq_len:
            bounds.append((number + 1) * seq_len)
            ids.append(None)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.tensor(bounds), ids)


def one_pass(source: TokenSource, batch_size: int, seq_len: int) -> Iterator[Batch]:
    """Every prediction of a source once, in batches of at most `batch_size` rows; for validation."""
    rows = pack(enumerate(source.lengths.tolist()), seq_len)
    for begin in range(0, len(rows), batch_size):
        yield collate([(source, row) for row in rows[begin : begin + batch_size]], seq_len)
