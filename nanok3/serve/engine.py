"""The engine: jobs come in from any thread, one thread reads and speaks for all of them, step by step.

    inbox -> waiting -> [ plan -> read -> sample each -> tell its reader ] -> finished
                            one step, for all running sequences

A job brings its own `Reader`, which takes each token as it is sampled (a parser of the answer, in a server) and says
when nothing more is needed; and, for structured output, a `Constraint`, which says what may come next. Both belong to
one job, and so does what goes wrong: an exception in them, a NaN among the logits, a deadline or a client that has gone
end that job alone, and its pages are free at the next step. Random numbers belong to the job too, so an answer does not
depend on who else is served.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nanok3.serve.arena import Arena
from nanok3.serve.cache_check import CacheChecks
from nanok3.serve.offload import ArenaBytes, Offload, Tier
from nanok3.serve.page_pool import PageLayout, PagePool
from nanok3.serve.pictures import Pixels, check_pads
from nanok3.serve.prefix_cache import Picture, PrefixCache, SpanKeys
from nanok3.serve.sampler import (
    Row,
    Sampled,
    SamplingParams,
    TokenCounts,
    adjust,
    best,
    new_generator,
    sample_rows,
    tempered,
)
from nanok3.serve.scheduler import Limits, Memory, Scheduler, Work
from nanok3.serve.sequence import Sequence, Status
from nanok3.serve.speculative import Guess, Speculation, Wish, settle
from nanok3.serve.step_seconds import StepSeconds, Stopwatch

log = logging.getLogger("nanok3")
_numbers = itertools.count()
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Token:
    """One sampled token, as a reader gets it."""

    id: int
    logprob: float
    """Under softmax(z / temperature), as in sampler.sample."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable ids with their log-probabilities, as many as were asked for."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    finish_reason: str
    """'stop' (an end token, or the reader had enough), 'length', 'cancelled', 'timeout' or 'error'."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    said_tokens: int
    queue_seconds: float
    """From submission to admission."""
    first_token_seconds: float | None
    """From submission to the first token."""
    seconds: float
    cache_limit: str | None
    """Why the prefix hit was not longer (prefix_cache.Match), and at which token."""
    prompt_logprobs: tuple[Token, ...] = ()
    """Of prompt tokens 1, 2, ...: what the model gave them, where that was asked for."""


@runtime_checkable
class Reader(Protocol):
    """Takes an answer. Called in the engine's thread, so it must be quick."""

    def push(self, token: Token) -> bool:
        """One more token; True if nothing more is needed."""

    def finish(self, outcome: Outcome) -> None:
        """The job has ended; called once, always."""


@runtime_checkable
class Constraint(Protocol):
    """What may be said next."""

    def allowed(self) -> Bool[Tensor, " vocab"] | None:
        """True for the ids that may come next; None for all."""

    def advance(self, token: int) -> None:
        """This id was said."""


@runtime_checkable
class Reading(Protocol):
    """What reads tokens: a model (runner.Runner), or something that plays one (scripted)."""

    layout: PageLayout
    pages: int
    vocab_size: int
    context: int
    media_pad: int | None
    """The id that stands for a row of a picture; None for who does not see."""

    @property
    def arena(self) -> Memory: ...

    def read(self, work: list[Work], all_logits: frozenset[str]) -> dict[str, Tensor | Exception]:
        """As `Runner.read`."""

    def keep(self, sequence: Sequence, count: int) -> None:
        """As `Runner.keep`."""

    def forget(self) -> None:
        """Nothing that was computed before counts any more."""


@dataclass(eq=False)
class Job:
    """One answer that is wanted."""

    prompt: list[int]
    params: SamplingParams
    reader: Reader
    constraint: Constraint | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    """Score the prompt as well; such a job takes nothing from the prefix cache."""
    speculate: bool = True
    """Whether drafts may be tried for it, where the engine has any; a job whose prompt is scored has none."""
    ignore_ends: bool = False
    """Go on after ids that end an answer."""
    priority: int = 0
    seconds: float | None = None
    """Time it may take in all; None for as long as it needs."""
    salt: tuple[bytes, ...] = ()
    """Jobs with different salts share no cache."""
    pictures: tuple[Picture, ...] = ()
    """What the placeholders in the prompt stand for, in order (pictures.show)."""
    id: str = field(default_factory=lambda: f"job-{next(_numbers)}")
    cancelled: bool = False
    """Set by `Engine.cancel`."""


