"""What no kernel on this machine can pass, measured, not looked up: float32 multiply-adds on registers, and the rate at
which memory can be read. Decoding a token is reading the weights once, so the second is its limit."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from nanok3.kernels import native

READ_BYTES = 1 << 28
"""Far more than any cache holds, less than a small machine has."""


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


def read_bandwidth(
    threads: int = 1, clock: Callable[[], float] = time.perf_counter, rounds: int = 5, nbytes: int = READ_BYTES
) -> float | None:
    """Bytes per second at which `threads` threads together read memory that no cache holds, the best of `rounds`; None
    without a compiler. With one thread and a clock of CPU time other work on the machine counts less, but not nothing:
    it shares the memory and the last cache."""
    library = native.load("roofline")
    if library is None:
        return None
    read = library.roofline_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p], None
    memory, out, best = torch.zeros(nbytes // 4 >> 14 << 14), torch.zeros(1), 0.0
    for _ in range(rounds):
        start = clock()
        read(memory.data_ptr(), memory.numel(), threads, out.data_ptr())
        best = max(best, memory.nbytes / (clock() - start))
    return best
