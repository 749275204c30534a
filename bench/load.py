"""Asking a server of the OpenAI API and timing its answer: what a load generator does once for each request.

    target = open_target("http://127.0.0.1:8000", model=None, key=None, allow_remote=False)
    sample = ask(target, "/v1/completions", body, end)      seconds to the first piece, between pieces, tokens by usage

Nothing beyond the standard library, so that the client costs little of the machine that it measures.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

BROKEN = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError)
"""What a connection or an answer that is none raises."""


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path: str
    """What stands before /v1 in its URL."""
    secure: bool
    model: str
    key: str | None = None

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass
class Sample:
    """One request: seconds, and tokens as the server counts them."""

    first: float = math.nan
    """To the first piece with text."""
    gaps: list[float] = field(default_factory=list)
    """Between pieces."""
    whole: float = math.nan
    prompt: int = 0
    cached: int = 0
    said: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float:
        return sum(self.gaps) / (self.said - 1) if self.said > 1 else math.nan


def ask(target: Target, endpoint: str, body: dict[str, Any], end: float) -> Sample:
    """Send one request and time its stream. Whatever goes wrong is in the sample."""
    sample = Sample()
    start = last = time.perf_counter()
    connection = target.connect(max(0.01, end - start))
    try:
        connection.request("POST", target.path + endpoint, json.dumps(body), target.headers())
        response = connection.getresponse()
        if response.status != 200:
            sample.error = f"status {response.status}: {response.read(2000).decode('utf-8', 'replace')}"
            return sample
        for chunk in events(response, end):
            now = time.perf_counter()
            count(sample, chunk)
            if has_text(chunk):
                if math.isnan(sample.first):
                    sample.first = now - start
                else:
                    sample.gaps.append(now - last)
                last = now
        sample.whole = time.perf_counter() - start
    except BROKEN as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return sample


def events(response: http.client.HTTPResponse, end: float) -> Iterator[dict[str, Any]]:
    """The chunks of a stream. TimeoutError where it goes on too long, ValueError where it breaks off."""
    while line := response.readline():
        if time.perf_counter() > end:
            raise TimeoutError("cut: max_seconds are over")
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise ValueError(str(chunk["error"].get("message")))
            yield chunk
    raise ValueError("the stream broke off")


def has_text(chunk: dict[str, Any]) -> bool:
    """Whether any choice says something."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False


def count(sample: Sample, chunk: dict[str, Any]) -> None:
    """Usage stands in a chunk, or in its choice."""
    usage = chunk.get("usage") or next((c["usage"] for c in chunk.get("choices") or () if c.get("usage")), None)
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        sample.prompt, sample.said = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        sample.cached = details.get("cached_tokens") or usage.get("cached_tokens") or 0


# ---------------------------------------------------------------------- whom to ask


def open_target(url: str, model: str | None, key: str | None, allow_remote: bool) -> Target:
    """Read a URL and, where no model is named, ask it for its models. SystemExit if it may not be asked or does not
    answer."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SystemExit(f"base_url is {url!r}; a URL such as http://127.0.0.1:8000 is allowed")
    if not allow_remote and not is_local(parts.hostname):
        raise SystemExit(f"base_url is {url!r}; other machines than this one need --allow-remote")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = parts.path.rstrip("/").removesuffix("/v1")
    target = Target(parts.hostname, port, path, parts.scheme == "https", model or "", key)
    return target if model else replace(target, model=first_model(target, url))


def first_model(target: Target, url: str) -> str:
    """The first that the server lists."""
    connection = target.connect(30)
    try:
        connection.request("GET", f"{target.path}/v1/models", headers=target.headers())
        return str(json.loads(connection.getresponse().read())["data"][0]["id"])
    except BROKEN as error:
        raise SystemExit(f"base_url: {url}/v1/models gives no list of models ({error!r})") from None
    finally:
        connection.close()


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
