"""Where the time of a training step, of reading a prompt and of one token goes, as a table and as a picture.

    python bench/profile_step.py                        K3Config.small(), 2048 tokens, one thread
    python bench/profile_step.py --preset tiny --tokens 512

Each step is timed unwatched first, then recorded by torch.profiler with a named scope around every module and every
kernel. An operator counts for the part of the innermost scope it ran in, a backward operator for that of the forward
one it belongs to. What is left of a module's scope is Python's time between operators, less what scopes themselves
cost under the recorder. All parts are then scaled to the best unwatched time.

A training step is run once more in two fresh processes, with the C library's default policy for freed memory and with
ours (`keep_freed_memory`): seconds in the program and in the system, and page faults.

Writes runs/bench/profile_step.json and the pictures runs/bench/profile/*.svg.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from inspect import isfunction
from pathlib import Path
from typing import Any, Literal

import harness
import torch
import tyro
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from nanok3.config import K3Config
from nanok3.kernels import decode_cpu, native
from nanok3.model.basics import Linear, RMSNorm
from nanok3.model.decoder import K3, Embedding
from nanok3.model.kda import KDA, OutputNorm
from nanok3.model.latent_moe import Experts, LatentMoE, Router
from nanok3.model.mla import GatedMLA
from nanok3.model.native_decode import NativeDecoder
from nanok3.model.short_conv import ShortConv
from nanok3.train.loss import IGNORE, cross_entropy
from nanok3.train.machine import choose_precision, keep_freed_memory
from nanok3.train.muon import K3Optimizer
from nanok3.train.qk_clip import QKClip
from nanok3.train.quantile_balancing import QuantileBalancer
from nanok3.train.svg import compact, svg, text

EXPERTS, LINEAR, MEMORY, ATTENTION = "expert products", "other linear maps", "KDA", "attention"
SMALL, LOSS, OPTIMIZER, NATIVE = "norms, gates, convolutions, depth mixes", "loss", "optimizer", "the native call"
OTHER, PYTHON = "everything else in torch", "Python between operators"
SCOPES: dict[type[nn.Module], str] = {
    Linear: LINEAR,
    Router: LINEAR,
    KDA: SMALL,
    RMSNorm: SMALL,
    OutputNorm: SMALL,
    ShortConv: SMALL,
    GatedMLA: ATTENTION,
    LatentMoE: EXPERTS,
    Experts: EXPERTS,
    Embedding: OTHER,
}
"""The part that a module's own operators count for; its inner modules count for theirs."""
KERNELS = {
    "kda_cpu": MEMORY,
    "linear_cpu": EXPERTS,
    "short_conv_cpu": SMALL,
    "norms_cpu": SMALL,
    "situ_cpu": SMALL,
    "attn_res_cpu": SMALL,
    "attention_cpu": ATTENTION,
    "newton_schulz_cpu": OPTIMIZER,
}
"""The part of each kernel; `linear` is told from the experts by its name, the decoder is a part of its own."""
OPERATORS = {
    "nanok3::kda": MEMORY,
    "nanok3::situ": SMALL,
    "nanok3::attn_res": SMALL,
    "nanok3::attention": ATTENTION,
    "aten::_scaled_dot_product": ATTENTION,
}
"""By how the name begins; these count for one part wherever they run."""
WHOLE, MODULE, KERNEL = "the step", "module: ", "kernel: "
"""Beginnings of scope names. What a module's scope spends itself is Python; a kernel's scope is the kernel."""


BACKWARD = 1
"""torch's RecordScope of a backward function."""


@dataclass
class Options(harness.Options):
    preset: Literal["tiny", "small"] = "small"
    tokens: int = 2048
    rounds: int = 3
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    json: Path = Path("runs/bench/profile_step.json")
    faults_of: Literal["", "default", "kept"] = ""
    """Internal: measure page faults under this policy and print them."""


# ---------------------------------------------------------------------- the steps


