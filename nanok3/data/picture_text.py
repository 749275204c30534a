"""A picture document as ids: the wide form, one `<|media_pad|>` for each feature row of a picture.

    text  <|media_begin|> image 64x56 <|media_content|> <|media_pad|> x rows <|media_end|>  text  [EOS]

It is what the model makes of one pad a picture, so a document's length in a row is known before its pictures are
read. A block and the time before a video chunk are written by the program and never learned; what is learned is the
text, `[EOS]` included (packing.py). `told` bounds the ids of the text that only the pictures tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from nanok3.data.images import plan_size
from nanok3.data.pictures.document import Picture, PictureDocument
from nanok3.data.tokenizer import Tokenizer
from nanok3.data.video import chunk_prompt

PAD = "<|media_pad|>"


class PlacedPicture(NamedTuple):
    """A picture, where its block begins and ends in the ids, and where its first pad stands."""

    picture: Picture
    begin: int
    end: int
    token: int


class Encoded(NamedTuple):
    """A document's ids, `[EOS]` last, its pictures in order, and bounds of the ids that the pictures tell."""

    ids: list[int]
    placed: list[PlacedPicture]
    told: list[tuple[int, int]]


def media_pad_id(tokenizer: Tokenizer) -> int:
    """The id of `<|media_pad|>`; ValueError for a vocabulary without the media tokens."""
    for name in ("<|media_begin|>", "<|media_content|>", PAD, "<|media_end|>"):
        if name not in tokenizer.special:
            raise ValueError(f"tokenizer: no {name} among its control tokens; pictures need it")
    return tokenizer.special[PAD]


def block(picture: Picture) -> str:
    """The text that stands for a picture or a chunk, with one pad."""
    width, height = picture.size
    if picture.start is not None:
        return chunk_prompt(picture.start, width, height)
    return f"<|media_begin|>image {width}x{height}<|media_content|>{PAD}<|media_end|>"


def encode_document(document: PictureDocument, tokenizer: Tokenizer) -> Encoded:
    """A document as a row holds it."""
    pad = media_pad_id(tokenizer)
    ids: list[int] = []
    placed: list[PlacedPicture] = []
    last = 0
    for part in document.parts:
        if isinstance(part, str):
            last = len(ids)
            ids += tokenizer.encode(part)
            continue
        begin, narrow = len(ids), tokenizer.encode(block(part), allow_special=True)
        at = narrow.index(pad)
        ids += [*narrow[:at], *[pad] * plan_size(*part.size).tokens, *narrow[at + 1 :]]
        placed.append(PlacedPicture(part, begin, len(ids), begin + at))
    told: list[tuple[int, int]] = []
    if document.told:
        assert isinstance(document.parts[-1], str)
        told = [(last + a, last + b) for a, b in _in_ids(document.parts[-1], ids[last:], document.told, tokenizer)]
    return Encoded([*ids, tokenizer.eos_id], placed, told)


def _in_ids(
    text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """Bounds in characters as bounds of the ids that have a part in them."""
    ends = list(accumulate(len(tokenizer.token_bytes(token)) for token in ids))
    found = []
    for begin, end in spans:
        first, last = len(text[:begin].encode()), len(text[:end].encode())
        found.append((sum(e <= first for e in ends), 1 + sum(e < last for e in ends)))
    return found
