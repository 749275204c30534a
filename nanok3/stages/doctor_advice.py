"""What `nanok3 doctor` would change: one line for each thing that would make this machine faster or more able."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator

from nanok3.stages.doctor_machine import EXTRAS, Facts
from nanok3.stages.doctor_speed import Rates

OLDEST_TORCH = (2, 10)


def advice(facts: Facts, rates: Rates) -> list[str]:
    """All of it, from the facts and rates."""
    return [line for line in (*_build_advice(facts), *_thread_advice(facts), *_library_advice(facts, rates)) if line]


def _build_advice(facts: Facts) -> Iterator[str]:
    reasons = {kernel.error for kernel in facts.kernels if kernel.error}
    if facts.compiler is None:
        install = "g++ (`apt install g++`)" if sys.platform.startswith("linux") else "clang or g++"
        why = f" ({reason})" if len(reasons) == 1 and (reason := min(reasons)) else ""
        yield f"No C++ compiler that works: the kernels fall back to slower torch forms{why}. Install {install}."
    elif len(reasons) == 1 and all(kernel.error for kernel in facts.kernels):
        yield f"No kernel can be built, slower torch forms stand in for them: {min(reasons)}"
    else:
        for kernel in facts.kernels:
            if kernel.error:
                yield f"The {kernel.name} kernel cannot be built, torch stands in for it: {kernel.error}"
    if platform.machine() in ("x86_64", "AMD64") and not {"avx2", "fma"} <= set(facts.flags):
        yield "This processor has no AVX2: the kernels take their portable path, several times slower."


def _thread_advice(facts: Facts) -> Iterator[str]:
    allowed = min(facts.cores, facts.quota or facts.cores)
    if facts.threads > allowed:
        fitting = max(1, int(allowed))
        yield f"{facts.threads} threads on {allowed:g} cores wait for each other: give --threads {fitting}."
    if facts.wait_policy is not None and facts.wait_policy.lower() != "passive":
        yield (
            f"OMP_WAIT_POLICY is {facts.wait_policy!r}: threads spin while they wait, ten times slower on a busy "
            "machine. Leave it unset (nanok3 then lets them spin briefly)."
        )
    if busy(facts):
        yield f"The load is {facts.load:.1f} on {facts.cores} cores: other work runs, and the rates here are too low."


def _library_advice(facts: Facts, rates: Rates) -> Iterator[str]:
    if release(facts.torch) < OLDEST_TORCH:
        yield f"torch {facts.torch} is older than {'.'.join(map(str, OLDEST_TORCH))}: update it."
    if rates.bfloat16 > 1.5 * rates.float32:
        yield "bfloat16 products are faster than float32 ones here: train with bfloat16 (auto does)."
    elif rates.bfloat16 < 0.5 * rates.float32:
        yield (
            f"torch's bfloat16 products reach {rates.bfloat16 / 1e9:.1f} GFLOP/s, float32 {rates.float32 / 1e9:.0f}: "
            "train and generate in float32 (auto does)."
        )
    if rates.multiply_add and rates.float32 < 0.4 * rates.multiply_add and not busy(facts):
        yield "torch's float32 products reach less than 40 % of the peak: its BLAS does not know this processor well."
    if facts.memory_free is not None and facts.memory_free < 4 * 2**30:
        yield f"{facts.memory_free / 2**30:.1f} GiB of memory are free: stay with the tiny and small presets."
    missing = {l.extra for l in facts.libraries if l.extra and l.version is None}
    if facts.gpus and any(l.name == "fla-core" and l.version is None for l in facts.libraries):
        yield "A GPU without fla-core: KDA runs in its torch form. pip install 'nanok3[gpu]'."
    if not facts.gpus:
        missing.discard("gpu")
    if missing:
        named = ", ".join(f"{extra} ({EXTRAS.get(extra, 'optional')})" for extra in sorted(missing))
        yield f"Not installed: {named}. `pip install 'nanok3[{','.join(sorted(missing))}]'`"


def busy(facts: Facts) -> bool:
    """Whether other work takes so much that rates of several threads by the clock say little."""
    return facts.load > 1.5 * facts.cores


def release(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
