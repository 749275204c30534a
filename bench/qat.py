"""What four bits cost, and what training for them gives back: no rounding, rounding afterwards, QAT.

    nanok3 tokenizer --out runs/quality/tokenizer
    nanok3 data --tokenizer runs/quality/tokenizer --out runs/quality/data
    python bench/qat.py                    MLPs are routed experts and nothing else: what the rounding is felt in
    python bench/qat.py --model family     K3 in small, where shared experts carry the load
    python bench/qat.py --model memory     two layers that learn random sequences by heart, in nats a token
    python bench/qat.py --model text       pairs of short runs, channels of unlike size; makes its own data; minutes

One run of K3 is trained to step `steps - qat_steps` and goes on from there three times, over the same text at the same
learning rates: without QAT, with weights in MXFP4, and with inputs in MXFP8 too. So all three have seen the same, and
what differs is what their last steps were trained for. Each is then measured on held-out text as trained and as served.

    score       bits per byte of held-out text
    lost        thousandths of that above the run without QAT, not rounded
    recovered   1 - lost with QAT / lost by rounding the run without QAT afterwards, served the same way

A small model that was trained for minutes loses next to nothing by rounding, so there is nothing to win back. `text`
makes rounding cost something without changing what the model computes: after `steps - qat_steps` steps at a constant
rate each channel of the latent that the experts read is scaled by a log-normal factor, the columns of w1 and w3 by it
and the rows of the projection into the latent by its inverse. Channels of large models differ as much in size; in a
block of 32 the small ones then share the step of the largest. From there every order of the text is trained twice, at
a rate that falls to zero, without QAT and with w4a16: a pair. The difference of two pairs says how sure a figure is.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import harness
import torch
import torch.nn.functional as F
import tyro

from nanok3.cli import main as nanok3_command
from nanok3.config import K3Config
from nanok3.data.loader import MixtureLoader
from nanok3.data.prepared import Prepared
from nanok3.eval.bits_per_byte import bits_per_byte
from nanok3.model.decoder import K3
from nanok3.quant.qat import QAT
from nanok3.train.loop import Trainer
from nanok3.train.machine import keep_freed_memory
from nanok3.train.muon import K3Optimizer, OptimizerSettings
from nanok3.train.schedule import learning_rate
from nanok3.train.settings import TrainSettings

SERVED = (("w4a16", "ceil"), ("w4a16", "floor"), ("w4a16", "even"), ("w4a8", "ceil"))
"""How the run without QAT is rounded afterwards."""
TRAINED = (("w4a16", "ceil"), ("w4a8", "ceil"))
"""The runs with QAT; each is served as it was trained."""
TEXT_DEPTH, TEXT_WARMUP = 3, 15
TEXT_RATES: dict[str, Any] = {"lr": 2e-2, "adam_lr_scale": 0.4}
Start = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Weights, and the state of a trainer."""
CONTEXT = 512
"""Tokens that a prediction looks back over at most."""


@dataclass
class Options(harness.Options):
    rounds: int | None = None
    """Seeds 0, 1, ..., by default two; for `text` orders of the text, by default four."""
    model: Literal["experts", "family", "memory", "text"] = "experts"
    """family: K3Config.small at the depth; experts: the same without shared experts and dense MLP, 8 experts of double
    width, one a token; text: three layers, 8 experts of twice the model's width, two a token."""
    depth: int = 5
    steps: int | None = None
    """In all, by default 300; for `text` 500."""
    qat_steps: int = 100
    """The last steps, which are trained three times; for `text` in pairs."""
    final_lr: float = 0.03
    """Where the cosine ends, relative to the peak."""
    bytes: int = 60_000
    """Held-out bytes of each slice; 0 for all."""
    spread: float = 1.5
    """For `text`: standard deviation of the logarithm of a channel's factor."""
    data: Path = Path("runs/quality/data")
    json: Path = Path("runs/bench/qat.json")

    def __post_init__(self) -> None:
        steps, rounds = (500, 4) if self.model == "text" else (300, 2)
        super().__post_init__()
        self.steps, self.rounds = self.steps or steps, self.rounds or rounds
        if not 0 < self.qat_steps < self.steps:
            raise SystemExit(f"qat_steps is {self.qat_steps}; it must lie between 1 and steps - 1 = {self.steps - 1}")


