"""The KDA operator side by side: the C++ kernel, the torch chunk form, the token loop, and softmax attention.

    python bench/kda.py --lengths 512 2048 8192 --dims 64 128 --threads 1

All contenders get the same inputs, threads and clock, and take turns within a round, so that a busy moment of the
machine hits all of them. Before anything is timed the forms are compared with each other. The table gives the median
and the spread (half the range of the middle half), the time per token, the ratio to the kernel, and for the kernel
the share of the float32 peak measured in the same run (multiply-adds executed, recomputation included).

On a machine with other work use `--cpu-time --threads 1`: it counts the process's CPU seconds instead of the clock.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from nanok3.kernels import kda_cpu, native, roofline
from nanok3.model.kda import kda_chunked, kda_reference

CHUNK = 16


@dataclass
class Options:
    lengths: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    dims: list[int] = field(default_factory=lambda: [64, 128])
    """Key and value channels per head."""
    heads: int = 8
    threads: int = 1
    rounds: int = 5
    bf16: bool = False
    """q, k, v in bf16, gates in float32, as in mixed-precision training."""
    loop_up_to: int = 512
    """The token loop is left out of longer sequences."""
    cpu_time: bool = False
    json: Path = Path("runs/bench/kda.json")


@dataclass
class Result:
    contender: str
    what: str
    dim: int
    tokens: int
    median_ms: float
    spread_ms: float
    best_ms: float
    us_per_token: float
    ratio: float
    """Median over the kernel's median: above 1 the kernel is faster."""
    of_peak: float | None


Contender = Callable[..., Tensor]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def contenders(options: Options, tokens: int) -> dict[str, Contender]:
    """Functions of (q, k, v, log_decay, beta) that return the output."""
    forms: dict[str, Contender] = {
        "C++ kernel": lambda *x: kda_cpu.kda(*x)[0],
        "torch chunks": lambda *x: kda_chunked(*x)[0],
        "softmax attention": softmax_attention,
    }
    if tokens <= options.loop_up_to:
        forms["token loop"] = lambda *x: kda_reference(*x)[0]
    return forms


def make_inputs(options: Options, dim: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, options.heads, dim)
    q, k = (F.normalize(torch.randn(shape, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(shape, generator=generator)
    gates = [-5 * torch.rand(shape, generator=generator) ** 4, torch.rand(shape[:3], generator=generator)]
    return [x.bfloat16() if options.bf16 else x for x in (q, k, v)] + gates


def check_equal(options: Options, dim: int) -> None:
    """Every form of KDA gives the same output; the bound is far above rounding and far below a bug."""
    inputs = make_inputs(options, dim, 200)
    forms = contenders(options, 200)
    expected = kda_reference(*inputs)[0].double()
    for name in ("C++ kernel", "torch chunks"):
        error = ((forms[name](*inputs).double() - expected).norm() / expected.norm()).item()
        if error > (1e-2 if options.bf16 else 1e-5):
            raise SystemExit(f"{name} differs from the token loop by {error:.1e} at D={dim}: nothing to time")


def forward(form: Contender, inputs: list[Tensor], _: Tensor) -> None:
    with torch.no_grad():
        form(*inputs)


def forward_backward(form: Contender, inputs: list[Tensor], gradient: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = form(*leaves)
    torch.autograd.grad(o, leaves, gradient, allow_unused=True)


def measure(options: Options, dim: int, tokens: int, run: Callable[..., None]) -> dict[str, list[float]]:
    """Seconds of each contender in each round; one round before the first warms up."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    inputs = make_inputs(options, dim, tokens)
    gradient = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1)).to(inputs[2].dtype)
    forms = contenders(options, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for round_number in range(options.rounds + 1):
        for name, form in forms.items():
            start = clock()
            run(form, inputs, gradient)
            if round_number:
                seconds[name].append(clock() - start)
    return seconds


def multiply_adds(dim: int, what: str) -> int:
    """Of the kernel per token and head: products with the state, and pairs of tokens of a chunk."""
    forward_work = 3 * dim * dim + 2 * CHUNK * dim
    return forward_work if what == "forward" else forward_work + 8 * dim * dim + 6 * CHUNK * dim


def results_of(options: Options, dim: int, tokens: int, what: str, peak: float | None) -> list[Result]:
    run = forward if what == "forward" else forward_backward
    seconds = measure(options, dim, tokens, run)
    ours = statistics.median(seconds["C++ kernel"])
    work = 2 * multiply_adds(dim, what) * tokens * options.heads
    rows = []
    for name, times in seconds.items():
        median, ordered = statistics.median(times), sorted(times)
        quarter = len(ordered) // 4
        of_peak = work / median / peak if peak and name == "C++ kernel" else None
        spread = (ordered[-1 - quarter] - ordered[quarter]) / 2
        numbers = (median * 1e3, spread * 1e3, ordered[0] * 1e3, median * 1e6 / tokens, median / ours)
        rows.append(Result(name, what, dim, tokens, *numbers, of_peak))
    return rows


def print_row(row: Result) -> None:
    peak = f"{row.of_peak:6.0%}" if row.of_peak is not None else "      "
    print(
        f"{row.dim:4d} {row.tokens:6d}  {row.what:17s} {row.contender:18s} {row.median_ms:9.2f} ±{row.spread_ms:6.2f}"
        f" {row.us_per_token:8.2f} {row.ratio:7.1f}x {peak}",
        flush=True,
    )


def main(options: Options) -> None:
    if not native.available("kda"):
        raise SystemExit("no C++ compiler builds the kernel here")
    if options.cpu_time and options.threads > 1:
        raise SystemExit("--cpu-time adds up all threads: use it with --threads 1")
    torch.set_num_threads(options.threads)
    one_core = roofline.peak_flops()
    peak = one_core * options.threads if one_core else None
    machine = {"load": os.getloadavg()[0], "cpu": native.cpu_features().splitlines()[-1], "torch": torch.__version__}
    clock = "CPU time" if options.cpu_time else "clock"
    print(f"H={options.heads}, {options.threads} thread(s), {clock}, load {machine['load']:.1f}, {platform.machine()}")
    if peak:
        print(f"float32 peak of {options.threads} core(s): {peak / 1e9:.0f} GFLOP/s")
    print("   D      T  pass              form               median ms         us/token    ratio   peak")
    rows = []
    for dim in options.dims:
        check_equal(options, dim)
        for tokens in options.lengths:
            for what in ("forward", "forward+backward"):
                for row in results_of(options, dim, tokens, what, peak):
                    rows.append(row)
                    print_row(row)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "options": asdict(options), "peak_flops": peak, "rows": [asdict(r) for r in rows]}
    options.json.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
