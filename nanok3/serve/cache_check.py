"""Is a warm answer the cold one? A share of the prompts with a cache hit are read again from nothing and compared.

    difference = max |logits of the first token, with the cache - without it|

The second reading is a sequence of its own beside those of the scheduler: it looks nothing up, registers nothing, takes
its pages when its job has ended, and reads one chunk a step. It shows a page that was overwritten, a state that belongs
to other tokens, or a half-restored prefix, which no other number would.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor

from nanok3.serve.page_pool import Kind
from nanok3.serve.prefix_cache import PrefixCache, SpanKeys
from nanok3.serve.scheduler import Reading, Work
from nanok3.serve.sequence import Sequence

log = logging.getLogger("nanok3")


@dataclass(eq=False)
class _Check:
    """A prompt to be read again, and the logits it had."""

    sequence: Sequence
    warm: Float[Tensor, " vocab"]


class CacheChecks:
    """The checks of one engine; everything but the numbers is for the engine's thread."""

    def __init__(self, runner: Reading, cache: PrefixCache, share: float, bound: float, budget: int) -> None:
        """share: of the sequences with a hit. bound: a difference above it is logged. budget: tokens a step."""
        self.runner, self.cache, self.share, self.bound, self.budget = runner, cache, share, bound, budget
        self.done = 0
        self.failed = 0
        """Of those done: with a difference above the bound."""
        self.skipped = 0
        """Given up for want of pages, or because the model failed."""
        self.worst = 0.0
        self._due = 0.0
        self._kept: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()
        self._queue: deque[_Check] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def keep(self, sequence: Sequence, logits: Float[Tensor, " vocab"]) -> None:
        """These are the logits after a sequence's prompt; kept if it had a hit and its turn has come."""
        if not self.share or sequence.said or not sequence.cached_tokens:
            return
        self._due += self.share
        if self._due >= 1 - 1e-9:
            self._due -= 1
            self._kept[sequence] = logits.detach().double().cpu()

    def queue(self, sequence: Sequence) -> None:
        """The sequence has ended: if its logits were kept, its prompt is read again."""
        warm = self._kept.pop(sequence, None)
        if warm is not None:
            prompt = sequence.ids[: sequence.prompt_tokens]
            keys, pictures = SpanKeys(self.cache.span), sequence.pictures
            again = Sequence(f"{sequence.id}-again", prompt, len(prompt), keys, pictures=pictures)
            self._queue.append(_Check(again, warm))

    def abandon(self) -> None:
        """Check nothing more."""
        self.share = 0.0

    def step(self) -> None:
        """Read the next chunk of the oldest check."""
        if not self._queue:
            return
        check = self._queue[0]
        try:
            cold = self._read_on(check.sequence)
        except Exception as error:  # no page is free, or the model failed: of no consequence to any answer
            log.warning("%s: not checked: %s", check.sequence.id, error)
            self.skipped += 1
        else:
            if cold is None:
                return
            self._compare(check, cold)
        self._release(self._queue.popleft().sequence)

    def _read_on(self, sequence: Sequence) -> Float[Tensor, " vocab"] | None:
        """The next chunk; logits behind the last."""
        layout, allocate = self.runner.layout, self.cache.allocate
        if not self.share:
            raise ValueError("the engine stops")
        if not sequence.computed:
            sequence.state = allocate(Kind.SNAPSHOT, len(layout.groups))
            for page in sequence.state:
                self.runner.arena.clear(page)
        end = min(len(sequence.ids), sequence.computed + self.budget)
        sequence.pages += allocate(Kind.LATENT, layout.latent_pages(end) - len(sequence.pages))
        piece = Work(sequence, sequence.computed, end - sequence.computed)
        result = self.runner.read([piece], frozenset()).get(sequence.id)
        if isinstance(result, Exception):
            raise result
        sequence.computed = end
        return None if result is None else result[-1]

    def _compare(self, check: _Check, cold: Float[Tensor, " vocab"]) -> None:
        difference = float((cold.double().cpu() - check.warm).abs().max())
        self.done += 1
        if not difference <= self.bound:  # NaN is a failure
            self.failed += 1
            log.error("%s: warm and cold logits differ by %g", check.sequence.id, difference)
        self.worst = max(self.worst, difference)

    def _release(self, sequence: Sequence) -> None:
        self.cache.pool.release([*sequence.pages, *sequence.state])
        sequence.pages, sequence.state = [], []
