"""Writing the picture sources of a prepared folder: draw, encode, put on one side of the split.

A kind of pictures (pictures/kinds.py) is a source like any other. The words that are rendered come from the training
texts, so pictures are written behind the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from nanok3.data.files import replacing
from nanok3.data.picture_text import PlacedPicture, encode_document, media_pad_id
from nanok3.data.pictures.document import PictureDocument
from nanok3.data.pictures.kinds import WRITTEN, PictureMix, check_needs, open_kind, picture_documents, with_split
from nanok3.data.pictures.words import common_words
from nanok3.data.tokenizer import Tokenizer

WORD_BYTES = 4 << 20
"""Training text that the words are counted in."""

Split = tuple[str, PictureDocument]


@runtime_checkable
class Writer(Protocol):
    """What takes the documents of one source and split (prepared.py)."""

    def add(
        self, ids: list[int], size: int, placed: Sequence[PlacedPicture], told: Sequence[tuple[int, int]]
    ) -> None: ...

    def flush(self) -> None: ...


def check_mix(mix: PictureMix, names: Sequence[str], tokenizer: Tokenizer) -> None:
    """ValueError or ImportError for what would only be found out after the texts, called `names`, are written."""
    media_pad_id(tokenizer)
    for name in names:
        if name in mix.kinds:
            raise ValueError(f"source {name}: a kind of pictures has that name; rename the file")
    for kind in mix.kinds:
        check_needs(kind)


def drawn(
    mix: PictureMix, texts: Iterator[str], validation: float, seed: int, cache: Path | None
) -> dict[str, Iterator[Split]]:
    """Kind -> its documents with their sides of the split, drawn as they are read. `texts` are the training texts."""
    words = common_words(texts) if set(WRITTEN) & set(mix.kinds) else []
    return {
        kind: with_split(picture_documents(kind, open_kind(kind, words, cache), count, seed), validation, seed)
        for kind, count in mix.counts().items()
    }


def write_kind(
    kind: str, documents: Iterator[Split], tokenizer: Tokenizer, folder: Path, writers: Mapping[str, Writer]
) -> None:
    """Encode and write one kind, its held-out texts and questions too."""
    validation = folder / "validation"
    with replacing(validation / f"{kind}.txt") as raw, replacing(validation / f"{kind}.jsonl") as facts:
        for split, document in documents:
            ids, placed, told = encode_document(document, tokenizer)
            content = document.text.encode()
            writers[split].add(ids, len(content), placed, told)
            if split == "validation":
                raw.write(content)
                facts.write(_facts(document))
    for writer in writers.values():
        writer.flush()


def _facts(document: PictureDocument) -> bytes:
    """What a validation document shows, as a line of JSON."""
    record = {"questions": [question._asdict() for question in document.questions], "keys": document.keys}
    return (json.dumps(record) + "\n").encode()
