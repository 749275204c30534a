"""Documents of any length -> rows of one length, never across a boundary.

A document of n ids gives n - 1 predictions: input i predicts id i + 1, so its last id, `[EOS]`, is only a target.
Its predictions are cut into consecutive pieces of T; the last piece is what is left. Full pieces are rows of their
own. The others share rows, the longest that fits first; where none fits, the longest is cut to fill the row, unless
less than T / 16 is free, which is padded:

    row = [piece | piece | ... | padding]     every piece starts fresh; cu_seqlens tells the model where

A piece cut by a row's end keeps its last target, the next id of the same document. Padding has no target.

A document with pictures is never cut: a caption without its picture would teach guessing. Whole documents share rows,
the longest that fits first, and a row holds at most so many patches (by default two a token), so that the tower's work
is about the same for every row of pictures. What stands in a picture's block is no target: neither the placeholders
nor what the program writes around them.

Most of what stands behind a picture any picture of its kind has behind it: "Question:", the question, "There are". With
`picture_text_weight` below 1 these targets weigh that much, and what the picture tells (`told_of`) weighs 1, as all
texts do.

This is ours; the report does not say how K3's documents were packed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
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


class PictureId(NamedTuple):
    """A picture of a prepared folder: source, document, and which of the document's pictures."""

    source: str
    document: int
    number: int


@dataclass(frozen=True)
class Pictures:
    """The pictures of a batch, in the order of their places: what `model(input_ids, pixel_values, grid_thw)` takes.
    Every one has its rows of `<|media_pad|>` side by side in one row of the batch."""

    pixel_values: Float[Tensor, "N 3 14 14"]
    """The patches of all pictures, end to end."""
    grid_thw: Int[Tensor, "items 3"]
    """Frames, rows and columns in patches; t * h * w patches each, and h/2 * w/2 feature rows."""
    places: Int[Tensor, " items"]
    """Where each picture's first placeholder stands, counted over the rows laid end to end."""
    ids: list[PictureId]

    def to(self, device: torch.device) -> Pictures:
        """The same pictures with their tensors on `device`."""
        return Pictures(self.pixel_values.to(device), self.grid_thw.to(device), self.places.to(device), self.ids)


