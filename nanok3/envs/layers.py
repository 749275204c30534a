"""Workspaces as layers: what a snapshot and a fork cost nothing to make.

    workspace = upper (writable) on a list of frozen layers, newest first, seen as one tree by overlayfs
    snapshot  = the upper becomes a layer, an empty upper begins                 one rename, whatever the size
    fork      = a new upper on the same layers
    flatten   = more than 20 layers become one, by copying what they show together

A layer never changes again, so any number of workspaces stand on it. Each snapshot has a manifest: its layers, its
parent, and what the caller wants to remember (a policy version), written whole and synced before the snapshot has a
name. So a store survives a kill at any point: what has no manifest and no workspace is swept away.

The tree is mounted inside the namespace of each command (`bubblewrap.py`), hence no mount outlives it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nanok3.data.files import write_file
from nanok3.envs.sandbox import safe_path

MOST_LAYERS = 20
NOBODY = 65534
"""Root becomes this user before anything untrusted runs; layers belong to it then."""

Flatten = Callable[["Store", tuple[str, ...], str], None]
"""(store, layers, name): copy what the layers show together into the new, empty layer `name`."""


@dataclass(frozen=True)
class Manifest:
    """A snapshot on disk."""

    id: str
    layers: tuple[str, ...]
    parent: str | None = None
    note: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Workspace:
    """`name` is the folder of its upper; `layers` lie below it, newest first."""

    name: str
    layers: tuple[str, ...]
    parent: str | None = None


def usage(folder: Path, most_files: int) -> tuple[int, int]:
    """Bytes on disk and entries below a folder; stops counting above `most_files`. Follows no link."""
    size = count = 0
    stack = [str(folder)]
    while stack and count <= most_files:
        with suppress(OSError), os.scandir(stack.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
    return size, count


def remove(folder: Path) -> None:
    """Remove a tree, also where its owner has taken every right from a folder. Follows no link."""

    def open_up(_: object, path: str, error: object) -> None:
        for place in (os.path.dirname(path), path):
            with suppress(OSError):
                if not os.path.islink(place):
                    os.chmod(place, 0o700)

    for _ in range(3):
        if not folder.exists():
            return
        shutil.rmtree(str(folder), onerror=open_up)


class Store:
    """A folder with layers/, work/ and manifests/. Without `folder`, a temporary one that `close` removes."""

    def __init__(self, folder: Path | None = None, flatten: Flatten | None = None) -> None:
        self.temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="nanok3-sandbox-")) if folder is None else Path(folder).resolve()
        self.owner = NOBODY if os.geteuid() == 0 else None
        self._flatten, self._lock = flatten, threading.RLock()
        self._live: dict[str, Workspace] = {}
        for part in ("layers", "work", "manifests"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)

    def _give(self, path: Path) -> Path:
        if self.owner is not None:
            os.chown(path, self.owner, self.owner, follow_symlinks=False)
        return path

    def _folder(self, part: str) -> str:
        name = secrets.token_hex(6)
        (self.folder / part / name).mkdir()
        self._give(self.folder / part / name)
        return name

    def layer(self, files: Mapping[str, bytes]) -> str:
        """A new layer that holds these files. Nothing untrusted has touched it yet, so writing is safe."""
        name = self._folder("layers")
        base = self.folder / "layers" / name
        for path, content in files.items():
            target = base / safe_path(path)
            for parent in reversed(target.relative_to(base).parents[:-1]):
                if not (base / parent).exists():
                    (base / parent).mkdir()
                    self._give(base / parent)
            target.write_bytes(content)
            self._give(target)
        return name

    def open(self, layers: tuple[str, ...], parent: str | None = None) -> Workspace:
        """A workspace on these layers (at least one)."""
        name = self._folder("work")
        for part in ("upper", "scratch"):
            (self.folder / "work" / name / part).mkdir()
            self._give(self.folder / "work" / name / part)
        workspace = Workspace(name, layers, parent)
        with self._lock:
            self._live[name] = workspace
        return workspace

    def upper(self, workspace: Workspace) -> Path:
        return self.folder / "work" / workspace.name / "upper"

    def freeze(self, workspace: Workspace) -> tuple[str, ...]:
        """The layers of the workspace as it is; its upper becomes the newest, if it holds anything."""
        upper = self.upper(workspace)
        with self._lock:
            if any(upper.iterdir()):
                name = secrets.token_hex(6)
                os.rename(upper, self.folder / "layers" / name)
                upper.mkdir()
                self._give(upper)
                workspace.layers = (name, *workspace.layers)
            if len(workspace.layers) > MOST_LAYERS and self._flatten is not None:
                name = self._folder("layers")
                self._flatten(self, workspace.layers, name)
                workspace.layers = (name,)
            return workspace.layers

    def snapshot(self, workspace: Workspace, **note: str) -> str:
        """Freeze, and give the state a name that survives this process."""
        manifest = Manifest(secrets.token_hex(6), self.freeze(workspace), workspace.parent, note)
        write_file(self.folder / "manifests" / f"{manifest.id}.json", json.dumps(asdict(manifest)).encode())
        workspace.parent = manifest.id
        return manifest.id

    def manifest(self, snapshot: str) -> Manifest:
        path = self.folder / "manifests" / f"{safe_path(snapshot)}.json"
        if not path.exists():
            raise ValueError(f"snapshot is {snapshot!r}; this store has no such snapshot")
        read = json.loads(path.read_bytes())
        return Manifest(read["id"], tuple(read["layers"]), read["parent"], read["note"])

    def restore(self, workspace: Workspace, snapshot: str) -> None:
        """The workspace as it was; what was written since is gone."""
        manifest = self.manifest(snapshot)
        remove(self.upper(workspace))
        self.upper(workspace).mkdir()
        self._give(self.upper(workspace))
        workspace.layers, workspace.parent = manifest.layers, snapshot

    def drop(self, snapshot: str) -> None:
        (self.folder / "manifests" / f"{safe_path(snapshot)}.json").unlink(missing_ok=True)

    def release(self, workspace: Workspace) -> None:
        """Remove a workspace; its layers stay until `sweep`."""
        with self._lock:
            self._live.pop(workspace.name, None)
        remove(self.folder / "work" / workspace.name)

    def sweep(self, keep: tuple[str, ...] = ()) -> int:
        """Remove layers that no snapshot, no workspace and no name in `keep` needs; how many."""
        with self._lock:
            used = {layer for workspace in self._live.values() for layer in workspace.layers} | set(keep)
            for path in (self.folder / "manifests").glob("*.json"):
                used.update(json.loads(path.read_bytes())["layers"])
            old = [path for path in (self.folder / "layers").iterdir() if path.name not in used]
            for path in old:
                remove(path)
            for path in (self.folder / "work").iterdir():
                if path.name not in self._live:
                    remove(path)
        return len(old)

    def close(self) -> None:
        for workspace in list(self._live.values()):
            self.release(workspace)
        if self.temporary:
            remove(self.folder)
