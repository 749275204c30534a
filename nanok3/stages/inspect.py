"""`nanok3 inspect k3`: what a model is, from its config alone. No weight is loaded.

    the schedule       which layer mixes tokens how, where experts begin, where the running sum is banked
    the ledger         parameters by component: all of them, those one token uses, their bytes in a checkpoint
    the arithmetic     operations a token, reading a prompt and writing an answer, at several context lengths
    the caches         what a sequence leaves behind
    four memories      weights, KDA state, MLA cache, depth sources: what each is, how long it lives, how large it is

All numbers come from `nanok3.ledger`. Given a folder with weights, the headers of its files are compared with what the
config promises. Files are counted in powers of 1,000 (GB), memory in powers of 1,024 (GiB).
"""

from __future__ import annotations

import json as json_format
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanok3 import ledger
from nanok3.config import K3Config
from nanok3.ledger import as_count, binary_bytes, decimal_bytes, scaled

ROW = 12
"""Layers in a row of the drawing; the release's AttnRes blocks have as many."""


@dataclass
class InspectArgs:
    """Show what a model is: layers, parameters, arithmetic, caches. Loads no weights."""

    config: tyro.conf.Positional[str] = "k3"
    """A preset (tiny, small, base, k3), a preset at a depth (small@12), a checkpoint folder, or a run folder."""
    context: str = "4K,128K,1M"
    """Context lengths in tokens, separated by commas; K is 1,024 and M is 1,048,576."""
    batch: int = 1
    """Sequences held at once, for the caches."""
    json: bool = False
    """Print JSON instead of tables."""


def main(args: InspectArgs) -> None:
    """Print it. ValueError for a config, a context or a batch that makes no sense."""
    if args.batch < 1:
        raise ValueError(f"batch is {args.batch}; allowed: a whole number of at least 1")
    cfg, folder = ledger.find_config(args.config)
    contexts = [ledger.parse_count("context", part) for part in args.context.split(",")]
    facts = collect(cfg, contexts, args.batch)
    facts["on_disk"] = compare_with_files(cfg, folder) if folder is not None else None
    if args.json:
        print(json_format.dumps({"config": args.config, **facts}, indent=2))
    else:
        show(args.config, cfg, facts)


# ---------------------------------------------------------------------- the numbers


def collect(cfg: K3Config, contexts: list[int], batch: int = 1) -> dict[str, Any]:
    """Everything that is printed, as plain numbers: `--json` is this record."""
    return {
        "layers": [
            {"mixer": kind, "channels": "experts" if cfg.is_moe(l) else "dense", "banks": ledger.bank_writes(cfg, l)}
            for l, kind in enumerate(cfg.kinds)
        ],
        "parameters": {
            "total": ledger.parameters(cfg),
            "active": ledger.active_parameters(cfg),
            "active_with_embedding": ledger.active_parameters(cfg, embedding=True),
            "ledger": _ledger(cfg),
        },
        "checkpoint": {
            "precision": ledger.stored_precision(cfg).name,
            "bytes": ledger.checkpoint_bytes(cfg),
            "tensors": ledger.checkpoint_tensors(cfg),
        },
        "flops_per_token": {str(tokens): _arithmetic(cfg, tokens) for tokens in contexts},
        "picture": _picture(cfg),
        "experts": _experts(cfg),
        "cache": _cache(cfg, contexts, batch),
        "depth": {"sources": ledger.depth_sources(cfg), "bytes_per_token": 2 * _depth_values(cfg)},
    }


def _ledger(cfg: K3Config) -> list[dict[str, Any]]:
    """One row per (component, part), in order of appearance."""
    stored = ledger.stored_precision(cfg)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for w in ledger.weights(cfg):
        empty = {"component": w.component, "part": w.part, "parameters": 0, "active": 0, "bytes": 0}
        row = rows.setdefault((w.component, w.part), empty)
        row["parameters"] += w.parameters
        row["active"] += w.active if w.component != ledger.EMBEDDING else 0
        row["bytes"] += stored.nbytes(w, on_disk=True)
    return list(rows.values())


def _arithmetic(cfg: K3Config, tokens: int) -> dict[str, Any]:
    prefill = ledger.prefill_flops(cfg, tokens)
    decode, expanded = (ledger.decode_flops(cfg, tokens, absorbed) for absorbed in (True, False))
    return {
        "prefill": {**vars(prefill), "total": prefill.total, "whole_prompt": prefill.total * tokens},
        "decode": {**vars(decode), "total": decode.total},
        "decode_expanded": {**vars(expanded), "total": expanded.total},
        "training": ledger.flops_per_token(cfg, tokens, training=True),
    }


