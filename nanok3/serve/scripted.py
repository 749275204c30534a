"""A stub in the place of a model: it says what a file tells it to, one line of the file a request.

    {"segments": [{"text": "Hello", "special": false}, {"text": "<|close|>", "special": true}], "delay_ms": 0}
    {"ids": [72, 105, 258]}

The last line repeats. `special` text is markup: the names of control tokens in it are control tokens. `delay_ms` is the
time each token takes. A script that does not end its message is ended by `<|end_of_msg|>`, as a model would be.

With it the parser, the API, the accounting of a cache and cancellation are tested without weights, in milliseconds. A
request under a grammar gets of its script what the grammar allows (`Playback.next`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanok3.serve.fields import Fields, RequestError, refuse
from nanok3.serve.sampling_fields import allowed_ids, is_id

if TYPE_CHECKING:
    from nanok3.data.tokenizer import Tokenizer

MAX_DELAY_MS = 60_000


@dataclass(frozen=True)
class Reply:
    """One line of the script."""

    ids: tuple[int, ...]
    """With an end."""
    delay: float = 0.0
    """Seconds a token."""


class Scripted:
    """The replies of a file, in turn. `vocab_size` is that of its tokenizer."""

    def __init__(self, replies: list[Reply], tokenizer: Tokenizer) -> None:
        assert replies
        self.replies, self.tokenizer = replies, tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._given = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Tokenizer) -> Scripted:
        """Read a script. ValueError names the file, the line, the field, and what is allowed."""
        try:
            lines = Path(path).read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"scripted: cannot read {path}: {reason}") from None
        replies = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    replies.append(read_reply(line, tokenizer))
                except RequestError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from None
        if not replies:
            raise ValueError(f"{path} has no lines; allowed: one reply or more, a JSON object a line")
        return cls(replies, tokenizer)

    def next(self) -> Reply:
        """The reply to the next request."""
        reply = self.replies[min(self._given, len(self.replies) - 1)]
        self._given += 1
        return reply

    def next_reply(self) -> list[int]:
        """Its ids alone."""
        return list(self.next().ids)

    def play(self) -> Playback:
        """The next reply, to be said token by token."""
        return Playback(self.next(), self.tokenizer.end_of_msg_id, self.vocab_size)


class Playback:
    """One reply while it is said: the runner of one request."""

    def __init__(self, reply: Reply, end: int, vocab_size: int) -> None:
        self.reply = reply
        self._end, self._vocab_size = end, vocab_size
        self._at = 0

    def next(self, allowed: Callable[[int], bool] | None = None) -> int:
        """The next id, after the reply's delay. `allowed` is the mask of a constrained request: ids of the script that
        it forbids are passed over; where it allows none of the rest and no end, the lowest id that it does."""
        if self.reply.delay:
            time.sleep(self.reply.delay)
        for at in range(self._at, len(self.reply.ids)):
            if allowed is None or allowed(self.reply.ids[at]):
                self._at = at + 1
                return self.reply.ids[at]
        if allowed is None or allowed(self._end):
            return self._end
        return next(token for token in range(self._vocab_size) if allowed(token))


def read_reply(line: str, tokenizer: Tokenizer) -> Reply:
    """One line of a script. RequestError for a wrong one."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"no JSON: {error}") from None
    if not isinstance(given, dict):
        raise refuse("it", given, "an object with segments or ids")
    f = Fields(given)
    unknown = sorted(set(given) - {"segments", "ids", "delay_ms"})
    if unknown:
        raise f.refuse(unknown[0], "no such field; segments or ids, and delay_ms")
    if f.has("segments") == f.has("ids"):
        raise RequestError("it has both segments and ids, or neither; allowed: one of them")
    ids = _ids(f, tokenizer) if f.has("ids") else _encoded(f, tokenizer)
    if not ids or ids[-1] not in (tokenizer.end_of_msg_id, tokenizer.eos_id):
        ids = [*ids, tokenizer.end_of_msg_id]
    return Reply(tuple(ids), (f.number("delay_ms", 0, MAX_DELAY_MS) or 0.0) / 1000)


def _ids(f: Fields, tokenizer: Tokenizer) -> list[int]:
    for k, token in enumerate(f.list("ids")):
        if not is_id(token, tokenizer.vocab_size):
            raise refuse(f"ids[{k}]", token, allowed_ids(tokenizer.vocab_size))
    return f.list("ids")


def _encoded(f: Fields, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    for k, segment in enumerate(f.list("segments")):
        ids += _segment(segment, f"segments[{k}]", tokenizer)
    return ids


def _segment(given: Any, where: str, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(given, dict):
        raise refuse(where, given, "an object with text and special")
    segment = Fields(given, where)
    text = segment.string("text")
    if text is None:
        raise segment.refuse("text", "a string")
    return tokenizer.encode(text, allow_special=segment.boolean("special"))
