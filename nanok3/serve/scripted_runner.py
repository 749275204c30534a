"""The scripted stub in the place of a model: the engine schedules, caches and samples as ever, a script is what comes.

    z[next id of the script] = 0        z[k-th id after it] = -1,000 k        z[its end] = -9e6        z[id] = -1e7 - id

So the script is said at any temperature, and where a grammar forbids its next id, what of the rest it allows comes
first: the ids behind, then the end of the message, then the lowest id. Tokens of a prompt are all equally probable.
A request gets its line of the script when its first token is due. The delay of a token is waited for once a step,
however many requests are served.
"""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.serve.page_pool import PageLayout
from nanok3.serve.scheduler import Work
from nanok3.serve.scripted import Reply, Scripted
from nanok3.serve.sequence import Sequence

STEP, END, FLOOR = -1e3, -9e6, -1e7
LOOK_AHEAD = 1024
"""Ids of a script that stand ready where a grammar forbids the next one."""


class NoBytes:
    """Pages without anything on them."""

    def copy(self, source: int, target: int) -> None:
        pass

    def clear(self, page: int) -> None:
        pass


class _Place:
    """How far a sequence is in its reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.at = self._read = 0

    def follow(self, said: list[int]) -> None:
        """Pass over what was said since; an id that is not in the script moves nothing."""
        for token in said[self._read :]:
            if token in self.reply.ids[self.at :]:
                self.at = self.reply.ids.index(token, self.at) + 1
        self._read = len(said)


class ScriptedRunner:
    """Plays a model of `context` tokens with one KDA and one MLA layer, in `pages` pages of 64 tokens.
    media_pad: the placeholder of a model that sees, which it plays then; None for one that reads text only."""

    def __init__(
        self, script: Scripted, context: int = 131_072, pages: int = 4096, media_pad: int | None = None
    ) -> None:
        self.script, self.context, self.pages, self.media_pad = script, context, pages, media_pad
        self.layout = PageLayout.of(mla_layers=1, latent_bytes=1, kda_layers=1, state_bytes=64, page_tokens=64)
        self.arena = NoBytes()
        self.vocab_size = script.vocab_size
        self._places: WeakKeyDictionary[Sequence, _Place] = WeakKeyDictionary()

    def read(self, work: list[Work], all_logits: frozenset[str] = frozenset()) -> dict[str, Tensor | Exception]:
        """As `Runner.read`."""
        results: dict[str, Tensor | Exception] = {}
        delay = 0.0
        for piece in work:
            rows = torch.zeros(piece.count if piece.sequence.id in all_logits else 1, self.vocab_size)
            if piece.last:
                place = self._place(piece.sequence)
                rows[-1] = self._logits(place)
                delay = max(delay, place.reply.delay)
            if piece.last or len(rows) == piece.count:
                results[piece.sequence.id] = rows
        if delay:
            time.sleep(delay)
        return results

    def keep(self, sequence: Sequence, count: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def _place(self, sequence: Sequence) -> _Place:
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = _Place(self.script.next())
        place.follow(sequence.said)
        return place

    def _logits(self, place: _Place) -> Float[Tensor, " vocab"]:
        z = FLOOR - torch.arange(self.vocab_size, dtype=torch.float32)
        z[self.script.tokenizer.end_of_msg_id] = END
        ahead = torch.tensor(place.reply.ids[place.at : place.at + LOOK_AHEAD], dtype=torch.int64)
        # Of an id that comes twice the nearer counts.
        return z.scatter_reduce(0, ahead, STEP * torch.arange(len(ahead), dtype=torch.float32), "amax")
