"""What `nanok3 doctor` finds on this machine, what it measures, and what it advises: facts first, advice from facts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanok3.eval.exactness import Draw, Operator
from nanok3.kernels import native, roofline
from nanok3.train.machine import describe, matmul_rate

FLAGS = (
    ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16")
    + ("amx_tile", "amx_bf16", "amx_int8")
    + ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16")
)
"""Instruction sets that decide how fast a product is: x86, AMX, ARM."""
EXTRAS = {
    "data": "Parquet files",
    "eval": "lm-eval's tasks",
    "gpu": "KDA and depth mixes on CUDA",
    "ray": "fleets",
    "serve": "the HTTP server",
    "track": "TensorBoard and wandb",
    "train": "pictures of a run",
    "vision": "pictures as input",
}
OLDEST_TORCH = (2, 10)


@dataclass(frozen=True)
class Library:
    """A package: its version, or None where it is absent; `extra` names the group it belongs to, "" the core."""

    name: str
    version: str | None
    extra: str


@dataclass(frozen=True)
class Built:
    """A kernel library: seconds of building (None: it lay in the cache), or why it cannot be had."""

    name: str
    seconds: float | None
    error: str | None


@dataclass(frozen=True)
class Facts:
    """The machine as it is. Bytes; `cores` are those this process may use, `quota` what a container allows of them."""

    processor: str
    system: str
    cores: int
    quota: float | None
    threads: int
    load: float
    flags: tuple[str, ...]
    memory: int | None
    memory_free: int | None
    gpus: tuple[str, ...]
    compiler: str | None
    torch: str
    blas: str
    wait_policy: str | None
    libraries: tuple[Library, ...]
    kernels: tuple[Built, ...]


def collect() -> Facts:
    """Look at everything; builds what is missing in the kernel cache."""
    return Facts(
        processor=describe()["processor"],
        system=platform.platform(terse=True),
        cores=usable_cores(),
        quota=cpu_quota(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        flags=instruction_sets(),
        memory=memory("MemTotal"),
        memory_free=memory("MemAvailable"),
        gpus=tuple(map(_gpu, range(torch.cuda.device_count()))),
        compiler=compiler(),
        torch=torch.__version__,
        blas=blas(),
        wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        libraries=tuple(libraries()),
        kernels=tuple(build_kernels()),
    )


# ---------------------------------------------------------------------- hardware


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """How many cores' worth of time a container may spend, or None without a limit."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def instruction_sets() -> tuple[str, ...]:
    known = set(re.split(r"[\s:]+", native.cpu_features()))
    return tuple(flag for flag in FLAGS if flag in known)


def memory(name: str, file: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes by a name of /proc/meminfo; elsewhere the total alone is known."""
    if file.exists():
        found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    if name == "MemTotal" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _gpu(index: int) -> str:
    device = torch.cuda.get_device_properties(index)
    return f"{device.name}, {device.total_memory / 2**30:.0f} GiB"


# ---------------------------------------------------------------------- software


def compiler() -> str | None:
    """The compiler that builds the kernels, with its version."""
    found = next(filter(None, map(shutil.which, native.COMPILERS)), None)
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return f"{found}: {said.splitlines()[0]}" if said else found


def blas() -> str:
    """What torch multiplies matrices with."""
    names = re.findall(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return " + ".join([*names, *(["oneDNN"] if torch.backends.mkldnn.is_available() else [])]) or "its own"


def libraries() -> Iterator[Library]:
    """The packages that ours names, the core's and those of every extra but `dev`."""
    try:
        required = importlib.metadata.requires("nanok3") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        required = []
    for line in required:
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        name = re.split(r"[\s\[<>=!~;(]", line)[0]
        if name != "nanok3" and (extra is None or extra[1] != "dev"):
            yield Library(name, _version(name), extra[1] if extra else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_kernels() -> Iterable[Built]:
    """Every C++ source, as many at a time as there are cores."""
    names = sorted(path.stem for path in native.SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(_build, names))


def _build(name: str) -> Built:
    wall, clock = time.time(), time.perf_counter()
    try:
        library = native.build(name)
    except (OSError, subprocess.SubprocessError, native.BuildError) as error:
        return Built(name, None, str(error))
    fresh = library.stat().st_mtime >= wall - 1
    return Built(name, time.perf_counter() - clock if fresh else None, None)


@contextmanager
def without_kernels() -> Iterator[None]:
    """The model as it runs where there is no compiler."""
    load = native.load
    native.load = lambda name: None  # type: ignore[assignment]
    try:
        yield
    finally:
        native.load = load


# ---------------------------------------------------------------------- how fast


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
    arithmetic (operations a second), `read` or `copy` for memory (bytes a second)."""

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
        return Speed(operator.name, seconds, operator.reads(*inputs) / seconds, "read", rates.read or rates.copy)
    results = [result] if isinstance(result, Tensor) else list(result)
    moved = sum(x.nbytes for x in (*inputs, *results) if isinstance(x, Tensor))
    return Speed(operator.name, seconds, moved / seconds, "copy", rates.copy)


# ---------------------------------------------------------------------- what to change


def advice(facts: Facts, rates: Rates) -> list[str]:
    """One line for each thing that would make this machine faster or more able."""
    return [line for line in (*_build_advice(facts), *_thread_advice(facts), *_library_advice(facts, rates)) if line]


def _build_advice(facts: Facts) -> Iterator[str]:
    if facts.compiler is None and sys.platform.startswith("linux"):
        yield "No C++ compiler: the kernels fall back to slower torch forms. Install g++ (`apt install g++`)."
    elif facts.compiler is None:
        yield "No C++ compiler: the kernels fall back to slower torch forms. Install clang or g++."
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
            "machine. Leave it unset (nanok3 then sets passive)."
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
