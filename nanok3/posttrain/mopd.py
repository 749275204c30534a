"""Nine teachers, one student: multi-teacher on-policy distillation.

    y ~ student(x, effort e)                            for each domain d and effort e in turn, with e in the prompt
    r_t = clip( log pT(y_t) - log p(y_t), -R, R )       T = the expert of (d, e); no gradient through r
    gain = sum of r_t exp(rho_t)                        the objective of RL, with a reward a token instead of an answer

The student's own answers are scored, so it learns where it stands. The mean of r_t is minus the reverse KL to the
teacher; r_t is taken from the student as it is at each pass, so the pull fades as it arrives. A token's reward is its
own alone, nothing is discounted into it, and no mean of a group is subtracted.

Teachers are loaded one at a time, score their share of the iteration's samples, and are dropped. They must have the
student's tokenizer. Source: report 4.1.2, Eq. 15. R is not published. The teacher's context is written there without
the effort; our experts were trained with it in the prompt, so by default they see it (`teacher_reads_effort`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nanok3.data.chat import OURS, Sentences, encode
from nanok3.data.files import write_file
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.weights import load
from nanok3.posttrain.evaluate import Scores, evaluate, first_tasks
from nanok3.posttrain.learner import Learner
from nanok3.posttrain.objective import dense_reward
from nanok3.posttrain.rl_settings import MopdSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.run import Run, save_model
from nanok3.posttrain.sample import Domain, Group, Problem, Sample
from nanok3.posttrain.score import Packed, logprobs, packed
from nanok3.posttrain.speaker import EngineSpeaker, Speaker, forbidden_ids, open_engine
from nanok3.posttrain.workers import Workers
from nanok3.train.checkpoint import latest, load_checkpoint, save_checkpoint
from nanok3.train.track import Tracker

Pair = tuple[str, str]
"""Domain and effort."""


@dataclass(frozen=True)
class Teacher:
    """Where an expert lies; it is loaded when it is asked."""

    folder: Path

    def open(self, tokenizer: Tokenizer, device: torch.device) -> K3:
        """ValueError for another tokenizer: its log-probabilities would belong to other words."""
        if Tokenizer.load(self.folder).fingerprint() != tokenizer.fingerprint():
            raise ValueError(f"teacher {self.folder}: its tokenizer is not the student's")
        return load(self.folder, torch.float32, str(device)).eval()


def without_effort(sample: Sample, prompt: list[int]) -> Sample:
    """The same tokens behind another prompt."""
    begin = sample.places[0]
    shift = len(prompt) - begin
    return replace(sample, ids=[*prompt, *sample.ids[begin:]], places=[place + shift for place in sample.places])


@torch.no_grad()
def teacher_logprobs(
    teacher: K3, samples: list[Sample], forbidden: Tensor, temperature: float, most: int
) -> dict[int, Tensor]:
    """Of each sample's sampled tokens, by the sample's `id()`."""
    marks = [[True] * sample.output for sample in samples]
    values = [logprobs(teacher, row, forbidden, temperature).cpu() for row in packed(samples, marks, most)]
    kept = [sample for sample in samples if sample.places]
    parts = torch.cat(values).split([sample.output for sample in kept]) if kept else []
    return {id(sample): part for sample, part in zip(kept, parts)}


class Mopd(Run):
    """One run; `step` is an iteration, `fit` all of them."""

    def __init__(
        self,
        student: K3,
        tokenizer: Tokenizer,
        teachers: Mapping[Pair, Path],
        domains: Mapping[str, Domain],
        settings: MopdSettings,
        run: Path,
        say: Callable[[str], None] = print,
        sentences: Sentences = OURS,
        clock: Callable[[], float] = time.monotonic,
        workers: Workers | None = None,
    ) -> None:
        unknown = sorted({domain for domain, _ in teachers} - domains.keys())
        if not teachers or unknown:
            raise ValueError(f"teachers: {unknown or 'there are none'}; allowed: experts of {', '.join(domains)}")
        self.model, self.tokenizer, self.domains, self.settings = student.eval(), tokenizer, domains, settings
        self.teachers = {pair: Teacher(folder) for pair, folder in sorted(teachers.items())}
        self.pairs, self.run, self.say, self.sentences, self.clock = list(self.teachers), run, say, sentences, clock
        names = {domain for domain, _ in self.pairs}
        self.tasks = {name: first_tasks(domains[name], settings.problems, "train", 0) for name in names}
        forbidden = forbidden_ids(student, tokenizer)
        temperature = settings.rollout.temperature
        self.learner = Learner(student, settings.learner, settings.objective, forbidden, temperature)
        self.speaker: Speaker
        if workers is None:
            self.speaker = EngineSpeaker(open_engine(student, tokenizer, settings.rollout.in_flight, settings.engine))
        else:
            self.speaker = workers.speaker(student, tokenizer, settings, run)
        self.rollouts = Rollouts(self.speaker, tokenizer, self._problem, settings.rollout, sentences=sentences)
        self.seconds, self.checked, self.track = 0.0, False, Tracker(run)

    def _problem(self, number: int) -> Problem:
        """The pairs in turn; tasks of a domain go on when all its efforts have had them."""
        domain, effort = self.pairs[number % len(self.pairs)]
        tasks = self.tasks[domain]
        return Problem(number, self.domains[domain], effort, tasks[number // len(self.pairs) % len(tasks)])

    def pair(self, group: Group) -> Pair:
        return self.pairs[group.prompt % len(self.pairs)]

    @property
    def length(self) -> MopdSettings:
        return self.settings

    def step(self) -> dict[str, Any]:
        """Rollouts of the student, the teachers' word on them, training steps; the iteration's numbers."""
        began = self.clock()
        self.learner.set_progress(self.progress)
        with self.learner.qat.projected():
            groups = self.rollouts.collect()
        self.check(groups)
        taught = self._teach(groups)
        samples = [sample for group in groups for sample in group.valid if id(sample) in taught]
        gaps: list[float] = []

        def advantage(row: Packed, logprob: Tensor) -> Tensor:
            teacher = torch.cat([taught[id(sample)] for sample in row.samples]).to(logprob)
            gaps.append(float((logprob - teacher).mean()))
            return dense_reward(teacher, logprob, self.settings.r_max)

        version, most = self.rollouts.version, self.settings.rollout.max_versions
        learned = self.learner.learn(samples, [s.trained(version, most) for s in samples], advantage, version)
        earned = [sample.reward or 0.0 for sample in samples]
        record = {"reverse_kl": sum(gaps) / max(len(gaps), 1), "accuracy": sum(earned) / max(len(earned), 1)}
        record |= {"lag": sum(s.lag(version) for s in samples) / max(len(samples), 1), **learned.record()}
        self.rollouts.renew()
        self.rollouts.release(groups)
        self.seconds += self.clock() - began
        self.track.write("mopd", self.iteration, seconds=self.seconds, **record)
        return record

    def _teach(self, groups: list[Group]) -> dict[int, Tensor]:
        """Each sample's tokens under its own teacher; one teacher in memory at a time."""
        found: dict[int, Tensor] = {}
        device, s = self.model.lm_head.weight.device, self.settings
        for pair, teacher in self.teachers.items():
            asked = [(g, sample) for g in groups if self.pair(g) == pair for sample in g.valid if sample.places]
            if not asked:
                continue
            read = [sample if s.teacher_reads_effort else self._bare(g, sample) for g, sample in asked]
            model = teacher.open(self.tokenizer, device)
            values = teacher_logprobs(
                model, read, self.learner.forbidden, s.rollout.temperature, s.learner.micro_tokens
            )
            found |= {id(sample): values[id(same)] for (_, sample), same in zip(asked, read)}
        return found

    def _bare(self, group: Group, sample: Sample) -> Sample:
        problem = self._problem(group.prompt)
        return without_effort(sample, encode(problem.domain.prompt(problem.task, None), self.tokenizer))

    # ---------------------------------------------------------------- the run

    def fit(self) -> Path:
        """To the end; the folder of the final model. Ctrl-C saves and is raised again."""
        try:
            while self.progress < 1:
                r = self.step()
                numbers = f"right {r['accuracy']:.2f} · KL {r['reverse_kl']:.4f} · masked {r['masked']:.1%}"
                self.say(f"iter {self.iteration:4d} {self.progress:4.0%} · {numbers} · |g| {r['grad_norm']:.2f}")
                if self.settings.save_every and self.iteration % self.settings.save_every == 0:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            self.say(f"interrupted after iteration {self.iteration}; saved. --resume goes on")
            raise
        if self.settings.save_every:
            self.save()
        folder = save_model(self.model, self.tokenizer, self.run, "mopd", self.sentences)
        if self.settings.eval_count:
            self.table()
        self.rollouts.close()
        return folder

    def table(self) -> list[dict[str, Any]]:
        """Each teacher against the student, on the same held-out tasks; also written to table.json."""
        rows = []
        device = self.model.lm_head.weight.device
        for (domain, effort), teacher in self.teachers.items():
            expert = EngineSpeaker(
                open_engine(teacher.open(self.tokenizer, device), self.tokenizer, self.settings.rollout.in_flight)
            )
            theirs, ours = self._scores(expert, domain, effort), self._scores(self.speaker, domain, effort)
            rows.append({"domain": domain, "effort": effort, "teacher": asdict(theirs), "student": asdict(ours)})
            self.say(f"{domain:8} {effort:5} teacher {theirs}\n{'':14} student {ours}")
        write_file(self.run / "table.json", json.dumps(rows, indent=1).encode())
        return rows

    def _scores(self, speaker: Speaker, domain: str, effort: str) -> Scores:
        s = self.settings
        chosen = self.domains[domain]
        return evaluate(speaker, self.tokenizer, chosen, effort, s.eval_count, s.rollout, sentences=self.sentences)

    def save(self) -> Path:
        """Everything that is begun."""
        state = {"learner": self.learner.state_dict(), "rollouts": json.dumps(self.rollouts.state_dict())}
        return save_checkpoint(
            self.run, self.iteration, self.model, state | {"seconds": self.seconds}, self.settings.keep
        )

    def load(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.rollouts.load_state_dict(json.loads(state["rollouts"]))
        self.seconds = state["seconds"]


def distill(
    student: K3,
    tokenizer: Tokenizer,
    teachers: Mapping[Pair, Path],
    domains: Mapping[str, Domain],
    settings: MopdSettings,
    run: Path,
    say: Callable[[str], None] = print,
    resume: bool = False,
    sentences: Sentences = OURS,
    workers: Workers | None = None,
) -> Path:
    """Teach `student` by all teachers, given by domain and effort; the folder of the result. workers: who plays the
    student's rollouts; this process if nobody."""
    found = latest(run)[0] if resume else None
    if not resume and (run / "metrics.jsonl").exists():
        raise ValueError(f"out: {run} holds a run; add --resume, or choose another folder")
    if workers is not None:
        workers.check(settings)  # before anything is written
    state = None
    if found is not None:
        student, state = load_checkpoint(found)
    named = {f"{domain}-{effort}": str(folder) for (domain, effort), folder in teachers.items()}
    write_file(run / "config.yaml", yaml.safe_dump({"teachers": named, **asdict(settings)}).encode())
    mopd = Mopd(student, tokenizer, teachers, domains, settings, run, say, sentences, workers=workers)
    if state is not None:
        mopd.load(state)
        say(f"going on after iteration {mopd.iteration}")
    try:
        return mopd.fit()
    finally:
        mopd.speaker.close()
