"""Conversations as training data: a row of a file -> ids, and for each id who wrote it and in which channel.

    {"messages": [...], "tools": [...], "effort": "low" | "high" | "max", "thinking": true}      one line of JSONL

`messages` and `tools` are as in the chat API (data/messages.py): `reasoning_content`, `tool_calls`, pictures as
`image_url` or `image` parts with a file's path, relative to the data's own folder, or a data URL. Only `messages` has
to be there; other fields are left alone. A parquet table has the same fields as columns, lists or JSON text.

    ids, kinds = the conversation, rendered once, segment by segment (data/chat.py)
    kind       = given | think | response | tools | end      end: the close of the message and <|end_of_msg|>
    target     = id, where its kind is not `given`

So the loss is on what the model samples, the end token included, and on nothing else: no prompt, no result of a tool,
no arguments that were no JSON. The kinds are the one mask; they come from who wrote a segment, never from an id's
value, so a pad that has the id of an end token is still padding. A conversation is never cut, and no [EOS] follows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.data.chat import CLOSE, EFFORTS, OPEN, OURS, RESPONSE, THINK, TOOLS, Segment, Sentences, encode, image_parts
from nanok3.data.chat import render as render_chat
from nanok3.data.images import Image, preprocess_image
from nanok3.data.packing import NO_TARGET, Batch, Piece, collate, pack_whole
from nanok3.data.tokenizer import Tokenizer

PAD = "<|media_pad|>"


class Kind(IntEnum):
    """Who wrote an id, and where. All but GIVEN are sampled."""

    GIVEN = 0
    THINK = 1
    RESPONSE = 2
    TOOLS = 3
    END = 4


SAMPLED = tuple(kind for kind in Kind if kind != Kind.GIVEN)
_CHANNELS = {THINK: Kind.THINK, RESPONSE: Kind.RESPONSE, TOOLS: Kind.TOOLS}


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Conversation:
    """One row. `where` names its file and line in errors; pictures are looked for beside it, in `folder`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    effort: str | None = None
    thinking: bool = True
    where: str = "conversation"
    folder: Path = Path()

    def render(self, sentences: Sentences = OURS, image_prompts: Sequence[str] | None = None) -> list[Segment]:
        """The whole conversation; nothing is left open behind its last message."""
        return render_chat(
            self.messages,
            self.tools,
            self.thinking,
            thinking_effort=self.effort if self.thinking else None,
            image_prompts=image_prompts,
            add_generation_prompt=False,
            sentences=sentences,
        )


def conversation_of(row: Any, where: str, folder: Path = Path()) -> Conversation:
    """A row, checked; ValueError names where it stands, the field, its value and what is allowed."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: the row is {row!r:.60}; allowed: an object with messages")
    messages, tools = (_parsed(row.get(field), f"{where}: {field}") for field in ("messages", "tools"))
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: messages is {messages!r:.60}; allowed: a list of at least one message")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{where}: tools is {tools!r:.60}; allowed: a list of tools")
    effort, thinking = row.get("effort"), row.get("thinking")
    if effort not in (None, *EFFORTS):
        raise ValueError(f"{where}: effort is {effort!r:.60}; allowed: {', '.join(EFFORTS)}")
    if thinking not in (None, True, False):
        raise ValueError(f"{where}: thinking is {thinking!r:.60}; allowed: true, false")
    return Conversation(messages, tools or None, effort, thinking is not False, where, folder)


def _parsed(value: Any, where: str) -> Any:
    """A column of a table may hold JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from None


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The rows of a .jsonl or .parquet file. ValueError at the first one that is wrong."""
    readers = {".jsonl": _lines, ".parquet": _table}
    if path.suffix not in readers:
        raise ValueError(f"data: {path} ends in {path.suffix!r}; allowed: {', '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"data: no file {path}")
    for where, row in readers[path.suffix](path):
        yield conversation_of(row, where, path.parent)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where}: no JSON: {error}") from None


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path}: reading .parquet needs pyarrow: pip install 'nanok3[data]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches(1000) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: not readable as parquet: {error}") from None


# ---------------------------------------------------------------------- encoding


class Placed(NamedTuple):
    """A picture among the ids: its media block, its first placeholder, and what the tower reads."""

    begin: int
    end: int
    token: int
    image: Image

    @property
    def grid(self) -> list[int]:
        """Frames, rows and columns in patches."""
        return [int(size) for size in self.image.grid_thw[0]]


@dataclass(frozen=True)
class Example:
    """A conversation as ids; `kinds` has as many entries."""

    ids: np.ndarray
    kinds: np.ndarray
    where: str
    pictures: tuple[Placed, ...] = ()

    @property
    def patches(self) -> int:
        return sum(len(placed.image.pixel_values) for placed in self.pictures)


def kinds_of(segments: Sequence[Segment]) -> Iterator[Kind]:
    """The kind of each segment. A channel's tags are of its kind; the program's opening of an answer is given."""
    kind = Kind.GIVEN
    for this, following in zip(segments, [*segments[1:], Segment("", False)]):
        if this.allow_special and this.text == OPEN:
            kind = _CHANNELS.get(following.text, kind)
        elif this.allow_special and this.text == CLOSE and following.text == "message":
            kind = Kind.END
        yield kind if this.sampled else Kind.GIVEN


class Encoder:
    """Conversations to examples, for one tokenizer and one wording. Short pieces are encoded once."""

    def __init__(self, tokenizer: Tokenizer, sentences: Sentences = OURS) -> None:
        self.tokenizer, self.sentences = tokenizer, sentences
        self._known: dict[tuple[str, bool], list[int]] = {}

    def __call__(self, conversation: Conversation) -> Example:
        """ValueError, with the row's place, for what the renderer refuses, a picture that cannot be read, and a row
        without anything to learn."""
        try:
            images = _images(conversation)
            segments = conversation.render(self.sentences, [image.prompt for image in images] if images else None)
            pieces = self._pieces(segments, images)
        except ValueError as error:
            raise ValueError(f"{conversation.where}: {error}") from None
        ids = np.array([i for piece in pieces for i in piece], np.int64)
        kinds = np.repeat([int(kind) for kind in kinds_of(segments)], [len(piece) for piece in pieces])
        if not kinds.any():
            raise ValueError(f"{conversation.where}: messages has no assistant's message, so nothing to learn")
        return Example(ids, kinds.astype(np.uint8), conversation.where, _placed(pieces, images, self.tokenizer))

    def _pieces(self, segments: Sequence[Segment], images: Sequence[Image]) -> list[list[int]]:
        """Ids of each segment; a picture's one placeholder becomes as many as it has feature rows."""
        left = iter(images)
        pieces = []
        for segment in segments:
            ids, is_picture = self._ids(segment), segment.allow_special and PAD in segment.text
            pieces.append(self._rows(ids, next(left)) if is_picture else ids)
        return pieces

    def _ids(self, segment: Segment) -> list[int]:
        key = segment.text, segment.allow_special
        if key in self._known:
            return self._known[key]
        ids = encode([segment], self.tokenizer)
        if len(segment.text) <= 32:
            self._known[key] = ids
        return ids

    def _rows(self, ids: list[int], image: Image) -> list[int]:
        pad = self.tokenizer.special[PAD]
        at = ids.index(pad)
        return [*ids[:at], *[pad] * image.tokens, *ids[at + 1 :]]


