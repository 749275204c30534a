"""Build and load the C++ kernels: one source a mechanism, compiled on first use, kept in the user's cache.

A kernel is `cpu/<name>.cpp` with a plain C interface and no torch headers, so it compiles in seconds. The
shared library is named by a hash of what decides its contents: the sources, the compiler and its version, the
flags and the processor's features (`-march=native` on another machine is another program). Two processes that
start at once take a file lock; the winner writes a temporary file and renames it, so a reader never sees half
a library. Beside it lies its SHA-256, compared before every loading: a damaged library would end the process, so
it is built anew. Of each kernel the newest few libraries are kept. Where a build fails, one line in the log says why
and `available` is False: callers then use their torch form. What fails for all of them alike, no compiler or nowhere to
keep a library, is said once for all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("nanok3")

SOURCES = Path(__file__).parent / "cpu"
COMPILERS = ("g++", "clang++", "c++")
COMMON_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
# The first set a compiler knows: Apple's has no OpenMP, some ARM compilers know only -mcpu.
TUNING_FLAGS: tuple[tuple[str, ...], ...] = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-fopenmp",),
    ("-mcpu=native",),
    (),
)
BUILD_SECONDS = 300
ANSWER_SECONDS = 60
"""For a compiler's version and for compiling nothing: who needs longer hangs, and is not asked a second time."""
LONGEST_REASON = 400
LIBRARIES_KEPT = 8
"""Of one kernel: for other checkouts, compilers and processors that share the folder."""


def use_flags(*flags: str) -> None:
    """Compile with COMMON_FLAGS and these instead of TUNING_FLAGS, from now on in this process: for checks under
    sanitizers and of other instruction sets. To be called before the first kernel is used."""
    global TUNING_FLAGS
    assert load.cache_info().currsize == 0, "kernels are loaded already"
    TUNING_FLAGS = (flags,)


def available(name: str) -> bool:
    """Whether the kernel `cpu/<name>.cpp` can be used here; builds it if it was not built before."""
    return load(name) is not None


def constant_when_traced(function: Callable[..., bool]) -> Callable[..., bool]:
    """Whether a kernel was built is no part of a traced graph. The mark is that of `torch.compiler`'s
    assume_constant_result, which would load the whole compiler, seconds of every start, to set it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `cpu/<name>.cpp`, or None (said once in the log) where it cannot be built."""
    try:
        return ctypes.CDLL(str(build(name)))
    except NothingBuilds as error:
        _warn_once(f"native kernels unavailable, using the slower torch forms: {error}")
    except (OSError, subprocess.SubprocessError, BuildError) as error:
        log.warning("native %s kernel unavailable, using the slower torch form: %s", name, error)
    return None


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


class BuildError(RuntimeError):
    """Why a kernel could not be built, in one line."""


class NothingBuilds(BuildError):
    """Why none of the kernels can be built here."""


def build(name: str) -> Path:
    """Path of the compiled kernel, compiling it when the cache has none. Raises BuildError or OSError."""
    if os.name != "posix":
        raise NothingBuilds(f"kernels are built on Linux and macOS only, this is {platform.system()}")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NothingBuilds(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    folder = cache_folder()
    target = folder / f"{name}-{fingerprint(name, compiler)}.so"
    if not _intact(target):
        _make(folder)
        with _locked(folder / f"{name}.lock"):
            if not _intact(target):
                _tidy(folder, name)
                _compile(compiler, SOURCES / f"{name}.cpp", target)
    return target


def _make(folder: Path) -> None:
    """The cache's folder, or NothingBuilds where nothing can be put into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        refused = None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        refused = error.strerror
    if refused:
        raise NothingBuilds(f"no folder to keep them in: {folder}: {refused}; XDG_CACHE_HOME can name another")


def _tidy(folder: Path, name: str) -> None:
    """Under the kernel's lock: what a build left that was killed, and the oldest libraries. A process that has one of
    them loaded keeps it."""
    for left in folder.glob(f".{name}-*"):
        left.unlink(missing_ok=True)
    libraries = sorted(folder.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in libraries[LIBRARIES_KEPT - 1 :]:
        _checksum_file(old).unlink(missing_ok=True)
        old.unlink(missing_ok=True)


def _intact(library: Path) -> bool:
    """Whether a library is there and still what the compiler wrote."""
    try:
        return _checksum_file(library).read_text("ascii") == _sha256(library)
    except (OSError, ValueError):
        return False


def _checksum_file(library: Path) -> Path:
    return library.with_name(library.name + ".sha256")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/nanok3/kernels`, by default under `~/.cache`. NothingBuilds for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named or Path.home() / ".cache") / "nanok3" / "kernels"
    except RuntimeError as error:
        raise NothingBuilds(f"no folder to keep them in: {error}; XDG_CACHE_HOME can name one") from None


def fingerprint(name: str, compiler: str) -> str:
    """Hash of the source with its headers, the compiler's version, the flags and the processor's features."""
    digest = hashlib.sha256()
    for source in sources(name):
        digest.update(source.read_bytes())
    digest.update(repr((compiler, version(compiler), COMMON_FLAGS, TUNING_FLAGS, cpu_features())).encode())
    return digest.hexdigest()[:20]


_useless: dict[str, str] = {}
"""Compilers that answered nothing or compile nothing, and why: the other kernels need not wait for them again."""


def _give_up(compiler: str, why: str) -> NothingBuilds:
    _useless[compiler] = why
    return NothingBuilds(f"{compiler} {why}")


def version(compiler: str) -> str:
    """What a compiler says of itself. NothingBuilds for one that cannot be run, or was of no use before."""
    if compiler in _useless:
        raise NothingBuilds(f"{compiler} {_useless[compiler]}")
    try:
        return _output([compiler, "--version"], ANSWER_SECONDS).stdout
    except subprocess.TimeoutExpired:
        raise _give_up(compiler, f"does not answer within {ANSWER_SECONDS} s") from None
    except OSError as error:
        raise _give_up(compiler, f"cannot be run: {error.strerror}") from None


def _output(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run to its end. A compiler speaks the language of its user in whatever encoding; nothing is decided by it."""
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False, timeout=seconds
    )