class Overloaded(Exception):
    """There is no room to wait; `retry_after` seconds is when to ask again."""

    def __init__(self, what: str, retry_after: float) -> None:
        super().__init__(f"{what}; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Stopping(Exception):
    """The engine takes no more jobs."""


@dataclass(frozen=True)
class Settings:
    """How an engine is set up."""

    hash_block: int = 512
    """Tokens between two boundaries of the prefix cache."""
    caching: bool = True
    max_model_len: int | None = None
    """Tokens of prompt and answer; None for the model's own context."""
    max_waiting: int = 1024
    """Jobs that may wait before more are refused."""
    check_cache: float = 0.0
    """Share of the jobs with a cache hit whose first logits are computed again without it and compared."""
    check_bound: float = 1e-3
    """A difference above this is logged as an error."""
    limits: Limits = field(default_factory=Limits)
    tier: Tier | None = None
    """Where evicted prefixes go; None for nowhere."""
    picture_bytes: int = 2 << 30
    """Of decoded pictures that jobs may hold before more are refused; a single job may have more."""

    def __post_init__(self) -> None:
        if self.hash_block < 16:
            raise ValueError(f"hash_block is {self.hash_block}; it must be at least 16 tokens")
        if not 0 <= self.check_cache <= 1:
            raise ValueError(f"check_cache is {self.check_cache}; it is a share from 0 to 1")


@dataclass(eq=False)
class _Running:
    """A job inside the engine."""

    job: Job
    sequence: Sequence
    generator: torch.Generator
    counts: TokenCounts | None
    submitted: float
    limit: int
    """Tokens it may say."""
    admitted: float | None = None
    first_token: float | None = None
    scored: list[Token] = field(default_factory=list)


@dataclass
class Counters:
    """What was done since the start, for whoever watches."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    said_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Engine:
    """Serves jobs with one model. `start` its thread, or call `step` yourself."""

    def __init__(
        self,
        runner: Reading,
        ends: set[int],
        forbidden: list[int],
        settings: Settings | None = None,
        freed: Callable[[int], None] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """ends: ids that end an answer. forbidden: ids that are never said (generate.unnamed_ids). freed: told each
        page that becomes free. speculation: where drafts come from; None for none."""
        self.runner, self.ends, self.settings = runner, ends, settings or Settings()
        self.forbidden = torch.tensor(sorted(forbidden), dtype=torch.int64)
        self.counters, self.pixels, self.speculation = Counters(), Pixels(), speculation
        layout = runner.layout
        self.pool = PagePool(runner.pages, freed)
        self.cache = PrefixCache(self.pool, self.settings.hash_block, layout.page_tokens, len(layout.groups))
        self.scheduler = Scheduler(self.cache, layout, runner.arena, self.settings.limits, self.settings.caching)
        self._moving = Stopwatch()
        self.offload = None if self.settings.tier is None else self._offload(self.settings.tier)
        self.checks = CacheChecks(
            runner, self.cache, self.settings.check_cache, self.settings.check_bound, self.settings.limits.budget
        )
        self.context = min(runner.context, self.settings.max_model_len or runner.context, self.scheduler.most_tokens)
        self.weight_version = 0
        self._process = os.urandom(16)
        self._inbox: deque[_Running] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._jobs: dict[str, _Running] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._draining = self._stopped = self._ended = False
        self._afterwards = threading.Lock()
        """Once the thread has ended: who does its work holds this."""
        self.on_finish: Callable[[Job, Outcome], None] = lambda job, outcome: None
        self.on_step: Callable[[StepSeconds], None] = lambda seconds: None
        self.after_step: Callable[[], None] = lambda: None
        """Told when readers have been told all that a step brings."""

    # ---------------------------------------------------------------- from any thread

    def submit(self, job: Job) -> None:
        """Queue a job. ValueError for a prompt that cannot be served, Overloaded, Stopping."""
        self._check(job)
        with self._changed:
            if self._draining or self._stopped:
                raise Stopping("the server is shutting down")
            waiting = len(self._inbox) + len(self.scheduler.waiting)
            if waiting >= self.settings.max_waiting:
                after = 1.0 + waiting / max(1, self.settings.limits.max_sequences)
                raise Overloaded(f"{waiting} requests are waiting", after)
            if not self.pixels.has_room(job.pictures, self.settings.picture_bytes):
                raise Overloaded(f"requests with {self.pixels.bytes} bytes of pictures are waiting", 2.0)
            self.pixels.hold(job.pictures)
            running = self._running(job)
            self._inbox.append(running)
            self._changed.notify()
        if self.offload is not None:
            self.offload.store.read_ahead(running.sequence.keys.keys)

    def cancel(self, job: Job) -> None:
        """Its reader has gone: end it at the next step."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def do(self, errand: Callable[[], None]) -> None:
        """Run something in the engine's thread between two steps; here and now once that has ended."""
        with self._changed:
            if not self._ended:
                self._errands.append(errand)
                self._changed.notify()
                return
        with self._afterwards:
            errand()

    def ask(self, errand: Callable[[], Answer]) -> Answer:
        """As `do`, and wait for what it gives; its exception is raised here. Without a thread it is run at once."""
        if self._thread is None:
            return errand()
        future: Future[Answer] = Future()

        def run() -> None:
            try:
                future.set_result(errand())
            except Exception as error:
                future.set_exception(error)

        self.do(run)
        return future.result()

    def flush(self) -> None:
        """Forget all cached prefixes, those of the tier too. Returns when it is done."""
        self.ask(self._forget)

    def _forget(self) -> None:
        self.cache.clear()
        self.runner.forget()
        if self.offload is not None:
            self.offload.store.clear()

    def keys(self, ids: Iterable[int], salt: tuple[bytes, ...] = (), pictures: tuple[Picture, ...] = ()) -> SpanKeys:
        """The keys under which tokens are cached. Weights that were changed since they were loaded are known to this
        process alone, so nobody else may find what they computed."""
        version = b"%d" % self.weight_version + (self._process if self.weight_version else b"")
        keys = SpanKeys(self.settings.hash_block, (version, *salt), pictures)
        keys.push(ids)
        return keys

    def _offload(self, tier: Tier) -> Offload:
        if not isinstance(self.runner.arena, Arena):
            raise ValueError("tier: this model keeps nothing that could be evicted; allowed: None")
        offload = Offload(tier, self.cache, self.runner.layout, ArenaBytes(self.runner.arena))

        def restore(sequence: Sequence) -> None:
            offload.restore(sequence.keys.keys, len(sequence.ids), len(self.scheduler.running))

        self.scheduler.before_lookup = self._moving.timed(restore)
        self.cache.leaving = self._moving.timed(offload.leaving)
        return offload

    @property
    def waiting(self) -> int:
        return len(self._inbox) + len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def accepting(self) -> bool:
        """Whether jobs are taken."""
        return not (self._draining or self._stopped)

    @property
    def alive(self) -> bool:
        """False once the thread has ended, in peace or not."""
        return not self._stopped and (self._thread is None or self._thread.is_alive())

    @property
    def idle(self) -> bool:
        return not (self._inbox or self._errands or self._jobs or self.checks.pending)

    def _check(self, job: Job) -> None:
        if not job.prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        outside = [token for token in job.prompt if not 0 <= token < self.runner.vocab_size]
        if outside:
            raise ValueError(f"the prompt holds id {outside[0]}; ids are 0 to {self.runner.vocab_size - 1}")
        if len(job.prompt) >= self.context:
            raise ValueError(f"the prompt has {len(job.prompt)} tokens; the context of {self.context} leaves no answer")
        check_pads(job.prompt, job.pictures, self.runner.media_pad)

    def _running(self, job: Job) -> _Running:
        now = time.monotonic()
        salt = (*job.salt, job.id.encode()) if job.prompt_logprobs else job.salt
        keys = self.keys(job.prompt, salt, job.pictures)
        sequence = Sequence(job.id, list(job.prompt), len(job.prompt), keys, job.priority, now, pictures=job.pictures)
        counts = TokenCounts.of(job.prompt, self.runner.vocab_size) if job.params.counts_tokens else None
        limit = min(job.params.max_tokens, self.context - len(job.prompt))
        return _Running(job, sequence, new_generator(job.params.seed), counts, now, limit)

    # ---------------------------------------------------------------- the thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more jobs and wait until all have ended, or end them after `seconds`. Whether they all finished."""
        with self._changed:
            self._draining = True
            self.checks.abandon()
            finished = self._changed.wait_for(lambda: self.idle, seconds)
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        with self._afterwards:
            if self.offload is not None:
                self.offload.close(keep=not self.weight_version)  # else nobody could ask for it
        return finished

    def _loop(self) -> None:
        try:
            self._serve()
        finally:
            with self._changed:
                self._ended = True  # from here on nobody adds an errand
            with self._afterwards:
                self._run_errands()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self.idle and not self._stopped:
                    self._changed.notify_all()
                    self._changed.wait()
                if self._stopped:
                    break
            try:
                self.step()
            except Exception:  # a fault of the engine's own: nobody must wait for an answer that cannot come
                log.exception("the engine stopped")
                self._end_all("error", "the engine stopped")
                raise
        self._end_all("cancelled")

    def _end_all(self, reason: str, error: str | None = None) -> None:
        with self._changed:
            self._stopped = True
            left = [*self._inbox, *self._jobs.values()]
            self._inbox.clear()
        for running in left:
            self._finish(running, reason, error)
        self.after_step()

    def step(self) -> None:
        """One step for all jobs."""
        began, cpu = time.perf_counter(), time.thread_time()
        self._moving.reset()
        self._run_errands()
        self._welcome()
        self._dismiss()
        work = self.scheduler.plan()
        for piece in work:
            running = self._jobs[piece.sequence.id]
            running.admitted = running.admitted or time.monotonic()
        if self.speculation is not None:
            work = self.speculation.extend(work, self._wishes(), self.scheduler)
        decided, decided_cpu = time.perf_counter(), time.thread_time()
        scored = frozenset(name for name, running in self._jobs.items() if running.job.prompt_logprobs)
        results = self._read(work, scored)
        read, read_cpu = time.perf_counter(), time.thread_time()
        for piece in work:
            result = results.get(piece.sequence.id)
            if isinstance(result, Exception):
                log.warning("%s failed: %s", piece.sequence.id, result)
                self._finish(self._jobs[piece.sequence.id], "error", str(result))
            elif not piece.draft:
                self.scheduler.commit(piece)
        committed, committed_cpu = time.perf_counter(), time.thread_time()
        moving, moving_cpu = self._moving.seconds, self._moving.cpu
        self._answer(work, results)
        if self.speculation is not None:
            self.speculation.stepped()
        self.after_step()
        answered = time.perf_counter()
        self.checks.step()
        self.counters.steps += 1
        deciding = decided - began + committed - read - moving
        deciding_cpu = decided_cpu - cpu + committed_cpu - read_cpu - moving_cpu
        self.on_step(StepSeconds(deciding, deciding_cpu, moving_cpu, read - decided, answered - committed))

    def _read(self, work: list[Work], scored: frozenset[str]) -> dict[str, Tensor | Exception]:
        try:
            return self.runner.read(work, scored)
        except Exception as error:  # nobody knows whose fault it was
            return {piece.sequence.id: error for piece in work}

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _welcome(self) -> None:
        while self._inbox:
            running = self._inbox.popleft()
            self._jobs[running.job.id] = running
            self.scheduler.add(running.sequence)
            self.counters.prompt_tokens += len(running.job.prompt)

    def _dismiss(self) -> None:
        now = time.monotonic()
        for running in list(self._jobs.values()):
            allowed = running.job.seconds
            if running.job.cancelled:
                self._finish(running, "cancelled")
            elif allowed is not None and now - running.submitted > allowed:
                self._finish(running, "timeout", f"the request took more than its {allowed:g} seconds")

    def _wishes(self) -> dict[str, Wish]:
        """For whom a draft may be tried: who has begun to answer."""
        wishes = {}
        for name, running in self._jobs.items():
            job, said = running.job, len(running.sequence.said)
            if said and job.speculate and not job.prompt_logprobs:
                wishes[name] = Wish(running.sequence, running.limit - said - 1, job.params, running.generator)
        return wishes

    def _answer(self, work: list[Work], results: dict[str, Tensor | Exception]) -> None:
        """Look at what the model said after each piece. Tokens of those with nothing left to read are sampled together,
        behind the others, whose drafts are looked at one by one."""
        due: list[tuple[_Running, Row]] = []
        for piece in work:
            running, logits = self._jobs.get(piece.sequence.id), results.get(piece.sequence.id)
            if running is not None and isinstance(logits, Tensor) and piece.sequence.status is Status.RUNNING:
                with self._own_fault(running):
                    row = self._use(running, piece, logits)
                    due += [] if row is None else [(running, row)]
        for (running, _), found in zip(due, sample_rows([row for _, row in due], self.forbidden), strict=True):
            with self._own_fault(running):
                if isinstance(found, ValueError):
                    raise found
                self._end(running, self._say(running, found))

    @contextlib.contextmanager
    def _own_fault(self, running: _Running) -> Iterator[None]:
        """What goes wrong here ends this job alone."""
        try:
            yield
        except Exception as error:
            log.warning("%s failed: %s", running.job.id, error)
            self._finish(running, "error", str(error))

    def _use(self, running: _Running, piece: Work, logits: Tensor) -> Row | None:
        """The scores of a prompt, the tokens of a draft; or what the next token is to be drawn from."""
        job = running.job
        if job.prompt_logprobs and len(running.scored) < len(job.prompt) - 1:
            running.scored += self._score(running, piece.start, logits)
        if piece.draft:
            self._verify(running, piece, logits.cpu())
        elif piece.last:
            self.checks.keep(running.sequence, logits[-1])
            return self._row(running, logits[-1])
        return None

    @staticmethod
    def _row(running: _Running, logits: Float[Tensor, " vocab"]) -> Row:
        job = running.job
        allowed = None if job.constraint is None else job.constraint.allowed()
        return Row(logits, job.params, running.generator, running.counts, allowed, job.top_logprobs)

    def _score(self, running: _Running, start: int, logits: Float[Tensor, "rows vocab"]) -> list[Token]:
        """What the model gave the prompt's tokens start + 1, ...; plain softmax; alternatives are sayable."""
        following = running.job.prompt[start + 1 : start + 1 + len(logits)]
        logp = logits[: len(following)].cpu().double().log_softmax(-1)
        wanted, sayable = running.job.top_logprobs, logp.index_fill(1, self.forbidden, -torch.inf)
        return [Token(t, float(row[t]), best(said, wanted)) for t, row, said in zip(following, logp, sayable)]

    def _verify(self, running: _Running, piece: Work, logits: Float[Tensor, "rows vocab"]) -> None:
        """Say tokens as long as they are those of the draft, and one more; keep of the piece what was said before."""
        assert self.speculation is not None
        sequence, reason, read = running.sequence, None, 0
        guesses = self.speculation.guesses[sequence.id]
        for row, guess in zip(logits, [*guesses, None], strict=True):
            reason, read = self._say(running, self._settle(self._row(running, row), guess)), read + 1
            if reason is not None or guess is None or sequence.ids[-1] != guess.id:
                break
        while sequence.computed < piece.start + read:  # in parts: at a boundary the state may be wanted
            stop = min(piece.start + read, self.scheduler.next_stop(sequence))
            self.runner.keep(sequence, stop - sequence.computed)
            self.scheduler.commit(Work(sequence, sequence.computed, stop - sequence.computed))
        self.speculation.verified(piece, read - 1)
        self._end(running, reason)

    def _settle(self, row: Row, guess: Guess | None) -> Sampled:
        """One token, whatever was guessed."""
        if guess is None or guess.q is None:
            (found,) = sample_rows([row], self.forbidden)
            if isinstance(found, ValueError):
                raise found
            return found
        if bool(row.logits.isnan().any()):
            raise ValueError("a logit is NaN: the weights or the computation are broken")
        z = row.logits.index_fill(0, self.forbidden, -torch.inf)
        z = z if row.allowed is None else z.masked_fill(~row.allowed, -torch.inf)
        token, logprob = settle(z, guess, row.params, row.generator, row.counts)
        logp = tempered(adjust(z, row.params, row.counts), row.params.temperature)
        return Sampled(token, logprob, best(logp, row.top))

    def _end(self, running: _Running, reason: str | None) -> None:
        if reason is not None:
            self._finish(running, reason)

    def _say(self, running: _Running, found: Sampled) -> str | None:
        """One token more; why it is the last, if it is."""
        job, said = running.job, Token(found.token, found.logprob, found.top)
        self._record(running, said)
        enough = job.reader.push(said)
        ends = said.id in self.ends and not job.ignore_ends
        if enough or ends or said.id in job.params.stop_ids:
            return "stop"
        return "length" if len(running.sequence.said) >= running.limit else None

    def _record(self, running: _Running, said: Token) -> None:
        running.sequence.say(said.id)
        if running.counts is not None:
            running.counts.add(said.id)
        if running.job.constraint is not None:
            running.job.constraint.advance(said.id)
        if running.first_token is None:
            running.first_token = time.monotonic()
        self.counters.said_tokens += 1

    def _finish(self, running: _Running, reason: str, error: str | None = None) -> None:
        """End a job: its memory is free, its reader told."""
        sequence, now = running.sequence, time.monotonic()
        if running.job.id in self._jobs:
            self.scheduler.finish(sequence)
            self.checks.queue(sequence)
            del self._jobs[running.job.id]
        self.pixels.release(running.job.pictures)
        outcome = Outcome(
            reason,
            error,
            sequence.prompt_tokens,
            sequence.cached_tokens or 0,
            len(sequence.said),
            (running.admitted or now) - running.submitted,
            None if running.first_token is None else running.first_token - running.submitted,
            now - running.submitted,
            None if sequence.match is None else f"{sequence.match.limit} at {sequence.match.latent_tokens}",
            tuple(running.scored),
        )
        self.counters.cached_tokens += outcome.cached_tokens
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        try:
            self.on_finish(running.job, outcome)
            running.job.reader.finish(outcome)
        except Exception:
            log.exception("the reader of %s failed at its end", running.job.id)
