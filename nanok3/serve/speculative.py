"""Speculative decoding: guess some tokens, read them in one pass, keep those the model would have said itself.

    plan -> room for a draft -> propose d_1 ... d_g -> read x, d_1 ... d_g in one pass, on trial
    row i gives p_i, the model's distribution after d_1 ... d_i:
        d_{i+1} was certain (a look-up, or the likeliest):   draw from p_i as ever; go on if that is d_{i+1}
        d_{i+1} was drawn from q:    keep it with probability min(1, p_i / q), else draw from max(p_i - q, 0)
    -> the tokens before the first that differs are kept, the state is moved on by them, the rest is forgotten

Either rule says exactly what plain decoding says: the same tokens where they are greedy or the draft is certain (a seed
draws one number a token then, with a draft or without), the same distribution otherwise (Leviathan et al., Chen et al.
2023). A pass of 1 + g tokens reads the weights once, which is what decoding spends its time on; so it pays if it costs
less than the tokens it gives. `Gauge` measures both, and speculation stops for a while where it does not. Ours: the
gauge, and that requests with a seed are given certain drafts.

`NGrams` is the draft that costs nothing: what followed the last time the same tokens stood in the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.serve.sampler import SamplingParams, TokenCounts, adjust, draw, sample, tempered, truncate
from nanok3.serve.scheduler import Scheduler, Work
from nanok3.serve.sequence import Sequence

DRAFT_TOKENS = 7
"""Of K3's draft (report 4)."""


def check_tokens(tokens: int) -> None:
    """ValueError for a length that drafts cannot have."""
    if not 1 <= tokens <= 15:
        raise ValueError(f"draft_tokens is {tokens}; allowed: 1 to 15")


@dataclass(frozen=True, eq=False)
class Guess:
    """A token that may come; q is the distribution it was drawn from, None if it was certain."""

    id: int
    q: Float[Tensor, " vocab"] | None = None


@dataclass(frozen=True, eq=False)
class Wish:
    """A sequence for which up to `count` tokens are wanted, and how it samples."""

    sequence: Sequence
    count: int
    params: SamplingParams
    generator: torch.Generator

    @property
    def drawn(self) -> bool:
        """Whether guesses are to be drawn; else the likeliest are taken."""
        return self.params.temperature > 0 and self.params.seed is None


@runtime_checkable
class Drafter(Protocol):
    """Who guesses."""

    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        """For each wish as many guesses as it likes, none included."""


def settle(
    logits: Float[Tensor, " vocab"],
    guess: Guess | None,
    params: SamplingParams,
    generator: torch.Generator,
    counts: TokenCounts | None = None,
) -> tuple[int, float]:
    """One token and its log-probability, as `sampler.sample` gives it, whatever was guessed."""
    if guess is None or guess.q is None or params.temperature == 0:
        return sample(logits, params, generator, counts)
    logp = tempered(adjust(logits, params, counts), params.temperature)
    p, q = truncate(logp.exp(), params), guess.q.double()
    u = float(torch.rand((), dtype=torch.float64, generator=generator))
    if u * float(q[guess.id]) < float(p[guess.id]):
        return guess.id, float(logp[guess.id])
    rest = (p - q).clamp(min=0)
    token = draw(rest if bool(rest.any()) else p, generator)  # all zero only where p is q but for rounding
    return token, float(logp[token])


