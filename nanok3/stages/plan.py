"""`nanok3 plan k3 --serve --context 1M --devices 16 --memory 192GiB`: what a model needs, whether it fits, what would.

The bytes and the assumptions behind them are in `nanok3.capacity`; here they are asked for and printed. Memory is in
powers of 1,024 (GiB), tokens are counted with 1K = 1,024. With `--experts stream` the routed experts stay on disk, and
with `--routing-trace FILE` memory budgets for them are tried on a recorded run: plan_streaming.py.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanok3 import capacity, ledger
from nanok3.capacity import DEVICE_COUNTS, Plan
from nanok3.ledger import as_count, binary_bytes, scaled
from nanok3.stages import plan_streaming

COMMON_MEMORY = ("24GiB", "80GiB", "141GiB", "192GiB", "288GiB")
"""Device sizes for which the least number is listed where none was given."""
OPERATIONS = "kMGTPEZ"


@dataclass
class PlanArgs:
    """Say what serving or training a model needs, whether it fits, and what would fit instead."""

    config: tyro.conf.Positional[str] = "k3"
    """A preset (tiny, small, base, k3), a preset at a depth (small@12), a checkpoint folder, or a run folder."""
    serve: bool = False
    """Plan for serving. One of --serve and --train must be given."""
    train: bool = False
    """Plan for training."""
    context: str = "128K"
    """Tokens of each sequence; K is 1,024 and M is 1,048,576."""
    batch: int = 1
    """Sequences at once, over all devices: served together, or in one forward and backward."""
    precision: Literal["stored", "mxfp4", "bf16", "fp32"] = "stored"
    """Of weights when serving, of the arithmetic when training. mxfp4: routed experts in 4 bits, the rest bfloat16."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Training. muon: one moment for the layers' matrices, two for all else; adamw: two for all."""
    recompute: bool = False
    """Training: activation checkpointing, as in `nanok3 pretrain`."""
    devices: int = 1
    """How many devices."""
    memory: str | None = None
    """Memory of one device, such as 192GiB or 80GB. Without it: how many devices of the common sizes are needed."""
    usable: float = 0.9
    """Share of a device's memory to plan with; the rest is for the runtime, messages and fragmentation."""
    split: int | None = None
    """Devices that share one copy of all but the routed experts; 1 replicates it. By default what leaves most room."""
    prefill_chunk: int = 8192
    """Serving: tokens of a prompt that are read at once."""
    experts: Literal["resident", "stream"] = "resident"
    """stream: serve on one machine that reads the chosen experts from disk."""
    disk_bandwidth: str = "3GB"
    """With --experts stream: what the disk gives in a second, such as 3GB/s."""
    routing_trace: Path | None = None
    """Experts that a run chose, from `nanok3 generate --routing-trace`: hit rates by memory, and a recommendation."""
    tokens_per_second: float | None = None
    """Of all devices together; adds the arithmetic and the memory traffic that this rate takes."""
    json: bool = False
    """Print JSON instead of tables."""


def main(args: PlanArgs) -> None:
    """Print the plan. ValueError names a field that makes no sense, with what is allowed."""
    memory = None if args.memory is None else ledger.parse_bytes("memory", args.memory)
    if args.experts == "stream" or args.routing_trace is not None:
        return plan_streaming.main(args, memory)
    plan = resolve(args)
    facts = collect(plan, memory, args.usable, args.tokens_per_second)
    if args.json:
        print(json_format.dumps({"config": args.config, **facts}, indent=2))
    else:
        show(args.config, plan, facts)


