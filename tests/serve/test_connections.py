"""Bytes that are no request, or a part of one: an error of the client's or a closed connection, in bounded time."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import message, served

from nanok3.serve.connections import patient_protocol
from nanok3.serve.http_gate import GateSettings
from nanok3.serve.server import ServerSettings

pytestmark = pytest.mark.usefixtures("unchecked")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 2}'


@pytest.fixture(scope="module")
def address():
    """A server on a port of its own, which waits half a second for heads and bodies."""
    gate = GateSettings(body_seconds=0.5, body_bytes=1 << 16)
    with served(message(), server=ServerSettings(names=("stub",), gate=gate)) as stub:
        listener = socket.create_server(("127.0.0.1", 0))
        protocol = patient_protocol(0.5)
        server = uvicorn.Server(uvicorn.Config(stub.app, http=protocol, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield listener.getsockname(), stub
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive() and stub.is_free()


def exchange(address, *pieces, half_closed=False, seconds=20.0):
    """Send, and read until the other side closes, or nothing comes any more."""
    said = b""
    with socket.create_connection(address, timeout=seconds) as raw:
        try:
            for piece in pieces:
                raw.sendall(piece)
            if half_closed:
                raw.shutdown(socket.SHUT_WR)
            while more := raw.recv(1 << 16):
                said += more
                if not half_closed and said.endswith(b"}"):
                    break
        except OSError:  # it closed while we were sending
            pass
    return said


def status(said):
    return int(said.split(b" ", 2)[1]) if said else None


def lives(address):
    head = POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
    return status(exchange(address, head + BODY)) == 200


CHUNKED = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
CASES = {
    "no head": (b"\r\n\r\n", {400, None}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), {400, None}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    "no version": (b"GET /health\r\n\r\n", {400}),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", {400}),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", {400}),
    "a length of words": (POST + b"Content-Length: ten\r\n\r\n", {400}),
    "an endless length": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", {400, 413}),
    "length and chunks": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "an unknown coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", {400, 501}),
    "a huge header": (POST + b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n", {400, 431, None}),
    "many headers": (POST + b"".join(b"X-%d: y\r\n" % k for k in range(20_000)) + b"\r\n", {400, 431, None}),
    "a NUL in a header": (POST + b"X-Nul: a\x00b\r\n\r\n", {400}),
    "a folded header": (POST + b"X-A: b\r\n c\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", {400}),
    "a chunk without a size": (CHUNKED + b"zz\r\n", {400, None}),
    "a chunk that is too short": (CHUNKED + b"5\r\nab\r\n0\r\n\r\n", {400, None}),
    "a negative chunk": (CHUNKED + b"-5\r\nab\r\n0\r\n\r\n", {400, None}),
    "a huge chunk": (CHUNKED + b"ffffffffffffffff\r\nab", {400, 408, 413, None}),
    "chunks that go on": (CHUNKED + b"1000\r\n" + bytes(4096) + b"\r\n", {400, 408, None}),
    "chunks above the limit": (CHUNKED + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 40, {413, None}),
    "a length above the limit": (POST + b"Content-Length: 99999999\r\n\r\n{", {413}),
    "less than its length": (POST + b"Content-Length: 500\r\n\r\n{", {408, 400, None}),
    "a strange path": (b"GET /%00%ff/../../etc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404}),
    "a strange method": (b"BREW / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {405}),
    "an upgrade": (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", {200, 400, 426}),
}  # fmt: skip


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_is_no_request_is_an_error_of_the_clients(address, case, half_closed, caplog):
    sent, right = CASES[case]
    began = time.monotonic()
    with caplog.at_level(logging.ERROR):
        said = exchange(address[0], sent, half_closed=half_closed)
    assert status(said) in right | ({None} if half_closed else set()), said[:200]
    assert b"Traceback" not in said and "Traceback" not in caplog.text
    assert time.monotonic() - began < 15


def test_who_sends_a_byte_now_and_then_is_not_waited_for(address):
    for begin in (b"", POST, POST + b"Content-Length: 100\r\n\r\n"):
        began = time.monotonic()
        with socket.create_connection(address[0], timeout=20) as raw:
            raw.sendall(begin)
            said = raw.recv(1000)  # nothing more is sent
        assert status(said) == (408 if begin.endswith(b"\r\n\r\n") else None)
        assert time.monotonic() - began < 15
    end = time.monotonic() + 15
    with socket.create_connection(address[0], timeout=20) as raw, pytest.raises(OSError):
        while time.monotonic() < end:
            raw.sendall(b"G")
            time.sleep(0.05)
    assert time.monotonic() < end
    assert lives(address[0])


def test_a_connection_that_is_used_again_is_not_cut(address):
    with socket.create_connection(address[0], timeout=20) as raw:
        for _ in range(2):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            said = b""
            while not said.endswith(b"}"):
                said += raw.recv(1000)
            assert status(said) == 200
            time.sleep(0.8)  # longer than a head may take


parts = st.sampled_from(
    [b"POST ", b"GET ", b"/v1/completions", b"/health", b" HTTP/1.1", b"\r\n", b"\n", b"\r\n\r\n", b"Host: x", b":",
     b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"0\r\n\r\n",
     b"5\r\nhello\r\n", b"{}"]
) | st.binary(max_size=12)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(parts, max_size=12))
def test_no_bytes_bring_a_fault(address, pieces):
    said = exchange(address[0], b"".join(pieces) or b" ", half_closed=True)
    assert (status(said) or 400) < 500 and b"Traceback" not in said


def test_afterwards_it_answers(address):
    assert lives(address[0])
