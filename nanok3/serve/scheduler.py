"""Who reads how many tokens in the next step, and with which pages.

A step reads at most `budget` tokens. Sequences that decode come first, one token each: their readers are waiting.
What is left goes to prompts in chunks: half of it to the one that came first, so that a long prompt gets through, the
rest to those with least left, so that a short one does not wait for long ones; what a half leaves over is the other's.
A quarter of the places is kept for prompts that fit into one step. A step begins with one prompt for every 64 tokens of
its budget, or 8 where that is more: others wait while memory is made ready for each, and the rest come a step later.
Where making ready takes long, a step begins with 4 and then with none any more after 0.8 ms.

Whoever is served in a step waits for all of it, and whoever comes meanwhile for its end. So where somebody waits, an
answer or a prompt that can be read to its end, prompts that cannot fill a step up to a quarter of the budget only, and
the first of them has half of that in any case. So it is in the few steps after it, too: the next short one may be on
its way. Long ones among themselves have all of the budget.

    admission    wait while another sequence reads the same beginning; look the prompt up in the prefix cache; hold what
                 was found; take pages for the rest of the prompt and for the state; copy the snapshot into the state,
                 and the last page if the hit ends inside it
    step         each sequence reads up to a boundary where its state is to be kept, or to its chunk's end
    commit       register the spans that were completed; keep the state at boundaries worth it
    no pages     the last in rank gives all of its pages back and waits; it will find most of them in the cache

A chunk ends at a boundary where the state is wanted: the last one of the prompt (the turn's end, where the next request
goes on), the point where an earlier request with the same beginning parted from this one, and a sparse grid. Ours: the
grid's width, the halves, the quarters and how many begin at once.

Numbers only; the bytes are moved by a `Memory`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, runtime_checkable

from nanok3.serve.page_pool import Kind, OutOfPages, PageLayout
from nanok3.serve.prefix_cache import Match, PrefixCache
from nanok3.serve.sequence import Sequence, Status

LONG_SHARE = 4
"""Where others wait, prompts that do not end in a step fill it up to one part in so many of its budget."""
WATCHFUL_STEPS = 8
"""Steps after the last that others waited in, before the budget is theirs again."""
ADMITTED_TOKENS, FEWEST_ADMITTED = 64, 8
"""A step begins with one prompt for so many tokens of its budget, or with so many where that is more."""
HASTY_SECONDS, HASTY_ADMITTED = 0.8e-3, 4
"""Once a step's deciding has taken so long, it begins with so many at most."""

_by_rank = attrgetter("rank")


def _length(sequence: Sequence) -> tuple[int, int]:
    """Sorts those that wait by how much they have to read."""
    return sequence.priority, len(sequence.ids)


@runtime_checkable
class Memory(Protocol):
    """The bytes behind the page numbers."""

    def copy(self, source: int, target: int) -> None:
        """Make a page's bytes those of another, at once."""

    def clear(self, page: int) -> None:
        """Make a page the state of a sequence that has read nothing."""


@dataclass(slots=True)
class Work:
    """Tokens [start, start + count) of a sequence, at its end with a draft behind them, of which each is read on trial.
    `last`: nothing of the sequence remains after it, so its logits are wanted. Not frozen: that would take five times
    as long, for every sequence in every step."""

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def last(self) -> bool:
        return self.end == len(self.sequence.ids) + len(self.draft)

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.ids[self.start : self.end], *self.draft]


@runtime_checkable
class Reading(Protocol):
    """What reads tokens: a model (runner.Runner), or something that plays one (scripted)."""

    layout: PageLayout
    pages: int
    vocab_size: int
    context: int
    media_pad: int | None
    """The id that stands for a row of a picture; None for who does not see."""

    @property
    def arena(self) -> Memory: ...

    def read(self, work: list[Work], all_logits: frozenset[str]) -> dict[str, Tensor | Exception]:
        """As `Runner.read`."""

    def keep(self, sequence: Sequence, count: int) -> None:
        """As `Runner.keep`."""

    def forget(self) -> None:
        """Nothing that was computed before counts any more."""


