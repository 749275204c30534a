"""Training one expert: a domain, an effort, a budget, and iterations of rollouts and training steps.

    budgets    b0 of each problem with the model as it comes, once; kept in the run and in no way changed by it
    check      sampler and trainer give the same log-probabilities, or the run refuses
    iterate    collect -> reward, -1 above the budget -> minus the group's mean -> learn -> caches forgotten

The run folder is that of other runs: config.yaml, metrics.jsonl (kinds rl, eval, sample, event), budgets.json,
checkpoints with everything that is begun, report.html, and model/ at the end. A line `rl` lists the samples that were
trained on, so that after a crash one can count that none is missing and none came twice.

Sources: report 4.1.2 and K2.5 report 4.4. The metrics are those by which runs of this kind are seen to go wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nanok3.data.chat import EFFORTS, OURS, Sentences
from nanok3.data.files import write_file
from nanok3.data.packing import Batch
from nanok3.data.tokenizer import Tokenizer
from nanok3.envs.environment import Task
from nanok3.model.decoder import K3
from nanok3.posttrain.effort import Budgets, budgeted, means
from nanok3.posttrain.evaluate import Scores, evaluate, first_tasks, play, scores
from nanok3.posttrain.learner import Learned, Learner
from nanok3.posttrain.objective import group_advantages
from nanok3.posttrain.replay import replayed
from nanok3.posttrain.rl_settings import RLSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.run import Run, save_model
from nanok3.posttrain.sample import Domain, Group, Problem, Sample
from nanok3.posttrain.score import Packed
from nanok3.posttrain.speaker import EngineSpeaker, Speaker, forbidden_ids, open_engine
from nanok3.posttrain.workers import Workers
from nanok3.train.checkpoint import latest, load_checkpoint, save_checkpoint
from nanok3.train.track import Tracker

ALARM_AFTER = 3
"""Iterations in a row."""


def spent(sample: Sample, counted: str) -> int:
    """T(y)."""
    return sample.thinking if counted == "thinking" else sample.output


def rewards(group: Group, counted: str) -> list[float]:
    """Of the samples with a verdict, the override applied: before any mean is taken."""
    return [budgeted(sample.reward or 0.0, spent(sample, counted), group.limit) for sample in group.valid]


def measure_budgets(
    model: K3,
    tokenizer: Tokenizer,
    domain: Domain,
    settings: RLSettings,
    sentences: Sentences = OURS,
    name: str = "",
) -> Budgets:
    """b0 of the training problems: the mean T(y) of `model` over all efforts. Call it with the cold start, once."""
    tasks = first_tasks(domain, settings.problems, "train", 0)
    problems = [Problem(n, domain, effort, task) for n, (task, effort) in enumerate(_each(tasks))]
    rollout = replace(settings.rollout, samples=settings.budget_samples)
    speaker = EngineSpeaker(open_engine(model.eval(), tokenizer, rollout.in_flight, settings.engine))
    counts: dict[str, list[int]] = {task.id: [] for task in tasks}
    for problem, group in zip(problems, play(speaker, tokenizer, problems, rollout, sentences), strict=True):
        counts[problem.task.id] += [spent(sample, domain.counted) for sample in group.valid]
    return Budgets(means(counts), name)


def _each(tasks: Sequence[Task]) -> Iterator[tuple[Task, str]]:
    return ((task, effort) for task in tasks for effort in EFFORTS)


def since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """What counters of a speaker have grown by; names in `_bytes` are as they are."""
    return {name: value if name.endswith("_bytes") else value - before.get(name, 0) for name, value in now.items()}


class RL(Run):
    """One run; `step` is an iteration, `fit` all of them."""

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer,
        domain: Domain,
        settings: RLSettings,
        run: Path,
        budgets: Budgets,
        say: Callable[[str], None] = print,
        sentences: Sentences = OURS,
        ptx: Iterator[Batch] | None = None,
        clock: Callable[[], float] = time.monotonic,
        workers: Workers | None = None,
    ) -> None:
        self.model, self.tokenizer, self.domain, self.settings, self.run = (
            model.eval(),
            tokenizer,
            domain,
            settings,
            run,
        )
        self.budgets, self.say, self.sentences, self.clock = budgets, say, sentences, clock
        self.tasks = first_tasks(domain, settings.problems, "train", 0)
        rollout = settings.rollout
        forbidden = forbidden_ids(model, tokenizer)
        self.learner = Learner(model, settings.learner, settings.objective, forbidden, rollout.temperature, ptx)
        self.speaker: Speaker
        if workers is None:
            replay = settings.learner.replay
            self.speaker = EngineSpeaker(open_engine(model, tokenizer, rollout.in_flight, settings.engine, replay))
        else:
            self.speaker = workers.speaker(model, tokenizer, settings, run)
        self.rollouts = Rollouts(self.speaker, tokenizer, self._problem, rollout, self._limit, sentences)
        self.seconds, self.cut_off, self.checked = 0.0, 0, False
        self.track = Tracker(run)
        self.scores: list[Scores] = []

    def _problem(self, number: int) -> Problem:
        return Problem(number, self.domain, self.settings.effort.effort, self.tasks[number % len(self.tasks)])

    def _limit(self, problem: Problem) -> int:
        return self.settings.effort.limit(self.budgets.of(problem.task.id), self.progress)

    @property
    def length(self) -> RLSettings:
        return self.settings

    # ---------------------------------------------------------------- an iteration

    def step(self) -> dict[str, Any]:
        """Rollouts, and what is learned from the groups that are whole; the iteration's numbers."""
        began = self.clock()
        said, counted = self.speaker.said_tokens, self.speaker.counts()
        self.learner.set_progress(self.progress)
        with self.learner.qat.projected():
            groups = self.rollouts.collect()
        rolled = self.clock()
        said = self.speaker.said_tokens - said
        self.check(groups)
        learned, chosen = self._learn(groups)
        record = self._record(groups, learned)
        record["trained"] = [[sample.prompt, sample.number] for sample in chosen]
        record |= since(counted, self.speaker.counts())
        record |= {"rollout_seconds": rolled - began, "tokens_per_second": said / max(rolled - began, 1e-9)}
        self.rollouts.renew()
        self.rollouts.release(groups)
        self.seconds += self.clock() - began
        self._alarm(record)
        self.track.write("rl", self.iteration, seconds=self.seconds, **record)
        self._show(groups)
        return record

    def _learn(self, groups: list[Group]) -> tuple[Learned, list[Sample]]:
        samples: list[Sample] = []
        worth: dict[int, float] = {}
        for group in groups:
            valid = group.valid
            if len(valid) < 2:
                continue
            advantages = group_advantages(torch.tensor(rewards(group, self.domain.counted), dtype=torch.float64))
            samples += valid
            worth |= {id(sample): float(a) for sample, a in zip(valid, advantages)}
        version, most = self.rollouts.version, self.settings.rollout.max_versions
        marks = [sample.trained(version, most) for sample in samples]

        def advantage(row: Packed, logprob: Tensor) -> Tensor:
            return torch.tensor([worth[id(sample)] for sample in row.samples])[row.tokens.answer]

        return self.learner.learn(samples, marks, advantage, version, self._routes), samples

    def _routes(self, row: Packed) -> AbstractContextManager[None]:
        return replayed(self.model, row) if self.settings.learner.replay else nullcontext()

    def _record(self, groups: list[Group], learned: Learned) -> dict[str, Any]:
        samples = [sample for group in groups for sample in group.valid]
        earned = [reward for group in groups for reward in rewards(group, self.domain.counted)]
        n, version, found = max(len(samples), 1), self.rollouts.version, scores(samples)
        lags = [sample.lag(version) for sample in samples]
        marks = [mark for s in samples for mark in s.trained(version, self.settings.rollout.max_versions)]
        whole = [group for group in groups if len(group.valid) > 1]
        flat = sum(len(set(rewards(group, self.domain.counted))) == 1 for group in whole)
        return {
            "reward": sum(earned) / n,
            "accuracy": found.accuracy,
            "thinking": found.thinking,
            "output": found.output,
            "over_budget": sum(reward < 0 for reward in earned) / n,
            "truncated": found.truncated,
            "lag": sum(lags) / n,
            "lag_max": max(lags, default=0),
            "withheld": 1 - sum(marks) / max(len(marks), 1),
            "zero_variance": flat / max(len(whole), 1),
            "groups": len(groups),
            "void": len(groups) - len(whole),
            "infra_failed": sum(s.outcome == "infra-failed" for g in groups for s in g.samples),
            "problems": sum(sample.problems for sample in samples) / n,
            "tool_errors": sum(sample.tool_errors for sample in samples) / n,
            "paused": sum(s.outcome == "running" and bool(s.ids) for g in self.rollouts.groups for s in g.samples),
            "in_flight": self.rollouts.throttle.most,
            "tau": self.settings.effort.tau_at(self.progress),
            **learned.record(),
        }

    def _alarm(self, record: dict[str, Any]) -> None:
        """Nothing is learned from answers that are all cut off, and nothing else would say so."""
        self.cut_off = self.cut_off + 1 if record["truncated"] > self.settings.alarm else 0
        if self.cut_off == ALARM_AFTER:
            share, most = record["truncated"], self.settings.rollout.max_tokens
            message = f"{share:.0%} of answers are cut off after {most} tokens: max_tokens is too small to learn from"
            self.track.write("event", self.iteration, message=message)
            self.say(f"ALARM: {message}")

    def _show(self, groups: list[Group]) -> None:
        """A few samples with their rewards."""
        if self.iteration % 10 != 1:
            return
        for group in groups[:2]:
            for sample, reward in list(zip(group.valid, rewards(group, self.domain.counted)))[:2]:
                first = sample.places[0] if sample.places else len(sample.ids)
                texts = {"prompt": self.tokenizer.decode(sample.ids[:first]), "reward": reward}
                self.track.write("sample", self.iteration, **texts, text=self.tokenizer.decode(sample.ids[first:]))

    # ---------------------------------------------------------------- the run

    def evaluate(self) -> Scores:
        """On held-out tasks, with the effort of the run."""
        s = self.settings
        with self.learner.qat.projected():
            found = evaluate(
                self.speaker,
                self.tokenizer,
                self.domain,
                s.effort.effort,
                s.eval_count,
                s.rollout,
                sentences=self.sentences,
            )
        self.track.write("eval", self.iteration, seconds=self.seconds, **asdict(found))
        self.scores.append(found)
        self.say(f"{'held out':>13} · {found}")
        return found

    def fit(self) -> Path:
        """To the end; the folder of the final model. Ctrl-C saves and is raised again."""
        s = self.settings
        if s.eval_count and self.iteration == 0:
            self.evaluate()
        try:
            while self.progress < 1:
                self.say(self._line(self.step()))
                if s.eval_every and s.eval_count and self.iteration % s.eval_every == 0:
                    self.evaluate()
                if s.save_every and self.iteration % s.save_every == 0:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            self.say(f"interrupted after iteration {self.iteration}; saved. --resume goes on")
            raise
        if s.eval_count and not (s.eval_every and self.iteration % s.eval_every == 0):
            self.evaluate()
        if s.save_every:
            self.save()
        self.rollouts.close()
        return save_model(self.model, self.tokenizer, self.run, "rl", self.sentences)

    def _line(self, r: dict[str, Any]) -> str:
        parts = [
            f"iter {self.iteration:4d} {self.progress:4.0%}",
            f"reward {r['reward']:+.3f}",
            f"right {r['accuracy']:.2f}",
            f"think {r['thinking']:.1f}",
            f"over {r['over_budget']:.0%}",
            f"masked {r['masked']:.1%}",
            f"lag {r['lag']:.1f}",
            f"flat {r['zero_variance']:.0%}",
            f"|g| {r['grad_norm']:.2f}",
            f"{r['tokens_per_second']:.0f} tok/s",
        ]
        return " · ".join(parts)

    def save(self) -> Path:
        """Everything that is begun."""
        state = {
            "learner": self.learner.state_dict(),
            "rollouts": json.dumps(self.rollouts.state_dict()),
            "progress": {"seconds": self.seconds, "cut_off": self.cut_off, "checked": False},
            "settings": json.dumps(asdict(self.settings)),
        }
        return save_checkpoint(self.run, self.iteration, self.model, state, self.settings.keep)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote; the weights are the model's already."""
        self.learner.load_state_dict(state["learner"])
        self.rollouts.load_state_dict(json.loads(state["rollouts"]))
        self.seconds, self.cut_off = state["progress"]["seconds"], state["progress"]["cut_off"]


