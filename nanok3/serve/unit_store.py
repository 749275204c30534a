"""Prefixes outside of the pool: whole units by their keys, in memory and in files, each with a budget.

    unit   keys of spans start + 1 .. end,  the latents of their tokens,  the state of every KDA layer at the end
    file   magic | length | header as JSON | latents | state | SHA-256 of all before

A unit is there whole or not at all. A file is written under another name and renamed when it is complete; when it is
read, its size, its checksum and its identity (model, weights, layout) must be right, and otherwise it is deleted and
the look-up a miss. What has not been used for longest moves from memory to the folder, and from there away. Files are
written and removed by a thread of their own; until one is done its unit is still in memory.

The folder belongs to one server at a time, which holds a lock on it. At its start files of other identities, and what
a killed server left, are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanok3.data.files import write_file

log = logging.getLogger("nanok3")

MAGIC = b"nanok3 prefix 1\n"
_DIGEST = hashlib.sha256().digest_size
_LONGEST_HEADER = 1 << 26
_BEHIND = 1 << 28
"""Bytes that may wait for the writer."""
_NAME = re.compile(r"([0-9a-f]{64})\.unit")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.unit-.*")


@dataclass(frozen=True, eq=False)
class Unit:
    """The memory of the spans `keys` that follow `start` spans, of which the last has the key `base`."""

    start: int
    base: bytes
    """Empty for a unit from the beginning."""
    keys: tuple[bytes, ...]
    latents: bytes
    state: bytes
    ids: tuple[int, ...] = ()
    """The tokens, where they are wanted as well (a saved conversation)."""

    @property
    def key(self) -> bytes:
        return self.keys[-1]

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def size(self) -> int:
        return len(self.latents) + len(self.state) + 32 * (len(self.keys) + 2)


@dataclass(frozen=True)
class Place:
    """What is known of a unit without reading it."""

    start: int
    base: bytes
    size: int


# ---------------------------------------------------------------------- files


def to_bytes(unit: Unit, identity: str) -> bytes:
    header = {
        "identity": identity,
        "start": unit.start,
        "base": unit.base.hex(),
        "keys": [key.hex() for key in unit.keys],
        "latents": len(unit.latents),
        "state": len(unit.state),
        "ids": list(unit.ids),
    }
    text = json.dumps(header).encode()
    whole = b"".join([MAGIC, len(text).to_bytes(8, "little"), text, unit.latents, unit.state])
    return whole + hashlib.sha256(whole).digest()


def from_bytes(data: bytes, identity: str, where: str) -> Unit:
    """The unit that a file holds. ValueError says why it is none, or another's."""
    if len(data) < len(MAGIC) + 8 + _DIGEST or not data.startswith(MAGIC):
        raise ValueError(f"{where} holds no saved prefix")
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise ValueError(f"{where} is damaged: its checksum is wrong")
    header, begin = _header(data)
    if header["identity"] != identity:
        raise ValueError(f"{where} is of another model, other weights or another layout")
    middle = begin + header["latents"]
    end = middle + header["state"]
    if end + _DIGEST != len(data):
        raise ValueError(f"{where} is damaged: its lengths do not add up")
    keys = tuple(bytes.fromhex(key) for key in header["keys"])
    base = bytes.fromhex(header["base"])
    return Unit(header["start"], base, keys, data[begin:middle], data[middle:end], tuple(header["ids"]))


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header and where it ends. ValueError for anything else."""
    begin = len(MAGIC) + 8
    length = int.from_bytes(data[len(MAGIC) : begin], "little")
    header = json.loads(data[begin : begin + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    return header, begin + length


def _glance(path: Path, identity: str) -> Place:
    """A unit's place from its file's header. ValueError for a file that cannot be one of ours."""
    if not path.is_file():  # a pipe would hold us up
        raise ValueError("not a file")
    with path.open("rb") as file:
        begin = file.read(len(MAGIC) + 8)
        length = int.from_bytes(begin[len(MAGIC) :], "little")
        if not begin.startswith(MAGIC) or length > _LONGEST_HEADER:
            raise ValueError("not a unit")
        header, end = _header(begin + file.read(length))
    size, start = path.stat().st_size, header["start"]
    if header["identity"] != identity or end + header["latents"] + header["state"] + _DIGEST != size:
        raise ValueError("another's, or cut off")
    if type(start) is not int or start < 0:
        raise ValueError("damaged")
    return Place(start, bytes.fromhex(header["base"]), size)


def _write(path: Path, unit: Unit, identity: str) -> int:
    """How many bytes it took."""
    data = to_bytes(unit, identity)
    write_file(path, data)
    return len(data)


def _remove(path: Path) -> None:
    """A file that no longer counts. One that cannot be removed stays, and is of no use to anybody."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


