"""A small server for tests of the page: its files, a list of models, and the answers that a test lines up."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nanok3.serve import page
from nanok3.serve.events import ArgumentsDelta, CallBegun, ContentDelta, Event, MessageEnd, ReasoningDelta
from nanok3.serve.replies import DONE, KEEP_ALIVE, ChatReply, Usage, sse

USAGE = Usage(prompt=1234, completion=56, cached=1024, reasoning=12)


@dataclass
class Reply:
    """One answer: a stream of events, or an error. A threading.Event among the events is waited for; `ends` False
    breaks the connection off behind the last."""

    events: list[Event | threading.Event] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ends: bool = True


def says(text: str, thought: str = "", reason: str = "stop") -> list[Event | threading.Event]:
    """The events of a plain answer, a word each."""
    found: list[Event | threading.Event] = [ReasoningDelta(word) for word in pieces(thought)]
    return [*found, *(ContentDelta(word) for word in pieces(text)), MessageEnd(reason)]


def pieces(text: str) -> list[str]:
    return [text[k : k + 5] for k in range(0, len(text), 5)]


def calls(*named: tuple[str, str, str]) -> list[Event | threading.Event]:
    """The events of calls (id, name, arguments)."""
    found: list[Event | threading.Event] = []
    for k, (id, name, arguments) in enumerate(named):
        found += [CallBegun(k, id, name), *(ArgumentsDelta(k, piece) for piece in pieces(arguments))]
    return [*found, MessageEnd("tool_calls")]


class PageServer(ThreadingHTTPServer):
    """`replies` are given in turn, then refusals; `requests` holds the bodies that came, `keys` their keys."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.model: dict[str, Any] = {"id": "tiny", "object": "model"}
        self.key: str | None = None
        self.gone = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 without chunks: a stream ends with its connection, as a broken one does, but for [DONE]."""

    server: PageServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        files = page.files()
        if self.path == "/v1/models":
            if self._wrong_key():
                return
            self._send(200, json.dumps({"object": "list", "data": [self.server.model]}).encode(), "application/json")
        elif self.path in files:
            self._send(200, *files[self.path], headers=page.HEADERS)
        else:
            self._send(404, b"{}", "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        self.server.keys.append(self.headers["Authorization"])
        if self._wrong_key():
            return
        reply = self.server.replies.pop(0) if self.server.replies else Reply(status=400, error="No more.")
        if reply.status != 200:
            error = {"error": {"message": reply.error, "type": "x"}}
            return self._send(reply.status, json.dumps(error).encode(), "application/json", headers=reply.headers)
        self._send(200, None, "text/event-stream")
        try:
            self._stream(reply)
        except OSError:
            self.server.gone.set()

    def _wrong_key(self) -> bool:
        if self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return False
        self._send(401, b'{"error": {"message": "the API key is wrong or missing"}}', "application/json")
        return True

    def _stream(self, reply: Reply) -> None:
        writer = ChatReply("chatcmpl-1", "tiny", 0)
        self._write(sse(writer.begin()))
        for event in reply.events:
            if isinstance(event, threading.Event):
                while not event.wait(0.02):
                    self._write(KEEP_ALIVE)
                continue
            for chunk in writer.chunks([event], usage=USAGE):
                self._write(sse(chunk))
        if reply.error is not None:
            self._write(sse({"error": {"message": reply.error}}))
        if reply.ends:
            self._write(sse(writer.usage(USAGE)) + DONE)

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _send(self, status: int, body: bytes | None, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        if body is not None:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body is not None:
            self.wfile.write(body)