@dataclass
class Step:
    """Something to profile: `run` is one step, `scoped` the modules that get scopes."""

    name: str
    run: Callable[[], object]
    model: K3


def build(options: Options) -> tuple[K3, Tensor]:
    torch.manual_seed(0)
    model = K3(getattr(K3Config, options.preset)())
    return model, torch.randint(model.cfg.vocab_size, (1, options.tokens))


def training_step(options: Options) -> Step:
    """What `Trainer.train_step` does: forward, loss, backward, clipping, update, observers. Documents of 256 tokens."""
    model, ids = build(options)
    model.train()
    precision = choose_precision(options.precision)
    model.compute_dtype = None if precision == torch.float32 else precision
    optimizer, balancer, clip = K3Optimizer(model), QuantileBalancer(model), QKClip(model)
    bounds = torch.arange(0, options.tokens + 1, min(256, options.tokens))
    targets = torch.roll(ids, -1, 1)

    def run() -> None:
        with balancer.observe(targets != IGNORE), clip.observe():
            hidden = model.hidden_states(ids, cu_seqlens=bounds)
        with scope(LOSS):
            loss, _ = cross_entropy(hidden, model.lm_head.weight, targets)
        (loss / options.tokens).backward()
        with scope(OPTIMIZER):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            clip.step()

    kind = str(precision).removeprefix("torch.")
    return Step(f"training step of {options.tokens} tokens, {kind}", run, model)


def prompt_step(options: Options) -> Step:
    model, ids = build(options)
    model.eval().requires_grad_(False)

    def run() -> None:
        with torch.no_grad():
            model.hidden_states(ids, state=model.new_state(1))

    return Step(f"reading a prompt of {options.tokens} tokens", run, model)


def token_step(options: Options, natively: bool) -> Step:
    """One token after a prompt, by the decoder that `nanok3 generate` uses or operator by operator."""
    model, ids = build(options)
    model.eval().requires_grad_(False)
    decoder, state = NativeDecoder.of(model), model.new_state(1)
    with torch.no_grad():
        model.hidden_states(ids, state=state)

    def run() -> None:
        with torch.no_grad():
            if natively and isinstance(decoder, NativeDecoder):
                decoder.step_state(ids[:, :1], state)
            else:
                model(ids[:, :1], state=state)

    return Step("one token, " + ("one native call" if natively else "operator by operator"), run, model)


# ---------------------------------------------------------------------- scopes


def scope(part: str, kind: str = MODULE) -> AbstractContextManager[Any]:
    return record_function(kind + part)


def scope_modules(model: nn.Module) -> None:
    """A scope around the forward of every module that SCOPES names."""
    for module in model.modules():
        part = SCOPES.get(type(module))
        if part is not None:
            module.forward = scoped(module.forward, part, MODULE)  # type: ignore[method-assign]


def scope_kernels() -> None:
    """A scope around the functions of the kernels: without autograd they are called past torch, which sees nothing."""
    for name, part in KERNELS.items():
        module = importlib.import_module(f"nanok3.kernels.{name}")
        for key, value in list(vars(module).items()):
            if isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_"):
                setattr(module, key, scoped(value, LINEAR if key == "linear" else part, KERNEL))
    decode_cpu.Decoder.run = scoped(decode_cpu.Decoder.run, NATIVE, KERNEL)  # type: ignore[method-assign]


def scoped(function: Callable[..., Any], part: str, kind: str) -> Callable[..., Any]:
    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with scope(part, kind):
            return function(*arguments, **named)

    return run


# ---------------------------------------------------------------------- from events to parts


def seconds_of_parts(events: Iterable[Any], cost_of_scope: float) -> dict[str, float]:
    """Self time of every recorded event, added up by part."""
    events = list(events)
    forward = {e.sequence_nr: e for e in events if e.sequence_nr >= 0 and not is_backward(e)}
    found = {PYTHON: 0.0}
    for event in events:
        part = PYTHON if event.name.startswith((MODULE, WHOLE)) else part_of(event, forward)
        scopes = sum(child.name.startswith((MODULE, KERNEL)) for child in event.cpu_children)
        own = max(0.0, event.self_cpu_time_total / 1e6 - cost_of_scope * scopes)
        found[part] = found.get(part, 0.0) + own
    return found


