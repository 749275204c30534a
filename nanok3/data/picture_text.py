"""A picture document as ids: the wide form, one `<|media_pad|>` for each feature row of a picture.

    text  <|media_begin|> image 64x56 <|media_content|> <|media_pad|> x rows <|media_end|>  text  [EOS]

It is what the model makes of one pad a picture, so a document's length in a row is known before its pictures are
read. A block and the time before a video chunk are written by the program and never learned; what is learned is the
text, `[EOS]` included (packing.py).
"""

from __future__ import annotations

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


def encode_document(document: PictureDocument, tokenizer: Tokenizer) -> tuple[list[int], list[PlacedPicture]]:
    """Ids of a document, `[EOS]` last, and its pictures in order."""
    pad = media_pad_id(tokenizer)
    ids: list[int] = []
    placed: list[PlacedPicture] = []
    for part in document.parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part)
            continue
        begin, narrow = len(ids), tokenizer.encode(block(part), allow_special=True)
        at = narrow.index(pad)
        ids += [*narrow[:at], *[pad] * plan_size(*part.size).tokens, *narrow[at + 1 :]]
        placed.append(PlacedPicture(part, begin, len(ids), begin + at))
    return [*ids, tokenizer.eos_id], placed
