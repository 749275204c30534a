"""`nanok3 eval`: what a model learned, in numbers.

    nanok3 eval runs/x                              on the held-out text of the run's own data
    nanok3 eval runs/x --data runs/data             on another prepared folder
    nanok3 eval MODEL --data a.txt --data notes/    on files or folders of your own, one slice each
    nanok3 eval runs/x --pictures                   and what it sees on held-out pictures (--no-pictures: not)

Bits per byte stand beside zlib -9 and xz -9e on the same bytes; chance levels stand beside recall. For a run folder the
numbers, and pictures of what goes on inside the model, go to final.json and report.html as well.
"""

from __future__ import annotations

import json as json_format
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from nanok3.stages.generate import ModelFlags

if TYPE_CHECKING:
    from rich.table import Table

    from nanok3.serve.run_folder import OpenModel

RECALL_IDS = 512
"""Random tokens of the recall probe: the most frequent ones of the held-out text, which the model knows best."""
DIAGNOSIS_ROWS, DIAGNOSIS_TOKENS = 16, 256


@dataclass(frozen=True, kw_only=True)
class EvalArgs(ModelFlags):
    """Bits per byte beside zlib and xz, and a recall probe."""

    data: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A prepared folder, or a file or folder of text; may be given several times. The run's own data when not given."""
    bytes: int = 200_000
    """Bytes of text per slice, from documents in a fixed random order."""
    context: int | None = None
    """Tokens a prediction may look back on; when not given, the row length the run was trained with, else 4096."""
    recall_distance: int = 2048
    """Farthest distance of the copy probe, in tokens."""
    pictures: bool = True
    """Ask about held-out pictures, where the model has a vision tower and the data pictures."""
    picture_questions: int = 100
    """Questions on pictures of each kind, for every field that is asked for."""
    json: bool = False
    """Print JSON instead of tables."""


def main(args: EvalArgs) -> None:
    """Measure, print, and complete the run's final.json and report.html where there is a run."""
    from rich.console import Console

    from nanok3.train.machine import keep_freed_memory

    for name in ("bytes", "recall_distance", "picture_questions"):
        if getattr(args, name) < 2:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least 2")
    keep_freed_memory()
    opened = args.open()
    run = run_of(opened.folder)
    settings = settings_of(run)
    data = args.data or (data_of(opened.folder, settings),)
    slices = held_out(data)
    context = args.context
    if context is None:
        context = settings.get("train", {}).get("seq_len") or 4096
    found = measure(opened, slices, args.bytes, context, args.recall_distance)
    with_pictures = picture_folders(data)
    if args.pictures and with_pictures and opened.model.cfg.has_vision:
        found["pictures"] = see(opened, with_pictures, args.picture_questions)
    elif args.pictures and (with_pictures or opened.model.cfg.has_vision):
        missing = "the data has no held-out pictures" if not with_pictures else "this model has no vision tower"
        print(f"pictures: {missing}, so none is asked about", file=sys.stderr)
    if run is not None:
        complete(run, found)
    if args.json:
        print(json_format.dumps(found, indent=2))
        return
    console = Console(highlight=False)
    console.print(compression_table(found["slices"]))
    console.print(recall_table(found["recall"]))
    if "pictures" in found:
        console.print(picture_table(found["pictures"]["fields"]))
    if run is not None:
        console.print(f"report: {run / 'report.html'}", soft_wrap=True)


# ---------------------------------------------------------------------- the text


