"""Uploaded files: kept in memory, each for the client that brought it, until they are deleted or the server ends.

A file is found by its id together with its owner, the number of the API key; without keys everybody is the same. An id
has 128 random bits, and whoever asks for the file of another learns no more than that it is not there.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

from nanok3.serve.fields import RequestError

SEEN = ("image", "vision")
VIDEO = "video"
PURPOSES = (*SEEN, VIDEO, "user_data", "assistants", "file-extract", "batch", "fine-tune", "evals")
MOST_FILES = 10_000
"""Entries of a list."""


@dataclass(frozen=True)
class FilesLimits:
    """How much is kept."""

    count: int = 100
    """Files of one client."""
    bytes: int = 256 << 20
    """Of all clients together."""


@dataclass(frozen=True)
class File:
    """One of them."""

    id: str
    owner: int | None
    name: str
    purpose: str
    content: bytes
    created: int

    def body(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
            "expires_at": None,
        }


class Files:
    """All of them. From any thread."""

    def __init__(self, limits: FilesLimits) -> None:
        self.limits = limits
        self.bytes = self.added = 0
        """Of those that are kept, and how many came since the start."""
        self._files: dict[str, File] = {}
        self._lock = threading.Lock()

    def add(self, owner: int | None, name: str, purpose: str, content: bytes) -> File:
        """Keep a file. RequestError where there is no room for it."""
        with self._lock:
            mine = sum(file.owner == owner for file in self._files.values())
            if mine >= self.limits.count:
                raise RequestError(
                    f"{mine} files are kept of this client; allowed: {self.limits.count}", "file", "too_many_files"
                )
            if self.bytes + len(content) > self.limits.bytes:
                left = f"{len(content)} bytes, and {self.limits.bytes - self.bytes} are left of {self.limits.bytes}"
                raise RequestError(f"the file has {left}; delete others first", "file", "no_room")
            file = File(f"file-{secrets.token_hex(16)}", owner, name, purpose, content, int(time.time()))
            self._files[file.id] = file
            self.bytes += len(content)
            self.added += 1
        return file

    def __len__(self) -> int:
        return len(self._files)

    def all(self, owner: int | None) -> list[File]:
        """Of one client, the newest first."""
        with self._lock:
            return [file for file in reversed(self._files.values()) if file.owner == owner]

    def get(self, id: str, owner: int | None) -> File:
        """RequestError where this client has no such file."""
        with self._lock:
            file = self._files.get(id)
        if file is None or file.owner != owner:
            raise RequestError(
                f"no file {id[:80]!r} here; allowed: the id of an uploaded file", "id", "file_not_found", 404
            )
        return file

    def delete(self, id: str, owner: int | None) -> None:
        file = self.get(id, owner)
        with self._lock:
            if self._files.pop(id, None) is not None:
                self.bytes -= len(file.content)