def _picture(cfg: K3Config) -> dict[str, Any] | None:
    """A picture of 256 x 256 patches, the largest the released preprocessing lets through."""
    if not cfg.has_vision:
        return None
    assert cfg.patch_size and cfg.merge_kernel_size
    patches = 256 * 256
    tokens = patches // (cfg.merge_kernel_size[0] * cfg.merge_kernel_size[1])
    side = 256 * cfg.patch_size
    return {"side": side, "patches": patches, "tokens": tokens, "flops": ledger.vision_flops(cfg, patches)}


def _experts(cfg: K3Config) -> dict[str, Any]:
    one = 3 * cfg.latent_size * cfg.moe_intermediate_size
    layers = sum(cfg.is_moe(l) for l in range(cfg.num_hidden_layers))
    return {
        "parameters_per_expert": one,
        "parameters_per_layer": cfg.num_experts * one,
        "parameters": layers * cfg.num_experts * one,
        "layers": layers,
        "sparsity": cfg.num_experts / cfg.num_experts_per_token,
    }


def _cache(cfg: K3Config, contexts: list[int], batch: int) -> dict[str, Any]:
    kda, mla = cfg.kinds.count("kda"), cfg.kinds.count("mla")
    return {
        "batch": batch,
        "recurrent_values_per_layer": ledger.recurrent_values(cfg),
        "recurrent_values": kda * ledger.recurrent_values(cfg),
        "convolution_values_per_layer": ledger.convolution_values(cfg),
        "convolution_values": kda * ledger.convolution_values(cfg),
        "latent_values_per_layer_and_token": cfg.latent_cache_size,
        "latent_values_per_token": mla * cfg.latent_cache_size,
        "expanded_values_per_layer_and_token": ledger.expanded_values(cfg),
        "expanded_values_per_token": mla * ledger.expanded_values(cfg),
        "kda_bytes_per_sequence": ledger.kda_state_bytes(cfg),
        "latent_bytes_per_token": ledger.latent_bytes(cfg),
        "bytes": {str(tokens): batch * ledger.state_bytes(cfg, tokens) for tokens in contexts},
    }


def _depth_values(cfg: K3Config) -> int:
    return ledger.depth_sources(cfg) * cfg.hidden_size


# ---------------------------------------------------------------------- what the files say

_NUMBERED = re.compile(r"\b(layers|blocks|experts)\.\d+\.")
_PLAIN = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


def compare_with_files(cfg: K3Config, folder: Path) -> dict[str, Any] | None:
    """Tensors and bytes that the headers in `folder` list, and every way in which they differ from the config's; None
    where there are no weights. Reads headers only."""
    if not list(folder.glob("*.safetensors")):
        return None
    from nanok3.model.weights import checkpoint_entries

    entries = checkpoint_entries(folder)
    found = Counter((_NUMBERED.sub(r"\1.*.", name), entry.shape, entry.dtype) for name, entry in entries.items())
    promised = _promised(cfg)
    differences = [
        f"{name} {dtype} {list(shape)}: the config asks for {promised[key]:,}, the files hold {found[key]:,}"
        for key in sorted(found.keys() | promised.keys())
        if found[key] != promised[key]
        for name, shape, dtype in [key]
    ]
    total = sum(entry.nbytes for entry in entries.values())
    return {"bytes": total, "tensors": len(entries), "differences": differences}