def _images(conversation: Conversation) -> list[Image]:
    """The pictures, in the order of the prompt."""
    found = []
    for number, part in enumerate(image_parts(conversation.messages)):
        given = part.get(part["type"])
        source = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(source, str) or source.startswith(("http:", "https:")):
            raise ValueError(f"picture {number} is {source!r:.60}; allowed: a file's path or a data URL")
        found.append(preprocess_image(source if source.startswith("data:") else conversation.folder / source))
    return found


def _placed(pieces: Sequence[Sequence[int]], images: Sequence[Image], tokenizer: Tokenizer) -> tuple[Placed, ...]:
    left, found, begin = iter(images), [], 0
    for piece in pieces:
        if images and tokenizer.special[PAD] in piece:
            found.append(Placed(begin, begin + len(piece), begin + piece.index(tokenizer.special[PAD]), next(left)))
        begin += len(piece)
    return tuple(found)


# ---------------------------------------------------------------------- as a source of batches


class _Pixels:
    def pixel_values(self, placed: Placed) -> Float[Tensor, "N 3 14 14"]:
        return placed.image.pixel_values


class Conversations:
    """Examples as `packing.collate` takes documents, with the mask of each batch."""

    def __init__(self, name: str, examples: Iterable[Example], pad_id: int) -> None:
        self.name, self.examples, self.pad_id = name, list(examples), pad_id
        self.pictures = _Pixels() if any(example.pictures for example in self.examples) else None
        self.lengths = np.array([len(example.ids) for example in self.examples], np.int64)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def digest(self) -> str:
        """Stands for all ids and kinds."""
        found = hashlib.sha256(self.name.encode())
        for example in self.examples:
            found.update(example.ids.tobytes() + example.kinds.tobytes())
        return found.hexdigest()

    def counts(self) -> dict[str, int]:
        """Tokens of each kind, given ones too."""
        total = sum((np.bincount(e.kinds, minlength=len(Kind)) for e in self.examples), np.zeros(len(Kind), np.int64))
        return {kind.name.lower(): int(total[kind]) for kind in Kind}

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.examples[document].ids[start:stop]

    def pictures_of(self, document: int) -> tuple[Placed, ...]:
        return self.examples[document].pictures

    def told_of(self, document: int) -> tuple[tuple[int, int], ...]:
        """None: a conversation's targets weigh alike."""
        return ()

    def pack(self, members: Iterable[int], seq_len: int) -> list[list[Piece]]:
        """Rows of whole conversations; pictures as in packing.py, two patches a token at most."""
        sized = [(i, int(self.lengths[i]), self.examples[i].patches) for i in members]
        return pack_whole(sized, seq_len, 2 * seq_len)

    def batch(self, rows: Sequence[list[Piece]], seq_len: int, kinds: Sequence[Kind] = SAMPLED) -> Batch:
        """Rows as a batch whose targets are the ids of these kinds."""
        whole = collate([(self, row) for row in rows], seq_len)
        keep = torch.zeros(whole.targets.numel(), dtype=torch.bool)
        for begin, end, of in zip(whole.cu_seqlens[:-1].tolist(), whole.cu_seqlens[1:].tolist(), whole.ids):
            if of is not None:
                written = self.examples[of.document].kinds[of.offset + 1 : of.offset + 1 + end - begin]
                keep[begin:end] = torch.from_numpy(np.isin(written, kinds))
        return replace(whole, targets=whole.targets.masked_fill(~keep.view_as(whole.targets), NO_TARGET))

    def one_pass(self, batch_size: int, seq_len: int, kinds: Sequence[Kind] = SAMPLED) -> list[Batch]:
        """Every conversation once."""
        rows = self.pack(range(len(self)), seq_len)
        return [self.batch(rows[at : at + batch_size], seq_len, kinds) for at in range(0, len(rows), batch_size)]
