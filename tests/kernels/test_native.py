"""Building, caching and loading the C++ kernels, and what happens where that is impossible."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanok3.kernels import native

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, native.COMPILERS)), reason="no C++ compiler on this machine"
)
TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and a library folder with one tiny kernel, `probe`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "probe.cpp").write_text(TINY)
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(native, "_useless", {})
    native.load.cache_clear()
    native._warn_once.cache_clear()
    yield
    native.load.cache_clear()


def built() -> list[Path]:
    return sorted(native.cache_folder().glob("*.so"))


@needs_compiler
def test_builds_once_and_is_reused(tmp_path: Path) -> None:
    library = native.load("probe")
    assert library is not None and library.answer() == 42
    (first,) = built()
    assert first.parent == tmp_path / "cache" / "nanok3" / "kernels"
    written = first.stat().st_mtime_ns
    native.load.cache_clear()
    assert native.available("probe")
    assert built() == [first] and first.stat().st_mtime_ns == written
    assert {p.suffix for p in native.cache_folder().iterdir()} == {".so", ".sha256", ".lock"}  # no temporary left


@needs_compiler
@pytest.mark.parametrize("changed", ("source", "header", "flags", "processor"))
def test_what_decides_the_library_is_in_its_name(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)))
    (native.SOURCES / "probe.cpp").write_text('#include "outer.h"\n' + TINY)
    (native.SOURCES / "outer.h").write_text('#pragma once\n#include "inner.h"\n')
    (native.SOURCES / "inner.h").write_text("#pragma once\n")
    before = native.fingerprint("probe", compiler)
    assert before == native.fingerprint("probe", compiler)
    if changed == "source":
        (native.SOURCES / "probe.cpp").write_text(TINY.replace("42", "43"))
    elif changed == "header":
        (native.SOURCES / "inner.h").write_text("#pragma once\n#define MORE\n")
    elif changed == "flags":
        monkeypatch.setattr(native, "COMMON_FLAGS", (*native.COMMON_FLAGS, "-g"))
    else:
        monkeypatch.setattr(native, "cpu_features", lambda: "another processor")
    assert native.fingerprint("probe", compiler) != before


@needs_compiler
def test_a_header_of_other_kernels_does_not_build_this_one_anew() -> None:
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)))
    before = native.fingerprint("probe", compiler)
    (native.SOURCES / "more.h").write_text("#pragma once\n")
    assert native.fingerprint("probe", compiler) == before


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe")
        assert not native.available("probe")
    (record,) = caplog.records  # once, in one line
    assert "no C++ compiler found" in record.getMessage() and "\n" not in record.getMessage()


def test_what_no_kernel_can_have_is_said_once_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (native.SOURCES / "other.cpp").write_text(TINY)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe") and not native.available("other")
    assert len(caplog.records) == 1


STRANGE = {
    "fails": ("exit 1", "compiles nothing at all: exit status 1"),
    "fails with bytes that are no text": (
        r"printf '\377\376\001 no\n\n' >&2; exit 3",
        "compiles nothing at all: \ufffd",
    ),
    "is no program": (None, "cannot be run: Exec format error"),
    "hangs": ("exec sleep 30", "does not answer within 0.5 s"),
    "hangs when it compiles": ('[ "$1" = --version ] || exec sleep 30', "takes more than 0.5 s to compile nothing"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_compiler_of_no_use_is_named_and_asked_once(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    script, reason = STRANGE[kind]
    monkeypatch.setattr(native, "ANSWER_SECONDS", 0.5)
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_bytes(b"\x7fELF" + bytes(60) if script is None else f"#!/bin/sh\n{script}\n".encode())
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    (native.SOURCES / "other.cpp").write_text(TINY)
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe")
        monkeypatch.setattr(native, "_output", None)
        assert not native.available("other")
    (record,) = caplog.records
    assert f"{compiler} {reason}" in record.getMessage() and record.getMessage().isprintable()
    assert [path.suffix for path in native.cache_folder().glob(".*")] == []


@needs_compiler
def test_a_build_that_takes_too_long_is_one_kernels_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "BUILD_SECONDS", 0.001)
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe")
    assert "failed on probe.cpp: it took more than 0.001 s" in caplog.text and not native._useless


@needs_compiler
def test_a_folder_that_cannot_be_written_to_still_gives_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.build("probe")
    (native.SOURCES / "other.cpp").write_text(TINY)
    monkeypatch.setattr(native.os, "access", lambda _, mode: not mode & os.W_OK)
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert native.available("probe") and not native.available("other")
    (record,) = caplog.records
    assert "cannot be written to; XDG_CACHE_HOME can name another" in record.getMessage()


@needs_compiler
def test_failing_build(caplog: pytest.LogCaptureFixture) -> None:
    (native.SOURCES / "probe.cpp").write_text("this is no C++\n")
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert native.load("probe") is None
    (record,) = caplog.records
    assert "failed on probe.cpp" in record.getMessage() and "\n" not in record.getMessage()
    assert built() == []


@needs_compiler
def test_flags_a_compiler_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "TUNING_FLAGS", (("-march=no-such-machine",), ()))
    assert native.available("probe")


@needs_compiler
def test_other_flags_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checks under sanitizers and of other instruction sets; what is loaded already cannot change."""
    monkeypatch.setattr(native, "TUNING_FLAGS", native.TUNING_FLAGS)  # restored afterwards
    (native.SOURCES / "probe.cpp").write_text(TINY.replace("42", "NUMBER"))
    native.use_flags("-DNUMBER=7")
    library = native.load("probe")
    assert library is not None and library.answer() == 7
    with pytest.raises(AssertionError, match="loaded already"):
        native.use_flags("-DNUMBER=8")


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe")
    assert len(caplog.records) == 1


