"""One sequence of tokens while the engine reads and continues it: ids and page numbers, no tensors.

    |<------------- prompt ------------->|<--- said --->|
    |<-- from the cache -->|<-- computed here -->|      |<- the last one said is not read yet

Reading a prompt, decoding and resuming after a pre-emption are one thing: there are `remaining` tokens to read, and
when none remain, the logits of the last give the next token. Decoding is the case of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nanok3.serve.prefix_cache import Match, Node, Picture, SpanKeys


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A request's tokens and the memory it holds while it runs."""

    id: str
    ids: list[int]
    """Prompt and what was said."""
    prompt_tokens: int
    keys: SpanKeys
    priority: int = 0
    """Lower goes first."""
    arrival: float = 0.0
    """Seconds; of equal priorities the earlier goes first, and is pre-empted last."""
    admitted: float | None = None
    """When it had memory for the first time."""
    status: Status = Status.WAITING
    computed: int = 0
    """Tokens that pages and state have read."""
    pages: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    """Pages of the live KDA state, one a group."""
    node: Node | None = None
    """The deepest span of it that is registered; pinned."""
    match: Match | None = None
    """What the last look-up found."""
    cached_tokens: int | None = None
    """Prompt tokens taken from the cache at the first admission."""
    spoken_snapshot: Node | None = None
    """The last boundary inside the answer whose state was kept."""
    preemptions: int = 0
    pictures: tuple[Picture, ...] = ()
    """What the placeholders in the prompt stand for."""
    rank: tuple[int, float] = field(init=False)
    """Sorts whom to serve first."""

    def __post_init__(self) -> None:
        self.rank = self.priority, self.arrival

    @property
    def remaining(self) -> int:
        """Tokens to read before the next one can be said."""
        return len(self.ids) - self.computed

    @property
    def decoding(self) -> bool:
        return self.remaining == 1 and self.computed > 0

    @property
    def said(self) -> list[int]:
        return self.ids[self.prompt_tokens :]

    def say(self, token: int) -> None:
        """Add a sampled token."""
        self.ids.append(token)
        self.keys.push((token,))