def sources(name: str) -> list[Path]:
    """The kernel's file and every header of ours that it includes, directly or through another."""
    found = [SOURCES / f"{name}.cpp"]
    for source in found:
        included = (SOURCES / header for header in re.findall(r'^#include "([^"]+)"', source.read_text("utf-8"), re.M))
        found += [header for header in included if header not in found]
    return found


def cpu_features() -> str:
    """Architecture, model and instruction-set flags as the system names them."""
    described = [platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("flags", "Features", "model name", "CPU part")
        described += sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)})
    return "\n".join(described)


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Compile to a temporary file beside `target` and rename it there."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-")
    os.close(handle)
    try:
        tuning = _accepted_flags(compiler, temporary)
        try:
            failure = _run(compiler, tuning, source, temporary, BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            failure = f"it took more than {BUILD_SECONDS} s"
        if failure is not None:
            raise BuildError(f"{compiler} failed on {source.name}: {failure}")
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        # The old checksum goes first and the new one comes last: in between, the library counts as damaged.
        _checksum_file(target).unlink(missing_ok=True)
        checksum = _sha256(Path(temporary))
        os.replace(temporary, target)
        _replace_file(_checksum_file(target), checksum)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _replace_file(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    with open(handle, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _accepted_flags(compiler: str, output: str) -> tuple[str, ...]:
    """The first of TUNING_FLAGS with which the compiler makes a library of nothing. A kernel that fails with these
    is a failure: trying weaker ones would hide it behind a library many times slower."""
    failure = None
    for tuning in TUNING_FLAGS:
        try:
            failure = _run(compiler, tuning, Path(os.devnull), output, ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise _give_up(compiler, f"takes more than {ANSWER_SECONDS} s to compile nothing") from None
        if failure is None:
            return tuning
        log.info("%s does not take %s: %s", compiler, " ".join(tuning), failure)
    raise _give_up(compiler, f"compiles nothing at all: {failure}")


def _run(compiler: str, tuning: tuple[str, ...], source: Path, output: str, seconds: float) -> str | None:
    """None, or one line that says why the compiler failed. TimeoutExpired for one that was stopped."""
    command = [compiler, *COMMON_FLAGS, *tuning, "-x", "c++", str(source), "-o", output]
    result = _output(command, seconds)
    if result.returncode == 0:
        return None
    # "error: ld returned 1 exit status" stands behind what the linker has told: a full disk, a missing library.
    said = ("".join(c if c.isprintable() else " " for c in line).strip() for line in result.stderr.splitlines())
    lines = [line for line in said if line and "ld returned" not in line]
    lines = lines or [f"exit status {result.returncode}"]
    return next((line for line in lines if "error" in line), lines[-1])[:LONGEST_REASON]


class _locked:
    """Exclusive lock on a file for a `with` block; other processes wait."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        import fcntl  # posix only, and so is building

        self.file = open(self.path, "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()