# ---------------------------------------------------------------------- the store


@dataclass
class Counts:
    """What was done since the start."""

    stored: int = 0
    found: int = 0
    refused: int = 0
    """Larger than any of the budgets."""
    damaged: int = 0
    dropped: int = 0
    """Gone for want of room, or by somebody's wish."""


@dataclass
class UnitStore:
    """Units in memory, up to `memory` bytes, and in `folder`, up to `disk` bytes. For one thread."""

    identity: str
    memory: int
    folder: Path | None = None
    disk: int = 0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._held: OrderedDict[bytes, Unit] = OrderedDict()
        self._files: OrderedDict[bytes, Place] = OrderedDict()
        self._moving: dict[bytes, tuple[Unit, Future[int]]] = {}
        self._removing: Future[None] | None = None
        self.memory_used = self.disk_used = 0
        self._writer = ThreadPoolExecutor(1, "offload") if self.folder is not None else None
        self._lock: int | None = None
        if self.folder is not None:
            self._lock = _claim(self.folder)
            self._find_files(self.folder)

    def _find_files(self, folder: Path) -> None:
        for path in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns):
            named = _NAME.fullmatch(path.name)
            if named is None:
                if _UNFINISHED.fullmatch(path.name):
                    _remove(path)
                continue
            try:
                self._files[bytes.fromhex(named[1])] = place = _glance(path, self.identity)
                self.disk_used += place.size
            except (ValueError, KeyError, TypeError, OSError, RecursionError):
                _remove(path)
        self._trim_disk()

    def __len__(self) -> int:
        return len(self._held) + len(self._moving) + len(self._files)

    @property
    def units_kept(self) -> dict[str, int]:
        """How many there are in memory and in the folder."""
        return {"memory": len(self._held) + len(self._moving), "disk": len(self._files)}

    @property
    def bytes_kept(self) -> dict[str, int]:
        """What they weigh, without those that are being written."""
        return {"memory": self.memory_used, "disk": self.disk_used}

    def place(self, key: bytes) -> Place | None:
        """What is known of a unit; None if there is none."""
        unit = self._held.get(key) or self._moving.get(key, (None,))[0]
        return self._files.get(key) if unit is None else Place(unit.start, unit.base, unit.size)

    def touch(self, key: bytes) -> None:
        """It was used, and so were those it builds on: they stay as long as it does."""
        levels: tuple[OrderedDict[bytes, Any], ...] = (self._held, self._files)
        place, before = self.place(key), None
        while place is not None and (before is None or place.start < before):
            for level in levels:
                if key in level:
                    level.move_to_end(key)
            key, before = place.base, place.start
            place = self.place(key)

    def put(self, unit: Unit) -> None:
        """Keep a unit, if it fits at all."""
        self._collect()
        if unit.size > max(self.memory, self.disk if self.folder else 0):
            self.counts.refused += 1
        elif self.place(unit.key) is None:
            self._held[unit.key] = unit
            self.memory_used += unit.size
            self.counts.stored += 1
        self.touch(unit.key)
        while self.memory_used > self.memory:
            self._spill(self._held.popitem(last=False)[1])

    def get(self, key: bytes) -> Unit | None:
        """A unit, checked; None if it is not there or no longer whole."""
        self._collect()
        unit = self._held.get(key) or self._moving.get(key, (None,))[0]
        if unit is None and key in self._files:
            unit = self._read(key)
        if unit is not None:
            self.counts.found += 1
        return unit

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """These will be looked up soon: the system may begin to read their files. From any thread, and at once."""
        for key in keys:
            if key not in self._files or not hasattr(os, "posix_fadvise"):
                continue
            with contextlib.suppress(OSError):  # it has gone in between
                file = os.open(self._path(key), os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                os.close(file)

    def discard(self, key: bytes) -> None:
        """Nobody will ask for this unit again; one that is being written goes when there is no room."""
        unit = self._held.pop(key, None)
        if unit is not None:
            self.memory_used -= unit.size
        elif key in self._files:
            self._delete(key)
        else:
            return
        self.counts.dropped += 1

    def clear(self) -> None:
        """Forget everything, files too."""
        self.settle()
        self.counts.dropped += len(self)
        self._held.clear()
        self.memory_used = 0
        for key in list(self._files):
            self._delete(key)

    def settle(self) -> None:
        """Wait until all files are written, and those that made room for them are gone."""
        for _, writing in self._moving.values():
            writing.exception()
        self._collect()
        if self._removing is not None:
            self._removing.exception()

    def close(self) -> None:
        """Write what is in memory to the folder, as far as it fits, and end the writer."""
        while self._held and self._writer is not None:
            self.settle()
            self._spill(self._held.popitem(last=False)[1])
        self.settle()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---------------------------------------------------------------- the folder

    def _path(self, key: bytes) -> Path:
        assert self.folder is not None
        return self.folder / f"{key.hex()}.unit"

    def _spill(self, unit: Unit) -> None:
        """A unit leaves memory: to the folder, or away if there is none or its writer is behind."""
        self.memory_used -= unit.size
        behind = sum(other.size for other, _ in self._moving.values()) > max(self.memory, _BEHIND)
        if self._writer is None or behind or unit.size > self.disk:
            self.counts.dropped += 1
            return
        path, identity = self._path(unit.key), self.identity
        self._moving[unit.key] = unit, self._writer.submit(_write, path, unit, identity)

    def _collect(self) -> None:
        """Take note of files that were written since."""
        for key, (unit, writing) in list(self._moving.items()):
            if not writing.done():
                continue
            del self._moving[key]
            try:
                size = writing.result()
            except Exception as error:
                log.warning("a prefix could not be written to %s: %s", self.folder, error)
                self.counts.dropped += 1
                continue
            self._files[key] = Place(unit.start, unit.base, size)
            self.disk_used += size
        self._trim_disk()

    def _trim_disk(self) -> None:
        while self.disk_used > self.disk:
            key, place = self._files.popitem(last=False)
            self.disk_used -= place.size
            self.counts.dropped += 1
            path = self._path(key)
            if self._writer is None:
                _remove(path)
            else:  # a removal takes the system milliseconds, and the engine's thread must not wait for it
                self._removing = self._writer.submit(_remove, path)

    def _read(self, key: bytes) -> Unit | None:
        path = self._path(key)
        try:
            unit = from_bytes(path.read_bytes(), self.identity, path.name)
            if unit.key != key:
                raise ValueError(f"{path.name} holds another unit")
            with contextlib.suppress(OSError):  # only the next server wants to know when it was used
                os.utime(path)
            return unit
        except (ValueError, OSError) as error:
            log.warning("a saved prefix is left out: %s", error)
            self.counts.damaged += 1
            self._delete(key)
            return None

    def _delete(self, key: bytes) -> None:
        self.disk_used -= self._files.pop(key).size
        _remove(self._path(key))


def _claim(folder: Path) -> int:
    """A lock on a folder, which is made if need be. ValueError if another server holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"cache_folder {folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"the folder {folder} is in use by a server; allowed: one of its own") from None
    return lock


def chain(store: UnitStore, keys: Sequence[bytes], end: int, latents: int) -> list[bytes] | None:
    """Keys of the units, first to last, that lead from `latents` spans or fewer to `end` spans; None if one misses.
    A key names all tokens before it, so units whose spans meet belong together."""
    found: list[bytes] = []
    while end > latents:
        place = store.place(keys[end - 1])
        if place is None or place.start >= end:
            return None
        found.append(keys[end - 1])
        end = place.start
    return found[::-1]