def cost_of_scope(scopes: int = 2000) -> float:
    """Seconds that an empty scope takes from the one around it under the recorder."""
    with profile(activities=[ProfilerActivity.CPU]) as recorder, scope("calibration"):
        for _ in range(scopes):
            with scope("empty"):
                pass
    outer = next(event for event in recorder.events() if event.name == MODULE + "calibration")
    return float(outer.self_cpu_time_total) / 1e6 / scopes


def part_of(event: Any, forward: dict[int, Any]) -> str:
    """By its name, by the scope around it, or by the forward operator that it is the backward of."""
    around = list(lineage(event))
    for one in around:
        for beginning, part in OPERATORS.items():
            if one.name.startswith(beginning):
                return part
        for kind in (KERNEL, MODULE):
            if one.name.startswith(kind):
                return one.name.removeprefix(kind)
    for one in around:
        if is_backward(one) and one.sequence_nr in forward:
            return part_of(forward[one.sequence_nr], {})
    return OTHER


def is_backward(event: Any) -> bool:
    return event.scope == BACKWARD or event.name.startswith("autograd::engine::evaluate_function")


def lineage(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def recorded(step: Step, options: Options) -> tuple[float, dict[str, float]]:
    """The best unwatched seconds, and those of each part, scaled so that they add up to that."""
    times = harness.rounds({step.name: step.run}, options.rounds)[step.name]
    scope_modules(step.model)
    step.run()
    with profile(activities=[ProfilerActivity.CPU]) as recorder, record_function(WHOLE):
        step.run()
    parts = seconds_of_parts(recorder.events(), cost_of_scope())
    scale = min(times) / sum(parts.values())
    parts = {name: scale * value for name, value in parts.items()}
    return min(times), dict(sorted(parts.items(), key=lambda item: -item[1]))


# ---------------------------------------------------------------------- page faults


def faults(options: Options) -> dict[str, float]:
    """Seconds and page faults of a training step in this process, under the policy of `options.faults_of`."""
    if options.faults_of == "kept":
        keep_freed_memory()
    step = training_step(options)
    step.run()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(options.rounds):
        step.run()
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
    found = {
        "seconds": seconds,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "faults": float(after.ru_minflt - before.ru_minflt),
    }
    return {name: value / options.rounds for name, value in found.items()}


def faults_elsewhere(options: Options, policy: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--faults-of", policy, "--preset", options.preset]
    command += ["--tokens", str(options.tokens), "--rounds", str(options.rounds), "--threads", str(options.threads)]
    command += ["--precision", options.precision]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------------- pictures

STYLE = """<style>
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
       fill: #1d1d1b; font-variant-numeric: tabular-nums; }
.title { font-weight: 600; font-size: 13px; } .soft { fill: #62605a; } .c0 { fill: #0069a8; } .c1 { fill: #c85000; }
.rule { stroke: #77746c; stroke-opacity: .6; }
@media (prefers-color-scheme: dark) {
  text { fill: #e9e6df; } .soft { fill: #a19e96; } .c0 { fill: #62b6ea; } .c1 { fill: #f08a4b; }
}
</style>"""
LABELS, BARS, LINE, LETTER = 262.0, 300.0, 20.0, 7.0


@dataclass(frozen=True)
class Bar:
    """A name, its parts from left to right as (colour, length), and what stands behind it."""

    name: str
    pieces: Sequence[tuple[str, float]]
    told: str


@dataclass(frozen=True)
class Panel:
    """Bars on a scale of their own."""

    title: str
    bars: Sequence[Bar]


def panel_of(title: str, seconds: float, parts: dict[str, float]) -> Panel:
    """The parts of a step, those below half a per cent left out."""
    bars = [
        Bar(name, [("c0", value)], f"{value / seconds:.0%}, {duration(value)}")
        for name, value in parts.items()
        if value > 0.005 * seconds
    ]
    return Panel(f"{title[0].upper()}{title[1:]}: {duration(seconds)}", bars)


def fault_panel(found: dict[str, dict[str, float]]) -> Panel:
    names = {"default": "freed memory goes back (default)", "kept": "freed memory is kept (ours)"}
    bars = []
    for policy, name in names.items():
        f = found[policy]
        share = f["system"] / max(f["system"] + f["user"], 1e-9)
        told = f"{share:.0%} system, {compact(f['faults'])} faults"
        bars.append(Bar(name, [("c0", f["user"]), ("c1", f["system"])], told))
    return Panel("CPU time of a training step: in the program (left) and in the system (right)", bars)


def duration(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} µs"
    )


def picture(panels: Sequence[Panel], description: str) -> str:
    """Panels one below the other, as a file of its own that follows the reader's light or dark."""
    parts, top = [STYLE], 4.0
    for panel in panels:
        parts.append(text(0, top + 13, panel.title, "title"))
        longest = max((sum(length for _, length in bar.pieces) for bar in panel.bars), default=1.0)
        first = top + 24
        for i, bar in enumerate(panel.bars):
            y, x = first + LINE * i, LABELS + 8
            parts.append(text(LABELS, y + 13, bar.name, "", "end"))
            for colour, length in bar.pieces:
                wide = BARS * length / longest
                parts.append(
                    f'<rect class="{colour}" x="{x:.1f}" y="{y + 2:.1f}" width="{wide:.1f}" height="{LINE - 5}"/>'
                )
                x += wide
            parts.append(text(x + 6, y + 13, bar.told, "soft"))
        top = first + LINE * len(panel.bars)
        parts.append(f'<path class="rule" d="M{LABELS + 8:.1f} {first:.1f}V{top:.1f}"/>')
        top += 18
    parts.append(text(0, top + 8, description, "soft"))
    told = max((len(bar.told) for panel in panels for bar in panel.bars), default=0)
    whole = svg(parts, LABELS + 8 + BARS + 12 + LETTER * told, top + 16, description)
    whole = whole.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return whole.replace(">", '><rect width="100%" height="100%" fill="white"/>', 1)  # for readers on dark paper


# ---------------------------------------------------------------------- the whole


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    if options.faults_of:
        print(json.dumps(faults(options)))
        return
    if not native.available("kda"):
        raise SystemExit("no C++ compiler builds the kernels here: there is little to see")
    print(harness.machine_line(options.threads))
    keep_freed_memory()
    scope_kernels()
    steps = [lambda: training_step(options), lambda: prompt_step(options)]
    steps += [lambda natively=natively: token_step(options, natively) for natively in (True, False)]
    panels, table = [], harness.Table()
    for make in steps:
        step = make()
        seconds, parts = recorded(step, options)
        panels.append(panel_of(step.name, seconds, parts))
        rows = [
            {"step": step.name, "part": name, "ms": 1e3 * value, "share": value / seconds}
            for name, value in parts.items()
        ]
        table.add(rows)
    found = {policy: faults_elsewhere(options, policy) for policy in ("default", "kept")}
    fault_rows = [{"policy": policy, **numbers} for policy, numbers in found.items()]
    harness.print_table(fault_rows)
    model = K3Config.small() if options.preset == "small" else K3Config.tiny()
    what = f"K3Config.{options.preset}(): {model.num_hidden_layers} layers, {options.threads} thread(s)"
    write(options.json.parent / "profile" / "steps.svg", picture(panels, f"Where the time goes: {what}"))
    write(options.json.parent / "profile" / "page_faults.svg", picture([fault_panel(found)], f"Page faults: {what}"))
    harness.write_json(options.json, table.records, options, page_faults=fault_rows)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