@dataclass(frozen=True)
class Limits:
    """What a server allows."""

    budget: int = 512
    """Tokens a step."""
    max_sequences: int = 64
    grid: int = 8
    """Spans between two snapshots of the sparse grid."""

    def __post_init__(self) -> None:
        for name in ("budget", "max_sequences", "grid"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


class Scheduler:
    """Waiting and running sequences over one prefix cache."""

    def __init__(
        self, cache: PrefixCache, layout: PageLayout, memory: Memory, limits: Limits | None = None, caching: bool = True
    ) -> None:
        """caching: whether prompts are looked up and what was read is registered."""
        self.cache, self.layout, self.memory, self.caching = cache, layout, memory, caching
        self.limits = limits or Limits()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both by rank."""
        self._by_length: list[Sequence] = []
        """Those that wait."""
        self.preemptions = 0
        self._watchful = 0
        self._lent = 0
        """Pages of those that run, while sequences are admitted; shared ones count more than once."""
        self._held: set[int] | None = None
        """The same, each once; None until somebody asks."""
        self.before_lookup: Callable[[Sequence], None] = lambda sequence: None
        """Told each sequence that is to be admitted; may bring back what was evicted (offload.py)."""
        self.deciding_seconds: Callable[[], float] = lambda: 0.0
        """How long this step has been deciding, by whoever measures it."""

    @property
    def most_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""
        pages = self.cache.pool.pages - len(self.layout.groups) - 1
        return max(0, pages) * self.layout.page_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError if the pool could never hold it."""
        if len(sequence.ids) >= self.most_tokens:
            raise ValueError(f"{len(sequence.ids)} tokens do not fit; the pool holds {self.most_tokens} with an answer")
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_by_rank)
        insort(self._by_length, sequence, key=_length)

    def _wait_no_more(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._by_length.remove(sequence)

    # ---------------------------------------------------------------- a step

    def plan(self) -> list[Work]:
        """What to read now; pages are taken. Call `commit` for each piece once it was read."""
        self._admit()
        work: list[Work] = []
        reading: list[Sequence] = []
        size = self.layout.page_tokens
        for sequence in list(self.running):
            computed = sequence.computed
            if not computed or len(sequence.ids) - computed != 1:
                reading.append(sequence)
            elif computed < len(sequence.pages) * size:  # most have a page for their next token
                work.append(Work(sequence, computed, 1))
            elif (piece := self._give(sequence, 1)) is not None:
                work.append(piece)
        left = self.limits.budget - len(work)
        reading = [sequence for sequence in reading if sequence.status is Status.RUNNING]
        self._watch(work, reading, left)
        if reading and left > 0:
            work += self._chunks(reading, left)
        return [piece for piece in work if piece.sequence.status is Status.RUNNING]

    def _watch(self, decoding: list[Work], reading: list[Sequence], left: int) -> None:
        """Note whether anybody waits for this step."""
        if decoding or any(sequence.remaining <= left for sequence in reading):
            self._watchful = WATCHFUL_STEPS + 1
        else:
            self._watchful = max(0, self._watchful - 1)

    def _chunks(self, reading: list[Sequence], budget: int) -> list[Work]:
        """Who reads how much of the budget; `long` is what is left of it for prompts that do not end in this step."""
        long = min(budget, max(1, self.limits.budget // LONG_SHARE)) if self._watchful else budget
        first, *others = reading
        parts = 2 if others else 1
        share = min(first.remaining, -(-budget // parts))
        if share < first.remaining:
            share = min(share, -(-long // parts))
        long = max(0, long - share)
        counts, left = {id(first): share}, budget - share
        for sequence in sorted(others, key=lambda sequence: (sequence.priority, sequence.remaining, sequence.arrival)):
            count = min(sequence.remaining, left)
            if count < sequence.remaining:
                count = min(count, long)
            long = max(0, long - count)
            counts[id(sequence)], left = count, left - count
        rest = min(first.remaining - share, left)
        counts[id(first)] += rest if share + rest == first.remaining else min(rest, long)
        pieces = [self._give(sequence, counts[id(sequence)]) for sequence in reading if counts[id(sequence)]]
        return [piece for piece in pieces if piece is not None]

    def _give(self, sequence: Sequence, count: int) -> Work | None:
        """A piece of work and the pages it writes, or None when the sequence had to give way."""
        if sequence.status is not Status.RUNNING:
            return None
        end = sequence.computed + 1 if count == 1 else min(sequence.computed + count, self.next_stop(sequence))
        while (missing := self.layout.latent_pages(end) - len(sequence.pages)) > 0:
            try:
                sequence.pages += self.cache.allocate(Kind.LATENT, missing)
            except OutOfPages:
                loser = self.running[-1]
                self.preempt(loser)
                if loser is sequence:
                    return None
        return Work(sequence, sequence.computed, end - sequence.computed)

    def room_behind(self, work: Work, tokens: int) -> int:
        """How many tokens behind a piece have a page: up to `tokens`, without taking one from another sequence."""
        sequence, layout = work.sequence, self.layout
        missing = layout.latent_pages(work.end + tokens) - len(sequence.pages)
        if missing > 0:
            try:
                sequence.pages += self.cache.allocate(Kind.LATENT, missing)
            except OutOfPages:
                return min(tokens, len(sequence.pages) * layout.page_tokens - work.end)
        return tokens

    def next_stop(self, sequence: Sequence) -> int:
        """The next boundary at which the state is wanted, or the end of what there is."""
        span, end = self.cache.span, len(sequence.ids)
        if not self.caching or not self.layout.groups:
            return end
        return min(self._next_wanted(sequence, sequence.computed // span + 1) * span, end)

    def _next_wanted(self, sequence: Sequence, depth: int) -> int:
        """After how many spans, `depth` or more, the state is to be kept next: at the grid, where another request
        parted, at the turn's end, or anywhere in the answer."""
        span, grid, prompt = self.cache.span, self.limits.grid, sequence.prompt_tokens
        found = min(-(-depth // grid) * grid, max(depth, -(-prompt // span)))
        parted = 0 if sequence.match is None else sequence.match.latent_tokens // span
        for place in (parted, max(0, prompt - 1) // span):
            if depth <= place < found:
                found = place
        return found

    def _wanted(self, sequence: Sequence, depth: int) -> bool:
        """Whether to keep the state after `depth` spans."""
        return self._next_wanted(sequence, depth) == depth

    def commit(self, work: Work) -> None:
        """The piece was read: pages and state hold it. Of a draft only what is by now part of the sequence is one."""
        self.commit_all([work])

    def commit_all(self, work: Iterable[Work]) -> None:
        """All of these pieces were read."""
        span = self.cache.span
        for piece in work:
            sequence = piece.sequence
            assert sequence.status is Status.RUNNING and sequence.computed == piece.start
            assert not piece.draft
            sequence.computed = computed = piece.start + piece.count
            if self.caching:
                assert sequence.node is not None
                if not 0 < computed - sequence.node.depth * span < span:
                    self._register(sequence)

    def _register(self, sequence: Sequence) -> None:
        """A boundary was reached."""
        span = self.cache.span
        assert sequence.node is not None
        for depth in range(sequence.node.depth + 1, sequence.computed // span + 1):
            if sequence.node.removed:
                return  # the cache was cleared since
            pages = self.cache.span_pages(depth, sequence.pages)
            node = self.cache.insert(sequence.node, sequence.keys.keys[depth - 1], pages, pin=True)
            self.cache.unpin(sequence.node)
            sequence.node = node
        at_boundary = sequence.computed == sequence.node.depth * span and not sequence.node.removed
        if at_boundary and sequence.node.depth and self.layout.groups and self._wanted(sequence, sequence.node.depth):
            self._keep_state(sequence)

    def _keep_state(self, sequence: Sequence) -> None:
        node, span = sequence.node, self.cache.span
        assert node is not None
        spoken = node.depth * span >= sequence.prompt_tokens
        if node.snapshot is None:
            try:
                pages = self.cache.allocate(Kind.SNAPSHOT, len(self.layout.groups))
            except OutOfPages:
                return  # the state is a convenience for later requests; the running ones need the pages
            for live, kept in zip(sequence.state, pages, strict=True):
                self.memory.copy(live, kept)
            turn_end = node.depth == (sequence.prompt_tokens - 1) // span
            self.cache.keep_snapshot(node, pages, turn_end)
        if spoken:
            before, sequence.spoken_snapshot = sequence.spoken_snapshot, node
            if before is not None and not before.turn_end and not before.removed:
                self.cache.drop_snapshot(before)  # only the answer's end is where a later request goes on

    # ---------------------------------------------------------------- coming and going

    def _admit(self) -> None:
        """Begin with whom there is a place and room for. The last quarter of the places is for prompts of at most one
        step."""
        most, budget = self.limits.max_sequences, self.limits.budget
        before = len(self.running)
        places = min(most, before + max(FEWEST_ADMITTED, budget // ADMITTED_TOKENS))
        long_places = most - most // 4
        if not self.waiting or before >= places:
            return
        self._held, self._lent = None, sum([len(one.pages) + len(one.state) for one in self.running])
        reading = [one for one in self.running if not one.computed or len(one.ids) - one.computed > 1]
        for sequence in self._queue():
            taken = len(self.running)
            if taken >= places:
                return
            if taken >= before + HASTY_ADMITTED and self.deciding_seconds() > HASTY_SECONDS:
                return
            if taken >= long_places and len(sequence.ids) > budget:
                continue
            if not self._is_being_read(sequence, reading) and self._start(sequence):
                reading.append(sequence)

    def _queue(self) -> Iterator[Sequence]:
        """Waiting sequences: those that came first, and every second one the shortest of the rest."""
        seen: set[Sequence] = set()
        for pair in zip(list(self.waiting), list(self._by_length)):
            for sequence in pair:
                if sequence not in seen:
                    seen.add(sequence)
                    yield sequence

    def _is_being_read(self, sequence: Sequence, reading: list[Sequence]) -> bool:
        """Whether one of those that read is on its way to a boundary, common to both, where its state will be kept:
        waiting for it costs less than reading the same tokens beside it."""
        usable = sequence.keys.keys[: (len(sequence.ids) - 1) // self.cache.span] if self.caching else []
        return any(
            self._next_wanted(other, other.computed // self.cache.span + 1) <= _common(other.keys.keys, usable)
            for other in (reading if usable else ())
            if other.keys.keys[:1] == usable[:1]
        )

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its memory; False (and nothing changed) if there is not enough."""
        if self.caching:
            self.before_lookup(sequence)
        match = self.cache.match(sequence.keys.keys if self.caching else (), len(sequence.ids))
        if self._start_from(sequence, match):
            return True
        # What was found stays beside the copy of its last page and its state: without it a small pool has room.
        alone = match.tokens > 0 and not self.running
        return alone and self._start_from(sequence, self.cache.match((), len(sequence.ids)))

    def _start_from(self, sequence: Sequence, match: Match) -> bool:
        taken = self.cache.take(match)  # held before anything is allocated, which could evict it
        whole = match.tokens // self.layout.page_tokens
        fresh = self._pages_for(len(sequence.ids), whole)
        if fresh is None:
            self.cache.pool.release([*taken.pages, *taken.snapshot])
            self.cache.unpin(match.node)
            return False
        latents, state = fresh
        for shared, own in zip(taken.pages[whole:], latents):  # the hit ends inside this page
            self.memory.copy(shared, own)
        self._load_state(taken.snapshot, state)
        self.cache.pool.release([*taken.pages[whole:], *taken.snapshot])
        sequence.pages, sequence.state = taken.pages[:whole] + latents, state
        self._enter(sequence, match)
        return True

    def _pages_for(self, tokens: int, whole: int) -> tuple[list[int], list[int]] | None:
        """Latent pages for all tokens but those of the first `whole` pages, and pages for the state; None if running
        sequences would then have no page to grow by."""
        latents, groups = self.layout.latent_pages(tokens) - whole, len(self.layout.groups)
        wanted = latents + groups + len(self.running)
        if not self._within_reach(wanted) or not self.cache.make_room(wanted):
            return None
        return self.cache.pool.take(Kind.LATENT, latents), self.cache.pool.take(Kind.SNAPSHOT, groups)

    def _within_reach(self, pages: int) -> bool:
        """Whether that many could be free if all that is cached were evicted: nothing is given up for a prompt that
        has to wait all the same."""
        if self.cache.pool.free >= pages:
            return True
        if self.cache.pool.pages - self._lent >= pages:
            return True
        if self._held is None:
            self._held = {page for sequence in self.running for page in (*sequence.pages, *sequence.state)}
        return self.cache.pool.pages - len(self._held) >= pages

    def _load_state(self, snapshot: tuple[int, ...], state: list[int]) -> None:
        for kept, live in zip(snapshot, state):
            self.memory.copy(kept, live)
        for live in state[len(snapshot) :]:
            self.memory.clear(live)

    def _enter(self, sequence: Sequence, match: Match) -> None:
        sequence.node, sequence.match, sequence.computed = match.node, match, match.tokens
        sequence.status = Status.RUNNING
        if sequence.cached_tokens is None:
            sequence.cached_tokens, sequence.admitted = match.tokens, time.monotonic()
        self._wait_no_more(sequence)
        insort(self.running, sequence, key=_by_rank)
        self._lent += len(sequence.pages) + len(sequence.state)
        if self._held is not None:
            self._held.update(sequence.pages, sequence.state)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory away and queue it again."""
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence ends, whatever it was doing; what it registered stays in the cache."""
        if sequence.status is Status.RUNNING:
            if sequence.spoken_snapshot is not None:
                sequence.spoken_snapshot.turn_end = True
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self._wait_no_more(sequence)
        sequence.status = Status.FINISHED
        if not self.running and not self.waiting:
            self._watchful = 0

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.pool.release([*sequence.pages, *sequence.state])
        sequence.pages, sequence.state, sequence.spoken_snapshot = [], [], None
        if sequence.node is not None:
            self.cache.unpin(sequence.node)
            sequence.node = None


def _common(a: list[bytes], b: list[bytes]) -> int:
    """How many keys two sequences share from the beginning. A key names all before it, so equal keys have equal
    beginnings and the last equal one can be searched by halves."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low
