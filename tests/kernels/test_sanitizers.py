"""Every C++ file compiled in other ways than the one this machine likes best, and its own tests run on the result.

A kernel `cpu/<name>.cpp` is covered by being there: its tests are `test_<name>_cpu.py`, or `test_<name>.py`. They run
in a process of their own,

    compiled with the address and undefined-behaviour sanitizers, whose runtime is loaded before Python: each tensor
        then lies between poisoned zones, and a read or write outside of one ends the process,
    compiled for plain x86-64 (vectors of 4 numbers, the code ARM gets) and for AVX2 (8),
    and as usual, but with every block of memory filled with 0x7f7f... when it is handed out (the C library's
        MALLOC_PERTURB_): what reads memory nobody wrote gives another result, 3e38 in both types.

Files are also compiled for processors that are not here.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanok3.kernels import native

pytestmark = pytest.mark.slow

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
NAMES = sorted(path.stem for path in native.SOURCES.glob("*.cpp"))
RUN_NAMES = [name for name in NAMES if name != "roofline"]  # which measures time, and computes nothing
COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
X86 = platform.machine() in ("x86_64", "AMD64")
RUN = """
import sys
import pytest
from nanok3.kernels import native
if sys.argv[2] != "as usual":
    native.use_flags(*sys.argv[2].split())
native.BUILD_SECONDS = 1000  # sanitized code takes ten times as long to compile
sys.exit(pytest.main([sys.argv[1], "-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not slow"]))
"""


def tests_of(name: str) -> Path:
    found = [path for path in (HERE / f"test_{name}_cpu.py", HERE / f"test_{name}.py") if path.exists()]
    assert found, f"cpu/{name}.cpp has no test_{name}_cpu.py"
    return found[0]


def run(tests: Path, flags: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The tests with kernels compiled with `flags` into `cache`; programs they start themselves use the usual ones."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-c", RUN, str(tests), flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=2100)


def assert_passed(name: str, flags: str, cache: Path, **env: str) -> None:
    result = run(tests_of(name), flags, cache, **env)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    assert " passed" in result.stdout and list(cache.rglob(f"{name}-*.so")), "nothing was tested"


def runtime() -> str:
    """What LD_PRELOAD must name: the sanitizers' runtime, and the C++ library it looks into when it starts."""
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C++ compiler on Linux")
    names = ("libasan.so", "libstdc++.so.6")
    paths = [subprocess.run([COMPILER, f"-print-file-name={n}"], capture_output=True, text=True).stdout for n in names]
    if not all(Path(path.strip()).is_absolute() for path in paths):
        pytest.skip(f"{COMPILER} comes without the sanitizers' runtime")
    return " ".join(path.strip() for path in paths)


def sanitized_flags() -> str:
    tuning = ("-march=native",) if X86 else ()
    return " ".join((*tuning, "-fopenmp", "-O1", "-g", *SANITIZERS))


def sanitized(cache: Path) -> dict[str, str]:
    return {"LD_PRELOAD": runtime(), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


@pytest.mark.timeout(2200)
@pytest.mark.parametrize("name", RUN_NAMES)
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    assert_passed(name, sanitized_flags(), tmp_path, **sanitized(tmp_path))


BROKEN = """
import ctypes, sys
from pathlib import Path
import torch
from nanok3.kernels import native
native.SOURCES = Path(sys.argv[1])
native.use_flags(*sys.argv[2].split())
library = native.load("broken")
x = torch.ones(24)
getattr(library, sys.argv[3])(ctypes.c_void_p(x.data_ptr()), 24)
"""
WRONG = """
extern "C" float read_outside(const float* x, int n) { float s = 0; for (int i = 0; i <= n; ++i) s += x[i]; return s; }
extern "C" int overflow(const int* x, int n) { return x[0] * n; }
extern "C" void fine(float* x, int n) { for (int i = 0; i < n; ++i) x[i] = 0; }
"""


@pytest.mark.parametrize(
    ("function", "finding"),
    (("read_outside", "heap-buffer-overflow"), ("overflow", "signed integer overflow"), ("fine", None)),
)
def test_sanitizers_would_find_it(function: str, finding: str | None, tmp_path: Path) -> None:
    """To know that the test above can fail: one number too many read from a tensor, and an overflow."""
    (tmp_path / "broken.cpp").write_text(WRONG)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **sanitized(tmp_path)}
    command = [sys.executable, "-c", BROKEN, str(tmp_path), sanitized_flags(), function]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert (result.returncode != 0) == (finding is not None)
    assert finding is None or finding in result.stderr, result.stderr


@pytest.mark.timeout(2200)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MALLOC_PERTURB_ is glibc's")
@pytest.mark.parametrize("name", RUN_NAMES)
def test_poisoned_memory(name: str, tmp_path: Path) -> None:
    assert_passed(name, "as usual", tmp_path, MALLOC_PERTURB_="128")


@pytest.mark.timeout(2200)
@pytest.mark.parametrize("flags", ("-march=x86-64", "-march=haswell -fopenmp"))
@pytest.mark.parametrize("name", RUN_NAMES)
def test_other_instruction_sets(name: str, flags: str, tmp_path: Path) -> None:
    if "avx2" not in native.cpu_features():
        pytest.skip("needs an x86 processor with AVX2")
    assert_passed(name, flags, tmp_path)


@pytest.mark.parametrize("target", ("x86-64-v4", "cooperlake", "arm64", "arm64 with bf16"))
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_other_processors(name: str, target: str, tmp_path: Path) -> None:
    """AVX-512 with and without bf16, and ARM where there is a cross compiler. Not optimised: code is made of every
    instruction meant for the target, and that is what can fail."""
    arm = target.startswith("arm64")
    compiler = shutil.which("aarch64-linux-gnu-g++") if arm else COMPILER
    if compiler is None or (not arm and not X86):
        pytest.skip(f"no compiler for {target} here")
    tuning = {"arm64": "-march=armv8-a", "arm64 with bf16": "-march=armv8.6-a"}.get(target, f"-march={target}")
    flags = ("-std=c++17", "-O0", "-fPIC", "-shared", "-Wall", "-Werror=return-type", "-fopenmp")
    command = [compiler, *flags, tuning, str(native.SOURCES / f"{name}.cpp"), "-o", str(tmp_path / "library.so")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
