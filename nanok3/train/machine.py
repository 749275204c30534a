"""What the machine can do, measured at the start of a run: matmul rates, the precision that pays, and a heap that
keeps what it is given."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time

import torch


def matmul_rate(
    dtype: torch.dtype, device: torch.device | str = "cpu", size: int | None = None, seconds: float = 0.1
) -> float:
    """FLOP/s of a square matrix product, the best of several: the peak that utilisation is measured against. By default
    of a size that fills the device: 768 on a CPU, 8,192 on a GPU, where 768 would measure the launch."""
    size = size or (768 if torch.device(device).type == "cpu" else 8192)
    a = torch.randn(size, size, device=device).to(dtype)
    best, spent, runs = float("inf"), 0.0, 0
    while spent < seconds or runs < 10:  # the first run of a shape also builds its kernel
        runs += 1
        start = time.perf_counter()
        torch.mm(a, a)
        if a.is_cuda:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        best, spent = min(best, taken), spent + taken
    return 2 * size**3 / best


def choose_device(wanted: str) -> torch.device:
    """'cpu', 'cuda', or 'auto': a GPU where there is one."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {wanted!r}; allowed: 'auto', 'cpu', 'cuda'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU here")
    return torch.device("cuda" if torch.cuda.is_available() and wanted != "cpu" else "cpu")


def choose_precision(wanted: str, device: torch.device | str = "cpu") -> torch.dtype:
    """'float32', 'bfloat16', or 'auto': bfloat16 where its products are at least 1.5 times as fast as float32's.
    The choice depends on timing only through this ratio; a run saves what was chosen and resumes with it."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if wanted in names:
        return names[wanted]
    if wanted != "auto":
        raise ValueError(f"precision is {wanted!r}; allowed: 'auto', 'float32', 'bfloat16'")
    faster = matmul_rate(torch.bfloat16, device) > 1.5 * matmul_rate(torch.float32, device)
    return torch.bfloat16 if faster else torch.float32


def keep_freed_memory() -> bool:
    """Tell the C library to keep large freed blocks instead of returning them to the system.

    A training step frees and asks again for the same buffers of many megabytes. By default glibc maps each from the
    system and unmaps it, and every page of it is faulted in and zeroed anew: more than half of a small model's time.
    Pages that are kept cost their faults once, so huge ones for tensors (torch's THP_MEM_ALLOC_ENABLE=1) gain nothing
    more: steps of 512 tokens of the small preset took 1.07 to 1.20 s without and 1.11 to 1.31 s with them (one Zen 3
    core). Returns whether it took effect (glibc only). Call it before the first large allocation.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    mmap_max, trim_threshold, arenas = -4, -1, -8  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX of malloc.h
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (arenas, 1))
    return all(libc.mallopt(parameter, value) == 1 for parameter, value in settings)


def describe() -> dict[str, str]:
    """Hardware and versions, for the report."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(terse=True),
    }
