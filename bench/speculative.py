"""Decoding with drafts and without, through the engine: what a pass costs, and how much of a draft has to be right.

    python bench/speculative.py --batches 1 4 --drafts 1 3 7
    python bench/speculative.py --model FOLDER

    python bench/speculative.py --model FOLDER --trained      a trained draft's own time counts too

Every contender answers the same prompts greedily. The draft knows the answers beforehand, so a share `--right` of its
tokens is right and the rest is not: that is no property of a draft, it is how far one pays. `pass` is the time of a
step with drafts over that of a step without; a draft pays where it gets more tokens right than `pays above`, and makes
half as many tokens again where it gets more than `half more above`, which may be more than it guesses. `trained` is
the same with a draft of the size that `nanok3 draft` makes, which reads along and guesses as ever; what it guesses is
replaced by what is right. Answers are compared before anything is timed. The last line is what a rollback keeps of each
token, beside a copy of the state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import random_k3
import torch
import tyro
from harness import Options as SharedOptions
from harness import Table, machine_line, rounds, rows_of, write_json

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.kda_replay import record_bytes
from nanok3.model.mtp import Draft
from nanok3.model.weights import load
from nanok3.serve.draft_model import DraftModel
from nanok3.serve.engine import Engine, Job, Outcome, Settings, Token
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.speculative import Guess, Speculation, Wish

MADE = Path("runs/bench/models/bench-s")
PROMPT = 2


@dataclass
class Options(SharedOptions):
    model: Path | None = None
    dtype: Literal["stored", "float32"] = "stored"
    batches: list[int] = field(default_factory=lambda: [1, 4])
    drafts: list[int] = field(default_factory=lambda: [1, 3, 7])
    right: float = 1.0
    """Share of the guesses that are right."""
    trained: bool = False
    """Also with the time of a trained draft."""
    tokens: int = 48
    """Of an answer."""
    json: Path = Path("runs/bench/speculative.json")


class Kept:
    """Keeps the ids of an answer."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def push(self, token: Token) -> bool:
        self.ids.append(token.id)
        return False

    def finish(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error


class Knowing:
    """A draft that knows the answers, and is right about a share of them."""

    def __init__(self, right: float) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.right, self.chance = right, random.Random(0)

    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        return [[Guess(self._maybe(token)) for token in self._next(wish)] for wish in wishes]

    def _next(self, wish: Wish) -> list[int]:
        sequence = wish.sequence
        said = len(sequence.said)
        return self.answers[tuple(sequence.ids[: sequence.prompt_tokens])][said : said + wish.count]

    def _maybe(self, token: int) -> int:
        return token if self.chance.random() < self.right else (token + 1) % 256


@dataclass
class Paid:
    """Guesses with a draft of its own, and says what is known."""

    draft: DraftModel
    knowing: Knowing

    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        own = self.draft.propose(wishes)
        return [known[: len(guesses)] for known, guesses in zip(self.knowing.propose(wishes), own)]


def engine_of(model: K3, tokens: int, knowing: Knowing, draft: Draft | None = None) -> Engine:
    runner = Runner(model, 1 << 30, draft=draft)
    drafter = knowing if runner.drafter is None else Paid(runner.drafter, knowing)
    speculation = Speculation(drafter, tokens, adaptive=False) if tokens else None
    return Engine(runner, set(), [], Settings(caching=False), speculation=speculation)


def answer(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    jobs = [Job(prompt, params, Kept()) for prompt in prompts]
    for job in jobs:
        engine.submit(job)
    while not engine.idle:
        engine.step()
    return [job.reader.ids for job in jobs]  # type: ignore[attr-defined]


def prompts_of(cfg: K3Config, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(cfg.vocab_size, (batch, PROMPT), generator=generator).tolist()


def contenders(engines: dict[str, Engine], prompts: list[list[int]], tokens: int) -> dict[str, Callable[[], None]]:
    def run(engine: Engine) -> Callable[[], None]:
        return lambda: (answer(engine, prompts, tokens), None)[1]

    return {name: run(engine) for name, engine in engines.items()}


@torch.no_grad()
def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    folder = options.model or MADE
    if options.model is None:
        random_k3.write("bench-s", folder)
    model = load(folder, dtype=torch.float32 if options.dtype == "float32" else None)
    print(machine_line(options.threads))
    table = Table()
    for batch in options.batches:
        prompts, knowing = prompts_of(model.cfg, batch), Knowing(options.right)
        engines = {"plain": engine_of(model, 0, knowing)}
        engines |= {f"draft {n}": engine_of(model, n, knowing) for n in options.drafts}
        if options.trained:
            own = Draft(model.cfg).to(model.model.embed_tokens.weight.dtype).requires_grad_(False)
            engines |= {f"trained {n}": engine_of(model, n, knowing, own) for n in options.drafts}
        plain = answer(engines["plain"], prompts, options.tokens)
        knowing.answers = {tuple(prompt): ids for prompt, ids in zip(prompts, plain, strict=True)}
        steps = {}
        for name, engine in engines.items():
            before = engine.counters.steps
            if answer(engine, prompts, options.tokens) != plain:
                raise SystemExit(f"{name} says something else than plain decoding")
            steps[name] = engine.counters.steps - before
        seconds = rounds(contenders(engines, prompts, options.tokens), options.rounds, options.clock())
        step = {name: sorted(times)[len(times) // 2] / steps[name] for name, times in seconds.items()}

        def more(name: str, median: float, batch: int = batch, step: dict[str, float] = step) -> dict[str, object]:
            price = step[name] / step["plain"]
            return {
                "tokens_per_s": batch * options.tokens / median,
                "ms_per_step": 1e3 * step[name],
                "pass": None if name == "plain" else price,
                "pays_above": None if name == "plain" else price - 1,
                "half_more_above": None if name == "plain" else 1.5 * price - 1,
            }

        table.add(rows_of(f"batch {batch}", seconds, "plain", more))
    records = {kind: record_bytes(model.cfg, kind == "projected") for kind in ("written", "projected")}
    for kind, (record, state) in records.items():
        print(f"{kind}: {record} bytes a token and KDA layer, {state / record:.0f} times less than its state")
    k3 = {kind: record_bytes(K3Config.k3(), kind == "projected") for kind in records}
    print("K3:", ", ".join(f"{kind} {state / record:.0f} times" for kind, (record, state) in k3.items()), "less")
    write_json(options.json, table.records, options)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