def held_out(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Slices of documents: the validation documents of each source of a prepared folder, or the documents of each file
    or folder. ValueError if there is no text."""
    from nanok3.data.corpus import documents
    from nanok3.data.prepared import MANIFEST

    slices: dict[str, list[str]] = {}
    for path in paths:
        if (path / MANIFEST).is_file():
            slices |= prepared_texts(path)
        elif path.exists():
            slices[path.stem] = [document.text for document in documents(path)]
        else:
            raise ValueError(f"data: {path} does not exist")
    if not any(slices.values()):
        raise ValueError(f"data: {', '.join(map(str, paths))} holds no held-out text")
    return slices


def prepared_texts(folder: Path) -> dict[str, list[str]]:
    """The validation documents of every source of text, without [EOS]."""
    from nanok3.data.prepared import Prepared

    data = Prepared(folder)
    tokenizer = data.tokenizer()
    return {
        source.name: [tokenizer.decode(source.tokens(i)[:-1].tolist()) for i in range(len(source))]
        for source in data.sources("validation")
        if source.pictures is None
    }


def picture_folders(paths: Sequence[Path]) -> list[Path]:
    """Those that are prepared folders with held-out pictures."""
    from nanok3.data.prepared import MANIFEST, Prepared

    prepared = [path for path in paths if (path / MANIFEST).is_file()]
    return [path for path in prepared if any(s.pictures for s in Prepared(path).sources("validation"))]


def see(opened: OpenModel, folders: Sequence[Path], questions: int) -> dict[str, Any]:
    """What eval/pictures.py measures, on the one prepared folder with pictures."""
    from nanok3.data.prepared import Prepared
    from nanok3.eval.pictures import evaluate_pictures

    if len(folders) != 1:
        names = ", ".join(map(str, folders))
        raise ValueError(f"pictures: {names} have held-out pictures; allowed: one such folder, or --no-pictures")
    data = Prepared(folders[0])
    data.check_tokenizer(opened.tokenizer)
    return evaluate_pictures(opened.model, data, questions)


def run_of(model_folder: Path) -> Path | None:
    """The run folder that a model belongs to, None for a model on its own."""
    from nanok3.serve.run_folder import run_root

    root = run_root(model_folder)
    return root if (root / "metrics.jsonl").is_file() else None


def settings_of(run: Path | None) -> dict[str, Any]:
    """The settings in the run's config.yaml; empty without one."""
    import yaml

    config = run / "config.yaml" if run is not None else None
    document = yaml.safe_load(config.read_text("utf-8")) if config is not None and config.is_file() else None
    return (document or {}).get("settings", {})


def data_of(model_folder: Path, settings: dict[str, Any]) -> Path:
    """The prepared data that the settings of the model's run name."""
    if "data" not in settings:
        raise ValueError(f"data: {model_folder} belongs to no run that names its data; give --data")
    data = Path(settings["data"])
    if not data.is_dir():
        raise ValueError(f"data: {model_folder} was trained on {data}, which is not here; give --data")
    return data


# ---------------------------------------------------------------------- the numbers


def measure(
    opened: OpenModel,
    slices: dict[str, list[str]],
    max_bytes: int = 200_000,
    context: int = 4096,
    recall_distance: int = 2048,
) -> dict[str, Any]:
    """{"slices", "recall", "diagnostics", "context", "parameters"} of a model on held-out texts."""
    from nanok3 import ledger
    from nanok3.eval import recall
    from nanok3.eval.bits_per_byte import evaluate_slices, first_bytes
    from nanok3.train.diagnostics import diagnose

    model, tokenizer = opened.model, opened.tokenizer
    chosen = {name: first_bytes(shuffled(texts), max_bytes) for name, texts in slices.items()}
    encoded = {name: tokenizer.encode_batch(texts) for name, texts in chosen.items()}
    distances = [d for d in recall.DISTANCES if d <= recall_distance]
    return {
        "slices": evaluate_slices(model, tokenizer, chosen, model.cfg.vocab_size, context, None),
        "recall": recall.recall_probe(model, frequent_ids(encoded), distances),
        "diagnostics": diagnose(model, diagnosis_batch(encoded).to(model.lm_head.weight.device)),
        "context": context,
        "parameters": {
            "total": ledger.parameters(model.cfg),
            "active": ledger.active_parameters(model.cfg),
        },
    }


def shuffled(texts: Sequence[str]) -> list[str]:
    """The texts in a fixed random order, so that the first bytes stand for all of them."""
    order = list(texts)
    random.Random(0).shuffle(order)
    return order


def frequent_ids(encoded: dict[str, list[list[int]]], count: int = RECALL_IDS) -> list[int]:
    """The `count` most frequent token ids, ties by id."""
    counts = Counter(token for documents in encoded.values() for document in documents for token in document)
    return sorted(counts, key=lambda token: (-counts[token], token))[:count]


def diagnosis_batch(
    encoded: dict[str, list[list[int]]], rows: int = DIAGNOSIS_ROWS, tokens: int = DIAGNOSIS_TOKENS
) -> Any:
    """(B, T) token ids: the beginnings of documents that are long enough, of each slice in turn."""
    import torch

    length = min(tokens, max(len(d) for documents in encoded.values() for d in documents))
    long_enough = [[d[:length] for d in documents if len(d) >= length][:rows] for documents in encoded.values()]
    in_turn = [documents[i] for i in range(rows) for documents in long_enough if i < len(documents)]
    return torch.tensor(in_turn[:rows])


def complete(run: Path, found: dict[str, Any]) -> None:
    """Add `found`, the machine and the versions to the run's final.json, and write report.html."""
    import nanok3
    from nanok3.data.files import write_file
    from nanok3.train.machine import describe
    from nanok3.train.report import write_report

    path = run / "final.json"
    before = json_format.loads(path.read_text("utf-8")) if path.is_file() else {}
    machine = describe()
    versions = {"nanok3": nanok3.__version__, **{name: machine.pop(name) for name in ("python", "torch")}}
    after = {"hardware": machine, "versions": versions, **before, **found, "evaluated": time.strftime("%Y-%m-%d %H:%M")}
    write_file(path, (json_format.dumps(after, indent=1) + "\n").encode())
    write_report(run)


# ---------------------------------------------------------------------- tables


def compression_table(slices: dict[str, Any]) -> Table:
    """Bits per byte of every slice, and of all bytes together."""
    from rich import box
    from rich.table import Table

    shown = Table(title="bits per byte", title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("held-out text")
    for column in ("bytes", "tokens", "this model", "zlib -9", "xz -9e", "against xz"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, s in slices.items():
        shown.add_row(name, *_cells(s))
    if len(slices) > 1:
        size = sum(s["bytes"] for s in slices.values())
        mean = {k: sum(s[k] * s["bytes"] for s in slices.values()) / size for k in ("bits_per_byte", "zlib", "xz")}
        shown.add_section()
        shown.add_row("all", *_cells({"bytes": size, "tokens": sum(s["tokens"] for s in slices.values()), **mean}))
    return shown


def _cells(s: dict[str, Any]) -> list[str]:
    bits = [f"{s[name]:.3f}" for name in ("bits_per_byte", "zlib", "xz")]
    return [f"{s['bytes']:,}", f"{s['tokens']:,}", *bits, f"{s['bits_per_byte'] / s['xz'] - 1:+.0%}"]


def recall_table(recall: dict[str, Any]) -> Table:
    """Both probes, a distance or a number of pairs a line."""
    from rich import box
    from rich.table import Table

    shown = Table(title="recall of random tokens", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("probe", "right", "chance", "a shown one", "nats"):
        shown.add_column(column, justify="left" if column == "probe" else "right", no_wrap=True)
    for entry in recall["copy"]:
        right, chance = f"{entry['accuracy']:.1%}", f"{recall['copy_chance']:.1%}"
        shown.add_row(f"copy, {entry['distance']} back", right, chance, "", f"{entry['nats']:.2f}")
    shown.add_section()
    for entry in recall["pairs"]:
        shares = (entry["accuracy"], recall["pairs_chance"], entry["shown"])
        name = f"{entry['pairs']} pair" + ("s" if entry["pairs"] > 1 else "")
        shown.add_row(name, *(f"{share:.1%}" for share in shares), f"{entry['nats']:.2f}")
    return shown


def picture_table(fields: Sequence[dict[str, Any]]) -> Table:
    """A line for each kind and field."""
    from rich import box
    from rich.table import Table

    shown = Table(title="questions on held-out pictures", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("pictures of", "asked for", "questions", "right", "blind", "chance"):
        shown.add_column(column, justify="left" if column in ("pictures of", "asked for") else "right", no_wrap=True)
    for f in fields:
        shares = (f"{f[name]:.1%}" for name in ("right", "blind", "chance"))
        shown.add_row(f["kind"], f["field"], f"{f['count']:,}", *shares)
    return shown
