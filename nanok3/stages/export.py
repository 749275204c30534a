"""`nanok3 export`: the same weights in a file of another engine.

    nanok3 export runs/x --gguf x.gguf                    bfloat16, for llama.cpp
    nanok3 export runs/x --gguf x.gguf --dtype mxfp4      routed experts in four bits
    llama-completion -m x.gguf -p "Once upon a time"      there

The checkpoint is read tensor by tensor and the file written in one pass, under a temporary name that it loses when it
is whole, so memory holds one tensor and nobody ever sees half a file. What llama.cpp cannot run is refused before
anything is written, with every reason; what it has no place for (the vision tower, a prediction layer) is left out and
said.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from torch import Tensor

    from nanok3.data.tokenizer import Tokenizer
    from nanok3.model.weights import _Entry
    from nanok3.quant.gguf import Value
    from nanok3.quant.llama_cpp import Plan


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write the weights of a model into a GGUF file, which llama.cpp runs."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run folder, one of its checkpoints, or any model folder in the official layout."""
    gguf: Path
    """The file to write; an older GGUF file of that name is replaced."""
    dtype: Literal["f32", "bf16", "mxfp4"] = "bf16"
    """Of the matrices: float32, bfloat16, or bfloat16 with the routed experts in MXFP4 (as K3 was released)."""
    vocabulary: Literal["auto", "none"] = "auto"
    """auto: with the tokenizer where the model has one; none: a model that takes ids only."""


def main(args: ExportArgs) -> None:
    """Run the command. ValueError for a model that llama.cpp cannot run, a wrong folder or a target in the way."""
    from nanok3.data.files import check_file, remove_left, replacing
    from nanok3.quant.gguf import file_size, header, write_gguf
    from nanok3.serve.run_folder import model_folder

    check_file("gguf", args.gguf)
    folder = model_folder(args.model)
    plan = plan_of(folder, args.dtype)
    metadata, remarks = metadata_of(args, folder, plan)
    tensors = plan.tensors()
    remove_left(args.gguf)
    check_target(args.gguf, file_size(header(metadata, tensors), tensors))
    start = time.monotonic()
    with replacing(args.gguf) as file:
        size = write_gguf(file, metadata, tensors, progress_line())
    print(f"{args.gguf}: {len(tensors)} tensors, {size:,} bytes, {args.dtype}, {time.monotonic() - start:.1f} s")
    for remark in remarks:
        print(f"note: {remark}")


# ---------------------------------------------------------------------- what goes in


def plan_of(folder: Path, dtype: str) -> Plan:
    """The tensors to be written. ValueError for what llama.cpp cannot hold and for a folder that does not fit."""
    from nanok3.config import K3Config
    from nanok3.model.weights import checkpoint_entries, disk_tensors, refuse_misfits, without_cut_layers
    from nanok3.quant.llama_cpp import FILE_TYPES, Plan, refusals

    cfg = K3Config.from_json(folder)
    reasons = refusals(cfg, dtype)
    if reasons:
        raise ValueError(f"{folder}: llama.cpp cannot run this model: {'; '.join(reasons)}")
    entries = without_cut_layers(cfg, checkpoint_entries(folder))
    packed = any(name.endswith(".weight_packed") for name in entries)
    text = {name: entry for name, entry in entries.items() if name.startswith(cfg.text_prefix)}
    wanted = {name: spec for name, spec in disk_tensors(cfg, packed).items() if name.startswith(cfg.text_prefix)}
    refuse_misfits(folder, cfg, wanted, text)
    return Plan(cfg, lambda name: read_stored(cfg.text_prefix + name, text), packed, FILE_TYPES[dtype])


def read_stored(name: str, entries: dict[str, _Entry]) -> Tensor:
    """One tensor as it lies in its file. ValueError for one with a number that is none: whoever runs it would get
    nothing else."""
    import torch

    from nanok3.model.weights import DTYPES

    entry = entries[name]
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    with open(entry.file, "rb") as file:
        file.seek(entry.offset)
        file.readinto(data.numpy().data)
    values = data.view(DTYPES[entry.dtype]).view(entry.shape)
    if not all_numbers(values, name.endswith("_scale")):
        raise ValueError(f"{entry.file}: {name} holds inf or NaN; no engine makes anything of that")
    return values


def all_numbers(values: Tensor, scale: bool) -> bool:
    """Whether a stored tensor is free of inf and NaN. Of the packed ones only scales can hold NaN, as code 255."""
    if values.dtype.is_floating_point:
        return all(bool(piece.isfinite().all()) for piece in values.flatten().split(1 << 22))
    return not scale or bool((values != 255).all())


def metadata_of(args: ExportArgs, folder: Path, plan: Plan) -> tuple[dict[str, Value], list[str]]:
    """The keys of the file, and what a user should know about them."""
    from nanok3.quant.gguf_vocabulary import vocabulary, without_vocabulary
    from nanok3.quant.llama_cpp import hyperparameters

    cfg, remarks = plan.cfg, []
    name = os.fsencode(folder.resolve().name).decode("utf-8", "replace")  # a folder's name may be any bytes
    keys = hyperparameters(cfg, args.dtype, name)
    if cfg.has_vision:
        remarks.append("the vision tower and its projector are left out: llama.cpp runs K3's text part")
    if cfg.num_nextn_predict_layers:
        remarks.append("the prediction layer is left out: the file has no place for it")
    if args.dtype == "mxfp4" and not plan.packed:
        remarks.append("the routed experts were rounded to four bits; a model trained for that loses less")
    tokenizer = find_tokenizer(folder) if args.vocabulary == "auto" else None
    if tokenizer is None:
        remarks.append("no tokenizer is in the file: llama.cpp can be given ids, not text")
        return keys | without_vocabulary(), remarks
    ranks = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size - len(tokenizer.special))]
    ids = {"bos": tokenizer.bos_id, "eos": cfg.eos_token_id, "padding": tokenizer.pad_id}
    return keys | vocabulary(ranks, tokenizer.special, cfg.vocab_size, ids), remarks


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that belongs to a model folder, None where there is none. ValueError for a damaged one."""
    from nanok3.data.tokenizer import MODEL_FILE, Tokenizer
    from nanok3.serve.run_folder import _tokenizer_folder

    place = _tokenizer_folder(folder)
    return Tokenizer.load(place) if (place / MODEL_FILE).exists() else None


# ---------------------------------------------------------------------- where it goes


def check_target(path: Path, size: int) -> None:
    """ValueError for a target that is no GGUF file of ours to replace, and for a disk without room."""
    from nanok3.quant.gguf import MAGIC

    if path.exists() and not path.is_file():  # a pipe's first bytes would be waited for
        raise ValueError(f"gguf is {path}, a device or a pipe; name a file, which is written whole or not at all")
    if path.exists() and _first_bytes(path) != MAGIC:
        raise ValueError(f"gguf is {path}, which exists and is no GGUF file; name another")
    near = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(near).free
    if size > free:
        raise ValueError(f"gguf: {size:,} bytes are to be written and {near} has {free:,} left")


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(4)


def progress_line() -> Callable[[int, int], None]:
    """Says on stderr, at most twice a second and at the end, how far it is; only on a terminal."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and (time.monotonic() - last > 0.5 or done == total):
            last = time.monotonic()
            end = "\n" if done == total else "\r"
            print(f"{done / total:4.0%} of {total:,} bytes", end=end, file=sys.stderr, flush=True)

    return show
