"""The client of an E2B-compatible service against a local stand-in that keeps the contract."""

from __future__ import annotations

import base64
import json
import struct
import threading
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest

from nanok3.envs.e2b import E2B, WORKSPACE, Service, enveloped, messages
from nanok3.envs.environment import InfraError
from nanok3.envs.sandbox import Limits


class Fake(BaseHTTPRequestHandler):
    """Sandboxes are dictionaries of files; `cat PATH` and `echo` are all that they can run."""

    boxes, kept, calls = {}, {}, []

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", kind="application/json"):
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self):
        name = self.path.rsplit("/", 1)[1]
        self.answer(204 if self.boxes.pop(name, None) is not None else 404, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlparse(self.path).path.strip("/").split("/")
        self.calls.append(self.path)
        if parts[0] != "sandboxes":
            return self.agent(parts[0] == "files", body)
        if self.headers["X-API-Key"] != "key":
            return self.answer(401, {"code": 401, "message": "no key"})
        read = json.loads(body)
        if len(parts) == 1:
            assert read["timeout"] == 300
            if read["templateID"] != "base" and read["templateID"] not in self.kept:
                return self.answer(404, {"code": 404, "message": "no such template"})
            name = f"i{len(self.calls)}"
            files = dict(self.kept.get(read["templateID"], {}))
            self.boxes[name] = {"files": files, "paused": False}
            return self.answer(201, {"sandboxID": name, "templateID": "base", "envdAccessToken": "token" + name})
        box = self.boxes[parts[1]]
        if parts[2] == "snapshots":
            name = f"s{len(self.calls)}"
            self.kept[name] = dict(box["files"])
            return self.answer(201, {"snapshotID": name})
        box["paused"] = parts[2] == "pause"
        return self.answer(204 if box["paused"] else 200, b"" if box["paused"] else {"sandboxID": parts[1]})

    def agent(self, upload, body):
        name = self.headers["E2b-Sandbox-Id"]
        assert self.headers["E2b-Sandbox-Port"] == "49983" and self.headers["X-Access-Token"] == "token" + name
        box = self.boxes[name]
        if box["paused"]:
            return self.answer(502, {"message": "paused"})
        if upload:
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            part = BytesParser().parsebytes(head + body).get_payload()[0]
            path = parse_qs(urlparse(self.path).query)["path"][0]
            box["files"][path] = part.get_payload(decode=True)
            return self.answer(200, b"[]")
        assert self.headers["Content-Type"] == "application/connect+json"
        flags, length = struct.unpack(">BI", body[:5])
        assert flags == 0 and length == len(body) - 5
        process = json.loads(body[5:])["process"]
        self.answer(200, self.program(box, process["args"][3:]), "application/connect+json")

    def program(self, box, command):
        if command[0] == "broken":
            return enveloped({"event": {"start": {"pid": 1}}})
        if command[0] == "error":
            return self.last({"error": {"code": "internal", "message": "oops"}})
        name = "stdout"
        if command == ["cat"]:
            out = box["files"][f"{WORKSPACE}/.nanok3-stdin"]
        elif command[0] == "cat":
            path = f"{WORKSPACE}/{command[2]}"
            out, name = (box["files"][path], name) if path in box["files"] else (b"no such file", "stderr")
        else:
            out = " ".join(command[1:]).encode()
        end = {"exited": True} if name == "stdout" else {"exitCode": 1, "exited": True}
        events = [{"start": {"pid": 7}}, {"data": {name: base64.b64encode(out).decode()}}, {"end": end}]
        return b"".join(enveloped({"event": event}) for event in events) + self.last({})

    def last(self, body):
        text = json.dumps(body).encode()
        return struct.pack(">BI", 2, len(text)) + text


@pytest.fixture
def service():
    Fake.boxes, Fake.kept, Fake.calls = {}, {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield Service(url, url, "key")
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_life_of_a_sandbox(service):
    box = E2B(service)
    assert box.run(["echo", "a", "b"]).stdout == b"a b" and box.run(["cat"], stdin=b"\0in").stdout == b"\0in"
    assert len(box.run(["cat"], b"a" * 5000, Limits(output=100)).stdout) == 100
    box.write("x/y", b"1\r\n2")
    assert box.read("x/y") == b"1\r\n2"
    with pytest.raises(FileNotFoundError, match="no such file"):
        box.read("z")
    kept, fork = box.snapshot(), box.with_files({"x/y": b"fork"})
    assert (box.read("x/y"), fork.read("x/y")) == (b"1\r\n2", b"fork")
    box.write("x/y", b"changed")
    box.restore(kept)
    assert box.read("x/y") == b"1\r\n2" and len(Fake.boxes) == 2
    box.pause()
    with pytest.raises(InfraError, match="502"):
        box.run(["echo"])
    box.resume()
    assert box.run(["echo", "again"]).ok
    for each in (box, fork, box):
        each.close()
    assert not Fake.boxes


def test_what_goes_wrong_is_the_machinerys(service):
    box = E2B(service)
    for command in ("broken", "error"):
        with pytest.raises(InfraError, match="stream"):
            box.run([command])
    with pytest.raises(InfraError, match="404"):
        box.restore("nothing")
    with pytest.raises(InfraError, match="401"):
        E2B(Service(service.url, service.url, "wrong"))
    with pytest.raises(InfraError, match="POST /sandboxes"):
        E2B(Service("http://127.0.0.1:9", "http://127.0.0.1:9", "key"))
    with pytest.raises(ValueError, match="below the workspace"):
        box.write("/etc/passwd", b"")


def test_streams():
    assert list(messages(enveloped({"a": 1}) + struct.pack(">BI", 2, 0))) == [{"a": 1}]
    for cut in (b"", b"\0\0", enveloped({"a": 1})[:-1], enveloped({"a": 1})):
        with pytest.raises(InfraError, match="cut off"):
            list(messages(cut))
