"""Where the time of a step goes, and how it is told apart.

    deciding     whom to admit, who reads what with which pages, what of it is kept: the scheduler's own work
    moving       prefixes that leave for the tier or come back from it while room is made: copies of bytes, checksums
    reading      the model
    answering    sampling, and the readers

Deciding is measured by the clock and in this thread's computing time: the rest of it the thread waited for another
thread or program. Moving happens in the middle of deciding, so it has a watch of its own and is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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

    def reset(self) -> None:
        self.seconds = self.cpu = 0.0