def train(
    model: K3,
    tokenizer: Tokenizer,
    domain: Domain,
    settings: RLSettings,
    run: Path,
    budgets: Budgets | None = None,
    say: Callable[[str], None] = print,
    resume: bool = False,
    sentences: Sentences = OURS,
    ptx: Iterator[Batch] | None = None,
    clock: Callable[[], float] = time.monotonic,
    workers: Workers | None = None,
) -> RL:
    """Train an expert from `model` and write its run folder. Without budgets they are measured with the model as it
    comes. resume: go on from the run's newest checkpoint, if it has one. workers: who plays the rollouts; this process
    if nobody."""
    found, broken = latest(run) if resume else (None, [])
    for problem in broken:
        say(f"passed over: {problem}")
    if not resume and (run / "metrics.jsonl").exists():
        raise ValueError(f"out: {run} holds a run; add --resume, or choose another folder")
    if workers is not None:
        workers.check(settings)  # before anything is measured or written
    state = None
    if found is not None:
        model, state = load_checkpoint(found)
        _same(settings, state, found)
    kept = run / "budgets.json"
    if resume and kept.is_file():
        budgets = Budgets.load(kept)
    elif budgets is None:
        budgets = measure_budgets(model, tokenizer, domain, settings, sentences)
    budgets.save(kept)
    write_file(run / "config.yaml", yaml.safe_dump({"domain": domain.name, **asdict(settings)}).encode())
    rl = RL(model, tokenizer, domain, settings, run, budgets, say, sentences, ptx, clock, workers)
    if state is not None:
        rl.load(state)
        say(f"going on after iteration {rl.iteration}")
    try:
        rl.fit()
    finally:
        rl.speaker.close()
    return rl


def _same(settings: RLSettings, state: dict[str, Any], where: Path) -> None:
    """A run goes on with what it was begun with; its length and how often it saves may change."""
    free = {"iterations": None, "minutes": None, "eval_every": 0, "eval_count": 0, "save_every": 0, "keep": 1}
    free |= {"engine": None}
    asked, begun = asdict(settings) | free, json.loads(state["settings"]) | free
    for name, value in begun.items():
        if asked[name] != value:
            raise ValueError(f"{name} is {asked[name]}; {where} was begun with {value}, which cannot change")
