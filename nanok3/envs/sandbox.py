"""What runs a model's commands: one interface, and the rule that nothing untrusted runs without a sandbox.

    run(command, stdin)      -> status, output, seconds, and which limit ended it, if one did
    snapshot, restore, fork     of the workspace; processes are kept by gVisor and E2B alone, commands are short
    with_files(files)        -> a fork that has these files on top: how hidden tests meet the work they judge

Back-ends: `bubblewrap.py` and `gvisor.py` on this machine, `e2b.py` for a service. Where bubblewrap is not there, or
does not work, `bubblewrap.Sandboxes` refuses with the line to install.
"""

from __future__ import annotations

import platform
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanok3.envs.environment import check_above_zero

INSTALL = "apt-get install bubblewrap"
PROGRAMS = ("bwrap", "unshare", "setpriv", "prlimit", "mount")


@dataclass(frozen=True)
class Limits:
    """Of one command. Memory and disk are of all its processes together; the kernel keeps the other limits."""

    seconds: float = 10.0
    processes: int = 32
    memory: int = 512 << 20
    disk: int = 64 << 20
    files: int = 5000
    output: int = 1 << 20

    def __post_init__(self) -> None:
        check_above_zero("limits", vars(self))


@dataclass(frozen=True)
class Ran:
    """What a command did. `limit` names the limit that ended it: seconds, memory, disk, files."""

    status: int
    stdout: bytes
    stderr: bytes
    seconds: float
    limit: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0 and self.limit is None

    @property
    def text(self) -> str:
        """Output, errors and how it ended, for a policy to read."""
        parts = [self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace")]
        if self.limit:
            parts.append(f"[stopped: the limit on {self.limit} was reached]")
        elif self.status:
            parts.append(f"[exit status {self.status}]")
        return "\n".join(part.rstrip("\n") for part in parts if part)


class Sandbox(ABC):
    """One workspace and the commands that run in it. No two commands run at a time."""

    @abstractmethod
    def run(self, command: Sequence[str], stdin: bytes = b"", limits: Limits | None = None) -> Ran: ...

    @abstractmethod
    def snapshot(self) -> str: ...

    @abstractmethod
    def restore(self, snapshot: str) -> None: ...

    @abstractmethod
    def fork(self) -> Sandbox: ...

    @abstractmethod
    def with_files(self, files: Mapping[str, bytes]) -> Sandbox: ...

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def read(self, path: str) -> bytes:
        """A file of the workspace. It is read inside: a link that leads out leads nowhere. FileNotFoundError."""
        ran = self.run(["cat", "--", safe_path(path)])
        if not ran.ok:
            raise FileNotFoundError(f"{path}: {ran.text.strip()}")
        return ran.stdout

    def write(self, path: str, content: bytes) -> None:
        """Write a file of the workspace, from inside. OSError where that fails."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        ran = self.run(["sh", "-c", script, "sh", safe_path(path)], stdin=content)
        if not ran.ok:
            raise OSError(f"{path}: {ran.text.strip()}")


def safe_path(path: str) -> str:
    """A path inside the workspace; ValueError for one that is absolute, leads upwards or is no path."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path or len(path) > 1000:
        raise ValueError(f"path is {path!r:.80}; expected a path below the workspace")
    return path


def missing() -> str | None:
    """Why there is no local sandbox here, or None. `bubblewrap.check` finds out whether what is there works."""
    if platform.system() != "Linux":
        return f"sandboxes need Linux; this is {platform.system()}"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"sandboxes need {', '.join(absent)}: {INSTALL}" if absent else None
