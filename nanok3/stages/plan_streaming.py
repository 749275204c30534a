"""`nanok3 plan k3 --experts stream --memory 192GiB`: what reading experts from disk means, in bytes and tokens.

    nanok3 plan k3 --experts stream --memory 192GiB --disk-bandwidth 7GB/s      by arithmetic, choices spread evenly
    nanok3 plan --routing-trace trace.npz                                       by a recorded run

A token needs its experts in every layer. Those in memory cost nothing here; the others are read, so the disk allows

    tokens/s <= bandwidth / ((1 - hit rate) x experts a token x bytes of an expert)

If choices were spread evenly the hit rate would be the share of the experts that memory holds. How far a real run is
from that is what a trace tells.
"""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanok3 import capacity, ledger
from nanok3.ledger import binary_bytes, decimal_bytes

if TYPE_CHECKING:
    from nanok3.capacity import Streaming
    from nanok3.stages.plan import PlanArgs


def main(args: PlanArgs, memory: int | None) -> None:
    """Print what was asked for: the arithmetic, the trace, or both."""
    facts: dict[str, Any] = {"config": args.config}
    if args.experts == "stream":
        facts |= arithmetic(args, memory)
    if args.routing_trace is not None:
        facts["trace"] = by_trace(args.routing_trace, None if args.experts == "stream" else memory)
    if args.json:
        print(json_format.dumps(facts, indent=2))
        return
    console = Console(highlight=False)
    if args.experts == "stream":
        show(console, facts)
    if args.routing_trace is not None:
        show_trace(console, facts["trace"])


# ---------------------------------------------------------------------- by arithmetic


def arithmetic(args: PlanArgs, memory: int | None) -> dict[str, Any]:
    """Everything that is printed of a model, as plain values."""
    from nanok3.stages.plan import resolve

    if args.train:
        raise ValueError(
            "experts is 'stream' with --train; allowed: 'stream' with --serve, streamed experts do not learn"
        )
    s = capacity.streaming(resolve(replace(args, serve=True)))
    bandwidth = ledger.parse_bytes("disk_bandwidth", args.disk_bandwidth.removesuffix("/s"))
    facts = {
        "trunk_bytes": s.trunk,
        "other_bytes": s.other,
        "expert_bytes": s.expert,
        "experts": s.all_experts,
        "experts_per_token": s.per_token,
        "bytes_per_token_cold": s.cold_bytes,
        "least_memory": int(-(-s.least // args.usable)),
        "disk_bandwidth": bandwidth,
        "tokens_per_second_cold": bandwidth / s.cold_bytes,
        "usable": args.usable,
        "memory": memory,
    }
    return facts if memory is None else facts | within(s, args.usable * memory, bandwidth)


def within(s: Streaming, room: float, bandwidth: int) -> dict[str, Any]:
    """What `room` bytes allow, choices spread evenly."""
    held = s.experts_in(room)
    hit_rate = held / s.all_experts
    read = (1 - hit_rate) * s.cold_bytes
    found = {"fits": held > 0, "experts_in_memory": held, "hit_rate_even": hit_rate, "bytes_per_token": read}
    return found | {"tokens_per_second": bandwidth / read if read and held else None}


def show(console: Console, facts: dict[str, Any]) -> None:
    """A table of bytes, and in words what they mean."""
    console.print(Text(f"{facts['config']} with its routed experts on disk", "bold"))
    console.print()
    experts, rate = facts["experts"], f"{decimal_bytes(facts['disk_bandwidth'])}/s"
    table = Table.grid(padding=(0, 2))
    rows = [
        ("in memory: weights without routed experts", binary_bytes(facts["trunk_bytes"])),
        ("in memory: states, latents, workspace", binary_bytes(facts["other_bytes"])),
        (f"on disk: {experts:,} experts", binary_bytes(experts * facts["expert_bytes"])),
        ("an expert", binary_bytes(facts["expert_bytes"])),
        (
            f"read for a token, none in memory: {facts['experts_per_token']:,}",
            binary_bytes(facts["bytes_per_token_cold"]),
        ),
        (f"so a disk of {rate} gives at most", f"{facts['tokens_per_second_cold']:.3g} tokens/s"),
        ("least memory", binary_bytes(facts["least_memory"])),
    ]
    for row in rows:
        table.add_row("", *row)
    console.print(table)
    if facts["memory"] is None:
        console.print("With --memory: how many experts fit, and what that gives.")
        return
    room = f"{binary_bytes(facts['memory'])}, {facts['usable']:.0%} of it planned with"
    if not facts["fits"]:
        console.print(f"Does not fit into {room}: what must be resident is larger.", style="bold red")
        return
    held, hits = facts["experts_in_memory"], facts["hit_rate_even"]
    console.print(f"In {room}: {held:,} of {experts:,} experts have room.", style="bold green")
    if facts["tokens_per_second"] is None:
        console.print("All of them: each is read once, and then no more.")
        return
    console.print(
        f"Were choices spread evenly, {hits:.1%} would be there: {binary_bytes(facts['bytes_per_token'])} read for a "
        f"token, at most {facts['tokens_per_second']:.3g} tokens/s. A recorded run tells more: --routing-trace FILE."
    )


# ---------------------------------------------------------------------- by a recorded run


def by_trace(path: Path, memory: int | None) -> dict[str, Any]:
    """Hit rates of every rule by memory for experts, and the recommendation. memory: one more size to try."""
    from nanok3.serve.expert_budget import recommend, sizes_to_try, try_budgets
    from nanok3.serve.routing_trace import Trace

    trace = Trace.load(path)
    visits, size = trace.visits(), trace.expert_bytes
    sizes = sizes_to_try(visits, trace.top_k, trace.all_bytes // size)
    if memory is not None:
        if memory < trace.top_k * size:
            raise ValueError(
                f"memory is {memory}; it must be at least {trace.top_k * size} bytes: the experts of a token"
            )
        sizes = sorted({*sizes, min(memory // size, trace.all_bytes // size)})
    budgets = try_budgets(visits, sizes)
    asked = sum(map(len, visits))
    return {
        "tokens": trace.read,
        "visits": len(visits),
        "asked": asked,
        "used": len({key for visit in visits for key in visit}),
        "experts": trace.all_bytes // size,
        "expert_bytes": size,
        "budgets": [{"places": b.places, "bytes": b.places * size, "hit_rates": b.hit_rates} for b in budgets],
        "recommended_bytes": recommend(budgets).places * size,
    }


def show_trace(console: Console, facts: dict[str, Any]) -> None:
    """A line for every size."""
    console.print(
        f"{facts['tokens']:,} tokens, {facts['asked']:,} times an expert was needed: {facts['used']:,} of "
        f"{facts['experts']:,} experts, {binary_bytes(facts['used'] * facts['expert_bytes'])}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for name in ("memory", "experts", "LRU", "pinned", "optimal", "read a token, LRU"):
        table.add_column(name, justify="right", no_wrap=True)
    for budget in facts["budgets"]:
        rates = budget["hit_rates"]
        read = (1 - rates["LRU"]) * facts["asked"] / facts["tokens"] * facts["expert_bytes"]
        style = "bold" if budget["bytes"] == facts["recommended_bytes"] else ""
        shares = [f"{rates[name]:.1%}" for name in ("LRU", "pinned", "optimal")]
        table.add_row(binary_bytes(budget["bytes"]), f"{budget['places']:,}", *shares, binary_bytes(read), style=style)
    console.print(table)
    console.print(
        f"Recommended: --expert-memory {-(-facts['recommended_bytes'] >> 20)}MiB; beyond it the next byte gives less "
        "than the average one."
    )
