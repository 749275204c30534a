"""The float32 speed no kernel on this machine can pass: multiply-adds on registers, measured, not looked up."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from nanok3.kernels import native


def peak_flops(clock: Callable[[], float] = time.thread_time, seconds: float = 0.2) -> float | None:
    """Float32 operations per second of one core, a multiply-add counting as two; None without a compiler.

    The clock is CPU time of the calling thread, so that other work on the machine does not lower the figure.
    """
    library = native.load("roofline")
    if library is None:
        return None
    run, operations = library.roofline_multiply_adds, library.roofline_operations
    run.argtypes, run.restype = [ctypes.c_int64], ctypes.c_float
    operations.argtypes, operations.restype = [ctypes.c_int64], ctypes.c_int64
    rounds, best, end = 200_000, 0.0, clock() + seconds
    while clock() < end:
        start = clock()
        run(rounds)
        best = max(best, operations(rounds) / (clock() - start))
    return best