@runtime_checkable
class Documents(Protocol):
    """What rows are made of: documents by their number. A prepared source is one."""

    @property
    def name(self) -> str: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def pictures(self) -> Any: ...

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray: ...

    def pictures_of(self, document: int) -> Sequence[Any]: ...

    def told_of(self, document: int) -> Sequence[tuple[int, int]]: ...


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens. `cu_seqlens` bounds the segments, counted over the rows laid end to end (0 to B * T);
    `ids` names the document behind each segment, None for padding. `pictures` is None where there are none, and
    `weights`, of the targets, where all are 1."""

    input_ids: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    cu_seqlens: Int[Tensor, " bounds"]
    ids: list[Segment | None]
    pictures: Pictures | None = None
    weights: Float[Tensor, "B T"] | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        pictures = self.pictures.to(device) if self.pictures else None
        weights = None if self.weights is None else self.weights.to(device)
        ids, targets, bounds = self.input_ids.to(device), self.targets.to(device), self.cu_seqlens.to(device)
        return Batch(ids, targets, bounds, self.ids, pictures, weights)

    @property
    def filled(self) -> Bool[Tensor, "B T"]:
        """Where there is no padding. Without pictures these are the positions that have targets."""
        lengths = self.cu_seqlens.diff()
        kept = torch.tensor([segment is not None for segment in self.ids], device=lengths.device)
        return kept.repeat_interleave(lengths).view_as(self.input_ids)


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


def pack_whole(
    documents: Iterable[tuple[int, int, int]], seq_len: int, patches_per_row: int, tries: int = 64
) -> list[list[Piece]]:
    """Rows of whole documents from (document, tokens, patches) triples, none of more than `seq_len` predictions. A row
    holds at most `patches_per_row` patches, or one document that has more. Of the documents that fit by length the
    longest `tries` are tried for their patches."""
    pool = sorted((tokens - 1, patches, document) for document, tokens, patches in documents)
    rows = []
    while pool:
        row: list[Piece] = []
        free, patches_free = seq_len, patches_per_row
        while (at := _longest(pool, free, patches_free, tries, first=not row)) is not None:
            length, patches, document = pool.pop(at)
            row.append(Piece(document, 0, length))
            free, patches_free = free - length, patches_free - patches
        assert row, "a document is longer than a row"
        rows.append(row)
    return rows


def _longest(pool: list[tuple[int, int, int]], free: int, patches: int, tries: int, first: bool) -> int | None:
    """The place of the longest document in the sorted pool that fits; the first of a row may have any patches."""
    fit = bisect_right(pool, free, key=lambda entry: entry[0])
    for at in range(fit - 1, max(fit - 1 - tries, -1), -1):
        if first or pool[at][1] <= patches:
            return at
    return None


def rows_of(source: TokenSource, documents: np.ndarray, seq_len: int, patches_per_row: int | None) -> list[list[Piece]]:
    """Documents of a source as rows: cut for texts, whole where there are pictures (`patches_per_row` patches a row at
    most, None: two a token)."""
    lengths = source.lengths[documents].tolist()
    if source.pictures is None:
        return pack(zip(documents.tolist(), lengths, strict=True), seq_len)
    patches = source.patches[documents].tolist()
    return pack_whole(zip(documents.tolist(), lengths, patches, strict=True), seq_len, patches_per_row or 2 * seq_len)


def check_fits(source: TokenSource, seq_len: int) -> None:
    """ValueError if a document with pictures, which is not cut, is longer than a row."""
    longest = int(source.lengths.max(initial=0)) - 1
    if source.pictures is not None and longest > seq_len:
        raise ValueError(f"seq_len: {seq_len}; documents with pictures are not cut, {source.name} needs {longest}")


def collate(rows: Sequence[tuple[Documents, list[Piece]]], seq_len: int, picture_text_weight: float = 1.0) -> Batch:
    """Rows of pieces, each row from one source, as a batch."""
    pad = rows[0][0].pad_id
    inputs = np.full((len(rows), seq_len), pad, np.int64)
    targets = np.full((len(rows), seq_len), NO_TARGET, np.int64)
    weights = np.ones((len(rows), seq_len), np.float32)
    bounds: list[int] = [0]
    ids: list[Segment | None] = []
    found: list[_Found] = []
    for number, (source, pieces) in enumerate(rows):
        at = 0
        for document, start, length in pieces:
            tokens = source.tokens(document, start, start + length + 1)
            inputs[number, at : at + length] = tokens[:-1]
            targets[number, at : at + length] = tokens[1:]
            for which, picture in enumerate(source.pictures_of(document)):
                targets[number, at + max(picture.begin - 1, 0) : at + picture.end - 1] = NO_TARGET
                place = number * seq_len + at + picture.token
                found.append(_Found(source, picture, place, PictureId(source.name, document, which)))
            if source.pictures is not None and picture_text_weight != 1:
                weights[number, at : at + length] = picture_text_weight
                for begin, end in source.told_of(document):
                    weights[number, at + begin - 1 : at + end - 1] = 1
            at += length
            bounds.append(number * seq_len + at)
            ids.append(Segment(source.name, document, start))
        if at < seq_len:
            bounds.append((number + 1) * seq_len)
            ids.append(None)
    pictures = _read(found) if found else None
    weighing = torch.from_numpy(weights) if (weights != 1).any() else None
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.tensor(bounds), ids, pictures, weighing)


class _Found(NamedTuple):
    """A picture that stands in a batch, before its pixels are read."""

    source: Documents
    picture: Any
    place: int
    id: PictureId


def _read(found: Sequence[_Found]) -> Pictures:
    values = [each.source.pictures.pixel_values(each.picture) for each in found if each.source.pictures]
    grids = torch.tensor([each.picture.grid for each in found])
    return Pictures(torch.cat(values), grids, torch.tensor([each.place for each in found]), [each.id for each in found])


def one_pass(source: TokenSource, batch_size: int, seq_len: int, patches_per_row: int | None = None) -> Iterator[Batch]:
    """Every prediction of a source once, in batches of at most `batch_size` rows; for validation."""
    check_fits(source, seq_len)
    rows = rows_of(source, np.arange(len(source)), seq_len, patches_per_row)
    for begin in range(0, len(rows), batch_size):
        yield collate([(source, row) for row in rows[begin : begin + batch_size]], seq_len)
