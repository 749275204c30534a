"""`nanok3 draft`: train a draft for speculative decoding on a finished model, which stays as it is.

    nanok3 draft runs/x --out runs/x-draft --train.steps 300
    nanok3 draft runs/x --out runs/x-draft --train.steps 300 --resume    after an interrupt
    nanok3 serve runs/x --draft runs/x-draft

It starts as the prediction layer that was trained with the model (`nanok3 pretrain --train.mtp-weight 0.3`), or from
fresh weights where there is none. It learns from the text the run was trained on, or that of --data, and shows on
held-out text how often its first guess would be kept, its second, ..., and how many tokens a pass would give. That is
for text as it is: how a draft does on the model's own answers, the server counts.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nanok3.posttrain.draft_settings import DraftSettings
from nanok3.stages.generate import ModelFlags

if TYPE_CHECKING:
    from nanok3.data.packing import Batch
    from nanok3.data.prepared import Prepared


@dataclass(frozen=True, kw_only=True)
class DraftArgs(ModelFlags):
    """Train a draft on a frozen model."""

    out: Path
    """The folder of the draft."""
    data: Path | None = None
    """A prepared folder; the run's own when not given."""
    train: DraftSettings = field(default_factory=DraftSettings)
    """How it is trained."""
    held_out: int = 16
    """Rows of held-out text that acceptance is measured on."""
    resume: bool = False
    """Go on with the draft of --out."""


def main(args: DraftArgs) -> None:
    """Train; KeyboardInterrupt, after saving, for Ctrl-C."""
    from nanok3.data.files import only_one
    from nanok3.data.loader import MixtureLoader
    from nanok3.data.prepared import Prepared
    from nanok3.model.mtp import load_prediction
    from nanok3.posttrain.draft_run import DraftRun, check_folder
    from nanok3.stages.eval import data_of, run_of, settings_of
    from nanok3.train.machine import keep_freed_memory

    keep_freed_memory()
    if args.held_out < 1:
        raise ValueError(f"held_out is {args.held_out}; it must be at least 1")
    check_folder(args.out, args.resume)
    opened = args.open()
    settings = settings_of(run_of(opened.folder))
    data = Prepared(args.data or data_of(opened.folder, settings))
    train = args.train.of_model(settings.get("train", {}))
    if data.manifest["vocab_size"] != opened.model.cfg.vocab_size:
        theirs, ours = data.manifest["vocab_size"], opened.model.cfg.vocab_size
        raise ValueError(f"data: {data.folder} has a vocabulary of {theirs}, the model of {ours}")
    texts = [(s, w) for s, w in zip(data.sources(), data.weights(), strict=True) if s.pictures is None]
    if not texts:
        raise ValueError(f"data: {data.folder} has no source of text without pictures")
    sources, weights = zip(*texts)
    loader = MixtureLoader(sources, weights, 1, train.seq_len, train.seed)
    rows = held_out_rows(data, train.seq_len, args.held_out)
    learned = load_prediction(opened.model, opened.folder)
    with only_one(args.out):
        run = DraftRun(opened.model, loader, rows, train, args.out, print, args.resume)
        count = sum(p.numel() for p in run.draft.parameters())
        begun = "fresh weights" if learned is None else "the model's prediction layer"
        numbers = {"off": "", "w4a16": "MXFP4", "w4a8": "MXFP4 on inputs in MXFP8"}[train.qat]
        rounded = f"; its experts trained for {numbers}, scales by {train.qat_scale_rule}" if numbers else ""
        print(f"a draft of {count:,} parameters, from {begun}{rounded}")
        print(f"kept: the chance that guess 1, 2, ... stays in a sampled answer, on {len(rows)} rows of held-out text")
        run.fit()
        print(f"{args.out}: {shlex.join(['nanok3', 'serve', str(args.model), '--draft', str(args.out)])}")


def held_out_rows(data: Prepared, seq_len: int, count: int) -> list[Batch]:
    """The first rows of each source of text, in turn."""
    from nanok3.data.packing import one_pass

    texts = [source for source in data.sources("validation") if source.pictures is None]
    each = -(-count // max(1, len(texts)))
    return [row for source in texts for row in islice(one_pass(source, 1, seq_len), each)][:count]
