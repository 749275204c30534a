"""Rollouts through our own servers: a speaker whose turns are said by `nanok3 serve --allow-reload`, one or several.

    begin      POST /v1/completions with the sample's ids, as a stream with `return_token_ids`
    step       ids, log-probabilities and the policy's number come as they are sampled, and go to their turns
    pause      connections are closed: what was said is kept, and the servers stop
    renew      before the next turn the weights are written into a folder and every server is told to read it

The ids are those that were sampled, never a text encoded again. Random numbers are a function of the sample and its
place, so that the same samples come as from the engine in this process. The folder has to be one that the servers see
under the same name. Every token says which weights it came from; tokens of others end the run.
"""

from __future__ import annotations

import http.client
import json
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain.rl_settings import MopdSettings, RLSettings
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.turn import Turn
from nanok3.serve.engine import Outcome, Token
from nanok3.serve.sampler import SamplingParams

SECONDS = 600.0
"""Longest wait for a server's next bytes."""
LOOK_SECONDS = 0.5
"""Between two questions to a server for how full it is."""
ADDRESS = "http://HOST:PORT of a nanok3 serve, commas between several"


@dataclass(frozen=True)
class HttpWorkers:
    """The servers of a run, as flags name them."""

    urls: tuple[str, ...]
    key: str = ""
    """Their admin key."""

    def check(self, settings: RLSettings | MopdSettings) -> None:
        """ValueError where a server does not answer, or for what cannot be asked of one."""
        if settings.learner.replay:
            raise ValueError("learner.replay is True; allowed with workers: False, servers do not tell their routes")
        _reach(self.urls, self.key)

    def speaker(self, model: K3, tokenizer: Tokenizer, settings: RLSettings | MopdSettings, run: Path) -> HttpSpeaker:
        self.check(settings)
        return HttpSpeaker(
            self.urls, run / "weights", lambda folder: save(model, folder, dtype=torch.float32), self.key
        )


class Server:
    """One of ours, and how many turns it has."""

    def __init__(self, url: str, key: str = "") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port or 80
        except ValueError:  # a port that is none, a bracket that is not closed
            host = None
        if not host or parts.scheme != "http" or parts.path.rstrip("/") not in ("", "/v1"):
            raise ValueError(f"workers: {url!r}; allowed: {ADDRESS}")
        self.url, self.host, self.port, self.turns = url.rstrip("/").removesuffix("/v1"), host, port, 0
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer. ValueError with what is wrong."""
        connection = self.connect()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self.headers)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise ValueError(f"workers: {self.url} cannot be reached ({error}); is the server running?") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(
                f"workers: {self.url}{path} answers {answer.status}: {said[:500].decode('utf-8', 'replace')}"
            )
        try:
            return json.loads(said)
        except ValueError:
            raise ValueError(f"workers: {self.url}{path} answers no JSON; allowed: {ADDRESS}") from None

    def load(self) -> tuple[int, float]:
        """Requests that wait there, others' too, and the share of its pages that running ones hold."""
        said = self.ask("GET", "/v1/loads")
        try:
            pages = said["pages"]
            used = sum(states["used"] for states in pages.values() if isinstance(states, dict) and "used" in states)
            return int(said["num_waiting_reqs"]), used / pages["total"]
        except (KeyError, TypeError, AttributeError, ZeroDivisionError):
            raise ValueError(f"workers: {self.url}/v1/loads does not say pages; allowed: {ADDRESS}") from None


def _reach(urls: Sequence[str], key: str) -> tuple[list[Server], int]:
    """Servers that have answered, and the tokens that a sequence may have in all of them."""
    if not urls:
        raise ValueError(f"workers is empty; allowed: {ADDRESS}")
    servers = [Server(url, key) for url in urls]
    lengths = []
    for server in servers:
        try:
            lengths.append(int(server.ask("GET", "/v1/models")["data"][0]["max_model_len"]))
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"workers: {server.url} does not say max_model_len; allowed: {ADDRESS}") from None
    return servers, min(lengths)