def _promised(cfg: K3Config) -> Counter[tuple[str, tuple[int, ...], str]]:
    """How many tensors of each (name, shape, dtype) the config asks for."""
    stored = ledger.stored_precision(cfg)
    promised: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    for w in ledger.weights(cfg):
        if stored.packs(w):
            rows, columns = w.shape
            promised[f"{w.name}_packed", (rows, columns // 2), "U8"] += w.copies
            promised[f"{w.name}_scale", (rows, columns // ledger.MXFP4_BLOCK), "U8"] += w.copies
        else:
            plain = "F32" if w.float32 and stored.plain < 4 else _PLAIN[cfg.dtype]
            promised[w.name, w.disk_shape or w.shape, plain] += w.copies
    return promised


# ---------------------------------------------------------------------- printing


def show(title: str, cfg: K3Config, facts: dict[str, Any]) -> None:
    """All sections, one after the other."""
    console = Console(highlight=False)
    console.print(Text(f"{title}:", "bold"), Text(_in_one_line(cfg)))
    _heading(console, "Layers")
    console.print(draw_schedule(cfg))
    _heading(console, "Parameters")
    console.print(_ledger_table(facts))
    _show_checkpoint(console, facts)
    _heading(console, "Arithmetic, operations a token")
    console.print(_flops_table(facts))
    if any(int(tokens) > cfg.max_position_embeddings for tokens in facts["flops_per_token"]):
        console.print(f"The config is made for at most {cfg.max_position_embeddings:,} tokens.")
    _show_picture(console, facts["picture"])
    _heading(console, "Caches, a sequence")
    console.print(_cache_table(cfg, facts["cache"]))
    _show_cache_sizes(console, facts["cache"])
    _heading(console, "Four memories")
    console.print(_memory_table(cfg, facts))


def _in_one_line(cfg: K3Config) -> str:
    moe = sum(cfg.is_moe(l) for l in range(cfg.num_hidden_layers))
    return (
        f"{cfg.num_hidden_layers} layers, {cfg.hidden_size:,} wide, vocabulary {cfg.vocab_size:,}: "
        f"{cfg.kinds.count('kda')} KDA and {cfg.kinds.count('mla')} gated MLA, "
        f"{cfg.num_hidden_layers - moe} dense and {moe} with {cfg.num_experts} experts "
        f"({cfg.num_experts_per_token} + {cfg.num_shared_experts} shared a token)"
    )


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def draw_schedule(cfg: K3Config) -> Text:
    """A letter per layer, rows of whole AttnRes blocks: K or M for the mixer, small where the channels are dense, and
    `>` in front of a layer that banks the running sum as a source for all later ones."""
    block = cfg.attn_res_block_size
    row = ROW if block is None else block * max(1, ROW // block)
    text = Text()
    for start in range(0, cfg.num_hidden_layers, row):
        end = min(start + row, cfg.num_hidden_layers)
        text.append(f"  {start:>3}-{end - 1:<3}", "dim")
        for layer in range(start, end):
            text.append_text(_cell(cfg, layer))
        if row == block:
            pad = "  " * (row - end + start)
            banked = "the embedding" if start == 0 else f"layers {start - block}-{start - 1}"
            text.append(f"{pad}   > {banked}", "dim")
        text.append("\n")
    text.append("  K KDA   M gated MLA   k m: dense MLP instead of experts", "dim")
    if block is not None:
        text.append(f"\n  > banks the sum so far as a depth source; the last read has {_sources(cfg)}", "dim")
    return text


def _sources(cfg: K3Config) -> str:
    return f"{ledger.depth_sources(cfg)} sources"


def _cell(cfg: K3Config, layer: int) -> Text:
    letter, style = ("K", "cyan") if cfg.kinds[layer] == "kda" else ("M", "magenta")
    cell = Text(">" if ledger.bank_writes(cfg, layer) else " ", "bold yellow")
    return cell.append(letter if cfg.is_moe(layer) else letter.lower(), style)


def _table(*columns: str, numbers: bool = True) -> Table:
    """The first column is text; the others are numbers, or text too."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for index, name in enumerate(columns):
        right = numbers and index > 0
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    return table


def _ledger_table(facts: dict[str, Any]) -> Table:
    total = facts["parameters"]["total"]
    table = _table("", "parameters", "active a token", "share", "on disk")

    def add(name: str, rows: list[dict[str, Any]], style: str = "") -> None:
        parameters, active, size = (sum(row[key] for row in rows) for key in ("parameters", "active", "bytes"))
        share = f"{parameters / total:.2%}"
        table.add_row(name, f"{parameters:,}", f"{active:,}", share, decimal_bytes(size), style=style)

    rows = facts["parameters"]["ledger"]
    for component in ledger.COMPONENTS:
        parts = [row for row in rows if row["component"] == component]
        if parts:
            add(component, parts)
        if component in (ledger.KDA, ledger.MLA):
            for part in parts:
                add(f"  {part['part']}", [part], "dim")
    table.add_section()
    add("total", rows, "bold")
    return table


def _show_checkpoint(console: Console, facts: dict[str, Any]) -> None:
    parameters, checkpoint, experts = facts["parameters"], facts["checkpoint"], facts["experts"]
    console.print(
        f"Active: {scaled(parameters['active'])} without the embedding table, of which a token reads one row; "
        f"{scaled(parameters['active_with_embedding'])} with it. The vision part counts in neither."
    )
    if experts["layers"]:
        console.print(
            f"An expert: {experts['parameters_per_expert']:,}; a layer's: {scaled(experts['parameters_per_layer'])}, "
            f"in {experts['layers']} layers; one in {experts['sparsity']:g} is chosen."
        )
    console.print(
        f"Checkpoint ({checkpoint['precision']}): {checkpoint['bytes']:,} bytes in {checkpoint['tensors']:,} tensors."
    )
    _show_files(console, facts["on_disk"])


def _show_files(console: Console, files: dict[str, Any] | None) -> None:
    if files is None:
        return
    held = f"{files['bytes']:,} bytes in {files['tensors']:,} tensors"
    if not files["differences"]:
        console.print(f"The files hold {held}: name by name what the config asks for.", style="green")
        return
    console.print(f"The files hold {held}, which is not what the config asks for:", style="red")
    for line in files["differences"][:20]:
        console.print(f"  {line}", style="red")
    if len(files["differences"]) > 20:
        console.print(f"  and {len(files['differences']) - 20} more", style="red")


def _flops_table(facts: dict[str, Any]) -> Table:
    by_context = facts["flops_per_token"]
    table = _table("", *(f"{as_count(int(tokens))} tokens" for tokens in by_context))

    def add(name: str, *path: str, style: str = "") -> None:
        values = []
        for record in by_context.values():
            for key in path:
                record = record[key]
            values.append(scaled(record, units="kMGTPEZ"))
        table.add_row(name, *values, style=style)

    parts = (("matrices, 2 x active", "matrices"), ("KDA", "kda"), ("MLA", "mla"))
    rest = (("depth reads", "depth"), ("short convolutions", "convolution"))
    add("prefill: mean over the prompt", "prefill", "total", style="bold")
    for name, key in parts + rest:
        add(f"  {name}", "prefill", key, style="dim")
    add("  the whole prompt", "prefill", "whole_prompt")
    add("decode: the next token", "decode", "total", style="bold")
    for name, key in parts:
        add(f"  {name}{', absorbed' if key == 'mla' else ''}", "decode", key, style="dim")
    add("  MLA, keys and values expanded", "decode_expanded", "mla", style="dim")
    add("training: forward and backward", "training", style="bold")
    return table


def _show_picture(console: Console, picture: dict[str, Any] | None) -> None:
    if picture is None:
        return
    console.print(
        f"A picture of {picture['side']:,} x {picture['side']:,} pixels: {picture['patches']:,} patches, "
        f"{picture['tokens']:,} tokens, {scaled(picture['flops'], units='kMGTPEZ')} operations in the tower."
    )


def _cache_table(cfg: K3Config, cache: dict[str, Any]) -> Table:
    kda, mla = cfg.kinds.count("kda"), cfg.kinds.count("mla")
    table = _table("", "a layer", "bf16", "layers", "all, bf16", "all, float32")
    rows = (
        ("KDA state S", "recurrent_values_per_layer", kda),
        ("KDA convolution inputs", "convolution_values_per_layer", kda),
        ("MLA latents, a token", "latent_values_per_layer_and_token", mla),
        ("  expanded, as released", "expanded_values_per_layer_and_token", mla),
    )
    for name, key, layers in rows:
        size = cache[key] * layers
        sizes = (binary_bytes(2 * size), binary_bytes(4 * size))
        table.add_row(name, f"{cache[key]:,}", binary_bytes(2 * cache[key]), f"x {layers}", *sizes)
    return table


def _show_cache_sizes(console: Console, cache: dict[str, Any]) -> None:
    sequences = "one sequence" if cache["batch"] == 1 else f"{cache['batch']:,} sequences"
    sizes = ", ".join(f"{binary_bytes(size)} at {as_count(int(tokens))}" for tokens, size in cache["bytes"].items())
    console.print(f"Held for {sequences}, KDA in float32 and latents in bfloat16: {sizes}.")


def _memory_table(cfg: K3Config, facts: dict[str, Any]) -> Table:
    cache, depth = facts["cache"], facts["depth"]
    table = _table("", "holds", "lives", "size", numbers=False)
    weights = f"{decimal_bytes(facts['checkpoint']['bytes'])}, shared by all"
    state = f"{binary_bytes(cache['kda_bytes_per_sequence'])}, fixed"
    sources = f"{binary_bytes(depth['bytes_per_token'])} a token"
    table.add_row("weights", "what training taught", "until retrained", weights)
    if cache["recurrent_values"]:
        table.add_row("KDA state", "an editable summary", "one sequence", state)
    if cache["latent_values_per_token"]:
        latents = f"{binary_bytes(cache['latent_bytes_per_token'])} a token"
        table.add_row("MLA cache", "every token, compressed", "one sequence", latents)
    if cfg.attn_res_block_size is not None:
        table.add_row("depth sources", "earlier layers' sums", "one forward pass", sources)
    return table