def resolve(args: PlanArgs) -> Plan:
    """The question in numbers. ValueError for the first field that makes no sense."""
    if args.serve == args.train:
        raise ValueError("say what the plan is for: exactly one of --serve and --train")
    for name in ("batch", "devices", "prefill_chunk"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; allowed: a whole number of at least 1")
    if not 0 < args.usable <= 1:
        raise ValueError(f"usable is {args.usable:g}; allowed: a share above 0 and up to 1")
    if args.tokens_per_second is not None and not args.tokens_per_second > 0:
        raise ValueError(f"tokens_per_second is {args.tokens_per_second:g}; allowed: a number above 0")
    cfg, _ = ledger.find_config(args.config)
    plan = Plan(
        cfg=cfg,
        train=args.train,
        batch=args.batch,
        context=ledger.parse_count("context", args.context),
        precision=capacity.precision_of(cfg, args.precision, args.train),
        devices=args.devices,
        split=args.split,
        optimizer=args.optimizer,
        recompute=args.recompute,
        prefill_chunk=args.prefill_chunk,
    )
    allowed = capacity.allowed_splits(plan)
    if args.split is not None and args.split not in allowed:
        what = f"divisors of {args.devices} devices" + ("" if args.train else " and of the model's heads")
        raise ValueError(f"split is {args.split}; allowed: {', '.join(map(str, allowed))} ({what})")
    return plan


# ---------------------------------------------------------------------- the numbers


def collect(plan: Plan, memory: int | None, usable: float, rate: float | None) -> dict[str, Any]:
    """Everything that is printed, as plain values: `--json` is this record."""
    answer = capacity.need(plan)
    facts: dict[str, Any] = {
        "for": "training" if plan.train else "serving",
        "batch": plan.batch,
        "context": plan.context,
        "precision": plan.precision.name,
        "devices": plan.devices,
        "split": answer.split,
        "bytes": [vars(line) for line in answer.lines],
        "total_bytes": answer.total,
        "bytes_per_device": answer.device,
        "usable": usable,
        "memory": memory,
        "work": _work(plan, answer.split, rate),
    }
    if memory is None:
        room = {size: usable * ledger.parse_bytes("memory", size) for size in COMMON_MEMORY}
        return facts | {"fewest_devices": {size: capacity.fewest_devices(plan, room[size]) for size in room}}
    fits = answer.device <= usable * memory
    limits = {**capacity.limits(plan, usable * memory), "memory": int(-(-answer.device // usable))}
    instead = [] if fits else capacity.alternatives(plan, usable * memory)
    return facts | {"fits": fits, "limits": limits, "instead": instead}


def _work(plan: Plan, split: int, rate: float | None) -> dict[str, float]:
    """Operations and, when serving, bytes that a decode step moves; with a rate, both per second and device."""
    if plan.train:
        work = {"flops_per_token": ledger.flops_per_token(plan.cfg, plan.context, training=True)}
    else:
        work = {
            "flops_per_token": ledger.decode_flops(plan.cfg, plan.context).total,
            "prefill_flops_per_token": ledger.prefill_flops(plan.cfg, plan.context).total,
            "bytes_per_step": capacity.read_bytes(plan, split),
        }
    if rate is not None:
        work["tokens_per_second"] = rate
        work["flops_per_second_and_device"] = rate * work["flops_per_token"] / plan.devices
        if not plan.train:
            work["bytes_per_second_and_device"] = rate / plan.batch * work["bytes_per_step"] / plan.devices
    return work


# ---------------------------------------------------------------------- printing


def show(title: str, plan: Plan, facts: dict[str, Any]) -> None:
    """The table, the verdict, and what would fit."""
    console = Console(highlight=False)
    console.print(Text(_question(title, plan, facts["memory"]), "bold"))
    console.print()
    console.print(_needs(facts))
    if plan.devices > 1:
        console.print(_layout(plan, facts["split"]))
    if plan.context > plan.cfg.max_position_embeddings:
        console.print(f"The config is made for at most {plan.cfg.max_position_embeddings:,} tokens.")
    console.print()
    if facts["memory"] is None:
        _show_device_counts(console, facts)
    else:
        _show_verdict(console, plan, facts)
    console.print()
    _show_work(console, plan, facts["work"])


def _question(title: str, plan: Plan, memory: int | None) -> str:
    verb = "Training" if plan.train else "Serving"
    devices = "1 device" if plan.devices == 1 else f"{plan.devices:,} devices"
    of = "" if memory is None else f" of {binary_bytes(memory)}"
    sequences = "1 sequence" if plan.batch == 1 else f"{plan.batch:,} sequences"
    return f"{verb} {title} on {devices}{of}: {sequences} of {as_count(plan.context)} tokens, {plan.precision.name}"


def _needs(facts: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("")
    for name in ("all devices", "fullest device", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = facts["bytes_per_device"]
    for line in facts["bytes"]:
        share = f"{line['device'] / whole:.1%}"
        table.add_row(line["name"], binary_bytes(line["total"]), binary_bytes(line["device"]), share)
    table.add_section()
    table.add_row("total", binary_bytes(facts["total_bytes"]), binary_bytes(whole), "100.0%", style="bold")
    return table


def _layout(plan: Plan, split: int) -> str:
    E = plan.cfg.num_experts
    if split == 1:
        rest = "a copy of everything else on every device"
    elif split == plan.devices:
        rest = f"everything else split over all {split:,}"
    else:
        rest = f"everything else split over groups of {split:,}"
    return f"Layout: up to {-(-E // plan.devices)} of a layer's {E} experts on a device, {rest}."


def _show_device_counts(console: Console, facts: dict[str, Any]) -> None:
    console.print(f"Fewest devices, {facts['usable']:.0%} of their memory planned with:")
    table = Table.grid(padding=(0, 2))
    for size, count in facts["fewest_devices"].items():
        table.add_row("", binary_bytes(ledger.parse_bytes("memory", size)), _devices(count))
    console.print(table)


def _show_verdict(console: Console, plan: Plan, facts: dict[str, Any]) -> None:
    room = f"{binary_bytes(facts['usable'] * facts['memory'])} planned with"
    device = f"{binary_bytes(facts['bytes_per_device'])} a device"
    if facts["fits"]:
        console.print(f"Fits: {device}, {room}.", style="bold green")
        console.print("The limits, all else equal:")
    else:
        console.print(f"Does not fit: {device}, {room}.", style="bold red")
        console.print("What would fit, all else equal:")
    table = Table.grid(padding=(0, 2))
    for name, text in [*_limits(plan, facts["limits"]), *_instead(facts["instead"])]:
        table.add_row("", name, text)
    console.print(table)


def _limits(plan: Plan, limits: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What each quantity may be; one that helps by no amount says so."""
    most = " (the most the config allows)" if limits["context"] == plan.cfg.max_position_embeddings else ""
    yield "context", _up_to(limits["context"]) + most
    yield "batch", _up_to(limits["batch"])
    yield "devices", _devices(limits["devices"])
    if "memory" in limits:
        yield "memory", f"{binary_bytes(limits['memory'])} a device"


def _up_to(most: int) -> str:
    return f"up to {most:,}" if most else "none is small enough"


def _devices(count: int | None) -> str:
    return f"at least {count:,}" if count else f"more than {DEVICE_COUNTS[-1]:,}, if any number"


def _instead(found: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for other in found:
        device = f"{binary_bytes(other['device'])} a device"
        if "depth" in other:
            yield "model", f"at_depth({other['depth']}): {scaled(other['parameters'])} parameters, {device}"
        elif "limits" in other:
            limits = other["limits"]
            yield "settings", f"{other['settings']}: {device}, and with these"
            yield "", f"context: {_up_to(limits['context'])}; or batch: {_up_to(limits['batch'])}"
            yield "", f"or devices: {_devices(limits['devices'])}"
        else:
            yield "settings", f"{other['settings']}: {device}"


def _show_work(console: Console, plan: Plan, work: dict[str, float]) -> None:
    token = scaled(work["flops_per_token"], units=OPERATIONS)
    if plan.train:
        console.print(f"Arithmetic: {token} operations a token, forward and backward.")
    else:
        prompt = scaled(work["prefill_flops_per_token"], units=OPERATIONS)
        console.print(
            f"Arithmetic: {prompt} operations a token of the prompt, {token} for the next token. "
            f"A decode step of the batch moves {binary_bytes(work['bytes_per_step'])}."
        )
    if "tokens_per_second" in work:
        arithmetic = f"{scaled(work['flops_per_second_and_device'], units=OPERATIONS)} operations a second"
        traffic = work.get("bytes_per_second_and_device")
        moves = "" if traffic is None else f" and moves {binary_bytes(traffic)} a second"
        console.print(f"At {work['tokens_per_second']:,g} tokens a second, a device does {arithmetic}{moves}.")