class _Stream:
    """One turn on its way, read by a thread of its own; what comes goes into `inbox`."""

    def __init__(self, server: Server, turn: Turn, request: dict[str, Any], inbox: queue.SimpleQueue[Any]) -> None:
        self.server, self.turn, self.connection = server, turn, server.connect()
        self._request, self._inbox = request, inbox
        threading.Thread(target=self._read, daemon=True, name="nanok3 worker").start()

    def _read(self) -> None:
        try:
            self.connection.request("POST", "/v1/completions", json.dumps(self._request), self.server.headers)
            answer = self.connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"answers {answer.status}: {answer.read()[:500].decode('utf-8', 'replace')}")
            for line in answer:
                if line.startswith(b"data: {"):
                    self._inbox.put((self, json.loads(line[6:])))
            self._inbox.put((self, None))
        except Exception as error:  # whatever it was: the thread that steps has to hear of it
            self._inbox.put((self, error))

    def close(self) -> None:
        """The server notices and stops."""
        with suppress(OSError, AttributeError):
            if self.connection.sock is not None:
                self.connection.sock.shutdown(2)
        self.connection.close()


class HttpSpeaker:
    """Says turns through servers. `save` writes the weights as they are now into a folder."""

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        save: Callable[[Path], None],
        key: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers, self.context = _reach(urls, key)
        self.folder, self.save = folder.resolve(), save
        self.version = self.said_tokens = 0
        self._clock, self._looked = clock, -math.inf
        self._loads: list[tuple[int, float]] = []
        self._pushed: int | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._at_work: list[_Stream] = []

    def begin(self, turn: Turn, params: SamplingParams) -> None:
        if self._pushed != self.version:
            self._push()
        request = {
            "prompt": turn.sample.ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "logprobs": 0,
            "stream": True,
            "return_token_ids": True,
        }
        server = min(self.servers, key=lambda each: each.turns)
        server.turns += 1
        self._at_work.append(_Stream(server, turn, request, self._inbox))

    def _push(self) -> None:
        """The weights as they are now, which are those that the rollouts are to be sampled from."""
        at = self.folder / f"version-{self.version}"
        self.save(at)
        for server in self.servers:
            server.ask("POST", "/admin/reload", {"folder": str(at), "version": self.version})
        shutil.rmtree(at, ignore_errors=True)
        self._pushed = self.version

    def step(self) -> None:
        """Hand out what has come; waits for something if nothing has."""
        if self._at_work:
            self._take(*self._inbox.get())
        while True:
            try:
                self._take(*self._inbox.get_nowait())
            except queue.Empty:
                return

    def _take(self, stream: _Stream, event: Any) -> None:
        if stream not in self._at_work:  # of a turn that was ended meanwhile
            return
        if isinstance(event, Exception) or event is None or "error" in event:
            what = "the stream ended early" if event is None else event["error"] if isinstance(event, dict) else event
            raise RuntimeError(f"{stream.server.url}: {what}")
        for choice in event["choices"]:
            if self._say(stream, choice):
                self._end(stream, "stop")
                return
            if choice["finish_reason"] is not None:
                self._end(stream, choice["finish_reason"])

    def _say(self, stream: _Stream, choice: dict[str, Any]) -> bool:
        """Push the tokens of a piece; whether the turn has enough."""
        if choice.get("weight_version", self.version) != self.version:
            found = choice["weight_version"]
            raise RuntimeError(f"{stream.server.url} has weights {found}, not {self.version}: does another run use it?")
        given = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else ()
        for token, logprob in zip(choice.get("token_ids") or (), given, strict=True):
            self.said_tokens += 1
            if stream.turn.push(Token(token, logprob)):
                return True
        return False

    def _end(self, stream: _Stream, reason: str) -> None:
        stream.close()
        stream.server.turns -= 1
        self._at_work.remove(stream)
        said = len(stream.turn.sample.ids) - stream.turn.sample.begins
        stream.turn.finish(Outcome(reason, None, 0, said, 0, 0.0, None, 0.0, None))

    def pause(self) -> None:
        for stream in list(self._at_work):
            self._end(stream, "cancelled")

    def renew(self, version: int) -> None:
        self.version, self._pushed = version, None

    def load(self) -> tuple[int, int, float]:
        """Of all servers together, as they said a moment ago; of the memory that of the fullest."""
        if self._clock() - self._looked > LOOK_SECONDS:
            self._looked = self._clock()
            self._loads = [server.load() for server in self.servers]
        queued = sum(waiting for waiting, _ in self._loads)
        return max(0, len(self._at_work) - queued), queued, max((use for _, use in self._loads), default=0.0)

    def rest(self, sample: Sample) -> None:
        """Servers keep what they like (--cache-memory)."""

    def forget(self, samples: Iterable[Sample]) -> None:
        """Nor are they told of this."""

    def counts(self) -> dict[str, float]:
        """Servers have metrics of their own."""
        return {}

    def close(self) -> None:
        self.pause()
