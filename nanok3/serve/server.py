"""What all endpoints share: the engine, the tokenizer, the settings, and the way from a request to its jobs.

    body -> protocol.read_chat -> render -> encode = Asked      (in a thread: a long prompt holds nobody up)
    Asked -> a Job for each choice -> engine                    -> Answers

An endpoint is a function of the server and a `Call`. It returns a body, or the events of a stream; what web framework
carries them is api.py's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanok3.data.chat import OURS, Segment, Sentences, encode
from nanok3.data.messages import MEDIA_TYPES, VIDEO_TYPE, read_messages
from nanok3.data.tokenizer import Tokenizer
from nanok3.serve.answers import Answers, ChatReader, Ended, Postbox, describer, refusals
from nanok3.serve.chat_fields import place_of
from nanok3.serve.engine import Constraint, Engine, Job, Reader
from nanok3.serve.fields import RequestError, read_json, shown
from nanok3.serve.generate import StopStrings
from nanok3.serve.http_gate import GateSettings
from nanok3.serve.metrics import Metrics
from nanok3.serve.picture_sources import PictureSettings, PictureSources
from nanok3.serve.pictures import Eyes, Shown, show
from nanok3.serve.places import named
from nanok3.serve.protocol import ChatRequest, Common, Policy, read_chat
from nanok3.serve.replies import Usage
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams

PAD = "<|media_pad|>"
Constrain = Callable[[Common], Constraint | None]
"""From a request to what its answer has to be; a fresh one for each choice. RequestError for a grammar that is none."""


@dataclass(frozen=True)
class ServerSettings:
    """How a server behaves, beside its engine."""

    names: tuple[str, ...] = ("nanok3",)
    """Names of the model; the first is told."""
    policy: Policy = field(default_factory=Policy)
    sentences: Sentences = OURS
    """The wording of prompts for tools and options."""
    seconds: float | None = None
    """Time a request may take; None for as long as it needs."""
    keep_alive: float = 5.0
    """Seconds without a token after which a stream gets a comment."""
    origins: tuple[str, ...] = ()
    """Web pages of these origins may ask."""
    gate: GateSettings = field(default_factory=GateSettings)
    conversations: Path | None = None
    """Folder in which an administrator can save them; None for nowhere."""
    pictures: PictureSettings = field(default_factory=PictureSettings)
    reload: bool = False
    """Whether an administrator may put other weights into the model."""

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"served_model_name is {self.names!r}; it needs at least one name, none of them empty")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"request_timeout is {self.seconds}; it must be above 0")
        if not self.keep_alive > 0:
            raise ValueError(f"keep_alive is {self.keep_alive}; it must be above 0")


@dataclass(frozen=True)
class Call:
    """One HTTP request, as an endpoint sees it."""

    body: bytes
    path: Mapping[str, str]
    """What stood in the places of the path."""
    headers: Mapping[str, str]
    receive: Callable[[], Awaitable[Any]]
    facts: dict[str, Any]
    """For the log; `key` says whose request it is."""
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A checked request for a message and the prompt it makes."""

    request: ChatRequest
    segments: list[Segment]
    ids: list[int]
    prompt_tokens: int
    """Without the opener of the answer's channel."""
    constraints: list[Constraint | None]
    """Of each choice."""
    pictures: tuple[Shown, ...] = ()


@dataclass(frozen=True)
class _Asking:
    """A checked request whose pictures and videos have not been opened yet."""

    chat: Mapping[str, Any]
    """As it was read, for the places of mistakes."""
    request: ChatRequest
    media: list[tuple[Mapping[str, Any], str]]
    """Parts that show something, and their places."""


@contextlib.contextmanager
def _named(chat: Mapping[str, Any]) -> Iterator[None]:
    """Mistakes get the names of the request that was sent."""
    try:
        yield
    except RequestError as error:
        raise named(error, chat) from None


