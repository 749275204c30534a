"""One interface for everything that a model can act in.

    task        = initial state + goal + tools + budget + what its verifier knows
    observation = reset(task), then step(reply) until one says that it is the last
    verdict     = verdict(hidden=True)                  the reward, from the state that the episode has left
    state       = snapshot(), restore(state), fork()    a fork is judged or played on without touching the first

A reply is what a model said: text, and calls with their arguments as the raw text that was sampled. A call that cannot
be carried out (no such tool, broken JSON, a missing field, a tool's own complaint) is answered by a result with
`error` set: it is an observation, never an exception. A reply without calls is the final answer.

Two verifiers look at the same end. The public one says what is wrong and may be shown to the policy; the hidden one
gives the reward and uses what the policy never sees (`Task.hidden`). `InfraError` is the third way out: the machinery
broke, so there is no reward at all, which is not the same as none earned (`episode.py`).

Source: report 4.2 (initial state, goal, tools, budgets, independent verifier; public and hidden; the reward comes from
the final state). The records, and the split into this interface and an episode, are ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanok3.envs.tools import Call, Tool


class InfraError(Exception):
    """The environment itself failed: the trajectory is void and must not count as reward 0."""


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class Result:
    """What a call gave, in the order of the calls."""

    name: str
    content: str
    error: bool = False
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What the policy sees next: the goal after a reset, the results of its calls after a step."""

    text: str = ""
    results: tuple[Result, ...] = ()
    done: bool = False
    pictures: tuple[bytes, ...] = ()


def check_above_zero(what: str, limits: Mapping[str, float]) -> None:
    """ValueError for a limit that is not above 0."""
    for name, value in limits.items():
        if not value > 0:
            raise ValueError(f"{what}: {name} is {value}; it must be more than 0")


@dataclass(frozen=True)
class Budget:
    """Limits of an episode. Seconds are deadlines of a single reset, step and verdict."""

    steps: int = 8
    calls: int = 32
    characters: int = 4000
    reset_seconds: float = 30.0
    step_seconds: float = 30.0
    verdict_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_above_zero("budget", vars(self))


@dataclass(frozen=True)
class Task:
    """One thing to do. `state` and `hidden` are JSON; `hidden` is for the verifier alone."""

    id: str
    domain: str
    goal: str
    state: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    budget: Budget = Budget()
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """0 to 1, and for the public verifier what there is to say about it."""

    score: float
    detail: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.score <= 1, self.score


class Environment(ABC):
    """What `Episode` drives.

    A paused environment keeps its state and runs nothing; only `resume` and `close` are allowed then. `close` gives
    back all that is held, and may be called twice.
    """

    @abstractmethod
    def reset(self, task: Task) -> Observation: ...

    @abstractmethod
    def step(self, reply: Reply) -> Observation: ...

    @abstractmethod
    def verdict(self, hidden: bool = True) -> Verdict: ...

    @abstractmethod
    def snapshot(self) -> bytes: ...

    @abstractmethod
    def restore(self, snapshot: bytes) -> None: ...

    @abstractmethod
    def fork(self) -> Environment: ...

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