DAMAGE = {
    "garbage": lambda library: library.write_bytes(b"no library" * 2000),
    "empty": lambda library: library.write_bytes(b""),
    "cut short": lambda library: library.write_bytes(library.read_bytes()[:9000]),
    "one bit": lambda library: library.write_bytes(library.read_bytes()[:-1] + b"?"),
    "no checksum": lambda library: native._checksum_file(library).unlink(),
    "a checksum that is no text": lambda library: native._checksum_file(library).write_bytes(b"\xff" * 64),
}
USE = """
import sys
from pathlib import Path
from nanok3.kernels import native
native.SOURCES = Path(sys.argv[1])
library = native.load("probe")
print(None if library is None else library.answer())
"""


def in_its_own_process(**env: str) -> tuple[str, str]:
    """What a fresh process gets from `probe`, and what it logs; a damaged library could end the process."""
    command = [sys.executable, "-c", USE, str(native.SOURCES)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_anew(damage: str) -> None:
    library = native.build("probe")
    whole = native._sha256(library)
    DAMAGE[damage](library)
    assert in_its_own_process() == ("42", "")
    assert built() == [library] and native._sha256(library) == whole
    written = library.stat().st_mtime_ns
    assert native.build("probe") == library and library.stat().st_mtime_ns == written, "once, not every time"


@needs_compiler
def test_a_build_removes_what_a_killed_one_left_and_the_oldest_libraries() -> None:
    folder = native.cache_folder()
    folder.mkdir(parents=True)
    kept = [folder / f"probe-{i:020d}.so" for i in range(native.LIBRARIES_KEPT + 2)] + [folder / "prober-1.so"]
    for age, path in enumerate(kept):
        path.write_bytes(b"")
        native._checksum_file(path).write_text("")
        os.utime(path, (1e9 - age, 1e9 - age))
    left = folder / ".probe-0123-killed"
    left.write_bytes(b"half a library")
    library = native.build("probe")
    assert set(built()) == {library, *kept[: native.LIBRARIES_KEPT - 1], kept[-1]}
    assert not left.exists() and len(list(folder.glob("*.sha256"))) == len(built())


@needs_compiler
def test_the_reason_is_the_linkers_not_that_it_had_one(caplog: pytest.LogCaptureFixture) -> None:
    (native.SOURCES / "probe.cpp").write_text(
        '__attribute__((visibility("hidden"))) int away();\nint x() { return away(); }\n'
    )
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert native.load("probe") is None
    assert "ld returned" not in caplog.text and ("away" in caplog.text or "link failed" in caplog.text)


@needs_compiler
def test_a_library_of_another_kernel_is_built_anew() -> None:
    """It would load, and then lack the function."""
    library = native.build("probe")
    (native.SOURCES / "other.cpp").write_text('extern "C" int question() { return 0; }\n')
    shutil.copyfile(native.build("other"), library)
    assert in_its_own_process() == ("42", "")


@needs_compiler
def test_a_damaged_library_that_cannot_be_built_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise native.BuildError("the compiler is broken")

    native.build("probe").write_bytes(b"garbage")
    monkeypatch.setattr(native, "_compile", broken)
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe")
        assert not native.available("probe")
    (record,) = caplog.records
    assert "the compiler is broken" in record.getMessage()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with caplog.at_level(logging.WARNING, logger="nanok3"):
        assert not native.available("probe")
    (record,) = caplog.records
    assert "Could not determine home directory" in record.getMessage() and "XDG_CACHE_HOME" in record.getMessage()


FIRST_USE = """
import sys, time
from pathlib import Path
from nanok3.kernels import native
native.SOURCES = Path(sys.argv[1])
while time.time() < float(sys.argv[2]):
    time.sleep(0.001)
library = native.load("probe")
print(library.answer(), native.build("probe").stat().st_ino)
"""


@needs_compiler
def test_concurrent_first_use() -> None:
    """Two processes build into an empty cache at the same moment: both work, one library is made."""
    start = str(time.time() + 1.0)
    command = [sys.executable, "-c", FIRST_USE, str(native.SOURCES), start]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] and answers[0][0] == "42"
    assert len(built()) == 1


def test_kda_falls_back_without_a_compiler(tmp_path: Path) -> None:
    """The whole path in a process of its own: one log line, NotImplemented, no exception."""
    program = """
import torch
from nanok3.kernels import kda_cpu
x = torch.rand(1, 3, 1, 8)
for _ in range(2):
    print(kda_cpu.kda(x, x, x, -x, x[..., 0]) is NotImplemented)
"""
    env = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    assert result.stdout.split() == ["True", "True"], result.stderr
    assert result.stderr.count("no C++ compiler found") == 1


def test_the_mark_for_tracing_is_torchs_own() -> None:
    def ours() -> bool:
        return True

    def theirs() -> bool:
        return True

    assert vars(native.constant_when_traced(ours)) == vars(torch.compiler.assume_constant_result(theirs))