class Server:
    """One model and those who ask it."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, settings: ServerSettings, constrain: Constrain | None = None
    ) -> None:
        """constrain: how `response_format` and `tool_choice` bind the sampling; without it, requests for what has to be
        kept are refused."""
        self.engine, self.tokenizer, self.settings, self.constrain = engine, tokenizer, settings, constrain
        self.pictures = PictureSources(settings.pictures)
        self.opening = ThreadPoolExecutor(4, "pictures")
        """Pictures and videos are fetched and decoded here: requests of text wait for none of them."""
        self.metrics = Metrics(engine, self.pictures)
        self.postbox = Postbox(engine, self.metrics.finished)
        pad = engine.runner.media_pad
        if pad is not None and pad != tokenizer.special.get(PAD):
            there = tokenizer.special.get(PAD)
            raise ValueError(f"the tokenizer's {PAD} is {there}, the model's placeholder {pad}; it is another model's")
        self.policy = replace(
            settings.policy,
            context=engine.context,
            vocab_size=tokenizer.vocab_size,
            from_web=settings.pictures.from_web,
        )
        self.created = int(time.time())
        self._eyes = engine.runner.eyes if isinstance(engine.runner, Runner) else None
        self._tower = ThreadPoolExecutor(1, "tower")
        self._longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    @property
    def name(self) -> str:
        return self.settings.names[0]

    @property
    def sees(self) -> bool:
        """Whether messages may hold pictures."""
        return self.engine.runner.media_pad is not None

    def check_model(self, asked: str | None) -> str:
        """The name to answer with. RequestError for a model that is not served here."""
        if asked is None or asked in self.settings.names:
            return asked or self.name
        known = ", ".join(self.settings.names)
        raise RequestError(f"no model {shown(asked)} here; there is: {known}", "model", "model_not_found", 404)

    # ------------------------------------------------------------------ chat

    async def read_chat(
        self,
        body: Mapping[str, Any] | bytes,
        call: Call | None = None,
        translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda body: body,
    ) -> Asked:
        """Check a request, open its pictures, render and encode its prompt. RequestError for what is wrong with it.
        call: whose files it may name. translate: from a request of another shape, with objects that are `Said`."""
        owner = None if call is None else call.facts.get("key")
        asking = await in_thread(self._read_chat, body, translate)
        return await in_thread(self._ask, asking, owner, pool=self.opening if asking.media else None)

    def _read_chat(
        self, body: Mapping[str, Any] | bytes, translate: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> _Asking:
        body = read_json(body) if isinstance(body, bytes) else body
        self._check_count(body)
        chat = translate(body)
        with _named(chat):
            request = read_chat(chat, self.policy)
            self.check_model(request.model)
            return _Asking(chat, request, self._media(request))

    def _ask(self, asking: _Asking, owner: int | None) -> Asked:
        request = asking.request
        with _named(asking.chat):
            seen = self.pictures.open(asking.media, owner)
            segments = request.prompt(self.settings.sentences, [one.prompt for one in seen])
            request.room(self.least_tokens(segment.text for segment in segments), least=True)
            items = [item for one in seen for item in one.items]
            ids, pictures = show(encode(segments, self.tokenizer), items, self.tokenizer.special.get(PAD, -1))
            request.room(len(ids))
            prompt_tokens = len(ids) - request.opener(self.tokenizer)
            return Asked(request, segments, ids, prompt_tokens, self.constraints(request, request.n), pictures)

    def _check_count(self, body: Mapping[str, Any]) -> None:
        """What cannot fit is not read first: a message is six ids of tags or more, an item at least one."""
        for name, ids in (("messages", 6), ("input", 1)):
            given = body.get(name)
            if isinstance(given, list) and ids * len(given) > self.engine.context:
                least = f"the prompt has at least {ids * len(given)} tokens"
                what = f"{least}; allowed: {self.engine.context} together"
                raise RequestError(what, name, "context_length_exceeded")

    def least_tokens(self, texts: Iterable[str]) -> int:
        """Texts, each encoded by itself, have no fewer."""
        return sum(-(-len(text) // self._longest) for text in texts)

    def _media(self, request: ChatRequest) -> list[tuple[Mapping[str, Any], str]]:
        """Pictures and videos in the order in which the prompt shows them, each with its place."""
        parts = [
            (part, f"{turn.where}.content[{k}]")
            for turn in read_messages(request.messages)
            for k, part in enumerate(turn.parts)
            if part["type"] in MEDIA_TYPES
        ]
        if parts and not self.sees:
            place, what = place_of(*parts[0]), "video" if parts[0][0]["type"] == VIDEO_TYPE else "picture"
            raise RequestError(f"{place} is a {what}; allowed: text, since {self.name} has no vision tower", place)
        return parts

    def constraints(self, request: Common, count: int) -> list[Constraint | None]:
        """What binds each of `count` answers. RequestError where that cannot be had."""
        if self.constrain is not None:
            return [self.constrain(request) for _ in range(count)]
        if request.constraint is not None:
            kind = request.constraint.kind
            raise RequestError(f"an answer of kind {kind} cannot be enforced by this server", "response_format")
        return [None] * count

    def start_chat(self, asked: Asked, call: Call) -> Answers:
        """Hand the request to the engine."""
        request, answers = asked.request, Answers(self.engine, self.postbox, self.metrics.gap)
        describe = None if request.logprobs is None else describer(self.tokenizer)
        jobs = []
        for k in range(request.n):
            stops = StopStrings(request.sampling.stop)
            parser = request.parser(self.tokenizer, stops)
            hidden = request.sampling.stop_ids
            reader = ChatReader(k, parser, stops, answers.tell, describe, hidden, request.ignore_eos)
            most, constraint = request.room(len(asked.ids)), asked.constraints[k]
            more = {"constraint": constraint, "pictures": asked.pictures}
            jobs.append(self.job(request, asked.ids, most, k, reader, **more))
        call.facts.update(prompt_tokens=asked.prompt_tokens, choices=request.n, stream=request.stream)
        if self.settings.gate.log_prompts:
            call.facts["prompt"] = "".join(segment.text for segment in asked.segments)
        if self._eyes is not None and self._eyes.unseen(asked.pictures):
            self._look_then_submit(self._eyes, answers, jobs)
        else:
            answers.submit(jobs)
        answers.watch(call.receive)
        return answers

    # ------------------------------------------------------------------ pictures, before the engine has them

    def _look_then_submit(self, eyes: Eyes, answers: Answers, jobs: Sequence[Job]) -> None:
        """Let the tower run in a thread of its own, one request at a time, while the engine says other answers.
        RequestError where the engine would not take the jobs now: those whose pictures are not yet looked at wait,
        too."""
        pictures = jobs[0].pictures
        with refusals():
            self.engine.promise(jobs, pictures)
        try:
            submission = answers.submit_after(lambda: self._look_ahead(eyes, jobs), jobs)
        except RequestError:
            self.engine.redeem(jobs, pictures)
            raise
        submission.add_done_callback(lambda task: self.engine.redeem(jobs, pictures))

    async def _look_ahead(self, eyes: Eyes, jobs: Sequence[Job]) -> None:
        """If it fails it will do so again in the engine's thread, which knows what to say of it."""
        looked = asyncio.get_running_loop().run_in_executor(self._tower, self._look, eyes, jobs)
        await asyncio.gather(looked, return_exceptions=True)

    def _look(self, eyes: Eyes, jobs: Sequence[Job]) -> None:
        """In the tower's thread: what lies in a cached prefix is not looked at again, and nothing for who has gone."""
        job, engine = jobs[0], self.engine
        if all(one.cancelled for one in jobs):
            return
        keys = engine.keys(job.prompt, job.salt, job.pictures).keys
        cached = engine.ask(lambda: engine.cache.match(keys, len(job.prompt))).tokens if engine.settings.caching else 0
        wanted = itertools.takewhile(lambda _: not all(one.cancelled for one in jobs), job.pictures)
        eyes.look_ahead(picture for picture in wanted if picture.end > cached)

    def job(self, request: Common, ids: list[int], most: int, choice: int, reader: Reader, **more: Any) -> Job:
        """One answer. Choices of one request have seeds of their own."""
        params = SamplingParams(**request.sampling.params(most))
        if params.seed is not None:
            params = replace(params, seed=(params.seed + choice) % 2**63)
        limits = [seconds for seconds in (request.timeout, self.settings.seconds) if seconds is not None]
        return Job(
            list(ids),
            params,
            reader,
            top_logprobs=request.logprobs or 0,
            ignore_ends=request.ignore_eos,
            priority=request.priority,
            seconds=min(limits, default=None),
            salt=() if request.cache_salt is None else (request.cache_salt.encode("utf-8", "replace"),),
            **more,
        )


