"""What callers and the engine give each other: jobs come in, tokens and an outcome go back.

Job        a prompt, how to sample, who reads the answer and what binds it
Reader     gets each Token when it is sampled, and the Outcome at the end
Running    a job inside the engine: its sequence, random numbers and what it has so far
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from nanok3.serve.prefix_cache import Picture
from nanok3.serve.sampler import SamplingParams, TokenCounts
from nanok3.serve.sequence import Sequence

_numbers = itertools.count()


class Token(NamedTuple):
    """One sampled token, as a reader gets it."""

    id: int
    logprob: float
    """Under softmax(z / temperature), as in sampler.sample."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable ids with their log-probabilities, as many as were asked for."""


class Outcome(NamedTuple):
    """How a job ended."""

    finish_reason: str
    """'stop' (an end token, or the reader had enough), 'length', 'cancelled', 'timeout' or 'error'."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    said_tokens: int
    queue_seconds: float
    """From submission to admission."""
    first_token_seconds: float | None
    """From submission to the first token."""
    seconds: float
    cache_limit: str | None
    """Why the prefix hit was not longer (prefix_cache.Match), and at which token."""
    prompt_logprobs: tuple[Token, ...] = ()
    """Of prompt tokens 1, 2, ...: what the model gave them, where that was asked for."""


@runtime_checkable
class Reader(Protocol):
    """Takes an answer. Called in the engine's thread, so it must be quick."""

    def push(self, token: Token) -> bool:
        """One more token; True if nothing more is needed."""

    def finish(self, outcome: Outcome) -> None:
        """The job has ended; called once, always."""


@runtime_checkable
class Constraint(Protocol):
    """What may be said next."""

    def allowed(self) -> Bool[Tensor, " vocab"] | None:
        """True for the ids that may come next; None for all."""

    def advance(self, token: int) -> None:
        """This id was said."""


@dataclass(eq=False)
class Job:
    """One answer that is wanted."""

    prompt: list[int]
    params: SamplingParams
    reader: Reader
    constraint: Constraint | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    """Score the prompt as well; such a job takes nothing from the prefix cache."""
    speculate: bool = True
    """Whether drafts may be tried for it, where the engine has any; a job whose prompt is scored has none."""
    ignore_ends: bool = False
    """Go on after ids that end an answer."""
    priority: int = 0
    seconds: float | None = None
    """Time it may take in all; None for as long as it needs."""
    salt: tuple[bytes, ...] = ()
    """Jobs with different salts share no cache."""
    pictures: tuple[Picture, ...] = ()
    """What the placeholders in the prompt stand for, in order (pictures.show)."""
    id: str = field(default_factory=lambda: f"job-{next(_numbers)}")
    cancelled: bool = False
    """Set by `Engine.cancel`."""


class Overloaded(Exception):
    """There is no room to wait; `retry_after` seconds is when to ask again."""

    def __init__(self, what: str, retry_after: float) -> None:
        super().__init__(f"{what}; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Stopping(Exception):
    """The engine takes no more jobs."""


@dataclass(eq=False)
class Running:
    """A job inside the engine."""

    job: Job
    sequence: Sequence
    generator: torch.Generator
    counts: TokenCounts | None
    submitted: float
    limit: int
    """Tokens it may say."""
    deadline: float
    """When its time is over."""
    first_token: float | None = None
    scored: list[Token] = field(default_factory=list)


@dataclass
class Counters:
    """What was done since the start, for whoever watches."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    said_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)
