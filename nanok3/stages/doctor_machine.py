"""What `nanok3 doctor` finds on this machine: hardware, libraries, kernels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nanok3.kernels import native
from nanok3.train.machine import describe

FLAGS = (
    ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16")
    + ("amx_tile", "amx_bf16", "amx_int8")
    + ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16")
)
"""Instruction sets that decide how fast a product is: x86, AMX, ARM."""
EXTRAS = {
    "data": "Parquet files",
    "envs": "reasoning-gym's tasks",
    "eval": "lm-eval's tasks",
    "gpu": "KDA and depth mixes on CUDA",
    "pictures": "plots and drawings to learn from",
    "ray": "fleets",
    "serve": "the HTTP server",
    "track": "TensorBoard and wandb",
    "train": "pictures of a run",
    "video": "videos as input",
    "vision": "pictures as input",
}


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
    """The compiler that builds the kernels, with its version; None where there is none that answers."""
    found = next(filter(None, map(shutil.which, native.COMPILERS)), None)
    try:
        said = native.version(found) if found else ""
    except native.NothingBuilds:  # the kernels say why
        return None
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
        ctypes.CDLL(str(library))
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
