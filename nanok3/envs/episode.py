"""One episode under deadlines: a policy and an environment take turns, and what came of it is a record.

    outcome = done            the policy answered, or its steps are spent; the reward is the hidden verdict
            | infra-failed    reset, step or verdict raised or ran past its deadline; the reward is None

A deadline is kept by doing the work on a thread of its own and leaving it behind. Python cannot stop a thread, so an
environment that was left is never touched again: not closed, not asked for a verdict. What it ran elsewhere has
deadlines of its own that are shorter (a sandbox kills its command), so nothing is left running but a waiting thread.

A `None` reward must void the trajectory, not score it: a hung verifier would otherwise teach that the last policy was
wrong. Source: problem 21 of the specification's list; the records are ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from nanok3.envs.environment import Environment, InfraError, Observation, Reply, Task, Verdict
from nanok3.envs.tools import Call

Value = TypeVar("Value")

Policy = Callable[["Trajectory"], Reply]
"""What has happened so far -> what to say next."""


@dataclass
class Trajectory:
    """Everything said and seen, and what came of it."""

    task: Task
    observations: list[Observation] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    outcome: str = "running"
    reward: float | None = None
    public: str = ""
    reason: str = ""

    @property
    def calls(self) -> int:
        return sum(len(reply.calls) for reply in self.replies)

    @property
    def tool_errors(self) -> int:
        return sum(result.error for seen in self.observations for result in seen.results)


def within(seconds: float, work: Callable[[], Value], what: str) -> Value:
    """`work()`; InfraError if it is not done after `seconds`."""
    found: list[Value] = []
    raised: list[BaseException] = []

    def target() -> None:
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target, daemon=True, name=f"nanok3 {what}")
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise InfraError(f"{what} was not done within {seconds:g} s")
    return found[0]


class Episode:
    """A trajectory in the making. `play` is the usual way; the parts are there for rollouts that pause in between."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self.environment, self.trajectory = environment, Trajectory(task)
        self._lost = False

    @property
    def running(self) -> bool:
        return self.trajectory.outcome == "running"

    def reset(self) -> None:
        task = self.trajectory.task
        seen = self._guarded(task.budget.reset_seconds, lambda: self.environment.reset(task), "reset")
        if seen is not None:
            self.trajectory.observations.append(seen)

    def step(self, reply: Reply) -> None:
        """Take one turn; the last one is followed by both verdicts."""
        assert self.running
        self.trajectory.replies.append(reply)
        budget = self.trajectory.task.budget
        seen = self._guarded(budget.step_seconds, lambda: self.environment.step(reply), "step")
        if seen is None:
            return
        self.trajectory.observations.append(seen)
        if seen.done:
            self._finish(budget.verdict_seconds)

    def _finish(self, seconds: float) -> None:
        def both() -> tuple[Verdict, Verdict]:
            return self.environment.verdict(hidden=False), self.environment.verdict(hidden=True)

        verdicts = self._guarded(seconds, both, "verdict")
        if verdicts is not None:
            public, hidden = verdicts
            self.trajectory.public, self.trajectory.reward = public.detail, hidden.score
            self.trajectory.outcome = "done"

    def _guarded(self, seconds: float, work: Callable[[], Value], what: str) -> Value | None:
        """The value, or None with the trajectory marked."""
        try:
            return within(seconds, work, what)
        except Exception as error:  # the environment's own failure, whichever it was
            self._lost = isinstance(error, InfraError) and "not done within" in str(error)
            self.trajectory.outcome, self.trajectory.reward = "infra-failed", None
            self.trajectory.reason = f"{what}: {type(error).__name__}: {error}"
            return None

    def close(self) -> None:
        if not self._lost:
            self.environment.close()


def play(environment: Environment, task: Task, policy: Policy) -> Trajectory:
    """A whole episode. The policy's own exceptions are its caller's."""
    episode = Episode(environment, task)
    try:
        episode.reset()
        while episode.running:
            episode.step(policy(episode.trajectory))
    finally:
        episode.close()
    return episode.trajectory


def scripted(replies: list[Reply]) -> Policy:
    """A policy that says these, one a turn, and an empty answer afterwards."""
    return lambda trajectory: replies[len(trajectory.replies)] if len(trajectory.replies) < len(replies) else Reply()


def solution(task: Task) -> list[Reply]:
    """What a perfect policy says: every task of ours knows it, for demonstrations and for its test."""
    return [
        Reply(turn.get("text", ""), tuple(Call(*call) for call in turn.get("calls", ())), turn.get("thinking", ""))
        for turn in task.hidden["solution"]
    ]
