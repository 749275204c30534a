"""Quality for time: what each model has learned after the same CPU-minutes on one thread.

    nanok3 tokenizer --out runs/quality/tokenizer
    nanok3 data --tokenizer runs/quality/tokenizer --out runs/quality/data
    python bench/quality.py --rates           seconds a step of every configuration; wants three quiet minutes
    python bench/quality.py --tune            size and rates of each contender, found with the same effort
    python bench/quality.py                   the runs: every contender, seeds 0, 1, 2, 10 minutes each
    python bench/quality.py --ablate --rates  seconds a step of K3 with one mechanism exchanged at a time
    python bench/quality.py --ablate          those runs, seed 0
    python bench/quality.py --table           what has been measured so far

The runs begin with the tuning where there was none: two hours and twenty minutes in all on a quiet machine.

Contenders: K3; GPT-2 with AdamW; a modern dense GPT with Muon (nanok3/baselines). All read the same prepared text with
the same tokenizer, and none sees a text twice. A step of one contender always costs the same work, while the seconds it
takes vary up to twofold with what the machine's other cores do. So seconds a step are measured once, all contenders
side by side on a quiet machine, and a run's budget is the number of steps that its minutes hold; warm-up and decay end
with it. Building the model and measuring it are not counted. Bits per byte are those of the whole held-out set.

Tuning: six configurations of each contender for one minute, the best two for the whole ten, the better wins;
its ten minutes are its run with seed 0.
Every run is a process of its own and leaves one JSON file; what is there is not run again. Contenders take turns, so
that a busy hour of the machine hits all of them.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import torch
import tyro

from nanok3.baselines.frame import Baseline, BaselineConfig
from nanok3.baselines.gpt2 import GPT2, GPT2Config
from nanok3.baselines.modern_gpt import ModernGPT
from nanok3.config import K3Config
from nanok3.data.files import write_file
from nanok3.data.loader import MixtureLoader
from nanok3.data.prepared import Prepared
from nanok3.eval.bits_per_byte import bits_per_byte
from nanok3.model.decoder import K3
from nanok3.train.loop import Trainer
from nanok3.train.machine import keep_freed_memory
from nanok3.train.settings import TrainSettings

FIRST_MINUTES = 1.0
"""What every configuration gets."""
FINALISTS = 2
"""How many of a contender's then get the whole time."""
RATE_ROUNDS = 8
SHARED = {"save_every": 0, "eval_every": 0, "sample_every": 0, "log_seconds": 60.0, "final_lr_fraction": 0.03}


@dataclass
class Options(harness.Options):
    rounds: int = 3
    """Seeds: 0, 1, ..."""
    tune: bool = False
    rates: bool = False
    ablate: bool = False
    table: bool = False
    contenders: list[str] = field(default_factory=lambda: list(CANDIDATES))
    minutes: float = 10.0
    """CPU-minutes of a run."""
    bf16: bool = False
    """Where the machine has bfloat16 products; float32 otherwise."""
    data: Path = Path("runs/quality/data")
    out: Path = Path("runs/quality")
    """Folder of the single runs."""
    json: Path = Path("runs/bench/quality.json")


# ---------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Candidate:
    """A model and how it is trained. size: fields of its config; for K3 over `K3Config.small().at_depth(depth)`."""

    contender: str
    size: dict[str, Any]
    train: dict[str, Any]


def k3(depth: int, batch: int, lr: float, adam: float, **size: Any) -> Candidate:
    rates = {"batch_size": batch, "lr": lr, "adam_lr_scale": adam}
    return Candidate("k3", {"depth": depth, **size}, rates)


def gpt2(width: int, layers: int, batch: int, lr: float, **size: Any) -> Candidate:
    rates = {"batch_size": batch, "lr": lr, "adam_lr_scale": 1.0, "optimizer": "adamw", "warmup_fraction": 0.03}
    return Candidate("gpt2", {"hidden_size": width, "num_hidden_layers": layers, **size}, rates)


def modern_gpt(width: int, layers: int, batch: int, lr: float, adam: float) -> Candidate:
    rates = {"batch_size": batch, "lr": lr, "adam_lr_scale": adam}
    return Candidate("modern_gpt", {"hidden_size": width, "num_hidden_layers": layers}, rates)


