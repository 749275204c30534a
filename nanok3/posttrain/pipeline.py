"""Post-training from end to end on the small world: one plan, its parts in order, each done once.

    OUT/facts                    SFT on the first domain's demonstrations alone, where there are others
    OUT/cold                     SFT on demonstrations of all
    OUT/DOMAIN-max               RL from the cold start, with budgets b0 measured on the cold start
    OUT/DOMAIN-high, -low        RL from DOMAIN-max, the budget annealed from max's to its own
    OUT/student                  MOPD: all experts teach one model, each its domain and effort; it begins as the cold
                                 start with the changes of all DOMAIN-max added
    OUT/draft                    a draft for speculative decoding, the student frozen
    OUT/steps.json               what is done, and what it gave; report.html is written from it

A part that is done is not done again; one that was interrupted goes on from its own checkpoint. The order is the
report's (4.1: SFT, nine experts of three domains and three efforts, one student, a draft); sizes and minutes are ours.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanok3.data.chat import EFFORTS
from nanok3.data.files import write_file
from nanok3.model.decoder import K3
from nanok3.model.weights import load
from nanok3.posttrain.conversation_loader import ConversationLoader
from nanok3.posttrain.domains import SENTENCES, domains, small_tokenizer
from nanok3.posttrain.draft_run import DraftRun
from nanok3.posttrain.draft_settings import DraftSettings
from nanok3.posttrain.effort import TAUS, Budgets
from nanok3.posttrain.evaluate import first_tasks, play, scores
from nanok3.posttrain.mopd import distill
from nanok3.posttrain.rl import RL, train
from nanok3.posttrain.rl_report import write_rl_report
from nanok3.posttrain.rl_settings import MopdSettings, RLSettings, RolloutSettings
from nanok3.posttrain.sample import Problem
from nanok3.posttrain.sft import cold_start, world_lessons
from nanok3.posttrain.sft_settings import WORLD
from nanok3.posttrain.speaker import EngineSpeaker, open_engine
from nanok3.serve.draft_folder import WEIGHTS as DRAFT_WEIGHTS

STEPS = "steps.json"
GOING_ON_LR = 1.3e-2
"""Of SFT on a model that knows the facts: with the rate of the beginning it forgot them before it learned the rest."""
ORDER = ("max", "high", "low")
"""Efforts in the order in which they are trained."""


@dataclass(frozen=True)
class Plan:
    """What is trained and for how long. Lengths are counted, not timed: a busy machine gives the same models."""

    domains: tuple[str, ...] = ("general", "agent", "coding")
    model: str = "quick"
    """Size of the model: small or quick."""
    demonstrations: int = 12000
    """Of all domains together."""
    mistakes: float = 0.25
    """Share of demonstrations that go wrong."""
    facts_steps: int = 400
    """On the first domain alone, before all; 0 where it is the only one. What domains share, facts and how to find a
    thing in the prompt, is learned where conversations are short: a general one has a fifth of the tokens of an
    agent's."""
    cold_steps: int = 450
    max_iterations: int = 45
    """Of each expert of effort max."""
    branch_iterations: int = 20
    """Of each expert of effort high or low."""
    student_iterations: int = 80
    student_prompts: int = 90
    """Answers of an iteration of the student; domains and efforts take turns."""
    draft_steps: int = 60
    """0 trains no draft."""
    eval_count: int = 300
    """Held-out answers for every number of the tables."""
    problems: int = 128
    """Tasks of the training split of each domain, for experts and student."""
    prompts: int = 8
    """Tasks of an expert's iteration; each is answered eight times."""
    max_tokens: int = 128
    """Tokens of a turn at most."""
    seed: int = 0

    def times(self, factor: float) -> Plan:
        """The same plan, longer or shorter."""
        if not 0 < factor < 1000:
            raise ValueError(f"times is {factor}; it must be above 0 and below 1000")
        lengths = (
            "facts_steps",
            "cold_steps",
            "max_iterations",
            "branch_iterations",
            "student_iterations",
            "draft_steps",
        )
        changes: dict[str, Any] = {name: math.ceil(getattr(self, name) * factor) for name in lengths}
        return replace(self, **changes)


SMALL = Plan()
"""All nine experts: meant for an hour on two quiet cores."""
QUICK = Plan(
    domains=("general",),
    facts_steps=0,
    cold_steps=420,
    max_iterations=80,
    branch_iterations=25,
    student_iterations=80,
    student_prompts=72,
    draft_steps=0,
    problems=256,
    prompts=16,
)
"""One domain and three efforts: meant for ten minutes."""