# ---------------------------------------------------------------------- what is told of an answer


def usage(prompt_tokens: int, ends: Sequence[Ended]) -> Usage:
    """Of the answers to one prompt. Cached are the tokens that every one of them took from the cache."""
    cached = min((end.outcome.cached_tokens for end in ends), default=0)
    return Usage(
        prompt_tokens,
        sum(end.outcome.said_tokens for end in ends),
        min(cached, prompt_tokens),
        sum(end.reasoning_tokens for end in ends),
    )


def debug(ends: Iterable[Ended]) -> dict[str, Any]:
    """Why the cache gave no more, and where the time went; an entry for each answer."""
    return {
        "debug": [
            {
                "cached_tokens": end.outcome.cached_tokens,
                "cache_limit": end.outcome.cache_limit,
                "queue_seconds": _short(end.outcome.queue_seconds),
                "first_token_seconds": _short(end.outcome.first_token_seconds),
                "seconds": _short(end.outcome.seconds),
            }
            for end in ends
        ]
    }


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


async def in_thread(function: Callable[..., Any], *arguments: Any, pool: Executor | None = None) -> Any:
    """Run what may take long beside the loop. A structure that is nested too deeply for us is the client's mistake."""
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
    except RecursionError:
        raise RequestError("the request is nested too deeply", None, "invalid_json") from None