CANDIDATES = {
    "k3": [
        k3(5, 8, 2.5e-2, 0.4),
        k3(5, 4, 2.5e-2, 0.4),
        k3(5, 4, 1.5e-2, 0.6),
        k3(4, 4, 2.5e-2, 0.4),
        k3(4, 4, 1.5e-2, 0.6),
        k3(6, 4, 1.5e-2, 0.6),
    ],
    "gpt2": [
        gpt2(128, 4, 4, 4e-3),
        gpt2(128, 4, 4, 8e-3),
        gpt2(192, 4, 4, 2e-3),
        gpt2(192, 4, 4, 4e-3),
        gpt2(192, 4, 4, 4e-3, tie_word_embeddings=False),
        gpt2(256, 4, 4, 2e-3),
    ],
    "modern_gpt": [
        modern_gpt(128, 4, 4, 2.5e-2, 0.4),
        modern_gpt(128, 6, 4, 2.5e-2, 0.4),
        modern_gpt(192, 4, 4, 1.5e-2, 0.6),
        modern_gpt(192, 4, 4, 2.5e-2, 0.4),
        modern_gpt(128, 4, 4, 1.5e-2, 0.6),
        modern_gpt(256, 4, 4, 1.5e-2, 0.6),
    ],
}


def ablations(chosen: Candidate) -> dict[str, Candidate]:
    """The chosen K3 with one mechanism exchanged for what it replaced."""
    layers = tuple(range(1, chosen.size["depth"] + 1))
    sizes: dict[str, dict[str, Any]] = {
        "whole": {},
        "no attention residuals": {"attn_res_block_size": None, "model_type": "kimi_linear"},
        "dense MLP for MoE": {"first_k_dense_replace": len(layers)},
        "MLA for KDA": {"kda_layers": (), "full_attn_layers": layers},
        "KDA for MLA": {"kda_layers": layers, "full_attn_layers": ()},
        "SwiGLU for SiTU": {"hidden_act": "silu"},
    }
    found = {name: replace(chosen, size=chosen.size | size) for name, size in sizes.items()}
    adamw = {"optimizer": "adamw", "lr": chosen.train["lr"] * chosen.train["adam_lr_scale"] / 2, "adam_lr_scale": 1.0}
    found["AdamW for Muon"] = replace(chosen, train=chosen.train | adamw)
    return found


