"""`nanok3 quantize`: the routed experts in four bits, as K3 was released, and what that costs.

    nanok3 quantize runs/x --out runs/x-mxfp4              a run, one of its checkpoints, or any model folder
    nanok3 quantize runs/x --out runs/x-floor --scale-rule floor
    nanok3 generate runs/x-mxfp4 --prompt "Once upon"      and so with chat, serve, eval, export --gguf

A run trained with `--train.qat` gives the very values its forward pass saw; any other is rounded afterwards. The folder
appears when it is whole. It holds the checkpoint in the official packed layout, the tokenizer, a prediction layer where
the model has one, and quantization.json: the error of every stack of matrices, and bits per byte on the run's held-out
text with the experts as they were, in MXFP4 (W4A16), and reading their inputs in MXFP8 too (W4A8).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from nanok3.model.decoder import K3
    from nanok3.quant.pack import Rounding

REPORT = "quantization.json"


@dataclass(frozen=True, kw_only=True)
class QuantizeArgs:
    """Round the routed experts of a model to MXFP4 and store them packed."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run folder, one of its checkpoints, or any model folder in the official layout with plain experts."""
    out: Path
    """The folder to make."""
    scale_rule: Literal["auto", "ceil", "floor", "even"] = "auto"
    """How a block of 32 gets its power of two; auto: as the run was trained, else ceil (nothing is cut off)."""
    dtype: Literal["bf16", "float32"] = "bf16"
    """Of everything that is no routed expert."""
    evaluate: bool = True
    """Measure bits per byte before and after."""
    data: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Text to measure on, as for `nanok3 eval`; the run's own prepared data when not given."""
    bytes: int = 200_000
    """Bytes of text per slice."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""


def main(args: QuantizeArgs) -> None:
    """Run the command. ValueError for a model that cannot be packed and for a folder that is in the way."""
    import torch

    from nanok3.data.files import check_place
    from nanok3.model.mtp import load_prediction
    from nanok3.model.weights import load
    from nanok3.quant.pack import pack_experts
    from nanok3.serve.run_folder import model_folder
    from nanok3.stages.eval import run_of, settings_of
    from nanok3.train.machine import keep_freed_memory

    keep_freed_memory()
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"threads is {args.threads}; it must lie between 1 and 1024")
        torch.set_num_threads(args.threads)
    if args.bytes < 2:
        raise ValueError(f"bytes is {args.bytes}; it must be at least 2")
    if args.out.exists():
        raise ValueError(f"out is {args.out}, which exists; name a folder to be made")
    check_place("out", args.out)
    folder = model_folder(args.model)
    settings = settings_of(run_of(folder)).get("train", {})
    rule, remarks = rule_of(args.scale_rule, settings)
    slices = held_out_text(args, folder, remarks)
    model = load(folder)
    errors = pack_experts(model, rule, progress)
    if load_prediction(model, folder) is not None:
        remarks.append("the prediction layer goes along with its experts as they are: drafts start from it")
    report: dict[str, Any] = {"source": str(folder), "scale_rule": rule, "trained_with": settings.get("qat", "off")}
    report["rounding"] = [asdict(error) for error in errors]
    write_folder(args, folder, model, report)
    show(rounding_table(errors))
    print(f"{args.out}: {size_of(args.out):,} bytes, {size_of(folder):,} before; scales by {rule}")
    for remark in remarks:
        print(f"note: {remark}")
    if slices:
        del model
        print("measuring bits per byte on held-out text, three times")
        report["bits_per_byte"] = measure(args, folder, rule, slices, settings.get("seq_len") or 4096)
        write_report(args.out, report)
        show(cost_table(report["bits_per_byte"]))
    print(f"report: {args.out / REPORT}")


def rule_of(asked: str, settings: dict[str, Any]) -> tuple[str, list[str]]:
    """The scale rule, and what a user should know about it."""
    mode, trained = settings.get("qat", "off"), settings.get("qat_scale_rule", "ceil")
    if mode == "off":
        return "ceil" if asked == "auto" else asked, ["rounded afterwards: a run trained with --train.qat loses less"]
    if asked in ("auto", trained):
        return trained, [f"trained for it: qat {mode}, scales by {trained}"]
    return asked, [f"trained for scales by {trained}: with {asked} the values are others than its forward pass saw"]


def progress(done: int, total: int) -> None:
    """On stderr, on a terminal."""
    if sys.stderr.isatty():
        print(f"packed {done} of {total} layers", end="\n" if done == total else "\r", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- the folder


def write_folder(args: QuantizeArgs, source: Path, model: K3, report: dict[str, Any]) -> None:
    """Weights, tokenizer, marker and report; the folder takes its name when all is there."""
    import torch

    from nanok3.data.files import write_file
    from nanok3.model.mtp import save_prediction
    from nanok3.model.weights import save
    from nanok3.serve.run_folder import MARKER, stage_of
    from nanok3.stages.export import find_tokenizer

    tokenizer, stage = find_tokenizer(source), stage_of(source)
    with new_folder(args.out) as aside:
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        save(model, aside, experts="mxfp4", dtype=dtype)
        save_prediction(model, aside, dtype)
        if tokenizer is not None:
            tokenizer.save(aside)
        if stage is not None:
            write_file(aside / MARKER, (json.dumps({"stage": stage}) + "\n").encode())
        write_report(aside, report)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that takes the name `path` when the block ends well, and else is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield aside
        os.chmod(aside, 0o755)
        for place in (aside, path.parent):
            flush(place)
        os.rename(aside, path)
        flush(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    from nanok3.data.files import write_file

    write_file(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode())


def size_of(folder: Path) -> int:
    """Bytes of the weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# ---------------------------------------------------------------------- what it costs


