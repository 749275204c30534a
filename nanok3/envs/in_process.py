"""The common back-end: an environment whose state lies in this process and is JSON, or can be made so.

A snapshot is exact, portable between machines and takes less than a millisecond. A call that cannot be carried out is
answered by an error result; whatever a tool raises, but InfraError, is for the policy to read.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from copy import deepcopy
from typing import Any

from nanok3.envs.environment import Environment, InfraError, Observation, Reply, Result, Task, Verdict
from nanok3.envs.tools import Call, ToolError, read_arguments, shorten


class InProcess(Environment):
    """A subclass gives `perform` (one call) and `judge`; more state than `self.state` goes into `dump` and `load`."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.state: dict[str, Any] = {}
        self.answer: str | None = None
        self.steps = self.calls = self.errors = 0
        self.paused = False

    def perform(self, name: str, arguments: dict[str, Any]) -> str | Result:
        """Carry out a call whose arguments fit its schema. Anything raised but InfraError becomes an error result."""
        raise ToolError(f"there is no tool {name!r}")

    @abstractmethod
    def judge(self, hidden: bool) -> Verdict:
        """The verdict on the state and the answer as they are."""

    def reset(self, task: Task) -> Observation:
        self.task, self.answer = task, None
        self.state = deepcopy(dict(task.state))
        self.steps = self.calls = self.errors = 0
        return Observation(task.goal, pictures=task.pictures)

    def step(self, reply: Reply) -> Observation:
        task = self._task()
        if self.answer is not None or self.steps >= task.budget.steps:
            raise ValueError("the episode is over; reset first")
        self.steps += 1
        if not reply.calls:
            self.answer = reply.text
            return Observation(done=True)
        results = tuple(self._result(call) for call in reply.calls)
        return Observation(results=results, done=self.steps >= task.budget.steps)

    def _result(self, call: Call) -> Result:
        task = self._task()
        self.calls += 1
        try:
            if self.calls > task.budget.calls:
                raise ToolError(f"more than {task.budget.calls} calls in one episode")
            found = next((t for t in task.tools if t.name == call.name), None)
            if found is None:
                raise ToolError(
                    f"there is no tool {call.name!r:.80}; there are {', '.join(t.name for t in task.tools)}"
                )
            result = self.perform(call.name, read_arguments(found, call.arguments))
        except InfraError:
            raise
        except Exception as error:  # whatever a call provokes is for the policy to read
            self.errors += 1
            text = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
            result = Result(call.name, f"error: {text}", error=True)
        if isinstance(result, str):
            result = Result(call.name, result)
        return Result(call.name, shorten(result.content, task.budget.characters), result.error, result.pictures)

    def verdict(self, hidden: bool = True) -> Verdict:
        self._task()
        return self.judge(hidden)

    def dump(self) -> dict[str, Any]:
        """All that `load` needs, as JSON."""
        return {"state": self.state}

    def load(self, dumped: dict[str, Any]) -> None:
        self.state = dumped["state"]

    def snapshot(self) -> bytes:
        counts = {"answer": self.answer, "steps": self.steps, "calls": self.calls, "errors": self.errors}
        return json.dumps({"task": self._task().id, **counts, **self.dump()}, sort_keys=True).encode()

    def restore(self, snapshot: bytes) -> None:
        read = json.loads(snapshot)
        if read["task"] != self._task().id:
            raise ValueError(f"snapshot of task {read['task']!r}; this environment plays {self._task().id!r}")
        self.answer, self.steps = read["answer"], read["steps"]
        self.calls, self.errors = read["calls"], read["errors"]
        self.load(read)

    def fork(self) -> Environment:
        other = type(self)()
        other.reset(self._task())
        other.restore(self.snapshot())
        return other

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        """Nothing is held."""

    def _task(self) -> Task:
        if self.paused:
            raise ValueError("the environment is paused; resume first")
        if self.task is None:
            raise ValueError("the environment has no task; reset first")
        return self.task