def build(candidate: Candidate, vocab_size: int, seq_len: int) -> K3 | Baseline:
    size = dict(candidate.size)
    if candidate.contender == "k3":
        cfg = K3Config.small().at_depth(size.pop("depth"))
        return K3(replace(cfg, **size).with_vocabulary(vocab_size))
    size |= {"vocab_size": vocab_size, "num_attention_heads": size["hidden_size"] // 64}
    if candidate.contender == "gpt2":
        return GPT2(GPT2Config(**size, max_position_embeddings=seq_len))
    return ModernGPT(BaselineConfig(**size))


# ---------------------------------------------------------------------- one run, in a process of its own


@dataclass(frozen=True)
class Job:
    candidate: Candidate
    minutes: float
    seed: int
    data: Path
    bf16: bool
    result: Path
    steps: int


def run(job: Job) -> None:
    """Train, measure, write the result."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    data = Prepared(job.data)
    precision = "bfloat16" if job.bf16 else "float32"
    trainer = trainer_of(job, data, precision)
    model, settings = trainer.model, trainer.settings
    began = time.monotonic()
    if not trainer.fit():
        raise SystemExit("interrupted")
    progress = trainer.progress
    found = {
        "candidate": asdict(job.candidate),
        "minutes": job.minutes,
        "seed": job.seed,
        "precision": precision,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": progress.step,
        "tokens": progress.tokens,
        "tokens_per_cpu_second": progress.tokens / progress.seconds,
        "cpu_seconds": progress.seconds,
        "wall_seconds": time.monotonic() - began,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "machine": harness.machine(1),
        "bits_per_byte": held_out(model, data, settings.seq_len),
    }
    write_file(job.result, (json.dumps(found, indent=1) + "\n").encode())


def trainer_of(job: Job, data: Prepared, precision: str) -> Trainer:
    chosen: dict[str, Any] = {"steps": job.steps, "seed": job.seed, "precision": precision}
    settings = TrainSettings(**(SHARED | chosen | job.candidate.train))
    model = build(job.candidate, data.manifest["vocab_size"], settings.seq_len)
    loader = MixtureLoader(data.sources(), data.weights(), settings.batch_size, settings.seq_len, job.seed)
    tokenizer = data.tokenizer()
    ordinary = tokenizer.vocab_size - 256
    sizes = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(ordinary)] + [0] * 256)
    return Trainer(model, loader, settings, job.result.with_suffix(""), sizes, clock=time.process_time)


def held_out(model: K3 | Baseline, data: Prepared, context: int) -> dict[str, float]:
    """Bits per byte of each slice, and of all of them. A prediction looks back over at most a row of training."""
    nats = size = 0.0
    found = {}
    for source in data.sources("validation"):
        documents = [source.tokens(i)[:-1].tolist() for i in range(len(source))]
        byte_count = len(data.validation_text(source.name))
        score = bits_per_byte(model, documents, byte_count, data.manifest["vocab_size"], context)
        found[source.name] = score.bits_per_byte
        nats, size = nats + score.nats, size + score.bytes
    return {**found, "all": nats / math.log(2) / size}


def done(job: Job) -> dict[str, Any]:
    """The result of a job, which is run first where there is none."""
    if not job.result.exists():
        job.result.parent.mkdir(parents=True, exist_ok=True)
        process = multiprocessing.get_context("spawn").Process(target=run, args=(job,))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{job.result}: the run ended with status {process.exitcode}")
    found: dict[str, Any] = json.loads(job.result.read_text())
    where, score = f"{job.result.parent.name}/{job.result.stem}", found["bits_per_byte"]["all"]
    print(f"{where:34s} {score:.4f} bits/byte, {found['tokens'] / 1e6:.2f} M tokens {job.candidate}", flush=True)
    return found


# ---------------------------------------------------------------------- tuning and the runs


def tune(options: Options) -> None:
    """A short run of each configuration, whole runs of the best; the winner's number goes to chosen.json."""
    scores: dict[str, dict[int, float]] = {name: {} for name in options.contenders}
    for number in range(max(len(CANDIDATES[name]) for name in scores)):
        for name in scores:
            if number < len(CANDIDATES[name]):
                scores[name][number] = tuning_run(options, name, number, FIRST_MINUTES)
    finalists = {name: sorted(tried, key=lambda n: tried[n])[:FINALISTS] for name, tried in scores.items()}
    found = {name: {n: tuning_run(options, name, n, options.minutes) for n in ns} for name, ns in finalists.items()}
    path = options.out / "chosen.json"
    winners = json.loads(path.read_text()) if path.exists() else {}
    winners |= {name: min(tried, key=lambda n: tried[n]) for name, tried in found.items()}
    write_file(path, (json.dumps(winners, indent=1) + "\n").encode())


def tuning_run(options: Options, name: str, number: int, minutes: float) -> float:
    """Held-out bits per byte of one configuration with seed 0."""
    return float(done(job_of(options, name, number, minutes, 0))["bits_per_byte"]["all"])


def job_of(options: Options, name: str, number: int, minutes: float, seed: int) -> Job:
    """The run of a contender's configuration for the steps that `minutes` hold."""
    result = options.out / f"runs-{minutes:g}" / f"{name}-{number}-seed{seed}.json"
    steps = steps_of(options, f"{name}-{number}", minutes)
    return Job(CANDIDATES[name][number], minutes, seed, options.data, options.bf16, result, steps)


def chosen(options: Options, name: str) -> int:
    """Which configuration the tuning has found best; it is done first where it was not."""
    path = options.out / "chosen.json"
    if not path.exists() or name not in json.loads(path.read_text()):
        tune(replace(options, contenders=[name]))
    return int(json.loads(path.read_text())[name])


def measure_rates(options: Options, candidates: dict[str, Candidate], path: Path) -> None:
    """Seconds a step of every candidate, in turns within one process: the median of the rounds."""
    keep_freed_memory()
    torch.set_num_threads(1)
    data = Prepared(options.data)
    seconds: dict[str, list[float]] = {}
    precision = "bfloat16" if options.bf16 else "float32"
    trainers = {}
    for name, candidate in candidates.items():
        job = Job(candidate, 0, 0, options.data, options.bf16, options.out / "rates" / name, 1000)
        trainers[name], seconds[name] = trainer_of(job, data, precision), []
        trainers[name].train_step()
    for _ in range(RATE_ROUNDS):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.train_step()
            seconds[name].append(time.perf_counter() - began)
    found = {}
    for name, one in candidates.items():
        # What differs in learning rates alone costs the same: their rounds count together.
        alike = [n for n, other in candidates.items() if work_of(other) == work_of(one)]
        found[name] = statistics.median(t for n in alike for t in seconds[n])
    write_file(path, (json.dumps({"seconds_a_step": found, "all": seconds}, indent=1) + "\n").encode())
    for name, taken in found.items():
        print(f"{name:22s} {taken:.3f} s a step (from {min(seconds[name]):.3f} to {max(seconds[name]):.3f})")


def work_of(candidate: Candidate) -> tuple[Any, ...]:
    """What decides how long a step takes."""
    return candidate.size, candidate.train["batch_size"], candidate.train.get("optimizer")


def steps_of(options: Options, name: str, minutes: float) -> int:
    """Steps that fit into `minutes`."""
    path = rates(options)
    if not path.exists():
        raise SystemExit(f"{path} is not there; run with --rates first, on a quiet machine")
    return round(60 * minutes / json.loads(path.read_text())["seconds_a_step"][name])


def final_jobs(options: Options) -> Iterator[Job]:
    """Seed by seed, the contenders in turn."""
    path = options.out / "chosen.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    winners = {name: chosen(options, name) for name in options.contenders if name in known or not options.table}
    for seed in range(options.rounds):
        for name, number in winners.items():
            yield job_of(options, name, number, options.minutes, seed)


def rates(options: Options) -> Path:
    return options.out / ("rates-ablations.json" if options.ablate else "rates.json")


def ablate(options: Options) -> list[dict[str, Any]]:
    found = {}
    for name, candidate in ablations(CANDIDATES["k3"][chosen(options, "k3")]).items():
        result = options.out / f"ablations-{options.minutes:g}" / f"{name.replace(' ', '-')}.json"
        steps = steps_of(options, name, options.minutes)
        found[name] = done(Job(candidate, options.minutes, 0, options.data, options.bf16, result, steps))
    return [record(name, [run], found["whole"]) for name, run in found.items()]


# ---------------------------------------------------------------------- tables


def records(options: Options) -> list[dict[str, Any]]:
    """A record for each contender that has finished a run."""
    finished: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contenders}
    for job in final_jobs(options):
        if job.result.exists():
            finished[job.candidate.contender].append(json.loads(job.result.read_text()))
    ours = finished.get("k3", [])
    return [record(name, runs, *ours) for name, runs in finished.items() if runs]


