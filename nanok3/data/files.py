"""Writing a file so that a reader never sees half of it: temporary name, fsync, rename."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the name `path` when the block ends well; else `path` is untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _lock(file: BinaryIO) -> bool:
    """Whether nobody else holds it. The lock goes with the process, however that ends."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # no locks on this system or file system
        return False
    return True


def remove_left(path: Path, seconds: float = 60) -> None:
    """Remove what writers of `path` left that were killed, which may fill a disk and which nobody sees: files of the
    temporary names of `replacing` that no process holds and that were not touched for so many seconds."""
    for left in path.parent.glob(f".{glob.escape(path.name)}-????????"):
        with suppress(OSError):
            if left.is_file() and time.time() - left.stat().st_mtime > seconds:
                with left.open("rb+") as file:
                    if _lock(file):
                        left.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write `content` under `path`, whole or not at all."""
    with replacing(path) as file:
        file.write(content)


def check_place(name: str, path: Path) -> None:
    """ValueError, with the field's name, where nothing can be made under `path`: told before there is work to lose."""
    there = path.absolute().parent
    while not os.path.exists(there):  # unlike Path's, it takes names that are too long
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{name} is {path}; {there} is no folder")
    try:
        handle, probe = tempfile.mkstemp(dir=there, prefix=f".{path.name}-")
    except OSError as error:  # permissions, a medium that is only read, a name that is too long, no file system at all
        raise ValueError(f"{name} is {path}; {there} cannot be written to: {error.strerror}") from None
    os.close(handle)
    os.unlink(probe)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a folder that a command writes to: a second process would remove what the first is writing. The lock goes
    with the process, however that ends. A folder made here in which nothing was written is removed. ValueError where
    another process has it."""
    import fcntl

    made, lock = not folder.exists(), folder / ".lock"
    folder.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out: another process is writing in {folder}") from None
        try:
            yield
        finally:
            if made and list(folder.iterdir()) == [lock]:
                lock.unlink()
                folder.rmdir()


def check_file(name: str, path: Path) -> None:
    """The same for a file that is to be written or replaced."""
    if os.path.isdir(path):
        raise ValueError(f"{name} is {path}, which is a folder; name a file")
    check_place(name, path)