def config(options: Options) -> K3Config:
    if options.model == "text":
        sizes = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 128}
        cfg = replace(K3Config.small().at_depth(TEXT_DEPTH), routed_expert_hidden_size=64, **sizes)
        return replace(cfg, num_shared_experts=0, first_k_dense_replace=0)
    cfg = K3Config.small().at_depth(options.depth)
    if options.model == "family":
        return cfg
    sizes = {"num_experts": 8, "num_experts_per_token": 1, "moe_intermediate_size": 2 * cfg.moe_intermediate_size}
    return replace(cfg, num_shared_experts=0, first_k_dense_replace=0, **sizes)


def trainer_of(options: Options, data: Prepared, seed: int, run: Path, **changes: Any) -> Trainer:
    settings = TrainSettings(
        steps=options.steps,
        batch_size=4,
        lr=1.5e-2,
        adam_lr_scale=0.6,
        final_lr_fraction=options.final_lr,
        precision="float32",
        seed=seed,
        log_seconds=60.0,
        **dict.fromkeys(("save_every", "eval_every", "sample_every"), 0),
    )
    settings = replace(settings, **changes)
    torch.manual_seed(seed)
    model = K3(config(options).with_vocabulary(data.manifest["vocab_size"]))
    loader = MixtureLoader(data.sources(), data.weights(), settings.batch_size, settings.seq_len, seed)
    tokenizer = data.tokenizer()
    sizes = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size - 256)] + [0] * 256)
    return Trainer(model, loader, settings, run, sizes)