def held_out_text(args: QuantizeArgs, folder: Path, remarks: list[str]) -> dict[str, list[str]]:
    """The text to measure on; empty where there is none to be had, which is remarked."""
    from nanok3.stages.eval import data_of, held_out, run_of, settings_of
    from nanok3.stages.export import find_tokenizer

    if not args.evaluate:
        return {}
    if find_tokenizer(folder) is None:
        remarks.append("nothing was measured: the model has no tokenizer")
        return {}
    settings = settings_of(run_of(folder))
    if not args.data and "data" not in settings:
        remarks.append("nothing was measured: the model belongs to no run that names its data; give --data")
        return {}
    return held_out(args.data or (data_of(folder, settings),))


def measure(
    args: QuantizeArgs, source: Path, rule: str, slices: dict[str, list[str]], context: int
) -> dict[str, dict[str, float]]:
    """Bits per byte of every slice and of all bytes: with the experts of `source`, with the packed ones, and with these
    on MXFP8 inputs. Everything else is as it was written, so that the experts alone make the difference."""
    import torch

    from nanok3.model.weights import load
    from nanok3.quant.qat import MATRICES, moe_layers, mxfp8_inputs
    from nanok3.stages.export import find_tokenizer

    tokenizer = find_tokenizer(source)
    assert tokenizer is not None
    model = load(args.out, dtype=torch.float32)
    found = {"W4A16": score(model, tokenizer, slices, args.bytes, context)}
    mxfp8_inputs(model, rule)
    found["W4A8"] = score(model, tokenizer, slices, args.bytes, context)
    model, before = load(args.out, dtype=torch.float32), moe_layers(load(source, dtype=torch.float32))
    for name, moe in moe_layers(model).items():
        for matrix in MATRICES:
            moe.experts.get_parameter(matrix).data = before[name].experts.get_parameter(matrix).data
    return {"as stored": score(model, tokenizer, slices, args.bytes, context), **found}


def score(model: K3, tokenizer: Any, slices: dict[str, list[str]], limit: int, context: int) -> dict[str, float]:
    from nanok3.eval.bits_per_byte import bits_per_byte, first_bytes
    from nanok3.stages.eval import shuffled

    found, bits, size = {}, 0.0, 0
    for name, texts in slices.items():
        chosen = first_bytes(shuffled(texts), limit)
        count = sum(len(text.encode()) for text in chosen)
        one = bits_per_byte(model, tokenizer.encode_batch(chosen), count, model.cfg.vocab_size, context)
        found[name] = one.bits_per_byte
        bits, size = bits + one.bits_per_byte * count, size + count
    return {**found, "all": bits / size} if len(found) > 1 else found


# ---------------------------------------------------------------------- tables


def rounding_table(errors: list[Rounding]) -> Table:
    """A layer a line: relative error by projection, and the worst of the rest."""
    from rich import box
    from rich.table import Table

    shown = Table(title="what rounding changed in the routed experts", title_justify="left", box=box.SIMPLE_HEAD)
    columns = ("layer", "rms error: gate", "up", "down", "largest, in rms", "beyond the scale", "became zero")
    for column in columns:
        shown.add_column(column, justify="right")
    for layer in sorted({error.layer for error in errors}):
        here = {error.projection: error for error in errors if error.layer == layer}
        rms = [f"{here[name].rms_error:.4f}" for name in ("gate", "up", "down")]
        worst = [max(getattr(e, field) for e in here.values()) for field in ("max_error", "saturated", "zeros")]
        shown.add_row(str(layer), *rms, f"{worst[0]:.2f}", f"{worst[1]:.2%}", f"{worst[2]:.1%}")
    return shown


def cost_table(found: dict[str, dict[str, float]]) -> Table:
    """Slices as lines, ways to serve as columns, each with its distance from the first."""
    from rich import box
    from rich.table import Table

    shown = Table(title="bits per byte, experts", title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("held-out text")
    for served in found:
        shown.add_column(served, justify="right", no_wrap=True)
    first = found["as stored"]
    for name, base in first.items():
        cells = [f"{found[served][name]:.4f} ({found[served][name] - base:+.4f})" for served in list(found)[1:]]
        shown.add_row(name, f"{base:.4f}", *cells)
    return shown


def show(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)
