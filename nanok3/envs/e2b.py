"""Sandboxes of a service that speaks E2B's HTTP interface, AgentENV among them.

    POST   /sandboxes                    template (or snapshot) -> a sandbox
    POST   /sandboxes/ID/pause, connect  processes and memory stop, and go on
    POST   /sandboxes/ID/snapshots       -> a name that can be a template
    DELETE /sandboxes/ID
    POST   /process.Process/Start        on the sandbox's own address: a command, its output as a stream (Connect)
    POST   /files?path=                  on the sandbox's own address: a file

A fork is a snapshot and a second sandbox of it, which keeps processes too. The sandbox's own address is one host for
all of them; headers name the sandbox and the port of its agent. Every message of a stream is a byte of flags, four
bytes of length and JSON; flag 2 marks the last one, which may carry an error.

What goes wrong with the service, or with the way there, is an InfraError, never the policy's fault.
"""

from __future__ import annotations

import base64
import json
import struct
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from nanok3.envs.environment import InfraError
from nanok3.envs.sandbox import Limits, Ran, Sandbox, safe_path

_AGENT_PORT, _LAST, _COMPRESSED = "49983", 2, 1
WORKSPACE = "/home/user"


@dataclass(frozen=True)
class Service:
    """Where the service is. `seconds` is how long a sandbox lives without a sign of life."""

    url: str
    sandbox_url: str
    key: str
    template: str = "base"
    seconds: int = 300


def _send(request: urllib.request.Request, seconds: float) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise InfraError(
            f"{request.method} {urllib.parse.urlparse(request.full_url).path}: {error.code} {said}"
        ) from None
    except (OSError, HTTPException) as error:
        raise InfraError(f"{request.method} {urllib.parse.urlparse(request.full_url).path}: {error}") from None


def enveloped(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(body)) + body


def messages(stream: bytes) -> Iterator[dict[str, Any]]:
    """The messages of a stream up to its last; InfraError for one that is cut off, or ends with an error."""
    at = 0
    while at + 5 <= len(stream):
        flags, length = struct.unpack_from(">BI", stream, at)
        body = stream[at + 5 : at + 5 + length]
        if len(body) < length or flags & _COMPRESSED:
            break
        read = json.loads(body or b"{}")
        if flags & _LAST:
            if read.get("error"):
                raise InfraError(f"the command's stream ended with {read['error']}")
            return
        yield read
        at += 5 + length
    raise InfraError("the command's stream was cut off")


class E2B(Sandbox):
    """One sandbox of the service; made from a template, or from a snapshot's name."""

    def __init__(self, service: Service, template: str | None = None, limits: Limits | None = None) -> None:
        self.service, self.limits, self.id = service, limits or Limits(), ""
        self._create(template or service.template)

    def _create(self, template: str) -> None:
        made = self._call("POST", "", {"templateID": template, "timeout": self.service.seconds})
        self.id, self._token = made["sandboxID"], made.get("envdAccessToken") or ""

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The service's own interface."""
        headers = {"X-API-Key": self.service.key, "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.service.url}/sandboxes{path}", data, headers, method=method)
        return json.loads(_send(request, 60.0) or b"{}")

    def _agent(self, path: str, data: bytes, kind: str, seconds: float) -> bytes:
        """The interface of the agent inside the sandbox."""
        headers = {"E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": _AGENT_PORT, "Content-Type": kind}
        headers |= {"Connect-Protocol-Version": "1", "Connect-Timeout-Ms": str(int(seconds * 1000))}
        headers |= {"X-Access-Token": self._token} if self._token else {}
        request = urllib.request.Request(f"{self.service.sandbox_url}{path}", data, headers, method="POST")
        return _send(request, seconds + 10)

    def run(self, command: Sequence[str], stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        """Run a command; `timeout` inside keeps the seconds, the service's template every other limit."""
        limits = limits or self.limits
        self._upload(".nanok3-stdin", stdin)
        script = f'exec timeout -k 1 {limits.seconds:g} "$@" < {WORKSPACE}/.nanok3-stdin'
        process = {"cmd": "sh", "args": ["-c", script, "sh", *command], "cwd": WORKSPACE}
        began = time.monotonic()
        body = enveloped({"process": process, "stdin": False})
        stream = self._agent("/process.Process/Start", body, "application/connect+json", limits.seconds + 5)
        out, err, status = bytearray(), bytearray(), None
        for message in messages(stream):
            event = message.get("event", {})
            for name, kept in (("stdout", out), ("stderr", err)):
                piece = base64.b64decode(event.get("data", {}).get(name, ""))
                kept += piece[: max(0, limits.output - len(kept))]
            if "end" in event:
                status = int(event["end"].get("exitCode", 0))  # a zero is left out
        if status is None:
            raise InfraError("the command's stream has no end")
        seconds = time.monotonic() - began
        over = status in (124, 137) and seconds >= limits.seconds
        return Ran(status, bytes(out), bytes(err), seconds, "seconds" if over else None)

    def _upload(self, path: str, content: bytes) -> None:
        edge = "nanok3-part"
        head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n\r\n'
        query = urllib.parse.urlencode({"path": f"{WORKSPACE}/{path}", "username": "user"})
        body = head.encode() + content + f"\r\n--{edge}--\r\n".encode()
        self._agent(f"/files?{query}", body, f"multipart/form-data; boundary={edge}", 60.0)

    def write(self, path: str, content: bytes) -> None:
        self._upload(safe_path(path), content)

    def snapshot(self) -> str:
        return self._call("POST", f"/{self.id}/snapshots", {})["snapshotID"]

    def restore(self, snapshot: str) -> None:
        """A new sandbox takes the place of this one."""
        old = self.id
        self._create(snapshot)
        self._call("DELETE", f"/{old}")

    def fork(self) -> E2B:
        return E2B(self.service, self.snapshot(), self.limits)

    def with_files(self, files: Mapping[str, bytes]) -> E2B:
        made = self.fork()
        for path, content in files.items():
            made.write(path, content)
        return made

    def pause(self) -> None:
        self._call("POST", f"/{self.id}/pause", {})

    def resume(self) -> None:
        self._call("POST", f"/{self.id}/connect", {"timeout": self.service.seconds})

    def close(self) -> None:
        if self.id:
            self._call("DELETE", f"/{self.id}")
            self.id = ""
