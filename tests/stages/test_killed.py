"""`kill -9` while `nanok3 quantize` and `nanok3 export` write: what they make is there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import nanok3
from nanok3.data.tokenizer import Tokenizer
from nanok3.stages import export, quantize

CONFIG = nanok3.K3Config.tiny().at_depth(3, hidden_size=64).with_vocabulary(512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("killed") / "model"
    nanok3.save(nanok3.K3(CONFIG), folder)
    Tokenizer({bytes([byte]): byte for byte in range(256)}).save(folder)
    return folder


def pack(model: Path, out: Path) -> None:
    quantize.main(quantize.QuantizeArgs(model=model, out=out, evaluate=False, threads=1))


def write_gguf(model: Path, out: Path) -> None:
    export.main(export.ExportArgs(model=model, gguf=out))


WRITERS = {"quantize": pack, "export": write_gguf}
CALLS = ((os, "fsync"), (os, "rename"), (os, "replace"), (quantize, "progress"), (export, "progress_line"))
"""Between which a kill is seen: what reaches the disk, and the layers and tensors that are done."""


def counted(monkeypatch: pytest.MonkeyPatch, seen: Callable[[], None]) -> None:
    """From now on `seen` is called before each of CALLS; for the export, before each of its tensors."""
    for owner, name in CALLS:
        call = getattr(owner, name)
        if name == "progress_line":
            monkeypatch.setattr(owner, name, lambda: lambda *_: seen())
        else:
            monkeypatch.setattr(owner, name, lambda *a, call=call, **k: (seen(), call(*a, **k))[1])


def killed(write: Callable[[], None], at: int) -> bool:
    """Whether a child that ends itself by SIGKILL before its `at`-th call was ended so."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                calls = iter(range(1, 1 << 30))
                counted(patch, lambda: next(calls) == at and os.kill(os.getpid(), signal.SIGKILL))
                write()
            os._exit(0)
        finally:
            os._exit(1)  # on an error, before pytest sees it twice
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def contents(path: Path) -> dict[str, str]:
    """A digest by name, of a file or of all files of a folder."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def points(command: str, model: Path, folder: Path, out: str) -> tuple[int, dict[str, str]]:
    """How many calls there are, and what is written when nobody disturbs."""
    calls: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, lambda: calls.append(None))
        WRITERS[command](model, folder / "whole" / out)
    return len(calls), contents(folder / "whole" / out)


def check(command: str, model: Path, folder: Path, chosen: Callable[[int], Iterator[int] | range | set[int]]) -> int:
    """Kill before the chosen calls: how many left nothing. The last is by a command that is run again in the same
    folder, beside what the killed ones left aside."""
    (folder / "whole").mkdir()
    count, whole = points(command, model, folder, "out")
    empty = 0
    for at in chosen(count):
        out = folder / "killed" / str(at) / "out"
        out.parent.mkdir(parents=True)
        assert killed(lambda out=out: WRITERS[command](model, out), at)
        assert all(path == out or path.name.startswith(".") for path in out.parent.iterdir())
        if out.exists():
            assert contents(out) == whole, f"killed before call {at} of {count}"
            continue
        empty += 1
        WRITERS[command](model, out)
        assert contents(out) == whole
    return empty


@pytest.mark.parametrize("command", WRITERS)
def test_killed_before_the_name_is_given_nothing_is_there(command: str, model: Path, tmp_path: Path) -> None:
    """Amid the work, and when all is written and flushed. The last call flushes the folder with the new name, for
    the export too."""
    assert check(command, model, tmp_path, lambda count: {count // 2, count - 1}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", WRITERS)
def test_killed_before_any_call(command: str, model: Path, tmp_path: Path) -> None:
    assert check(command, model, tmp_path, lambda count: range(1, count + 1)) > 1


def test_an_export_that_is_killed_leaves_the_file_of_before(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    export.main(export.ExportArgs(model=model, gguf=out, dtype="f32"))
    before = contents(out)
    assert killed(lambda: write_gguf(model, out), 20)
    assert contents(out) == before
