"""Rollouts in actors of Ray: each holds a model and an engine of its own, and the run's process deals turns to them.

    begin      the turn goes to the worker that had the sample's last one, or to that with the fewest turns
    step       every worker with turns is asked for a few steps of its engine; what it said goes to the turns
    pause      turns are ended where they are: what was said until then is kept
    renew      before the next turn the weights are put into Ray's store once, and every worker reads them there
    lost       a worker that died leaves its turns to the others, who go on behind the last token that has come

Random numbers are a function of the sample and its place, so the same samples come as from the engine in this process,
up to the rounding of other batches; turns that changed hands go on with other ones. What a worker answers bears the
number of its weights, and another number than asked for ends the run. Each worker keeps prefixes of samples that wait
(idle_pool.py), which is why a sample comes back to where it was.

Source: report 5.3 for what is done, Ray's actors for how; both sides of it are ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanok3.config import K3Config
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.posttrain.idle_pool import IdlePool
from nanok3.posttrain.rl_settings import EngineSettings, MopdSettings, RLSettings
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.speaker import counts, end_ids, forbidden_ids, held, make_engine
from nanok3.posttrain.turn import Turn
from nanok3.quant.qat import QAT
from nanok3.serve.engine import Job, Outcome, Token
from nanok3.serve.sampler import SamplingParams

ALLOWED = "ray:N, or ray:N@ADDRESS of a cluster (auto for the one that runs here)"
INSTALL = "pip install 'nanok3[ray]'"
STEPS = 8
"""Steps of its engine that a worker makes when it is asked."""
SECONDS = 300.0
"""Longest wait for a cluster to place the workers."""


# ---------------------------------------------------------------------- one worker


@dataclass(frozen=True)
class Plan:
    """What all workers of a run have in common."""

    cfg: K3Config
    compute_dtype: torch.dtype | None
    dtype: torch.dtype
    qat: str
    device: str
    ends: frozenset[int]
    forbidden: tuple[int, ...]
    in_flight: int
    engine: EngineSettings


class Asked(NamedTuple):
    """A turn on its way to a worker."""

    turn: int
    sample: int
    ids: list[int]
    params: SamplingParams


@dataclass
class Order:
    """What a worker is told before its steps."""

    version: int
    begun: list[Asked] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Turns that have enough."""
    resting: list[tuple[int, list[int]]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    """Samples that are over."""


class Said(NamedTuple):
    """What came of a turn in a few steps. `reason` is None while it goes on."""

    turn: int
    tokens: list[Token]
    reason: str | None
    error: str | None


class Report(NamedTuple):
    """A worker's answer."""

    version: int
    said: list[Said]
    load: tuple[int, int, float]
    counts: dict[str, float]


class _Listener:
    """The engine's reader of one turn: keeps what comes until it is fetched."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.outcome: Outcome | None = None

    def push(self, token: Token) -> bool:
        self.tokens.append(token)
        return False

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Player:
    """A model and an engine. Made inside an actor, or in this process by tests."""

    def __init__(self, plan: Plan) -> None:
        self.model = K3(plan.cfg).to(plan.device, plan.dtype).eval()
        self.model.compute_dtype = plan.compute_dtype
        QAT(self.model, plan.qat)  # weights come projected; this rounds the experts' inputs where the run does
        self.engine = make_engine(self.model, set(plan.ends), list(plan.forbidden), plan.in_flight, plan.engine)
        self.pool = IdlePool(self.engine)
        self._turns: dict[int, tuple[Job, _Listener]] = {}

    def context(self) -> int:
        return self.engine.context

    def reload(self, weights: dict[str, Tensor], version: int) -> int:
        """New weights; all that was computed with others is forgotten, turns too."""
        for job, _ in self._turns.values():
            self.engine.cancel(job)
        while not self.engine.idle:
            self.engine.step()
        self._turns.clear()
        self.model.load_state_dict(weights)
        self.engine.weight_version = version
        self.engine.flush()
        self.pool.clear()
        return version

    def work(self, order: Order) -> Report:
        """Do what was ordered and make a few steps; ends early when nothing is left to say."""
        if order.version == self.engine.weight_version:
            self._follow(order)
            for _ in range(STEPS):
                if self.engine.idle:
                    break
                self.engine.step()
        return Report(self.engine.weight_version, self._said(), self._load(), counts(self.engine, self.pool))

    def _follow(self, order: Order) -> None:
        for turn in order.ended:
            if turn in self._turns:
                self.engine.cancel(self._turns.pop(turn)[0])
        for sample, ids in order.resting:
            self.pool.want(sample, ids)
        for sample in order.forgotten:
            self.pool.forget(sample)
        for asked in order.begun:
            listener = _Listener()
            job = Job(asked.ids, asked.params, listener)
            self._turns[asked.turn] = job, listener
            self.pool.want(asked.sample, asked.ids)
            self.engine.submit(job)

    def _said(self) -> list[Said]:
        found = []
        for turn, (_, listener) in list(self._turns.items()):
            tokens, listener.tokens = listener.tokens, []
            outcome = listener.outcome
            if outcome is not None:
                del self._turns[turn]
                found.append(Said(turn, tokens, outcome.finish_reason, outcome.error))
            elif tokens:
                found.append(Said(turn, tokens, None, None))
        return found

    def _load(self) -> tuple[int, int, float]:
        return self.engine.running, self.engine.waiting, held(self.engine)


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class RayWorkers:
    """The actors of a run, as a flag names them. address: of the cluster; None begins one on this machine."""

    count: int
    address: str | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"workers: {self.count} actors; allowed: at least 1")

    @classmethod
    def read(cls, text: str) -> RayWorkers:
        number, at, address = text.removeprefix("ray:").partition("@")
        if not (number.isascii() and number.isdigit() and int(number)) or (at and not address):
            raise ValueError(f"workers: {text!r}; allowed: {ALLOWED}")
        return cls(int(number), address or None)

    def check(self, settings: RLSettings | MopdSettings) -> None:
        """ImportError without Ray, ValueError for what cannot be asked of an actor."""
        if settings.learner.replay:
            raise ValueError("learner.replay is True; allowed with workers: False, workers do not tell their routes")
        _ray()

    def speaker(self, model: K3, tokenizer: Tokenizer, settings: RLSettings | MopdSettings, run: Path) -> RaySpeaker:
        self.check(settings)
        plan = Plan(
            model.cfg,
            model.compute_dtype,
            model.lm_head.weight.dtype,
            settings.learner.qat,
            model.lm_head.weight.device.type,
            frozenset(end_ids(tokenizer)),
            tuple(forbidden_ids(model, tokenizer)),
            settings.rollout.in_flight,
            settings.engine,
        )
        return RaySpeaker(self, model, plan)


def _ray() -> Any:
    """Ray, or ImportError with the line that installs it."""
    if find_spec("ray") is None:
        raise ImportError(f"workers of Ray need ray, which is not installed: {INSTALL}")
    import ray

    return ray


@dataclass(eq=False)
class _Worker:
    """An actor, what it is to be told next, and the answer that is on its way."""

    actor: Any
    name: str
    order: Order
    turns: set[int] = field(default_factory=set)
    answer: Any = None
    load: tuple[int, int, float] = (0, 0, 0.0)
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Begun:
    """A turn at work."""

    turn: Turn
    params: SamplingParams
    worker: _Worker
    at: int
    """Tokens of the sample when it was handed over."""


class RaySpeaker:
    """Says turns through actors, which are made now. `close` ends them, and the cluster if it was begun here."""

    def __init__(self, workers: RayWorkers, model: K3, plan: Plan) -> None:
        self.ray, self.model = _ray(), model
        self.version = self.said_tokens = 0
        self._pushed: int | None = None
        self._number = 0
        self._at_work: dict[int, _Begun] = {}
        self._home: dict[int, _Worker] = {}
        """Of samples that are not over, by their id."""
        self._begun_here = not self.ray.is_initialized()
        if self._begun_here:
            self._join(workers)
        needs = {"num_cpus": 1, "num_gpus": int(plan.device == "cuda")}
        actor = self.ray.remote(Player).options(scheduling_strategy="SPREAD", **needs)
        self.workers = [_Worker(actor.remote(plan), f"worker {i}", Order(0)) for i in range(workers.count)]
        try:
            found = self.ray.get([worker.actor.context.remote() for worker in self.workers], timeout=SECONDS)
        except self.ray.exceptions.GetTimeoutError:
            self.close()
            raise ValueError(f"workers: Ray has found no place for {workers.count} of one CPU each") from None
        self.context = min(found)

    def _join(self, workers: RayWorkers) -> None:
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        if workers.address is None:
            self.ray.init(address="local", num_cpus=workers.count, **quiet)
            return
        try:
            self.ray.init(address=workers.address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray has many, none of them for a wrong address alone
            raise ValueError(f"workers: no Ray at {workers.address!r} ({error}); allowed: {ALLOWED}") from None

    def close(self) -> None:
        """The actors end."""
        for worker in self.workers:
            self.ray.kill(worker.actor)
        self.workers = []
        if self._begun_here:
            self.ray.shutdown()

    # ---------------------------------------------------------------- turns

    def begin(self, turn: Turn, params: SamplingParams) -> None:
        if self._pushed != self.version:
            self._push()
        worker = self._home.get(id(turn.sample)) or self._least_busy()
        self._hand(turn, params, worker)

    def _least_busy(self) -> _Worker:
        return min(self.workers, key=lambda each: len(each.turns))

    def _hand(self, turn: Turn, params: SamplingParams, worker: _Worker) -> None:
        self._number += 1
        self._home[id(turn.sample)] = worker
        self._at_work[self._number] = _Begun(turn, params, worker, len(turn.sample.ids))
        worker.turns.add(self._number)
        worker.order.begun.append(Asked(self._number, id(turn.sample), list(turn.sample.ids), params))

    def _push(self) -> None:
        """The weights as they are now, which are those that the rollouts are to be sampled from."""
        weights = self.ray.put({name: w.detach().cpu() for name, w in self.model.state_dict().items()})
        for worker in self.workers:
            worker.order = Order(self.version)
            worker.answer = worker.actor.reload.remote(weights, self.version)
        for worker in list(self.workers):
            self._fetch(worker)
        self._pushed = self.version

    def step(self) -> None:
        """Ask all who have turns, and hand out what the first of them answers; others who have answered, too."""
        for worker in self.workers:
            if worker.turns and worker.answer is None:
                order, worker.order = worker.order, Order(self.version)
                worker.answer = worker.actor.work.remote(order)
        asked = [worker for worker in self.workers if worker.answer is not None]
        if not asked:
            return
        ready, _ = self.ray.wait([worker.answer for worker in asked], num_returns=1)
        more, _ = self.ray.wait([worker.answer for worker in asked], num_returns=len(asked), timeout=0)
        for worker in asked:
            if worker.answer in ready or worker.answer in more:
                self._take(worker)

    def _fetch(self, worker: _Worker) -> Any:
        """What it answers; None if it has died."""
        answer, worker.answer = worker.answer, None
        try:
            return self.ray.get(answer)
        except self.ray.exceptions.RayActorError as error:
            self._lost(worker, error)
            return None

    def _take(self, worker: _Worker) -> None:
        report: Report | None = self._fetch(worker)
        if report is None:
            return
        if report.version != self.version:
            raise RuntimeError(f"{worker.name} has weights {report.version}, not {self.version}")
        worker.load, worker.counts = report.load, report.counts
        for said in report.said:
            if said.turn in self._at_work:  # else it had enough meanwhile
                self._hear(said)

    def _hear(self, said: Said) -> None:
        begun = self._at_work[said.turn]
        for token in said.tokens:
            self.said_tokens += 1
            if begun.turn.push(token):
                begun.worker.order.ended.append(said.turn)
                self._end(said.turn, "stop")
                return
        if said.reason is not None:
            self._end(said.turn, said.reason, said.error)

    def _end(self, number: int, reason: str, error: str | None = None) -> None:
        begun = self._at_work.pop(number)
        begun.worker.turns.discard(number)
        said = len(begun.turn.sample.ids) - begun.turn.sample.begins
        begun.turn.finish(Outcome(reason, error, 0, 0, said, 0.0, None, 0.0, None))

    def _lost(self, worker: _Worker, error: Exception) -> None:
        """Its turns go on elsewhere, from where they are."""
        self.workers.remove(worker)
        if not self.workers:
            raise RuntimeError(f"{worker.name} was the last one, and has ended: {error}")
        self._home = {sample: home for sample, home in self._home.items() if home is not worker}
        for number in sorted(worker.turns):
            begun = self._at_work.pop(number)
            params = _go_on(begun.params, len(begun.turn.sample.ids) - begun.at)
            self._hand(begun.turn, params, self._least_busy())

    def pause(self) -> None:
        """What is on its way is heard; then all turns end where they are."""
        for worker in list(self.workers):
            if worker.answer is not None:
                self._take(worker)
        for number, begun in list(self._at_work.items()):
            begun.worker.order.ended.append(number)
            begun.worker.order.begun = [asked for asked in begun.worker.order.begun if asked.turn != number]
            self._end(number, "cancelled")

    def renew(self, version: int) -> None:
        self.version, self._pushed = version, None

    # ---------------------------------------------------------------- what is known of them

    def load(self) -> tuple[int, int, float]:
        """Of all workers together, as they last said; of the memory that of the fullest."""
        queued, use = 0, 0.0
        for worker in self.workers:
            queued, use = queued + worker.load[1], max(use, worker.load[2])
        return max(0, len(self._at_work) - queued), queued, use

    def rest(self, sample: Sample) -> None:
        if id(sample) in self._home:
            self._home[id(sample)].order.resting.append((id(sample), list(sample.ids)))

    def forget(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if (home := self._home.pop(id(sample), None)) is not None:
                home.order.forgotten.append(id(sample))

    def counts(self) -> dict[str, float]:
        """Sums over the workers that are left."""
        names = dict.fromkeys(name for worker in self.workers for name in worker.counts)
        return {name: sum(worker.counts.get(name, 0.0) for worker in self.workers) for name in names}


def _go_on(params: SamplingParams, said: int) -> SamplingParams:
    """The same wishes behind so many tokens, with random numbers of its own."""
    name = f"{params.seed} {said}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
    return replace(params, max_tokens=params.max_tokens - said, seed=seed)