class NGrams:
    """Looks up what followed the last tokens before. longest, shortest: how many have to agree; the most are tried
    first. A draft may run into itself, so that what repeats goes on repeating."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams from {shortest} to {longest} tokens; allowed: 1 <= shortest <= longest")
        self.lengths = range(longest, shortest - 1, -1)
        self._seen: WeakKeyDictionary[Sequence, tuple[dict[tuple[int, ...], int], int]] = WeakKeyDictionary()

    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        return [[Guess(token) for token in self.follow(wish.sequence, wish.count)] for wish in wishes]

    def follow(self, sequence: Sequence, count: int) -> list[int]:
        """Up to `count` ids that may come."""
        ids = sequence.ids
        places = self._places(sequence)
        for n in self.lengths:
            place = places.get(tuple(ids[-n:])) if len(ids) > n else None
            if place is not None:
                period = len(ids) - place
                return [ids[place + i % period] for i in range(count)]
        return []

    def _places(self, sequence: Sequence) -> dict[tuple[int, ...], int]:
        """By n-gram: where its last occurrence ends, but for those at the very end."""
        places, end = self._seen.get(sequence, ({}, 1))
        ids = sequence.ids
        for at in range(end, len(ids)):
            for n in self.lengths:
                if at >= n:
                    places[tuple(ids[at - n : at])] = at
        self._seen[sequence] = places, max(end, len(ids))
        return places


@dataclass
class _Record:
    """Of one sequence."""

    accepted: float = 0.0
    """Of a draft, lately."""
    drafts: int = 0
    pause: int = 0
    """Steps without a draft that are still to come."""
    paused: int = 0
    """How many there were the last time."""


class Gauge:
    """Does a draft pay? The time of steps with drafts over that of steps without, for as many sequences, against the
    tokens they give. Both are means that forget; a sequence that loses is left alone for 32 steps, and for twice as
    many every time it loses again. Where the drafts of all lost lately, a new one begins with the first pause."""

    FORGET, FIRST, LONGEST, TRIALS = 0.8, 32, 1024, 4
    FEW = 16
    """Drafts that say nothing yet about all sequences."""

    def __init__(self) -> None:
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()
        self._seconds: dict[tuple[int, bool], float] = {}
        self._all = _Record()

    def wants(self, sequence: Sequence, sequences: int) -> bool:
        """Whether to try a draft now, in a step of so many sequences."""
        if sequence not in self._records:
            loses = self._all.drafts >= self.FEW and 1 + self._all.accepted < self.price(sequences)
            first = self.FIRST if loses else 0
            self._records[sequence] = _Record(pause=first, paused=first)
        record = self._records[sequence]
        if record.pause:
            record.pause -= 1
            return False
        return True

    def accepted(self, sequence: Sequence, tokens: int, sequences: int) -> None:
        """So many tokens of a draft were right, in a step of that many sequences."""
        record = self._records.setdefault(sequence, _Record())
        for mean, longest in ((record, self.FORGET), (self._all, 1 - 1 / self.FEW)):
            forget = min(longest, mean.drafts / (mean.drafts + 1))
            mean.accepted = forget * mean.accepted + (1 - forget) * tokens
            mean.drafts += 1
        if record.drafts % self.TRIALS:
            return
        if 1 + record.accepted < self.price(sequences):
            record.paused = record.pause = min(self.LONGEST, max(self.FIRST, 2 * record.paused))
        else:
            record.paused = 0

    def price(self, sequences: int) -> float:
        """A step with drafts in steps without; 1 until both were measured."""
        plain, tried = (self._seconds.get((sequences, kind)) for kind in (False, True))
        return 1.0 if plain is None or tried is None else tried / max(plain, 1e-9)

    def measured(self, sequences: int) -> bool:
        return (sequences, False) in self._seconds

    def took(self, sequences: int, tried: bool, seconds: float) -> None:
        """A step in which all sequences decoded, all with a draft or none."""
        before = self._seconds.get((sequences, tried))
        mean = seconds if before is None else self.FORGET * before + (1 - self.FORGET) * seconds
        self._seconds[sequences, tried] = mean


@dataclass
class Drafted:
    """What was guessed and what of it was right, since the start."""

    tokens: int = 0
    accepted: int = 0
    drafts: int = 0


class Speculation:
    """Drafts for the sequences of an engine.

    tokens: of a draft at most. adaptive: leave alone what does not pay. clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        tokens: int = DRAFT_TOKENS,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_tokens(tokens)
        self.drafter, self.tokens, self.clock = drafter, tokens, clock
        self.gauge = Gauge() if adaptive else None
        self.drafted = Drafted()
        self.guesses: dict[str, list[Guess]] = {}
        """By sequence id: of this step."""
        self._began = 0.0
        self._decoding = self._all = 0

    def extend(self, work: list[Work], wishes: dict[str, Wish], scheduler: Scheduler) -> list[Work]:
        """The pieces with drafts behind those that may have one. wishes: by sequence id, who may."""
        self._began, self.guesses = self.clock(), {}
        spare = scheduler.limits.budget - sum(piece.count for piece in work)
        asked: list[Wish] = []
        for piece in work:
            wish = wishes.get(piece.sequence.id)
            if wish is None or piece.count != 1 or not piece.last or not self._wants(piece.sequence, len(work)):
                continue
            count = scheduler.room_behind(piece, min(wish.count, self.tokens, spare))
            if count > 0:
                asked.append(replace(wish, count=count))
                spare -= count
        for wish, guesses in zip(asked, self.drafter.propose(asked) if asked else [], strict=True):
            if guesses:
                self.guesses[wish.sequence.id] = guesses[: wish.count]
        self._decoding, self._all = sum(piece.count == 1 and piece.last for piece in work), len(work)
        return [self._with_draft(piece) for piece in work]

    def _wants(self, sequence: Sequence, sequences: int) -> bool:
        if self.gauge is None:
            return True
        return self.gauge.measured(sequences) and self.gauge.wants(sequence, sequences)

    def _with_draft(self, piece: Work) -> Work:
        guesses = self.guesses.get(piece.sequence.id)
        if guesses is None:
            return piece
        draft = tuple(guess.id for guess in guesses)
        return replace(piece, count=piece.count + len(draft), draft=draft)

    def verified(self, piece: Work, accepted: int) -> None:
        """So many of a piece's guesses were right."""
        self.drafted.drafts += 1
        self.drafted.tokens += len(piece.draft)
        self.drafted.accepted += accepted
        if self.gauge is not None:
            self.gauge.accepted(piece.sequence, accepted, self._all)

    def stepped(self) -> None:
        """The step is over."""
        tried = len(self.guesses)
        if self.gauge is not None and self._all and self._decoding == self._all and tried in (0, self._all):
            self.gauge.took(self._all, tried > 0, self.clock() - self._began)
