"""One answer to one prompt, as it grows over turns, iterations and policies: plain numbers that survive a crash.

    ids        prompt | sampled | results | sampled | ...        what the model read and said, never encoded again
    places     where in `ids` each sampled token stands; everything else is given and has no loss
    logprobs   what the policy that sampled the token gave it then
    versions   which policy that was, counted in updates of the weights

A group is the K samples of one prompt. Tokens that are read as text and written again may come out as other tokens
("he", "llo" -> "hello"), and then the log-probabilities belong to nothing; here a token is appended when it is sampled
and never looked up again. Source: report 4.1.2, 5.3 (partial rollouts); the record is ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from nanok3.data.chat import Segment
from nanok3.envs.environment import Environment, Task


@runtime_checkable
class Domain(Protocol):
    """What rollouts need of a domain: tasks, their environment, and how a task is put to the model."""

    @property
    def name(self) -> str: ...

    @property
    def counted(self) -> str:
        """What a budget counts: thinking, or output."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """A stream of tasks, a function of split and seed; it may end."""

    def open(self, task: Task) -> Environment:
        """An environment for one sample."""

    def prompt(self, task: Task, effort: str | None) -> list[Segment]:
        """Everything before the first sampled token."""


@dataclass(frozen=True)
class Problem:
    """A prompt that is played: its running number, and what it stands for."""

    number: int
    domain: Domain
    effort: str
    task: Task


@dataclass
class Sample:
    """One trajectory. `outcome` is running, done or infra-failed; `finish` says how a done one ended: stop, length,
    budget or broken."""

    prompt: int
    number: int
    ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    begins: int = 0
    """Where in `ids` the turn that is being said begins."""
    thinking: int = 0
    """Tokens of thought in the turns that have ended."""
    turns: int = 0
    """Turns that have ended."""
    problems: int = 0
    """Breaches of the markup."""
    tool_errors: int = 0
    outcome: str = "running"
    finish: str = ""
    reason: str = ""
    """Why the machinery failed, where it did."""
    reward: float | None = None
    """The verdict; None where there is none."""
    snapshot: str = ""
    """The environment of a paused sample, as text."""
    routes: str = ""
    """The experts each token went to, as text, where they are recorded (replay.py)."""
    began: int = 0
    """Iteration of the first token."""
    ended: int | None = None

    @property
    def output(self) -> int:
        """Sampled tokens."""
        return len(self.places)

    def say(self, token: int, logprob: float, version: int) -> None:
        """One more sampled token."""
        self.places.append(len(self.ids))
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def lag(self, version: int) -> int:
        """Updates since the oldest token was sampled, time spent waiting included."""
        return version - min(self.versions, default=version)

    def trained(self, version: int, most: int | None) -> list[bool]:
        """Of each sampled token, whether it is young enough to be learned from."""
        return [most is None or version - v <= most for v in self.versions]

    def seed(self, run: int) -> int:
        """Of the random numbers from here on: a function of the run, prompt, sample and place, so that a run that was
        killed says the same again."""
        name = f"{run} {self.prompt} {self.number} {len(self.ids)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class Group:
    """The samples of one prompt, and the budget they were begun with."""

    prompt: int
    samples: list[Sample]
    limit: int | None = None

    @property
    def complete(self) -> bool:
        return all(sample.outcome != "running" for sample in self.samples)

    @property
    def valid(self) -> list[Sample]:
        """Those with a verdict."""
        return [sample for sample in self.samples if sample.outcome == "done"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Group:
        return cls(read["prompt"], [Sample(**sample) for sample in read["samples"]], read["limit"])