def remembered(options: Options, seed: int) -> Iterator[dict[str, Any]]:
    """256 sequences of 24 random tokens, learned by heart at the edge of what the experts hold; the whole batch a step.
    Scores are nats a token on these very sequences."""
    torch.manual_seed(seed)
    cfg = K3Config.tiny().at_depth(2).with_vocabulary(512)
    cfg = replace(cfg, num_experts=4, num_experts_per_token=1, moe_intermediate_size=128)
    base = K3(replace(cfg, num_shared_experts=0, first_k_dense_replace=0))
    ids, rules = torch.randint(0, 200, (256, 24)), OptimizerSettings(lr=2e-2, adam_lr_scale=0.4)

    def loss(model: K3) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())

    def steps(model: K3, optimizer: K3Optimizer, first: int, last: int, qat: QAT) -> None:
        for step in range(first, last):
            optimizer.lr = learning_rate(step, options.steps, rules.lr, 0.02, options.final_lr)
            with qat.projected():
                loss(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            qat.stepped()
            optimizer.zero_grad()

    optimizer, begun = K3Optimizer(base, rules), options.steps - options.qat_steps
    steps(base, optimizer, 0, begun, QAT(base))

    def finished(mode: str, rule: str) -> K3:
        model = copy.deepcopy(base)
        own = K3Optimizer(model, rules)
        own.load_state_dict(optimizer.state_dict())
        steps(model, own, begun, options.steps, QAT(model, mode, rule))
        return model

    def score(model: K3, mode: str, rule: str) -> float:
        model = copy.deepcopy(model)
        with torch.no_grad(), QAT(model, mode, rule).projected():
            return float(loss(model))

    yield from compared(seed, finished, score)


def train(trainer: Trainer, until: int) -> None:
    while trainer.progress.step < until:
        trainer._advance(trainer.train_step(), 1.0)


def bits(options: Options, data: Prepared, model: K3, mode: str, rule: str) -> float:
    """Of the model, rounded so; 'off' leaves it as it is."""
    model = copy.deepcopy(model)
    with QAT(model, mode, rule).projected():
        return held_out(model, data, options.bytes or None)


def held_out(model: K3, data: Prepared, limit: int | None) -> float:
    """Bits per byte of the first `limit` bytes of every slice, all of them together."""
    nats = size = 0.0
    for source in data.sources("validation"):
        text = data.validation_text(source.name)[:limit].decode("utf-8", "ignore")
        documents = [data.tokenizer().encode(text)]
        score = bits_per_byte(model, documents, len(text.encode()), data.manifest["vocab_size"], CONTEXT)
        nats, size = nats + score.nats, size + score.bytes
    return nats / math.log(2) / size


def one_seed(options: Options, data: Prepared, seed: int, run: Path) -> Iterator[dict[str, Any]]:
    """Its rows, as they are found."""
    base = trainer_of(options, data, seed, run / "base")
    train(base, options.steps - options.qat_steps)
    weights, state = copy.deepcopy(base.model.state_dict()), copy.deepcopy(base.state_dict())

    def finished(mode: str, rule: str) -> K3:
        trainer = trainer_of(options, data, seed, run / mode, qat=mode, qat_scale_rule=rule)
        trainer.model.load_state_dict(weights)
        trainer.load_state_dict(copy.deepcopy(state))
        train(trainer, options.steps)
        assert isinstance(trainer.model, K3)
        return trainer.model

    yield from compared(seed, finished, lambda model, mode, rule: bits(options, data, model, mode, rule))


def pairs(options: Options, data: Prepared, run: Path) -> Iterator[dict[str, Any]]:
    """A row for each order of the text, as they are found."""
    start = unlike_channels(options, data, run / "base")
    for order in range(1, options.rounds + 1):
        yield trained_pair(options, data, order, start, run)


def unlike_channels(options: Options, data: Prepared, run: Path) -> Start:
    """Weights after the steps at a constant rate, their channels scaled, and the state of the trainer."""
    begun = options.steps - options.qat_steps
    steady = {"steps": begun, "batch_size": 2, "final_lr_fraction": 1.0, "warmup_fraction": min(1, TEXT_WARMUP / begun)}
    base = trainer_of(options, data, 0, run, **steady, **TEXT_RATES)
    train(base, begun)
    return spread(base.model.state_dict(), options.spread), base.state_dict()


def trained_pair(options: Options, data: Prepared, order: int, start: Start, run: Path) -> dict[str, Any]:
    """The same steps over the same text twice, without QAT and with it."""
    weights, state = start

    def finished(mode: str) -> K3:
        falling = {"steps": options.qat_steps, "batch_size": 1, "final_lr_fraction": 0.0, "warmup_fraction": 0.0}
        trainer = trainer_of(options, data, order, run / f"{order}-{mode}", qat=mode, **falling, **TEXT_RATES)
        trainer.model.load_state_dict(weights)
        for name in ("optimizer", "balancer", "clip"):
            getattr(trainer, name).load_state_dict(copy.deepcopy(state[name]))
        train(trainer, options.qat_steps)
        assert isinstance(trainer.model, K3)
        return trainer.model

    scores = []
    for mode in ("off", "w4a16"):
        model = finished(mode)
        scores += [1000 * bits(options, data, model, served, "ceil") for served in ("off", "w4a16")]
    return pair(str(order), *scores)


def pair(order: str, exact: float, afterwards: float, masters: float, trained: float) -> dict[str, Any]:
    """From thousandths of a bit per byte: the run without QAT as it is and rounded, that with QAT not rounded and as
    it was trained."""
    lost, rounding = afterwards - exact, trained - masters
    return {
        "order": order,
        "without_QAT": exact / 1000,
        "rounded_afterwards": lost,
        "with_QAT": trained - exact,
        "rounding_with_QAT": rounding,
        "recovered_share": 1 - (trained - exact) / lost,
        "within_share": 1 - rounding / lost,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard error of every column over the pairs."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "order"}
    means = {name: statistics.fmean(values) for name, values in columns.items()}
    errors = {
        name: statistics.stdev(values) / math.sqrt(len(values)) for name, values in columns.items() if len(rows) > 1
    }
    return [{"order": "mean", **means}, {"order": "standard error", **errors}]


def spread(state: dict[str, torch.Tensor], sigma: float) -> dict[str, torch.Tensor]:
    """The same function with channels of unlike size in the latent that experts read."""
    generator, found = torch.Generator().manual_seed(0), dict(state)
    for name in state:
        if not name.endswith("experts.w1"):
            continue
        layer = name.removesuffix("experts.w1")
        factors = torch.exp(sigma * torch.randn(state[name].shape[-1], generator=generator))
        down = f"{layer}routed_expert_down_proj.weight"
        found[down] = state[down] / factors[:, None]
        found |= {f"{layer}experts.{w}": state[f"{layer}experts.{w}"] * factors for w in ("w1", "w3")}
    return found


def prepared(folder: Path) -> Prepared:
    """The data, made first where there is none."""
    if not (folder / "manifest.json").exists():
        tokenizer = folder.parent / "tokenizer"
        steps = [["tokenizer", "--out", str(tokenizer)]] if not tokenizer.exists() else []
        for command in (*steps, ["data", "--tokenizer", str(tokenizer), "--out", str(folder)]):
            if nanok3_command(command):
                raise SystemExit(f"nanok3 {' '.join(command)} failed")
    return Prepared(folder)


def compared(
    seed: int, finished: Callable[[str, str], K3], score: Callable[[K3, str, str], float]
) -> Iterator[dict[str, Any]]:
    """One run three ways: finished(mode, rule) trains its last steps, score(model, mode, rule) measures the served."""
    plain = finished("off", "ceil")
    exact = score(plain, "off", "ceil")
    yield row("without QAT", "float32", seed, exact, 0.0)
    afterwards = {}
    for mode, rule in SERVED:
        found = score(plain, mode, rule)
        afterwards[mode, rule] = 1000 * (found - exact)
        yield row("without QAT", f"{mode} {rule}", seed, found, afterwards[mode, rule])
    for mode, rule in TRAINED:
        found = score(finished(mode, rule), mode, rule)
        lost = 1000 * (found - exact)
        yield row(f"QAT {mode} {rule}", f"{mode} {rule}", seed, found, lost, 1 - lost / afterwards[mode, rule])


def row(
    trained: str, served: str, seed: int | str, found: float, lost: float, recovered: float | None = None
) -> dict[str, Any]:
    flat = {"trained": trained, "served": served, "seed": str(seed), "score": f"{found:.5f}"}
    return {**flat, "lost": lost, "recovered_share": recovered}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds; what is recovered is that of the mean losses."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["trained"], one["served"]), []).append(one)
    lost = {key: statistics.fmean(r["lost"] for r in group) for key, group in groups.items()}
    found = []
    for (trained, served), group in groups.items():
        mean = statistics.fmean(float(r["score"]) for r in group)
        recovered = 1 - lost[trained, served] / lost["without QAT", served] if trained != "without QAT" else None
        found.append(row(trained, served, "mean", mean, lost[trained, served], recovered))
    return found


def main(options: Options) -> None:
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    print(harness.machine_line(options.threads))
    table = harness.Table()
    with TemporaryDirectory() as folder:
        if options.model == "text":
            for found in pairs(options, prepared(options.data), Path(folder)):
                table.add([found])
            table.add(summary(table.records))
        else:
            for seed in range(options.rounds):
                if options.model == "memory":
                    rows = remembered(options, seed)
                else:
                    rows = one_seed(options, Prepared(options.data), seed, Path(folder) / str(seed))
                for found in rows:
                    table.add([found])
            table.add(means(table.records))
    harness.write_json(options.json, table.records, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