class Pipeline:
    """The plan in a folder; `run` does what is left of it."""

    def __init__(self, plan: Plan, out: Path, say: Callable[[str], None] = print) -> None:
        self.plan, self.out, self.say = plan, out, say
        self.tokenizer = small_tokenizer()
        known = domains()
        for name in plan.domains:
            if name not in known:
                raise ValueError(f"domains: {name!r}; allowed: {', '.join(known)}")
        self.domains = {name: known[name] for name in plan.domains}
        self.steps = self._read()

    def _read(self) -> dict[str, Any]:
        """What is done. ValueError where the folder was begun with another plan."""
        path = self.out / STEPS
        if not path.is_file():
            return {}
        found = json.loads(path.read_text("utf-8"))
        asked = json.loads(json.dumps(asdict(self.plan)))
        for name, value in found["plan"].items():
            if asked[name] != value:
                raise ValueError(f"{name} is {asked[name]}; {self.out} was begun with {value}, which cannot change")
        steps: dict[str, Any] = found["steps"]
        return steps

    def _once(self, name: str, work: Callable[[Path], dict[str, Any]]) -> None:
        """Do a part unless it is done, and remember what it gave."""
        if name in self.steps:
            self.say(f"== {name}: done before, {self.steps[name]['seconds']:.0f} s")
            return
        self.say(f"== {name}")
        began, used = time.monotonic(), time.process_time()
        facts = work(self.out / name)
        took = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - used}
        self.steps[name] = {**facts, **took}
        record = {"plan": asdict(self.plan), "steps": self.steps}
        write_file(self.out / STEPS, (json.dumps(record, indent=1) + "\n").encode())

    def model(self, name: str) -> K3:
        """The finished model of a part."""
        return load(self.out / name / "model", dtype=torch.float32)

    def run(self) -> dict[str, Any]:
        """All parts in order; what is in steps.json."""
        if self.plan.facts_steps:
            self._once("facts", self._facts)
        self._once("cold", self._cold)
        for name in self.domains:
            for effort in ORDER:
                self._once(f"{name}-{effort}", lambda folder, n=name, e=effort: self._expert(folder, n, e))  # type: ignore[misc]
        self._once("student", self._student)
        if self.plan.draft_steps:
            self._once("draft", self._draft)
        return self.steps

    # ------------------------------------------------------------------ the parts

    def _facts(self, folder: Path) -> dict[str, Any]:
        self._taught(folder, self.plan.domains[:1], self.plan.facts_steps, None)
        return {}

    def _taught(self, folder: Path, names: tuple[str, ...], steps: int, model: K3 | None) -> None:
        p = self.plan
        settings = replace(WORLD, steps=steps, seed=p.seed, lr=WORLD.lr if model is None else GOING_ON_LR)
        count = max(1, p.demonstrations // len(names))
        cold_start(folder, names, p.model, settings, count, p.mistakes, say=self.say, resume=True, model=model)

    def _cold(self, folder: Path) -> dict[str, Any]:
        p = self.plan
        self._taught(folder, p.domains, p.cold_steps, self.model("facts") if p.facts_steps else None)
        return {"scores": self._scores(self.model("cold")), "samples": self._transcripts(self.model("cold"))}

    def _expert(self, folder: Path, name: str, effort: str) -> dict[str, Any]:
        """One of the nine; budgets are those of the cold start, measured once for each domain."""
        p, tau = self.plan, TAUS[name]
        iterations = p.max_iterations if effort == "max" else p.branch_iterations
        rollout = RolloutSettings(prompts=p.prompts, max_tokens=p.max_tokens)
        settings = RLSettings(
            iterations=iterations, eval_count=p.eval_count, problems=p.problems, rollout=rollout
        ).with_effort(effort=effort, tau=tau[effort], tau_start=None if effort == "max" else tau["max"])
        measured = self.out / f"{name}-max" / "budgets.json"
        budgets = Budgets.load(measured) if effort != "max" else None
        start = self.model("cold" if effort == "max" else f"{name}-max")
        done: RL = train(
            start, self.tokenizer, self.domains[name], settings, folder, budgets, self.say, True, SENTENCES
        )
        write_rl_report(folder)
        return {"before": asdict(done.scores[0]), "after": asdict(done.scores[-1]), "iterations": done.iteration}

    def _student(self, folder: Path) -> dict[str, Any]:
        teachers = {(d, e): self.out / f"{d}-{e}" / "model" for d in self.domains for e in EFFORTS}
        p = self.plan
        settings = MopdSettings(iterations=p.student_iterations, eval_count=p.eval_count, problems=p.problems)
        settings = replace(
            settings, rollout=replace(settings.rollout, prompts=p.student_prompts, max_tokens=p.max_tokens)
        )
        student = added(self.model("cold"), (self.model(f"{name}-max") for name in self.domains))
        distill(student, self.tokenizer, teachers, self.domains, settings, folder, self.say, True, SENTENCES)
        write_rl_report(folder)
        table = json.loads((folder / "table.json").read_text("utf-8"))
        return {"table": table, "samples": self._transcripts(self.model("student"))}

    def _draft(self, folder: Path) -> dict[str, Any]:
        """Taught on demonstrations: guesses count where the student samples."""
        p = self.plan
        taught = world_lessons(p.domains, 300, p.mistakes, p.seed, WORLD.seq_len)
        settings = DraftSettings(steps=p.draft_steps, rows=2, seq_len=WORLD.seq_len, seed=p.seed)
        loader = ConversationLoader(taught.train, 1, settings.seq_len, p.seed)
        rows = taught.held_out.one_pass(1, settings.seq_len)[:8]
        again = (folder / DRAFT_WEIGHTS).exists()
        run = DraftRun(self.model("student"), loader, rows, settings, folder, self.say, again)
        run.fit()
        return {"kept": run.found.by_position, "tokens_a_pass": run.found.accepted_length}

    # ------------------------------------------------------------------ measuring

    def _played(self, model: K3, name: str, effort: str, count: int) -> Iterator[Any]:
        """Samples of held-out tasks."""
        tasks = first_tasks(self.domains[name], count, "held-out", 0)
        problems = [Problem(n, self.domains[name], effort, tasks[n % len(tasks)]) for n in range(count)]
        settings = RolloutSettings(samples=1, seed=1, max_tokens=self.plan.max_tokens)
        speaker = EngineSpeaker(open_engine(model.eval(), self.tokenizer, settings.in_flight))
        for group in play(speaker, self.tokenizer, problems, settings, SENTENCES):
            yield from group.samples

    def _scores(self, model: K3) -> dict[str, dict[str, Any]]:
        """Accuracy and lengths in every domain and effort."""
        found = {}
        for name in self.domains:
            for effort in EFFORTS:
                these = scores(list(self._played(model, name, effort, self.plan.eval_count)))
                self.say(f"{name:8} {effort:5} {these}")
                found[f"{name}-{effort}"] = asdict(these)
        return found

    def _transcripts(self, model: K3) -> dict[str, Any]:
        """The first held-out task of each domain at effort max, as it was played."""
        found = {}
        for name in self.domains:
            (sample,) = self._played(model, name, "max", 1)
            found[name] = {"text": self.tokenizer.decode(sample.ids), "reward": sample.reward}
        return found


@torch.no_grad()
def added(start: K3, experts: Iterable[K3]) -> K3:
    """`start` with what each expert has changed of it added up. Of one expert that is the expert."""
    whole = start.state_dict()
    before = {name: value.clone() for name, value in whole.items() if value.is_floating_point()}
    for expert in experts:
        for name, value in expert.state_dict().items():
            if name in before:
                whole[name] += value - before[name]
    return start


# ---------------------------------------------------------------------- what came of it


@dataclass(frozen=True)
class Row:
    """One domain and effort: the cold start, its teacher and the student, each as (accuracy, thinking, output)."""

    domain: str
    effort: str
    cold: tuple[float, float, float]
    teacher: tuple[float, float, float]
    student: tuple[float, float, float]


def table(steps: dict[str, Any]) -> list[Row]:
    """The result, a row for each teacher; of a domain low first."""

    def short(found: dict[str, Any]) -> tuple[float, float, float]:
        return found["accuracy"], found["thinking"], found["output"]

    cold = steps["cold"]["scores"]
    return [
        Row(
            row["domain"],
            row["effort"],
            short(cold[f"{row['domain']}-{row['effort']}"]),
            short(row["teacher"]),
            short(row["student"]),
        )
        for row in sorted(steps["student"]["table"], key=lambda row: (row["domain"], EFFORTS.index(row["effort"])))
    ]


def claims(rows: list[Row]) -> list[tuple[str, str, bool]]:
    """What was wanted, what was found, and whether it holds."""
    found = []
    for name in dict.fromkeys(row.domain for row in rows):
        of = {row.effort: row for row in rows if row.domain == name}
        gain = of["max"].teacher[0] - of["max"].cold[0]
        found.append((f"{name}: reinforcement learning gives +0.15 at max", f"{gain:+.3f}", gain >= 0.15))
        share = of["low"].teacher[1] / max(of["max"].teacher[1], 1e-9)
        found.append((f"{name}: low thinks for less than 0.7 of max's tokens", f"{share:.2f}", share < 0.7))
        more = of["max"].teacher[0] - of["low"].teacher[0]
        found.append((f"{name}: max is right more often than low", f"{more:+.3f}", more > 0))
        worst = min(row.student[0] - row.teacher[0] for row in of.values())
        found.append((f"{name}: the student is within 0.03 of each teacher", f"{worst:+.3f} at worst", worst >= -0.03))
    return found
