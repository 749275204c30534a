"""Addresses from strangers: nothing inside is asked, redirects included; sizes and times are bounded."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nanok3.serve import fetch_picture
from nanok3.serve.fetch_picture import fetch, is_public, public_address


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/slow":
            time.sleep(3)
        if self.path in ("/loop", "/inside"):
            self.send_response(302)
            self.send_header("Location", "/loop" if self.path == "/loop" else "http://127.0.0.1/secret")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(b"x" * 1000)


@pytest.fixture(scope="module")
def web():
    """A server that passes for the web: example.org leads to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def connect(parts, seconds):
        assert parts.hostname == "example.org", f"{parts.hostname} was asked"
        return http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=seconds)

    yield connect
    server.shutdown()
    server.server_close()


def test_a_content_within_its_bound(web):
    assert fetch("http://example.org/a.png?b=1", 1000, connect=web) == b"x" * 1000


@pytest.mark.parametrize(
    ("path", "reason"),
    [("", "more than 999 bytes"), ("/none", "status 404"), ("/loop", "more than 3 redirects")],
)
def test_an_answer_that_is_none(web, path, reason):
    with pytest.raises(ValueError, match=reason):
        fetch(f"http://example.org{path}", 999, connect=web)


def test_it_ends_in_time(web):
    began = time.monotonic()
    with pytest.raises(ValueError, match="cannot be fetched"):
        fetch("http://example.org/slow", 999, seconds=0.2, connect=web)
    assert time.monotonic() - began < 2


def test_a_redirect_does_not_lead_inside(web):
    def connect(parts, seconds):
        return web(parts, seconds) if parts.hostname == "example.org" else fetch_picture._connect(parts, seconds)

    with pytest.raises(ValueError, match="inside this machine"):
        fetch("http://example.org/inside", 999, connect=connect)


@pytest.mark.parametrize(
    "url",
    ["ftp://example.org/a", "http://example.org:8000/", "http://me@example.org/", "http:///a", "http://[",
     "http://a b/", "http://127.0.0.1/", "http://localhost/a", "https://[::1]/", "http://2130706433/", "http://169.254.169.254/latest"],
)  # fmt: skip
def test_addresses_that_are_never_asked(url):
    with pytest.raises(ValueError):
        fetch(url, 999)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"],
)  # fmt: skip
def test_private_addresses(address):
    assert not is_public(address)


def test_a_host_with_one_private_address_is_refused(monkeypatch):
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")
    found = [(0, 0, 0, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[: len(found)])
    with pytest.raises(ValueError, match="inside"):
        public_address("example.org", 80)
    del found[1]
    assert public_address("example.org", 80) == "93.184.216.34"
