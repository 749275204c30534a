"""Where the time of a step goes, and how it is told apart.

    deciding     whom to admit, who reads what with which pages, what of it is kept: the scheduler's own work
    moving       prefixes that leave for the tier or come back from it while room is made: copies of bytes, checksums
    reading      the model
    answering    sampling, and the readers

Deciding is measured by the clock and in this thread's computing time: the rest of it the thread waited for another
thread or program. Moving happens in the middle of other phases, so it has a watch of its own and is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import ParamSpec

Given = ParamSpec("Given")


@dataclass(frozen=True)
class StepSeconds:
    """One step."""

    deciding: float
    deciding_cpu: float
    moving_cpu: float
    reading: float
    answering: float


class Stopwatch:
    """Adds up what some calls take, of those inside each other the outermost."""

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0
        self._inside = False

    def timed(self, call: Callable[Given, None]) -> Callable[Given, None]:
        def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, began, cpu = True, time.perf_counter(), time.thread_time()
            try:
                call(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began
                self.cpu += time.thread_time() - cpu

        return run

    def take(self) -> tuple[float, float]:
        """By the clock and computing, since the last time."""
        taken = self.seconds, self.cpu
        self.seconds = self.cpu = 0.0
        return taken


class Phase(IntEnum):
    DECIDING = 0
    READING = 1
    ANSWERING = 2


class StepClock:
    """Goes through a step phase by phase; each may come several times."""

    def __init__(self) -> None:
        self.moving = Stopwatch()
        self._phase = Phase.DECIDING
        self._seconds, self._cpu, self._moved = [0.0] * len(Phase), [0.0] * len(Phase), 0.0
        self._since = self._since_cpu = 0.0

    def begin(self) -> None:
        """A step, with deciding."""
        self._seconds, self._cpu, self._moved = [0.0] * len(Phase), [0.0] * len(Phase), 0.0
        self.moving.take()
        self._phase, self._since, self._since_cpu = Phase.DECIDING, time.perf_counter(), time.thread_time()

    def deciding_cpu(self) -> float:
        """Computing time of this step's deciding so far, within that phase."""
        return self._cpu[Phase.DECIDING] + time.thread_time() - self._since_cpu - self.moving.cpu

    def turn_to(self, phase: Phase) -> None:
        now, cpu, (moved, moved_cpu) = time.perf_counter(), time.thread_time(), self.moving.take()
        self._seconds[self._phase] += now - self._since - moved
        self._cpu[self._phase] += cpu - self._since_cpu - moved_cpu
        self._moved += moved_cpu
        self._phase, self._since, self._since_cpu = phase, now, cpu

    def end(self) -> StepSeconds:
        self.turn_to(Phase.DECIDING)
        deciding, reading, answering = self._seconds
        return StepSeconds(deciding, self._cpu[Phase.DECIDING], self._moved, reading, answering)
