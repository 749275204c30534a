"""Warm = cold, many times over: whatever is cached, batched, evicted, restarted or pre-empted, answers stay the same.

    PYTHONPATH=tests python tests/serve/interleavings.py --seeds 20 --each 100

One interleaving is one engine of random shape (pages, spans, chunk and batch sizes, a tier in memory, on disk, both or
none) that ten to fourteen jobs meet at random moments. Their prompts share beginnings, are edited in the middle, go on
where an earlier answer ended; jobs are cancelled, the cache is flushed or emptied, and the engine is ended and started
again over the folder of its tier. After each step the pool's invariants are checked, at the end every answer is
compared with one forward pass over its tokens, from nothing, and every page has to be free.

The model is float32, so short pieces go through the native step where there is one. Rounding may tip a choice only
where two logits are nearer than the bound: such a choice counts as a tie, and is none of the differences.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_engine import END, GREEDY, VOCAB, job

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.serve.engine import Engine, Job, Settings
from nanok3.serve.offload import Tier
from nanok3.serve.runner import Runner
from nanok3.serve.scheduler import Limits

BOUND = 1e-5
"""Between a warm and a cold logit, relative to the largest of them where that is above 1."""


@dataclass
class Counts:
    """What happened."""

    interleavings: int = 0
    answers: int = 0
    tokens: int = 0
    """Said, and each compared with its logits."""
    hits: int = 0
    hit_tokens: int = 0
    edits: int = 0
    further_turns: int = 0
    evictions: int = 0
    """States that left the pool."""
    restores: int = 0
    """Prefixes that came back from the tier."""
    restarts: int = 0
    preemptions: int = 0
    cancelled: int = 0
    flushes: int = 0
    ties: int = 0
    worst: float = 0.0

    def add(self, other: Counts) -> None:
        for one in fields(self):
            mine, its = getattr(self, one.name), getattr(other, one.name)
            setattr(self, one.name, max(mine, its) if one.name == "worst" else mine + its)


def small_model() -> K3:
    """A KDA layer, an MLA layer and another of each. All experts are chosen: a near tie between two would turn rounding
    into another answer."""
    torch.manual_seed(4)
    cfg = K3Config.tiny(initializer_range=0.1).at_depth(2).with_vocabulary(VOCAB)
    cfg = replace(cfg, num_hidden_layers=3, kda_layers=(1, 3), full_attn_layers=(2,))
    return K3(replace(cfg, num_experts_per_token=cfg.num_experts)).eval()


class Interleaving:
    """One engine after another over the same tier, and the jobs that meet them."""

    def __init__(self, model: K3, chance: random.Random, folder: Path) -> None:
        self.model, self.chance, self.counts = model, chance, Counts(interleavings=1)
        self.tier = self._tier(folder)
        self.block = chance.choice([16, 24, 48])
        self.bases = [[chance.randrange(2, VOCAB) for _ in range(100)] for _ in range(3)]
        self.jobs: list[Job] = []
        self.open()

    def _tier(self, folder: Path) -> Tier | None:
        memory, disk = self.chance.choice([(0, False), (0, True), (1 << 20, False), (1 << 18, True)])
        if not memory and not disk:
            return None
        return Tier("it", memory, folder if disk else None, self.chance.choice([1 << 18, 1 << 22]))

    def open(self) -> None:
        """An engine of a new shape; its tier and span stay."""
        chance = self.chance
        limits = Limits(chance.choice([3, 17, 48, 200]), chance.randrange(1, 7), chance.randrange(1, 4))
        page = Runner(self.model, 1 << 20, chance.choice([None, 96, 144])).layout
        pages = max(len(page.groups) + 3, chance.choice([6, 7, 8, 10, 24, 200]))
        runner = Runner(self.model, pages * page.page_bytes, page.page_tokens)
        settings = Settings(self.block, limits=limits, tier=self.tier)
        self.engine = Engine(runner, {END}, [0], settings, runner.arena.poison)
        leaving = self.engine.cache.leaving

        def leaves(node: object) -> None:
            self.counts.evictions += 1
            leaving(node)

        self.engine.cache.leaving = leaves

    def close(self) -> None:
        """Let what runs end, count, and give everything back."""
        while not self.engine.idle:
            self.step()
        self.counts.preemptions += self.engine.scheduler.preemptions
        self.engine.drain(0)
        if self.engine.offload is not None:
            self.counts.restores += self.engine.offload.restored
        self.engine.cache.clear()
        assert self.engine.pool.free == self.engine.pool.pages

    def step(self) -> None:
        self.engine.step()
        self.engine.cache.check()

    def prompt(self) -> list[int]:
        """A beginning that others have too, and an end of its own; now and then an edit, or another's next turn."""
        chance = self.chance
        ended = [one for one in self.jobs if one.reader.outcome is not None and one.reader.ids]
        more = [chance.randrange(2, VOCAB) for _ in range(chance.randrange(6))]
        if ended and chance.random() < 0.3:
            self.counts.further_turns += 1
            one = chance.choice(ended)
            return [*one.prompt, *one.reader.ids, *more, 7]
        ids = chance.choice(self.bases)[: chance.randrange(1, 100)] + more
        if chance.random() < 0.3:
            self.counts.edits += 1
            ids[chance.randrange(len(ids))] = chance.randrange(2, VOCAB)
        return ids

    def happen(self) -> None:
        chance = self.chance
        if chance.random() < 0.03:
            self.engine.flush()
            self.counts.flushes += 1
        if chance.random() < 0.1:
            self.engine.cache.make_room(self.engine.pool.pages // 2)
        if chance.random() < 0.1 and self.jobs:
            self.engine.cancel(chance.choice(self.jobs))
        if self.tier is not None and chance.random() < 0.08:
            self.close()
            self.open()
            self.counts.restarts += 1

    def run(self) -> Counts:
        for _ in range(self.chance.randrange(10, 15)):
            one = job(self.prompt(), replace(GREEDY, max_tokens=self.chance.choice([1, 6, 6, 6, 50])))
            if len(one.prompt) < self.engine.context:
                self.engine.submit(one)
                self.jobs.append(one)
            for _ in range(self.chance.randrange(5)):
                self.step()
            self.happen()
            self.engine.cache.check()
        self.close()
        for one in self.jobs:
            self.compare(one)
        return self.counts

    @torch.no_grad()
    def compare(self, one: Job) -> None:
        """With one pass over prompt and answer, from nothing."""
        counts, outcome, said = self.counts, one.reader.outcome, one.reader.ids
        assert outcome is not None and outcome.finish_reason in ("stop", "length", "cancelled"), outcome
        counts.answers += 1
        counts.hits += bool(outcome.cached_tokens)
        counts.hit_tokens += outcome.cached_tokens
        counts.cancelled += outcome.finish_reason == "cancelled"
        if not said:
            return
        cold = self.model(torch.tensor([[*one.prompt, *said[:-1]]])).logits[0, len(one.prompt) - 1 :].double()
        cold[:, 0] = -torch.inf
        bound = BOUND * max(1.0, float(cold[:, 1:].abs().max()))
        for token, row in zip(one.reader.tokens, cold, strict=True):
            best = row.topk(3).values
            tie = float(best[0] - row[token.id])
            assert tie <= bound, f"said {token.id}, cold {int(row.argmax())} is {tie:.2e} above it"
            counts.ties += token.id != int(row.argmax())
            logp = row.log_softmax(-1)
            worst = max(abs(p - float(logp[other])) for other, p in token.top)
            assert worst <= bound, f"a log-probability differs by {worst:.2e}, allowed: {bound:.2e}"
            counts.worst = max(counts.worst, worst)
        counts.tokens += len(said)


def interleave(model: K3, seed: int, each: int) -> Counts:
    """`each` interleavings of one seed."""
    whole, chance = Counts(), random.Random(f"interleavings {seed}")
    for _ in range(each):
        with tempfile.TemporaryDirectory() as folder:
            whole.add(Interleaving(model, chance, Path(folder)).run())
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--each", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole, model = Counts(), small_model()
    print("native step:", Runner(model, 1 << 20).without_native or "yes")
    for seed in range(options.first, options.first + options.seeds):
        began = time.process_time()
        found = interleave(model, seed, options.each)
        whole.add(found)
        print(f"seed {seed}: {json.dumps(asdict(found))} ({time.process_time() - began:.0f} s of CPU)", flush=True)
    print("all:", json.dumps(asdict(whole)))


if __name__ == "__main__":
    main()
