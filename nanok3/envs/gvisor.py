"""Sandboxes of gVisor, where `runsc` exists: a kernel of its own, and snapshots that keep processes and their memory.

    open        runsc run --detach      a container that waits; /workspace and /tmp are memory inside it
    run         runsc exec              a command; `timeout` inside keeps the seconds, the container every other limit
    snapshot    runsc checkpoint --image-path=DIR --leave-running
    restore     runsc delete; runsc restore --image-path=DIR --detach           under a new name
    fork        a snapshot, and a second container restored from it
    pause       runsc pause, resume     nothing runs, everything stays

What bubblewrap cannot keep is kept here: a server that a policy has begun goes on in a fork. Files lie in tmpfs mounts,
so a snapshot is one folder and holds them too. `runsc restore` needs root, and so does all of this.

Source: gVisor's user guide (checkpoint/restore: every image has a folder of its own; top-level flags are the same in
all calls) and the OCI runtime specification (config.json). Tested against a stand-in that checks the command lines; it
has not met a real runsc.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanok3.envs.bubblewrap import WORKSPACE, readonly
from nanok3.envs.environment import InfraError
from nanok3.envs.layers import NOBODY, remove
from nanok3.envs.process import Process
from nanok3.envs.sandbox import Limits, Ran, Sandbox

INSTALL = "https://gvisor.dev/docs/user_guide/install"
FLAGS = ("--network=none", "--overlay2=none")
"""Before every verb: no network, and no layer over the root, which is read-only."""
GRACE = 5.0
"""Seconds that a call may take longer than the command inside."""
CALL_SECONDS = 120.0
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8", "PYTHONPATH": "/packages"}
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")


def missing() -> str | None:
    """Why there are no such sandboxes here, or None."""
    if shutil.which("runsc") is None:
        return f"sandboxes of gVisor need runsc: {INSTALL}"
    return None if os.geteuid() == 0 else "sandboxes of gVisor need root: runsc restores for nobody else"


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def bundle(folder: Path, binds: Mapping[str, Path], limits: Limits) -> None:
    """An OCI bundle: a root with nothing but places to mount at, and config.json."""
    root = folder / "rootfs"
    shown = {"/usr": Path("/usr"), **binds}
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            (root / path.relative_to("/")).symlink_to(os.readlink(path))
        elif path.is_dir():
            shown[str(path)] = path
    for target in (*shown, "/proc", "/dev", "/tmp", WORKSPACE):
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    owner = (f"uid={NOBODY}", f"gid={NOBODY}")
    mounts = [_mount(target, "bind", str(source), "rbind", "ro") for target, source in shown.items()]
    mounts += [
        _mount("/proc", "proc", "proc"),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"),
        _mount("/tmp", "tmpfs", "tmpfs", "nosuid", "nodev", "mode=1777", f"size={limits.disk}"),
        _mount(WORKSPACE, "tmpfs", "tmpfs", "nosuid", "nodev", "mode=700", f"size={limits.disk}", *owner),
    ]
    nothing: list[str] = []
    sets = ("bounding", "effective", "inheritable", "permitted", "ambient")
    bounds = {"RLIMIT_NOFILE": 256, "RLIMIT_FSIZE": limits.disk, "RLIMIT_CORE": 0}
    config = {
        "ociVersion": "1.0.0",
        "hostname": "sandbox",
        "root": {"path": "rootfs", "readonly": True},
        "process": {
            "args": ["sleep", "infinity"],
            "cwd": WORKSPACE,
            "env": [f"{name}={value}" for name, value in _ENVIRONMENT.items()],
            "user": {"uid": NOBODY, "gid": NOBODY},
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(sets, nothing),
            "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in bounds.items()],
        },
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "resources": {"memory": {"limit": limits.memory}, "pids": {"limit": limits.processes}},
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


class GVisor(Sandbox):
    """One container. Made by `Containers.open`."""

    def __init__(self, home: Containers, image: str | None = None) -> None:
        self.home, self.name, self.paused = home, "", False
        self._begin(image)

    def _begin(self, image: str | None) -> None:
        """A container under a new name, from nothing or from an image."""
        name = f"nanok3-{secrets.token_hex(6)}"
        verb = ["run"] if image is None else ["restore", f"--image-path={self.home.image(image)}"]
        self.home.call(*verb, f"--bundle={self.home.bundle}", "--detach", name)
        self.home.live.add(name)
        self.name = name

    def run(self, command: Sequence[str], stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        """Run a command to its end or its seconds; memory, processes and disk are the container's."""
        if self.paused or not self.name:
            raise ValueError(f"the sandbox is {'paused' if self.name else 'closed'}")
        limits = limits or self.home.limits
        inside = ["timeout", "-k", "1", f"{limits.seconds:g}", *command]
        ran = self.home.runsc("exec", f"--cwd={WORKSPACE}", self.name, *inside, stdin=stdin, limits=limits)
        over = ran.limit == "seconds" or (ran.status in (124, 137) and ran.seconds >= limits.seconds)
        return Ran(ran.status, ran.stdout, ran.stderr, ran.seconds, "seconds" if over else ran.limit)

    def snapshot(self) -> str:
        image = secrets.token_hex(6)
        self.home.call("checkpoint", f"--image-path={self.home.image(image)}", "--leave-running", self.name)
        return image

    def restore(self, snapshot: str) -> None:
        """Another container takes the place of this one, as it was."""
        if not self.home.image(snapshot).is_dir():
            raise ValueError(f"snapshot is {snapshot!r}; there is no such snapshot here")
        old = self.name
        self._begin(snapshot)
        self.home.delete(old)
        self.paused = False

    def fork(self) -> GVisor:
        """Its processes go on in both."""
        return GVisor(self.home, self.snapshot())

    def with_files(self, files: Mapping[str, bytes]) -> GVisor:
        made = self.fork()
        for path, content in files.items():
            made.write(path, content)
        return made

    def pause(self) -> None:
        self.home.call("pause", self.name)
        self.paused = True

    def resume(self) -> None:
        self.home.call("resume", self.name)
        self.paused = False

    def close(self) -> None:
        if self.name:
            self.home.delete(self.name)
            self.name = ""


