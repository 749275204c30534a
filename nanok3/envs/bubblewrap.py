"""The local sandbox: bubblewrap around every command, over a workspace of layers.

    our process
      unshare --mount                a mount namespace that dies with the command: no mount outlives it
        mount overlay                the workspace's layers as one tree; a bind mount for Python
        setpriv                      root becomes nobody
          bwrap                      new user, process, network, IPC and host name spaces; a filter of system calls
            prlimit                  processes, memory, file size, open files, CPU seconds
              the command            in /workspace

Inside there is /usr, read-only, Python, read-only, /workspace, and /tmp in memory. There is no network, no home, no
/etc but the table of libraries, no process but the sandbox's own, no capability, and no way to make a user namespace.
The environment holds PATH, HOME and LANG.

An ordinary user needs nothing but bubblewrap 0.8 and a kernel from 5.14 on that allows user namespaces. Root inside a
container often may not make namespaces; then `check` says what failed, and nothing is run.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nanok3.envs.environment import InfraError
from nanok3.envs.layers import NOBODY, Store, Workspace
from nanok3.envs.process import Process
from nanok3.envs.sandbox import INSTALL, Limits, Ran, Sandbox, missing
from nanok3.envs.seccomp import filter_program

WORKSPACE = "/workspace"
_MOUNTS = "/mnt"
"""Covered by a small file system in memory that only this command sees."""


def python() -> list[str]:
    """The interpreter inside: this one, without its installed packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [str(Path(sys.base_prefix) / "bin" / version), "-B", "-S", "-s"]


def readonly(packages: Sequence[str]) -> dict[str, Path]:
    """Where inside -> the folder outside: Python, and installed packages by the names of their folders."""
    found: dict[str, Path] = {}
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        found[sys.base_prefix] = Path(sys.base_prefix)
    site = Path(sysconfig.get_paths()["purelib"])
    for package in packages:
        for name in (package, f"{package}.libs"):
            if (site / name).is_dir():
                found[f"/packages/{name}"] = site / name
        if f"/packages/{package}" not in found:
            raise ValueError(f"packages: {package!r} is not installed beside nanok3")
    return found


def as_nobody() -> list[str]:
    """What makes root somebody else."""
    ids = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    return ["setpriv", *ids] if os.geteuid() == 0 else []


def outer(store: Store, workspace: Workspace, binds: Sequence[Path], inner: Sequence[str]) -> list[str]:
    """The command that mounts, and then runs `inner`. Its current folder is the store's."""
    root = os.geteuid() == 0
    upper = f"work/{workspace.name}"
    lower = ":".join(f"layers/{layer}" for layer in workspace.layers)
    options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/scratch" + ("" if root else ",userxattr")
    steps = [
        f"mount -n -t tmpfs -o size=1m,mode=755 tmpfs {_MOUNTS}",
        "mkdir " + " ".join(f"{_MOUNTS}/{name}" for name in ("tree", *map(str, range(len(binds))))),
        *(f"mount -n --bind {shlex.quote(str(bind))} {_MOUNTS}/{i}" for i, bind in enumerate(binds)),
        f"mount -n -t overlay -o {options} overlay {_MOUNTS}/tree",
    ]
    space = ["--propagation", "private"] if root else ["--user", "--map-root-user"]
    script = " && ".join([*steps, f"exec {shlex.join(inner)}"])
    return ["unshare", "--mount", *space, "sh", "-c", script]


