"""The engine: jobs come in from any thread, one thread reads and speaks for all of them, step by step.

    inbox -> waiting -> [ plan -> read -> say: sample, tell readers ] -> finished
                          one step, for all running sequences

    scheduler.py    who reads what, with which pages        saying.py    from logits to what readers are told
    runner.py       reads it                                job.py       what callers give and get

A job brings its own `Reader`, which takes each token as it is sampled (a parser of the answer, in a server) and says
when nothing more is needed; and, for structured output, a `Constraint`, which says what may come next. Both belong to
one job, and so does what goes wrong: an exception in them, a NaN among the logits, a deadline or a client that has gone
end that job alone, and its pages are free at the next step. Random numbers belong to the job too, so an answer does not
depend on who else is served.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nanok3.serve.arena import Arena
from nanok3.serve.cache_check import CacheChecks
from nanok3.serve.job import Constraint, Counters, Job, Outcome, Overloaded, Reader, Running, Stopping, Token
from nanok3.serve.offload import ArenaBytes, Offload, Tier
from nanok3.serve.page_pool import PagePool
from nanok3.serve.pictures import Pixels, check_pads
from nanok3.serve.prefix_cache import Picture, PrefixCache, SpanKeys
from nanok3.serve.sampler import TokenCounts, new_generator
from nanok3.serve.saying import Saying
from nanok3.serve.scheduler import Limits, Reading, Scheduler, Work
from nanok3.serve.sequence import Sequence
from nanok3.serve.speculative import Speculation, Wish
from nanok3.serve.step_seconds import Phase, StepClock, StepSeconds

__all__ = [
    "Constraint",
    "Engine",
    "Job",
    "Outcome",
    "Overloaded",
    "Reader",
    "Reading",
    "Settings",
    "Stopping",
    "Token",
]

log = logging.getLogger("nanok3")
Answer = TypeVar("Answer")


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
        self.counters, self.pixels, self.speculation = Counters(), Pixels(), speculation
        layout = runner.layout
        self.pool = PagePool(runner.pages, freed)
        self.cache = PrefixCache(self.pool, self.settings.hash_block, layout.page_tokens, len(layout.groups))
        self.scheduler = Scheduler(self.cache, layout, runner.arena, self.settings.limits, self.settings.caching)
        self._clock = StepClock()
        self.offload = None if self.settings.tier is None else self._offload(self.settings.tier)
        self.checks = CacheChecks(
            runner, self.cache, self.settings.check_cache, self.settings.check_bound, self.settings.limits.budget
        )
        never = torch.tensor(sorted(forbidden), dtype=torch.int64)
        self._saying = Saying(runner, self.scheduler, self.checks, self.counters, ends, never, speculation)
        self.context = min(runner.context, self.settings.max_model_len or runner.context, self.scheduler.most_tokens)
        self.weight_version = 0
        self._process = os.urandom(16)
        self._inbox: deque[Running] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._jobs: dict[str, Running] = {}
        self._timed: dict[str, Running] = {}
        """Of the jobs, those with a deadline."""
        self._gone: deque[Job] = deque()
        """Cancelled, and not yet ended."""
        self._outcomes: deque[tuple[Job, Outcome]] = deque()
        """Of jobs that ended; their readers are to be told."""
        self._promised: set[Job] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._draining = self._stopped = self._ended = False
        self._afterwards = threading.Lock()
        """Once the thread has ended: who does its work holds this."""
        self.on_step: Callable[[StepSeconds], None] = lambda seconds: None
        self.after_step: Callable[[], None] = lambda: None
        """Told when readers have been told all that a step brings."""

    # ---------------------------------------------------------------- from any thread

    def submit(self, job: Job) -> None:
        """Queue a job. ValueError for a prompt that cannot be served, Overloaded, Stopping."""
        self._check(job)
        with self._changed:
            if self._stopped or (self._draining and job not in self._promised):
                raise Stopping("the server is shutting down")
            self._check_room(self.waiting, job.pictures)
            self.pixels.hold(job.pictures)
            running = self._running(job)
            self._inbox.append(running)
            self._changed.notify_all()
        if self.offload is not None:
            self.offload.store.read_ahead(running.sequence.keys.keys)

    def promise(self, jobs: Iterable[Job], pictures: tuple[Picture, ...]) -> None:
        """Jobs that will be submitted a little later, when their pictures were looked at: until `redeem` they count as
        waiting, a drain waits for them, and their pictures are held. Overloaded, Stopping."""
        with self._changed:
            if not self.accepting:
                raise Stopping("the server is shutting down")
            self._check_room(self.waiting + len(self._promised), pictures)
            self.pixels.hold(pictures)
            self._promised.update(jobs)

    def redeem(self, jobs: Iterable[Job], pictures: tuple[Picture, ...]) -> None:
        """They were submitted, or never will be."""
        with self._changed:
            self._promised.difference_update(jobs)
            self.pixels.release(pictures)
            self._changed.notify_all()

    def _check_room(self, waiting: int, pictures: tuple[Picture, ...]) -> None:
        if waiting >= self.settings.max_waiting:
            after = 1.0 + waiting / max(1, self.settings.limits.max_sequences)
            raise Overloaded(f"{waiting} requests are waiting", after)
        if not self.pixels.has_room(pictures, self.settings.picture_bytes):
            raise Overloaded(f"requests with {self.pixels.bytes} bytes of pictures are waiting", 2.0)

    def cancel(self, job: Job) -> None:
        """Its reader has gone: end it at the next step."""
        with self._changed:
            job.cancelled = True
            self._gone.append(job)
            self._changed.notify_all()

    def do(self, errand: Callable[[], None]) -> None:
        """Run something in the engine's thread between two steps; here and now once that has ended."""
        with self._changed:
            if not self._ended:
                self._errands.append(errand)
                self._changed.notify_all()
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

        self.scheduler.before_lookup = self._clock.moving.timed(restore)
        self.cache.leaving = self._clock.moving.timed(offload.leaving)
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

    def _running(self, job: Job) -> Running:
        now = time.monotonic()
        salt = (*job.salt, job.id.encode()) if job.prompt_logprobs else job.salt
        keys = self.keys(job.prompt, salt, job.pictures)
        sequence = Sequence(job.id, list(job.prompt), len(job.prompt), keys, job.priority, now, pictures=job.pictures)
        counts = TokenCounts.of(job.prompt, self.runner.vocab_size) if job.params.counts_tokens else None
        limit = min(job.params.max_tokens, self.context - len(job.prompt))
        deadline = math.inf if job.seconds is None else now + job.seconds
        return Running(job, sequence, new_generator(job.params.seed), counts, now, limit, deadline)

    # ---------------------------------------------------------------- the thread

    def start(self) -> None:
        self.scheduler.deciding_seconds = self._clock.deciding_cpu  # who calls `step` gets the same steps each time
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more jobs but those that were promised, and wait until all have ended, or end them after `seconds`.
        Whether they all finished."""
        with self._changed:
            self._draining = True
            self.checks.abandon()
            finished = self._changed.wait_for(lambda: self.idle and not self._promised, seconds)
            self._stopped = True
            self._changed.notify_all()
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
        self._tell_ends()
        self.after_step()

    def step(self) -> None:
        """One step for all jobs."""
        clock = self._clock
        clock.begin()
        self._run_errands()
        self._welcome()
        self._dismiss()
        clock.turn_to(Phase.ANSWERING)
        self._tell_ends()
        clock.turn_to(Phase.DECIDING)
        work = self.scheduler.plan()
        if self.speculation is not None:
            work = self.speculation.extend(work, self._wishes(), self.scheduler)
        clock.turn_to(Phase.READING)
        results = self._read(work)
        clock.turn_to(Phase.DECIDING)
        self._commit(work, results)
        clock.turn_to(Phase.ANSWERING)
        self._saying.say(work, results, self._jobs)
        if self.speculation is not None:
            self.speculation.stepped()
        clock.turn_to(Phase.DECIDING)
        self._finish_ended()
        clock.turn_to(Phase.ANSWERING)
        self._tell_ends()
        self.after_step()
        seconds = clock.end()
        self.checks.step()
        self.counters.steps += 1
        self.on_step(seconds)

    def _read(self, work: list[Work]) -> dict[str, Tensor | Exception]:
        scored = frozenset(name for name, running in self._jobs.items() if running.job.prompt_logprobs)
        try:
            return self.runner.read(work, scored)
        except Exception as error:  # nobody knows whose fault it was
            return {piece.sequence.id: error for piece in work}

    def _commit(self, work: list[Work], results: dict[str, Tensor | Exception]) -> None:
        """What was read is registered; what failed is over. Of a draft nobody knows yet how much is right."""
        failed = {name: result for name, result in results.items() if isinstance(result, Exception)}
        for name, error in failed.items():
            log.warning("%s failed: %s", name, error)
            self._finish(self._jobs[name], "error", str(error))
        self.scheduler.commit_all(
            piece for piece in work if not piece.draft and not (failed and piece.sequence.id in failed)
        )

    def _finish_ended(self) -> None:
        ended, self._saying.ended = self._saying.ended, []
        for end in ended:
            self._finish(end.running, end.reason, end.error)

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _welcome(self) -> None:
        while self._inbox:
            running = self._inbox.popleft()
            self._jobs[running.job.id] = running
            if running.job.seconds is not None:
                self._timed[running.job.id] = running
            if running.job.cancelled:
                self._gone.append(running.job)
            self.scheduler.add(running.sequence)
            self.counters.prompt_tokens += len(running.job.prompt)

    def _dismiss(self) -> None:
        """End those whose reader has gone or whose time is over."""
        now = time.monotonic()
        while self._gone:
            running = self._jobs.get(self._gone.popleft().id)
            if running is not None:
                self._finish(running, "cancelled")
        for running in [one for one in self._timed.values() if now > one.deadline]:
            self._finish(running, "timeout", f"the request took more than its {running.job.seconds:g} seconds")

    def _wishes(self) -> dict[str, Wish]:
        """For whom a draft may be tried: who has begun to answer."""
        wishes = {}
        for name, running in self._jobs.items():
            job, said = running.job, len(running.sequence.said)
            if said and job.speculate and not job.prompt_logprobs:
                wishes[name] = Wish(running.sequence, running.limit - said - 1, job.params, running.generator)
        return wishes

    def _finish(self, running: Running, reason: str, error: str | None = None) -> None:
        """End a job: its memory is free at once; its reader is told a little later in the same step."""
        sequence, now = running.sequence, time.monotonic()
        if running.job.id in self._jobs:
            self.scheduler.finish(sequence)
            if self.checks.share:
                self.checks.queue(sequence)
            del self._jobs[running.job.id]
            self._timed.pop(running.job.id, None)
        if running.job.pictures:
            self.pixels.release(running.job.pictures)
        outcome = Outcome(
            reason,
            error,
            sequence.prompt_tokens,
            sequence.cached_tokens or 0,
            len(sequence.said),
            (sequence.admitted or now) - running.submitted,
            None if running.first_token is None else running.first_token - running.submitted,
            now - running.submitted,
            None if sequence.match is None else f"{sequence.match.limit} at {sequence.match.latent_tokens}",
            tuple(running.scored),
        )
        self.counters.cached_tokens += outcome.cached_tokens
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._outcomes.append((running.job, outcome))

    def _tell_ends(self) -> None:
        while self._outcomes:
            job, outcome = self._outcomes.popleft()
            try:
                job.reader.finish(outcome)
            except Exception:
                log.exception("the reader of %s failed at its end", job.id)
