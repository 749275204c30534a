"""Between the engine's thread and the server's: what the engine says of one request, as something to be awaited.

    engine thread    token -> reader (parser, stop strings) -> Piece ---.
                                           end -> Ended ---------------- Postbox, at the step's end -> queue
    server           async for pieces in answers.pieces(...)            <-'

A request is one job or several: choices, prompts. Who awaits has a reason to stop: the client that goes away. Whatever
ends the waiting, `close` cancels the jobs that have not ended, and the engine frees them at its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanok3.data.chat import RESPONSE
from nanok3.data.tokenizer import StreamDecoder, Tokenizer
from nanok3.serve.engine import Engine, Job, Outcome, Overloaded, Stopping, Token
from nanok3.serve.events import ContentDelta, Event, MessageEnd, merged
from nanok3.serve.fields import RequestError
from nanok3.serve.replies import TokenLogprob

if TYPE_CHECKING:
    from nanok3.serve.generate import StopStrings
    from nanok3.serve.parser import Parser


@dataclass(frozen=True)
class Piece:
    """What some tokens of the `index`-th answer brought: events, and if they were asked for, log-probabilities."""

    index: int
    events: list[Event]
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """The last of the `index`-th answer."""

    index: int
    events: list[Event]
    outcome: Outcome
    reasoning_tokens: int = 0
    stop: str | None = None
    """The stop string that ended it."""


@dataclass(eq=False)
class Whole:
    """An answer while it is collected."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, item: Piece | Ended) -> None:
        self.events += item.events
        if isinstance(item, Ended):
            check_outcome(item.outcome)
            self.ended = item
        else:
            self.logprobs += item.logprobs


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


Tell = Callable[[Piece | Ended], None]
Describe = Callable[[Token], TokenLogprob]
Inbox = asyncio.Queue[Piece | Ended | None]
"""What has come for one request; None when its client has gone."""


def describer(tokenizer: Tokenizer) -> Describe:
    """Turns a sampled token into what a client is told of it. Ids that have no name cannot be said and are left out."""

    def describe(token: Token) -> TokenLogprob:
        top = [(tokenizer.token_bytes(other), p) for other, p in token.top if other < tokenizer.vocab_size]
        return TokenLogprob(tokenizer.token_bytes(token.id), token.logprob, tuple(top), token.id)

    return describe


class ChatReader:
    """Reads a message. Its log-probabilities are those of the tokens of its content."""

    def __init__(
        self,
        index: int,
        parser: Parser,
        stops: StopStrings,
        tell: Tell,
        describe: Describe | None = None,
        hidden: Iterable[int] = (),
        ignore_ends: bool = False,
    ) -> None:
        """hidden: ids that end the answer and are no text of it."""
        self.index, self.parser, self.stops, self.tell, self.describe = index, parser, stops, tell, describe
        self.hidden, self.ignore_ends = frozenset(hidden), ignore_ends

    def push(self, token: Token) -> bool:
        if token.id in self.hidden:
            return True
        events = self.parser.push(token.id)
        content = self.describe is not None and self.parser.took == RESPONSE
        logprobs = [self.describe(token)] if self.describe is not None and content else []
        if events or logprobs:
            self.tell(Piece(self.index, events, logprobs))
        return self.stops.found is not None or (self.parser.done and not self.ignore_ends)

    def finish(self, outcome: Outcome) -> None:
        events = self.parser.finish(outcome.finish_reason)
        self.tell(Ended(self.index, events, outcome, self.parser.reasoning_ids, self.stops.found))


class TextReader:
    """Reads plain text. All its tokens have log-probabilities, those of an end and of a stop string too."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: StopStrings,
        tell: Tell,
        describe: Describe | None = None,
        hidden: Iterable[int] = (),
    ) -> None:
        self.index, self.stops, self.tell, self.describe = index, stops, tell, describe
        self.hidden, self._text = frozenset(hidden), StreamDecoder(tokenizer)

    def push(self, token: Token) -> bool:
        text = "" if token.id in self.hidden else self.stops.push(self._text.push(token.id))
        logprobs = [] if self.describe is None else [self.describe(token)]
        if text or logprobs:
            self.tell(Piece(self.index, [ContentDelta(text)] if text else [], logprobs))
        return self.stops.found is not None

    def finish(self, outcome: Outcome) -> None:
        text = self.stops.push(self._text.flush()) + self.stops.flush()
        end = MessageEnd(outcome.finish_reason)
        self.tell(Ended(self.index, [ContentDelta(text), end] if text else [end], outcome, 0, self.stops.found))


class Postbox:
    """What one step of the engine says to all who wait, handed over at its end: for every token by itself the server's
    thread would be woken, and the engine's would wait until that lets it go on."""

    def __init__(self, engine: Engine, ended: Callable[[Outcome], None] = lambda outcome: None) -> None:
        """ended: told of each end, in the server's thread."""
        self._ended = ended
        self._items: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, Piece | Ended]]] = {}
        engine.after_step = self.send

    def put(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, item: Piece | Ended) -> None:
        """From the engine's thread."""
        self._items.setdefault(loop, []).append((inbox, item))

    def send(self) -> None:
        items, self._items = self._items, {}
        for loop, found in items.items():
            with contextlib.suppress(RuntimeError):  # the server's loop has ended: nobody is left to be told
                loop.call_soon_threadsafe(self._deliver, found)

    def _deliver(self, items: list[tuple[Inbox, Piece | Ended]]) -> None:
        for inbox, item in items:
            if isinstance(item, Ended):
                self._ended(item.outcome)
            inbox.put_nowait(item)