@functools.cache
def _system() -> tuple[str, ...]:
    """The system's programs and libraries, read-only, as this machine has them."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for path in map(Path, ("/etc/ld.so.cache", "/etc/alternatives")):
        arguments += ["--ro-bind-try", str(path), str(path)]
    return tuple(arguments)


def inner(command: Sequence[str], limits: Limits, targets: Sequence[str], handle: int | None) -> list[str]:
    """bwrap, prlimit and the command."""
    memory = ["--size", str(limits.disk)]
    arguments = [
        *as_nobody(),
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--uid",
        "1000",
        "--gid",
        "1000",
    ]
    arguments += ["--cap-drop", "ALL", "--hostname", "sandbox", "--die-with-parent", "--new-session", *_system()]
    for i, target in enumerate(targets):
        arguments += ["--ro-bind", f"{_MOUNTS}/{i}", target]
    arguments += ["--proc", "/proc", "--dev", "/dev", *memory, "--tmpfs", "/tmp", *memory, "--tmpfs", "/dev/shm"]
    arguments += ["--bind", f"{_MOUNTS}/tree", WORKSPACE, "--chdir", WORKSPACE, "--remount-ro", "/dev"]
    arguments += ["--remount-ro", "/", "--clearenv"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8", "PYTHONPATH": "/packages"}
    for name, value in (environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}).items():
        arguments += ["--setenv", name, value]
    if handle is not None:
        arguments += ["--seccomp", str(handle)]
    space = limits.memory + (1 << 30)  # of addresses, of which a program reserves far more than it touches
    bounds = {"nproc": limits.processes, "as": space, "fsize": limits.disk, "core": 0, "nofile": 256}
    bounds["cpu"] = math.ceil(limits.seconds * 2) + 1
    return [*arguments, "--", "prlimit", *(f"--{name}={value}" for name, value in bounds.items()), *command]


class Bubblewrap(Sandbox):
    """One workspace of a store. Made by `Sandboxes.open`."""

    def __init__(self, home: Sandboxes, workspace: Workspace) -> None:
        self.home, self.workspace = home, workspace
        self._lock, self._paused, self._closed = threading.Lock(), False, False

    def _begin(self, command: Sequence[str], stdin: bytes | None, limits: Limits | None) -> Process:
        if self._paused or self._closed:
            raise ValueError(f"the sandbox is {'closed' if self._closed else 'paused'}")
        home, limits = self.home, limits or self.home.limits
        program = filter_program()
        handle = None if program is None else os.memfd_create("filter", 0)
        try:
            if handle is not None and program is not None:
                os.write(handle, program)
                os.lseek(handle, 0, os.SEEK_SET)
            whole = inner(command, limits, list(home.binds), handle)
            whole = outer(home.store, self.workspace, list(home.binds.values()), whole)
            upper = home.store.upper(self.workspace)
            return Process(whole, home.store.folder, upper, limits, stdin, () if handle is None else (handle,))
        except OSError as error:
            raise InfraError(f"the sandbox did not start: {error}") from None
        finally:
            if handle is not None:
                os.close(handle)

    def run(self, command: Sequence[str], stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        """Run a command to its end or its limits."""
        with self._lock:
            return self._begin(command, stdin, limits).finish()

    def start(self, command: Sequence[str], limits: Limits | None = None) -> Process:
        """A program to be asked line by line; its `seconds` run from now. Close it before anything else."""
        return self._begin(command, None, limits)

    def snapshot(self, **note: str) -> str:
        with self._lock:
            return self.home.store.snapshot(self.workspace, **note)

    def restore(self, snapshot: str) -> None:
        with self._lock:
            self.home.store.restore(self.workspace, snapshot)

    def fork(self) -> Bubblewrap:
        return self.with_files({})

    def with_files(self, files: Mapping[str, bytes]) -> Bubblewrap:
        with self._lock:
            layers = self.home.store.freeze(self.workspace)
            top = (self.home.store.layer(files),) if files else ()
            return Bubblewrap(self.home, self.home.store.open(top + layers, self.workspace.parent))

    def pause(self) -> None:
        """Between commands nothing runs, so there is nothing to stop."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def close(self) -> None:
        self._closed = True
        self.home.store.release(self.workspace)


class Sandboxes:
    """A store and what its sandboxes have in common. Refuses to exist where sandboxes do not work."""

    def __init__(self, folder: Path | None = None, packages: Sequence[str] = (), limits: Limits | None = None) -> None:
        if reason := check():
            raise ImportError(f"code is only run in a sandbox, and there is none: {reason}")
        self._prepare(Store(folder, flatten), readonly(packages), limits or Limits())

    def _prepare(self, store: Store, binds: dict[str, Path], limits: Limits) -> None:
        self.store, self.binds, self.limits = store, binds, limits
        self.kept: list[object] = []
        """What environments share that play in these sandboxes."""
        self.at_close: list[Callable[[], None]] = []

    def open(self, files: Mapping[str, bytes] | None = None) -> Bubblewrap:
        """A sandbox whose workspace holds these files."""
        return Bubblewrap(self, self.store.open((self.store.layer(files or {}),)))

    def close(self) -> None:
        """What is kept ends first; then nothing is left behind."""
        while self.at_close:
            self.at_close.pop()()
        self.store.close()

    def __enter__(self) -> Sandboxes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flatten(store: Store, layers: tuple[str, ...], name: str) -> None:
    """Copy what the layers show together; only `cp` runs, in the mount namespace, and reads no content."""
    workspace = store.open(layers)
    try:
        copy = ["cp", "-a", f"{_MOUNTS}/tree/.", f"layers/{name}/"]
        whole = outer(store, workspace, [], copy)
        ran = Process(whole, store.folder, store.upper(workspace), Limits(seconds=60), b"").finish()
        if not ran.ok:
            raise InfraError(f"layers could not be joined: {ran.text.strip()}")
    finally:
        store.release(workspace)


@functools.cache
def check() -> str | None:
    """Why sandboxes do not work here, or None: one command is tried, once a process."""
    if reason := missing():
        return reason
    home = Sandboxes.__new__(Sandboxes)
    home._prepare(Store(), readonly(()), Limits())
    try:
        ran = home.open().run(["true"])
    except InfraError as error:
        return str(error)
    finally:
        home.close()
    if ran.ok:
        return None
    said = ran.text.strip().replace("\n", "; ") or f"status {ran.status}"
    return f"{said} (bubblewrap 0.8 and user namespaces are needed: {INSTALL})"
