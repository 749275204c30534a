"""What `nanok3 doctor` measures: what the hardware gives, and each operator beside what limits it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.eval.exactness import Draw, Operator
from nanok3.kernels import roofline
from nanok3.stages.doctor_machine import Facts
from nanok3.train.machine import matmul_rate


@dataclass(frozen=True)
class Rates:
    """What the hardware gives: operations and bytes a second, of all threads."""

    multiply_add: float | None
    """Float32 multiply-adds on registers: no kernel can be faster. None without a compiler."""
    float32: float
    bfloat16: float
    read: float | None
    """Bytes read by all threads from memory that no cache holds. None without a compiler."""
    copy: float
    """Bytes read plus bytes written of a copy far larger than the caches."""

    @property
    def peak(self) -> float:
        """The most that was seen: on a shared core the two are not measured in equal moments."""
        return max(self.multiply_add or 0.0, self.float32)


@dataclass(frozen=True)
class Speed:
    """A forward call of an operator at the sizes of a small model, in float32, beside what limits it: `peak` for
    arithmetic (operations a second), `read` for memory or, where reading was not measured, `copy` (bytes a second)."""

    operator: str
    seconds: float
    per_second: float
    limited_by: str
    limit: float


def measure_rates(facts: Facts) -> Rates:
    one_core = roofline.peak_flops()
    busy = min(facts.threads, facts.cores)
    wide, narrow = (matmul_rate(dtype, size=256) for dtype in (torch.float32, torch.bfloat16))
    if narrow > 1e10:  # else a larger product would take seconds
        narrow = max(narrow, matmul_rate(torch.bfloat16))
    wide = max(wide, matmul_rate(torch.float32))
    read = roofline.read_bandwidth(facts.threads)
    return Rates(one_core * busy if one_core else None, wide, narrow, read, copy_rate())


def copy_rate(numbers: int = 2**25) -> float:
    source, target = torch.zeros(numbers), torch.empty(numbers)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


def best_seconds(run: Callable[[], object], seconds: float = 0.15) -> float:
    """The best of the calls that fit into `seconds`, at least three and one before."""
    run()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


@torch.no_grad()
def measure_operator(operator: Operator, rates: Rates, device: str = "cpu") -> Speed:
    """Arithmetic beside the peak, bytes that must be read beside reading, else inputs and outputs beside copying."""
    inputs = operator.draw(Draw(torch.float32, device, large=True))
    result = operator.run(*inputs)
    seconds = best_seconds(lambda: operator.run(*inputs))
    if operator.flops is not None:
        return Speed(operator.name, seconds, operator.flops(*inputs) / seconds, "peak", rates.peak)
    if operator.reads is not None:
        name, limit = ("read", rates.read) if rates.read else ("copy", rates.copy)
        return Speed(operator.name, seconds, operator.reads(*inputs) / seconds, name, limit)
    results = [result] if isinstance(result, Tensor) else list(result)
    moved = sum(x.nbytes for x in (*inputs, *results) if isinstance(x, Tensor))
    return Speed(operator.name, seconds, moved / seconds, "copy", rates.copy)
