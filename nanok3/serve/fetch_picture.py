"""A picture from the web, for a server that was told to: its address comes from a stranger.

    https://host/path -> all addresses of the host are public? -> connect to one of them -> at most 3 redirects, each
                         looked at in the same way -> at most so many bytes, within so many seconds

The connection goes to the address that was checked: a name that means another one a moment later leads nowhere. So
nothing inside this machine or its network can be asked through the server. Certificates are checked as ever.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

SECONDS = 10.0
"""For all of it."""
REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
INSIDE = [ipaddress.ip_network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]
"""Networks whose addresses hold another one, which may be private."""

Connect = Callable[[SplitResult, float], http.client.HTTPConnection]


def fetch(url: str, max_bytes: int, seconds: float = SECONDS, connect: Connect | None = None) -> bytes:
    """What lies at an address. ValueError for one that may not be asked, and for an answer that is none, too long or
    too late."""
    end = time.monotonic() + seconds
    for _ in range(REDIRECTS + 1):
        parts = _split(url)
        connection = (connect or _connect)(parts, _left(end))
        try:
            found = _ask_in_time(connection, parts, max_bytes, end)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ValueError(f"{_shown(url)}: cannot be fetched ({_reason(error)})") from None
        finally:
            connection.close()
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise ValueError(f"{_shown(url)}: more than {REDIRECTS} redirects")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{_shown(url)}: no address") from None
    usual = PORTS.get(parts.scheme)
    if usual is None or not parts.hostname or parts.username is not None or port not in (None, usual):
        raise ValueError(f"{_shown(url)}: allowed are http and https addresses without a port or a user's name")
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ValueError(f"{_shown(url)}: an address has no blanks")
    return parts


def _connect(parts: SplitResult, seconds: float) -> http.client.HTTPConnection:
    """A connection to the address that was checked."""
    assert parts.hostname is not None
    address = public_address(parts.hostname, PORTS[parts.scheme])
    kind = _Pinned if parts.scheme == "http" else _PinnedTls
    return kind(parts.hostname, address, seconds)


def public_address(host: str, port: int) -> str:
    """One of a host's addresses. ValueError unless all of them are public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"{host[:80]}: no such host") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise ValueError(f"{host[:80]}: addresses inside this machine or its network are not fetched")
    return addresses[0]


def is_public(address: str) -> bool:
    """Neither loopback, private, link-local, multicast, reserved nor a way around to one of these."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if any(ip in net for net in INSIDE):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class _Pinned(http.client.HTTPConnection):
    """Names one host and connects to an address."""

    def __init__(self, host: str, address: str, seconds: float) -> None:
        super().__init__(host, PORTS["http"], timeout=seconds)
        self.address = address

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)


class _PinnedTls(http.client.HTTPSConnection):
    """The same, encrypted; the certificate has to be the host's."""

    def __init__(self, host: str, address: str, seconds: float) -> None:
        self.tls = ssl.create_default_context()
        super().__init__(host, PORTS["https"], timeout=seconds, context=self.tls)
        self.address = address

    def connect(self) -> None:
        plain = socket.create_connection((self.address, self.port), self.timeout)
        self.sock = self.tls.wrap_socket(plain, server_hostname=self.host)


def _ask_in_time(connection: http.client.HTTPConnection, parts: SplitResult, max_bytes: int, end: float) -> bytes | str:
    """As `_ask`; at the end of the time the connection is cut, however slowly bytes still come."""
    connection.connect()
    cut = threading.Timer(_left(end), connection.sock.shutdown, [socket.SHUT_RDWR])
    cut.daemon = True
    cut.start()
    try:
        return _ask(connection, parts, max_bytes)
    finally:
        cut.cancel()
        _left(end)


def _ask(connection: http.client.HTTPConnection, parts: SplitResult, max_bytes: int) -> bytes | str:
    """The content, or where a redirect leads."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "nanok3"}
    connection.request("GET", target.encode("utf-8").decode("latin-1"), headers=headers)
    response = connection.getresponse()
    if response.status in (301, 302, 303, 307, 308):
        return response.getheader("location") or ""
    if response.status != 200:
        raise http.client.HTTPException(f"status {response.status}")
    content = response.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise http.client.HTTPException(f"more than {max_bytes} bytes")
    return content


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    return left


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _shown(url: str) -> str:
    return repr(url[:80])