class Answers:
    """The jobs of one request while they run; made in the server's loop."""

    def __init__(self, engine: Engine, postbox: Postbox, gap: Callable[[float], None]) -> None:
        """gap: told the seconds between two pieces of one answer."""
        self.engine, self.postbox, self.gap = engine, postbox, gap
        self.jobs: list[Job] = []
        self._open: set[int] = set()
        self._last: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._queue: Inbox = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None
        self._submission: asyncio.Task[None] | None = None
        self._failed: Exception | None = None

    def tell(self, item: Piece | Ended) -> None:
        """From the engine's thread."""
        now = time.monotonic()
        if isinstance(item, Piece):
            if item.index in self._last:
                self.gap(now - self._last[item.index])
            self._last[item.index] = now
        self.postbox.put(self._loop, self._queue, item)

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them or none. RequestError if the engine does not take them."""
        self._expect(jobs)
        self._hand_over()

    def submit_after(self, ready: Callable[[], Awaitable[None]], jobs: Sequence[Job]) -> asyncio.Task[None]:
        """As `submit`, once that has been done; the time it takes is the jobs' own. What the engine does not take then
        is the error of the answers. Nothing is done any more for a client that has gone, or when the time is over."""
        self._expect(jobs)
        begun = time.monotonic()
        allowed = min((job.seconds for job in jobs if job.seconds is not None), default=None)

        async def hand_over() -> None:
            try:
                async with asyncio.timeout(allowed):
                    await ready()
                for job in self.jobs:
                    job.seconds = job.seconds and max(1e-9, job.seconds - (time.monotonic() - begun))
                self._hand_over()
            except TimeoutError:
                self._fail(late(f"the request took more than its {allowed:g} seconds"))
            except Exception as error:
                self._fail(error)

        self._submission = self._loop.create_task(hand_over())
        return self._submission

    def _fail(self, error: Exception) -> None:
        self.close()
        self._failed = error
        self._queue.put_nowait(None)

    def _expect(self, jobs: Sequence[Job]) -> None:
        most = self.engine.settings.max_waiting
        if len(jobs) > most:
            raise RequestError(f"the request asks for {len(jobs)} answers; allowed: {most}", "n")
        self.jobs, self._open = list(jobs), set(range(len(jobs)))

    def _hand_over(self) -> None:
        try:
            with refusals():
                for job in self.jobs:
                    self.engine.submit(job)
        except RequestError:
            self.close()
            raise

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Close as soon as the client goes away, whether or not somebody awaits the pieces."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.close()
            self._queue.put_nowait(None)

        self._watch = self._loop.create_task(wait())

    async def pieces(self, pause: float | None = None) -> AsyncIterator[list[Piece | Ended]]:
        """What has come since the last time, until all have ended; an empty list if nothing came for `pause` seconds.
        ClientGone when the client has gone."""
        while self._open:
            try:
                async with asyncio.timeout(pause):
                    items = [await self._queue.get()]
            except TimeoutError:
                yield []
                continue
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            found = [item for item in items if item is not None]
            self._open -= {item.index for item in found if isinstance(item, Ended)}
            if len(found) < len(items):
                raise self._failed or ClientGone
            yield _joined(found)

    async def all(self) -> list[Whole]:
        """All answers, complete. RequestError if one of them is none."""
        wholes = [Whole() for _ in self.jobs]
        try:
            async for items in self.pieces():
                for item in items:
                    wholes[item.index].add(item)
        finally:
            self.close()
        return wholes

    def close(self) -> None:
        """Cancel what has not ended. May be called again."""
        for index in self._open:
            self.engine.cancel(self.jobs[index])
        for task in (self._watch, self._submission):
            if task is not None and task is not asyncio.current_task():
                task.cancel()


def _joined(items: list[Piece | Ended]) -> list[Piece | Ended]:
    """The same with the pieces of one answer made one: a slow client gets fewer and larger ones."""
    pieces: dict[int, Piece] = {}
    ends: list[Piece | Ended] = []
    for item in items:
        if isinstance(item, Ended):
            ends.append(item)
        else:
            piece = pieces.setdefault(item.index, Piece(item.index, [], []))
            piece.events.extend(item.events)
            piece.logprobs.extend(item.logprobs)
    return [*(Piece(p.index, merged(p.events), p.logprobs) for p in pieces.values()), *ends]


class Busy(RequestError):
    """More than the server takes now."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, None, "rate_limit_exceeded", 429, "rate_limit_error")
        self.retry_after = retry_after


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What the engine says of jobs that it does not take, as an answer to the client."""
    try:
        yield
    except Overloaded as error:
        raise Busy(str(error), error.retry_after) from None
    except Stopping as error:
        raise RequestError(str(error), None, "shutting_down", 503, "service_unavailable") from None
    except ValueError as error:
        raise RequestError(str(error), "prompt") from None


def late(message: str) -> RequestError:
    return RequestError(message, "timeout", "timeout", 504, "timeout_error")


def check_outcome(outcome: Outcome) -> None:
    """RequestError if the answer is none."""
    match outcome.finish_reason:
        case "timeout":
            raise late(outcome.error or "timeout")
        case "cancelled":
            raise RequestError("the server is shutting down", None, "shutting_down", 503, "service_unavailable")
        case "error":
            raise RequestError("the model failed on this request", None, "server_error", 500, "server_error")
