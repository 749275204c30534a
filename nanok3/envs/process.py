"""A sandboxed program seen from outside: its output up to a bound, its deadline, what it takes of memory and disk.

The kernel has no limit on the memory or the disk of a group of processes that an ordinary user could set, so both are
watched: every 20 ms the resident memory of all descendants, every 100 ms the upper layer. A program can pass these two
limits by what it takes in that time, and is killed then; no single file and no single process can (rlimits).

Killing the outer process is enough: the inner one dies with it, and as it is number 1 of its process namespace the
kernel kills all the others.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nanok3.envs.environment import InfraError
from nanok3.envs.layers import usage
from nanok3.envs.sandbox import Limits, Ran

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_LOOK, _LOOK_AT_DISK, _GRACE = 0.02, 0.1, 5.0


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    return [int(child) for child in found]


def resident(pid: int) -> int:
    """Bytes of memory that a process and all its descendants hold."""
    total, queue = 0, [pid]
    while queue:
        one = queue.pop()
        with suppress(OSError, IndexError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE
        queue += _children(one)
    return total


class Process:
    """One command from its start to its end. `upper` is the folder that it writes to."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        upper: Path,
        limits: Limits,
        stdin: bytes | None,
        passed: tuple[int, ...] = (),
    ) -> None:
        self.limits, self.upper, self.limit = limits, upper, ""
        self.began, self._looked, self._looked_at_disk = time.monotonic(), 0.0, time.monotonic()
        source = subprocess.PIPE if stdin is None else _memory(stdin)
        try:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                pass_fds=passed,
                start_new_session=True,
            )
        finally:
            if stdin is not None:
                os.close(source)
        assert self.process.stdout is not None and self.process.stderr is not None
        self._kept = {self.process.stdout: bytearray(), self.process.stderr: bytearray()}
        self._reader = selectors.DefaultSelector()
        for pipe in self._kept:
            os.set_blocking(pipe.fileno(), False)
            self._reader.register(pipe, selectors.EVENT_READ)

    def _read(self, seconds: float) -> None:
        """What has been written by now; beyond the bound it is read and forgotten."""
        for key, _ in self._reader.select(seconds):
            pipe = key.fileobj
            piece = os.read(key.fd, 65536)
            if not piece:
                self._reader.unregister(pipe)
            kept = self._kept[pipe]  # type: ignore[index]
            kept += piece[: max(0, self.limits.output - len(kept))]

    def _watch(self) -> None:
        """Kill the program if it has passed a limit."""
        now = time.monotonic()
        if now - self.began > self.limits.seconds:
            self.kill("seconds")
        elif now - self._looked > _LOOK:
            self._looked = now
            if resident(self.process.pid) > self.limits.memory:
                self.kill("memory")
            elif now - self._looked_at_disk > _LOOK_AT_DISK:
                self._look_at_disk()

    def _look_at_disk(self) -> None:
        self._looked_at_disk = time.monotonic()
        size, count = usage(self.upper, self.limits.files)
        if size > self.limits.disk:
            self.kill("disk")
        elif count > self.limits.files:
            self.kill("files")

    def kill(self, limit: str = "") -> None:
        self.limit = self.limit or limit
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> Ran:
        """Wait for the end, within the limits."""
        while self._reader.get_map() and not self.limit:
            self._read(_LOOK)
            self._watch()
        self._drain()
        status = self.process.wait(_GRACE)
        if not self.limit:
            self._look_at_disk()
        out, err = (bytes(kept) for kept in self._kept.values())
        return Ran(status, out, err, time.monotonic() - self.began, self.limit or None)

    def _drain(self) -> None:
        """Until nobody holds the other ends any more: then no process of the sandbox is left."""
        end = time.monotonic() + _GRACE
        while self._reader.get_map():
            self._read(_LOOK)
            if time.monotonic() > end:
                raise InfraError("a killed sandbox did not end")
        for pipe in self._kept:
            pipe.close()
        self._reader.close()

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Write a line, read a line. TimeoutError; EOFError where the program has ended or says too much."""
        assert self.process.stdin is not None and self.process.stdout is not None
        end = time.monotonic() + seconds
        kept = self._kept[self.process.stdout]
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise EOFError("the program has ended") from None
        while b"\n" not in kept:
            if time.monotonic() > end or self.limit:
                self.kill("seconds")
                raise TimeoutError(f"no answer within {seconds:g} s, or over the limit on {self.limit}")
            self._read(_LOOK)
            self._watch()
            if self.process.stdout not in [key.fileobj for key in self._reader.get_map().values()]:
                raise EOFError("the program has ended")
            if len(kept) >= self.limits.output:
                raise EOFError("the answer is too long")
        answer, _, rest = bytes(kept).partition(b"\n")
        kept[:] = rest
        return answer

    def close(self) -> None:
        """End the program, if it has not ended."""
        self.kill()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        if not self.process.stdout.closed:  # type: ignore[union-attr]
            self._drain()
        self.process.wait(_GRACE)


def _memory(content: bytes) -> int:
    """A file in memory that is read from its beginning."""
    handle = os.memfd_create("stdin")
    os.write(handle, b"") if not content else _write_all(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]
