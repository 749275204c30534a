"""What every HTTP request passes: a name for it, the key, the limits, a line in the log, and no traceback outwards.

    request -> id -> key? -> room for one more? -> body no larger than allowed -> the app -> one line of JSON in the log

It is plain ASGI, so a client that goes away is seen by whoever reads the request, and streams pass piece by piece.
The log has sizes and times, never what was asked or answered; that is only there with `log_prompts`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from nanok3.serve.answers import Busy, ClientGone
from nanok3.serve.fields import RequestError

log = logging.getLogger("nanok3")
access = logging.getLogger("nanok3.access")

OPEN_PATHS = frozenset({"/health", "/ready", "/"})
"""Asked by what watches the server, and by browsers before somebody types the key in; so is what lies under /page/."""
FACTS = "nanok3"
"""Name in the scope under which an endpoint leaves what the log tells of its request."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class GateSettings:
    """Who may come in."""

    keys: tuple[str, ...] = ()
    """Without any, everybody."""
    admin_key: str | None = None
    """Opens /admin; without one nobody does."""
    per_key: int | None = None
    """Requests of one key at a time."""
    body_bytes: int = 32 << 20
    log_prompts: bool = False
    body_seconds: float = 30.0
    """That may pass between two pieces of a body."""

    def __post_init__(self) -> None:
        if self.per_key is not None and self.per_key < 1:
            raise ValueError(f"per_key is {self.per_key}; it must be at least 1")
        if not self.body_seconds > 0:
            raise ValueError(f"body_seconds is {self.body_seconds}; it must be above 0")
        if self.body_bytes < 1:
            raise ValueError(f"body_bytes is {self.body_bytes}; it must be at least 1")
        if not all((*self.keys, self.admin_key or "-")):
            raise ValueError("an API key is empty")


class Gate:
    """Wraps an ASGI app."""

    def __init__(self, app: App, settings: GateSettings) -> None:
        self.app, self.settings = app, settings
        self._digests = [_digest(key) for key in settings.keys]
        self._inside: Counter[int | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, sent = time.monotonic(), _Sent(send, _request_id(scope))
        scope[FACTS] = {}
        try:
            await self._admit(scope, receive, sent)
        except ClientGone:
            sent.status = sent.status or 499
        except RequestError as error:
            await sent.answer(error, scope["path"])
        except Exception:
            log.exception("request %s failed", sent.id)
            await sent.answer(RequestError("internal error", None, "internal", 500, "server_error"), scope["path"])
        finally:
            self._write_line(scope, sent, time.monotonic() - began)

    async def _admit(self, scope: Scope, receive: Receive, sent: _Sent) -> None:
        key = self._key(scope)
        scope[FACTS]["key"] = key
        limit = self.settings.per_key if scope["method"] == "POST" else None
        if limit is not None and self._inside[key] >= limit:
            raise Busy(f"{limit} requests of this key are being answered; no more are taken", 1.0)
        self._inside[key] += 1
        try:
            await self.app(scope, _Limited(scope, receive, self.settings.body_bytes, self.settings.body_seconds), sent)
        finally:
            self._inside[key] -= 1

    def _key(self, scope: Scope) -> int | None:
        """Which of the keys the request has. RequestError if it needs one."""
        path, given = scope["path"], _given_key(scope)
        if path.startswith("/admin"):
            admin = self.settings.admin_key
            if admin is None:
                raise RequestError("this server has no admin key", None, "forbidden", 403, "permission_error")
            return self._find(given, [_digest(admin)])
        if path in OPEN_PATHS or path.startswith("/page/") or not self._digests:
            return None
        return self._find(given, self._digests)

    @staticmethod
    def _find(given: str | None, digests: list[bytes]) -> int:
        """Every key is compared, in a time that tells nothing of where they differ."""
        mine = _digest(given or "")
        found = [k for k, digest in enumerate(digests) if hmac.compare_digest(mine, digest)]
        if given is None or not found:
            what = "no API key was given" if given is None else "the API key is not known"
            raise RequestError(what, None, "invalid_api_key", 401, "authentication_error")
        return found[0]

    @staticmethod
    def _write_line(scope: Scope, sent: _Sent, seconds: float) -> None:
        line = {
            "id": sent.id,
            "client": (scope.get("client") or [None])[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": sent.status,
            "seconds": round(seconds, 4),
            **scope[FACTS],
        }
        access.info(json.dumps(line))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _given_key(scope: Scope) -> str | None:
    """From `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
    scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else _header(scope, b"x-api-key")


def _request_id(scope: Scope) -> str:
    """The client's own, if it is a plain word."""
    given = _header(scope, b"x-request-id")
    return given if given and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else f"req-{uuid.uuid4().hex}"


class _Sent:
    """`send` that adds the request's id and remembers the status."""

    def __init__(self, send: Send, id: str) -> None:
        self._send, self.id = send, id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            id = self.id.encode()
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", id), (b"x-trace-id", id)]
        await self._send(message)

    async def answer(self, error: RequestError, path: str) -> None:
        """Answer with an error, if nothing was answered yet."""
        if self.status is not None:
            return
        status, headers, body = error_answer(error, path)
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def error_answer(error: RequestError, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error, in the shape of the API that the path belongs to."""
    body = error.body()
    if path.startswith("/v1/messages"):
        body = {"type": "error", "error": {"type": body["error"]["type"], "message": body["error"]["message"]}}
    text = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
    if isinstance(error, Busy):
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return error.status, headers, text


class _Limited:
    """`receive` that stops reading a body that is too large, or does not come."""

    def __init__(self, scope: Scope, receive: Receive, most: int, seconds: float) -> None:
        """seconds: that may pass between two pieces of the body."""
        self._receive, self._most, self._read = receive, most, 0
        self._seconds: float | None = seconds
        declared = _header(scope, b"content-length") or "0"
        self._declared = int(declared) if declared.isdecimal() else 0

    async def __call__(self) -> Message:
        if self._declared > self._most:
            raise self._refused()
        try:
            async with asyncio.timeout(self._seconds):
                message = await self._receive()
        except TimeoutError:
            what = f"the body did not come; allowed: {self._seconds:g} seconds between two pieces"
            raise RequestError(what, None, "request_timeout", 408) from None
        if not message.get("more_body"):
            self._seconds = None  # what comes now is that the client goes away, whenever that is
        self._read += len(message.get("body", b""))
        if self._read > self._most:
            raise self._refused()
        return message

    def _refused(self) -> RequestError:
        return RequestError(f"the body is too large; allowed: {self._most} bytes", None, "too_large", 413)
