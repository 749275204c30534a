"""Who says the turns of a rollout: the engine that serves, here without a thread of its own.

A speaker takes turns, works a step at a time, can be told to stop where it is, and forgets what it has cached when the
weights change. It is told of samples that wait, whose prefixes are wanted again (idle_pool.py), and of those that are
over. Others have the same methods: servers behind HTTP (http_worker.py), actors of Ray (ray_worker.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.posttrain.idle_pool import IdlePool
from nanok3.posttrain.replay import RecordingRunner
from nanok3.posttrain.rl_settings import EngineSettings
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.turn import Turn
from nanok3.serve.engine import Engine, Job, Settings
from nanok3.serve.generate import unnamed_ids
from nanok3.serve.offload import Tier
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Limits


def forbidden_ids(model: K3, tokenizer: Tokenizer) -> list[int]:
    """Ids that are never said: sampler and trainer leave out the same ones."""
    pad = [] if model.cfg.media_placeholder_token_id is None else [model.cfg.media_placeholder_token_id]
    return sorted({*unnamed_ids(tokenizer, model.cfg.vocab_size), *pad})


def end_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids that end a turn."""
    return {tokenizer.eos_id, tokenizer.end_of_msg_id}


def make_engine(
    model: K3,
    ends: set[int],
    forbidden: list[int],
    in_flight: int,
    settings: EngineSettings | None = None,
    record_routes: bool = False,
) -> Engine:
    """An engine for rollouts with `model`, which may be trained between its steps. With recorded routes every sample is
    read from its beginning, so there are no prefixes to keep."""
    settings = settings or EngineSettings()
    memory, pool = settings.memory_mib << 20, settings.pool_mib << 20
    runner = RecordingRunner(model, memory) if record_routes else Runner(model, memory)
    keeps = bool(pool and not record_routes and runner.layout.groups)
    tier = Tier("rollouts", memory=pool) if keeps else None
    limits = Limits(budget=2048, max_sequences=in_flight)
    known = Settings(hash_block=16, caching=not record_routes, limits=limits, max_waiting=2**31, tier=tier)
    return Engine(runner, ends, forbidden, known)


def open_engine(
    model: K3,
    tokenizer: Tokenizer,
    in_flight: int,
    settings: EngineSettings | None = None,
    record_routes: bool = False,
) -> Engine:
    """`make_engine` with the tokenizer's ends, and without the ids that have no name."""
    return make_engine(model, end_ids(tokenizer), forbidden_ids(model, tokenizer), in_flight, settings, record_routes)


def held(engine: Engine) -> float:
    """The share of an engine's pages that its running sequences hold; shared ones count more than once."""
    return sum(len(one.pages) + len(one.state) for one in engine.scheduler.running) / engine.pool.pages


def counts(engine: Engine, pool: IdlePool) -> dict[str, float]:
    """What an engine has done since it began, for the metrics of a run."""
    said = engine.counters
    read = {"prompt_tokens": said.prompt_tokens, "cached_tokens": said.cached_tokens}
    return {**read, "preemptions": engine.scheduler.preemptions, **pool.counts()}


@runtime_checkable
class Speaker(Protocol):
    """Who says the turns: an engine in this process, or whatever offers the same."""

    context: int

    @property
    def said_tokens(self) -> int:
        """So far."""

    def begin(self, turn: Turn, params: SamplingParams) -> None:
        """Say a turn; its reader is told."""

    def step(self) -> None:
        """Work; tokens come to their readers meanwhile."""

    def pause(self) -> None:
        """End all turns where they are."""

    def renew(self, version: int) -> None:
        """The weights have changed: nothing that was computed counts any more."""

    def load(self) -> tuple[int, int, float]:
        """Turns that run, turns that wait, share of the memory that those that run hold."""

    def rest(self, sample: Sample) -> None:
        """It says nothing for now, and goes on later: what was computed of it is wanted again."""

    def forget(self, samples: Iterable[Sample]) -> None:
        """They are over."""

    def counts(self) -> dict[str, float]:
        """What was done since the beginning, by name; a name that ends in `_bytes` is what is kept now."""

    def close(self) -> None:
        """Give back what is held elsewhere."""


class EngineSpeaker:
    """Our engine, without a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.context, self.pool = engine, engine.context, IdlePool(engine)
        self._at_work: list[tuple[Job, Turn]] = []

    @property
    def said_tokens(self) -> int:
        """So far."""
        return self.engine.counters.said_tokens

    def begin(self, turn: Turn, params: SamplingParams) -> None:
        job = Job(list(turn.sample.ids), params, turn)
        self._at_work.append((job, turn))
        self.rest(turn.sample)  # also while it runs: its pages may be taken
        self.engine.submit(job)

    def step(self) -> None:
        self.engine.step()
        if isinstance(self.engine.runner, RecordingRunner):
            for job, turn in self._at_work:
                if turn.outcome is not None:
                    turn.sample.routes = self.engine.runner.take(job.id)
        self._at_work = [(job, turn) for job, turn in self._at_work if turn.outcome is None]

    def pause(self) -> None:
        for job, _ in self._at_work:
            self.engine.cancel(job)
        while not self.engine.idle:
            self.step()

    def renew(self, version: int) -> None:
        self.engine.weight_version = version
        self.engine.flush()
        self.pool.clear()

    def load(self) -> tuple[int, int, float]:
        return self.engine.running, self.engine.waiting, held(self.engine)

    def rest(self, sample: Sample) -> None:
        self.pool.want(id(sample), sample.ids)

    def forget(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.pool.forget(id(sample))

    def counts(self) -> dict[str, float]:
        return counts(self.engine, self.pool)

    def close(self) -> None:
        """Its memory is this process's own."""