def record(name: str, runs: list[dict[str, Any]], *ours: dict[str, Any]) -> dict[str, Any]:
    """Means over the seeds; `spread` is half the range of all bits per byte; `k3_lower_by_share` compares seed by seed
    with `ours` and takes the least."""
    totals = {run["seed"]: run["bits_per_byte"]["all"] for run in runs}
    lower = [1 - o["bits_per_byte"]["all"] / totals[o["seed"]] for o in ours if o["seed"] in totals]
    return {
        "contender": name,
        "seeds": len(runs),
        "parameters_M": runs[0]["parameters"] / 1e6,
        "tokens_M": statistics.mean(run["tokens"] for run in runs) / 1e6,
        "tokens_s": statistics.mean(run["tokens_per_cpu_second"] for run in runs),
        "peak_MB": max(run["peak_rss_mb"] for run in runs),
        # As text: the tables would round them to two digits.
        **{s: f"{statistics.mean(run['bits_per_byte'][s] for run in runs):.4f}" for s in runs[0]["bits_per_byte"]},
        "spread": f"{(max(totals.values()) - min(totals.values())) / 2:.4f}",
        "k3_lower_by_share": min(lower) if lower else None,
    }


def main(options: Options) -> None:
    unknown = sorted(set(options.contenders) - set(CANDIDATES))
    if unknown:
        raise SystemExit(f"contenders: {unknown} are unknown; allowed: {', '.join(CANDIDATES)}")
    if options.threads != 1:
        raise SystemExit(f"threads is {options.threads}; the clock is the CPU time of one thread")
    if options.tune:
        tune(options)
    elif options.rates:
        tried = {f"{name}-{number}": one for name in options.contenders for number, one in enumerate(CANDIDATES[name])}
        if options.ablate:
            tried = ablations(CANDIDATES["k3"][chosen(options, "k3")])
        measure_rates(options, tried, rates(options))
    elif options.ablate:
        harness.print_table(ablate(options))
    else:
        for job in [] if options.table else final_jobs(options):
            done(job)
        harness.print_table(records(options))
        harness.write_json(options.json, records(options), options)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