class Containers:
    """What the containers of a run have in common: a bundle, images, and how runsc is called. Refuses to exist where
    there is no runsc."""

    def __init__(self, folder: Path | None = None, packages: Sequence[str] = (), limits: Limits | None = None) -> None:
        """folder: where images stay; None for a temporary one that `close` removes."""
        if reason := missing():
            raise ImportError(f"code is only run in a sandbox, and there is none: {reason}")
        self.program, self.limits, self.temporary = str(shutil.which("runsc")), limits or Limits(), folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="nanok3-gvisor-")) if folder is None else Path(folder).resolve()
        self.bundle = self.folder / "bundle"
        self.live: set[str] = set()
        """Containers that were begun and not deleted."""
        for part in ("state", "images", "nothing"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        remove(self.bundle)
        self.bundle.mkdir()
        bundle(self.bundle, readonly(packages), self.limits)

    def image(self, name: str) -> Path:
        """The folder of a snapshot."""
        if not name.isalnum():
            raise ValueError(f"snapshot is {name!r:.80}; a name that `snapshot` gave was expected")
        return self.folder / "images" / name

    def runsc(self, verb: str, *arguments: str, stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        """One call. Its output is bounded, and it is killed some seconds after what it runs should have ended."""
        wanted = limits or Limits(seconds=CALL_SECONDS)
        bounds = Limits(wanted.seconds + GRACE, memory=1 << 40, output=wanted.output)
        command = [self.program, f"--root={self.folder / 'state'}", *FLAGS, verb, *arguments]
        try:
            return Process(command, self.folder, self.folder / "nothing", bounds, stdin).finish()
        except OSError as error:
            raise InfraError(f"runsc {verb}: {error}") from None

    def call(self, verb: str, *arguments: str) -> None:
        """One that has to succeed. InfraError says what runsc said."""
        ran = self.runsc(verb, *arguments)
        if not ran.ok:
            raise InfraError(f"runsc {verb}: {ran.text.strip()[-500:]}")

    def delete(self, name: str) -> None:
        """End a container, whatever it does."""
        self.call("delete", "--force", name)
        self.live.discard(name)

    def open(self, files: Mapping[str, bytes] | None = None) -> GVisor:
        """A sandbox whose workspace holds these files."""
        made = GVisor(self)
        for path, content in (files or {}).items():
            made.write(path, content)
        return made

    def close(self) -> None:
        """All containers end; a temporary folder goes with its images."""
        for name in list(self.live):
            self.delete(name)
        if self.temporary:
            remove(self.folder)

    def __enter__(self) -> Containers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
