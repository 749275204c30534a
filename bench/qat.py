"""What four bits cost, and what training for them gives back: no rounding, rounding afterwards, QAT.

    nanok3 tokenizer --out runs/quality/tokenizer
    nanok3 data --tokenizer runs/quality/tokenizer --out runs/quality/data
    python bench/qat.py

One run of K3 is trained to step `steps - qat_steps` and goes on from there three times, over the same text at the same
learning rates: without QAT, with weights in MXFP4, and with inputs in MXFP8 too. So all three have seen the same, and
what differs is what their last steps were trained for. Each is then measured on held-out text as trained and as served.

    lost        bits per byte above the run without QAT, not rounded
    recovered   1 - lost with QAT / lost by rounding the run without QAT afterwards, served the same way
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import torch
import tyro
from quality import held_out

from nanok3.config import K3Config
from nanok3.data.loader import MixtureLoader
from nanok3.data.prepared import Prepared
from nanok3.model.decoder import K3
from nanok3.quant.qat import QAT
from nanok3.train.loop import Trainer
from nanok3.train.machine import keep_freed_memory
from nanok3.train.settings import TrainSettings

SERVED = (("w4a16", "ceil"), ("w4a16", "floor"), ("w4a16", "even"), ("w4a8", "ceil"))
"""How the run without QAT is rounded afterwards."""
TRAINED = (("w4a16", "ceil"), ("w4a8", "ceil"))
"""The runs with QAT; each is served as it was trained."""


@dataclass
class Options(harness.Options):
    rounds: int = 2
    """Seeds: 0, 1, ..."""
    depth: int = 5
    steps: int = 300
    qat_steps: int = 100
    """The last steps, which are trained three times."""
    final_lr: float = 0.03
    """Where the cosine ends, relative to the peak."""
    bytes: int = 60_000
    """Held-out bytes of each slice; 0 for all."""
    data: Path = Path("runs/quality/data")
    json: Path = Path("runs/bench/qat.json")


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
    model = K3(K3Config.small().at_depth(options.depth).with_vocabulary(data.manifest["vocab_size"]))
    loader = MixtureLoader(data.sources(), data.weights(), settings.batch_size, settings.seq_len, seed)
    tokenizer = data.tokenizer()
    sizes = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size - 256)] + [0] * 256)
    return Trainer(model, loader, settings, run, sizes)


def train(trainer: Trainer, until: int) -> None:
    while trainer.progress.step < until:
        trainer._advance(trainer.train_step(), 1.0)


def bits(options: Options, data: Prepared, model: K3, mode: str, rule: str) -> float:
    """Of the model, rounded so; 'off' leaves it as it is."""
    model = copy.deepcopy(model)
    with QAT(model, mode, rule).projected():
        return held_out(model, data, 512, options.bytes or None)["all"]


def one_seed(options: Options, data: Prepared, seed: int, run: Path) -> list[dict[str, Any]]:
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

    def row(trained: str, mode: str, rule: str, found: float) -> dict[str, Any]:
        served = "float32" if mode == "off" else f"{mode} {rule}"
        return {"trained": trained, "served": served, "seed": seed, "bits_per_byte": found, "lost": found - exact}

    plain = finished("off", "ceil")
    exact = bits(options, data, plain, "off", "ceil")
    rows = [row("without QAT", "off", "", exact)]
    for mode, rule in SERVED:
        rows.append(row("without QAT", mode, rule, bits(options, data, plain, mode, rule)))
    for mode, rule in TRAINED:
        model = finished(mode, rule)
        rows.append(row(f"QAT {mode} {rule}", mode, rule, bits(options, data, model, mode, rule)))
        afterwards = next(r for r in rows if r["served"] == f"{mode} {rule}")
        rows[-1]["recovered_share"] = 1 - rows[-1]["lost"] / afterwards["lost"]
    return rows


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["trained"], row["served"]), []).append(row)
    lost = {key: statistics.fmean(r["lost"] for r in group) for key, group in groups.items()}
    found = []
    for (trained, served), group in groups.items():
        mean = {"trained": trained, "served": served, "seed": "mean"}
        mean["bits_per_byte"] = statistics.fmean(r["bits_per_byte"] for r in group)
        mean["lost"] = lost[trained, served]
        if "recovered_share" in group[0]:
            mean["recovered_share"] = 1 - mean["lost"] / lost["without QAT", served]
        found.append(mean)
    return found


def main(options: Options) -> None:
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    print(harness.machine_line(options.threads))
    data, table = Prepared(options.data), harness.Table()
    with TemporaryDirectory() as folder:
        for seed in range(options.rounds):
            table.add(one_seed(options, data, seed, Path(folder) / str(seed)))
    table.add(means(table.records))
    harness.write_json(options.json, table.records, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
