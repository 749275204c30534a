"""Who says the turns of a rollout: the engine that serves, here without a thread of its own.

A speaker takes turns, works a step at a time, can be told to stop where it is, and forgets what it has cached when the
weights change. Another one, behind HTTP (http_worker.py), has the same methods.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.posttrain.replay import RecordingRunner
from nanok3.posttrain.turn import Turn
from nanok3.serve.engine import Engine, Job, Settings
from nanok3.serve.generate import unnamed_ids
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Limits

MEMORY = 256 << 20
"""Bytes for states and latents of samples at work."""


def forbidden_ids(model: K3, tokenizer: Tokenizer) -> list[int]:
    """Ids that are never said: sampler and trainer leave out the same ones."""
    pad = [] if model.cfg.media_placeholder_token_id is None else [model.cfg.media_placeholder_token_id]
    return sorted({*unnamed_ids(tokenizer, model.cfg.vocab_size), *pad})


def open_engine(
    model: K3, tokenizer: Tokenizer, in_flight: int, memory: int = MEMORY, record_routes: bool = False
) -> Engine:
    """An engine for rollouts with `model`, which may be trained between its steps."""
    limits = Limits(budget=2048, max_sequences=in_flight)
    settings = Settings(hash_block=16, caching=not record_routes, limits=limits, max_waiting=2**31)
    ends = {tokenizer.eos_id, tokenizer.end_of_msg_id}
    runner = RecordingRunner(model, memory) if record_routes else Runner(model, memory)
    return Engine(runner, ends, forbidden_ids(model, tokenizer), settings)


@runtime_checkable
class Speaker(Protocol):
    """Who says the turns: an engine in this process, or whatever offers the same."""

    context: int

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


class EngineSpeaker:
    """Our engine, without a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.context = engine, engine.context
        self._at_work: list[tuple[Job, Turn]] = []

    @property
    def said_tokens(self) -> int:
        """So far."""
        return self.engine.counters.said_tokens

    def begin(self, turn: Turn, params: SamplingParams) -> None:
        job = Job(list(turn.sample.ids), params, turn)
        self._at_work.append((job, turn))
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

    def load(self) -> tuple[int, int, float]:
        running = self.engine.scheduler.running
        held = sum(len(sequence.pages) + len(sequence.state) for sequence in running)
        return len(running), self.engine.waiting, held / self.engine.pool.pages
