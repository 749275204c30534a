"""The fused CPU kernels beside the torch forms they stand for: SiTU-GLU, attention residuals, short convolution, norms.

    python bench/fused.py --tokens 4096 --threads 1

Both forms are the model's own functions, with the kernels and with the kernels switched off; they get the same inputs,
threads and clock, and take turns within a round. Before anything is timed the two are compared. Besides the times the
table gives each form's rate over the bytes that have to move: every input read once and every output written once. A
plain copy is the rate that memory allows; above it the operands stayed in a cache.

On a machine with other work use `--cpu-time --threads 1`: it counts the process's CPU seconds instead of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
import tyro
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.kernels import native
from nanok3.model.attn_res import mix
from nanok3.model.basics import RMSNorm, position_in_document
from nanok3.model.kda import OutputNorm, l2_normalize, log_decay
from nanok3.model.short_conv import short_conv
from nanok3.model.situ import situ_glu
from nanok3.train.machine import keep_freed_memory

LIBRARIES = ("situ", "attn_res", "short_conv", "norms")


@dataclass
class Options(harness.Options):
    tokens: int = 4096
    rounds: int = 10
    float32: bool = False
    """Inputs in float32 instead of bf16."""
    json: Path = Path("runs/bench/fused.json")


@dataclass
class Case:
    """A function of the small model, its inputs (all differentiated), and their sizes in words."""

    name: str
    size: str
    run: Callable[..., Tensor]
    inputs: list[Tensor]


def cases(options: Options) -> Iterator[Case]:
    """The sizes in which K3Config.small() calls each."""
    cfg, T = K3Config.small(), options.tokens
    D, H, K = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim
    eps, dtype = cfg.rms_norm_eps, torch.float32 if options.float32 else torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    for n, width in ((T * cfg.num_experts_per_token, cfg.moe_intermediate_size), (T, cfg.intermediate_size)):
        yield Case("SiTU-GLU", f"{n} x {width}", situ_glu, [draw(n, width), draw(n, width)])
    for S in (2, 5):
        inputs = [torch.randn(D), torch.randn(1, D) / 16, *(draw(1, T, D) for _ in range(S))]
        yield Case("AttnRes mix", f"{S} x {T} x {D}", lambda w, u, *v: mix(v, w, u, eps), inputs)
    position = position_in_document(torch.arange(0, T + 1, 256), T) if T % 256 == 0 else None
    conv = [draw(1, T, H * K), torch.randn(H * K, 1, cfg.short_conv_kernel_size)]
    yield Case("short conv", f"{T} x {H * K}", lambda u, w: short_conv(u, w, None, position), conv)
    rms, output = RMSNorm(D, eps), OutputNorm(K, eps)
    yield Case("RMSNorm", f"{T} x {D}", lambda w, x: with_weight(rms, w, x), [torch.randn(D), draw(1, T, D)])
    heads = f"{T} x {H} x {K}"
    gated = [torch.randn(K), draw(1, T, H, K), draw(1, T, H, K)]
    yield Case("gated norm", heads, lambda w, o, g: with_weight(output, w, o, g), gated)
    yield Case("l2 norm", heads, l2_normalize, [draw(1, T, H, K)])
    gates = [draw(1, T, H, K), torch.randn(H), torch.randn(H * K)]
    yield Case("decay gate", heads, lambda z, A, b: log_decay(z, A, b, cfg.gate_lower_bound), gates)


def with_weight(module: nn.Module, weight: Tensor, *inputs: Tensor) -> Tensor:
    out: Tensor = torch.func.functional_call(module, {"weight": weight}, inputs)
    return out


@contextmanager
def without_kernels() -> Iterator[None]:
    """The model as it runs where there is no compiler."""
    load = native.load
    native.load = lambda name: None  # type: ignore[assignment]
    try:
        yield
    finally:
        native.load = load


def switched_off(run: Callable[[], object]) -> Callable[[], object]:
    def without() -> None:
        with without_kernels():
            run()

    return without


def check_equal(case: Case) -> None:
    """Both forms give the same output; the bound is far above rounding and far below a bug."""
    ours = case.run(*case.inputs).double()
    with without_kernels():
        theirs = case.run(*case.inputs).double()
    harness.must_agree(f"{case.name}: the kernel", ((ours - theirs).norm() / theirs.norm()).item(), 1e-2)


def rows_of(options: Options, case: Case, copied: float) -> list[harness.Row]:
    """Forward without gradients, and backward alone."""
    leaves = [x.detach().requires_grad_() for x in case.inputs]
    ours = case.run(*leaves)
    with without_kernels():
        theirs = case.run(*leaves)
    gradient = torch.randn(ours.shape).to(ours.dtype)
    read, written = sum(x.nbytes for x in case.inputs), ours.nbytes

    def forward() -> None:
        with torch.no_grad():
            case.run(*case.inputs)

    def backward(out: Tensor) -> None:
        torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    passes = {
        "forward": ({"C++ kernel": forward, "torch": switched_off(forward)}, read + written),
        "backward": ({"C++ kernel": lambda: backward(ours), "torch": lambda: backward(theirs)}, 2 * read + written),
    }
    rows = []
    for what, (contenders, moved) in passes.items():
        seconds = harness.rounds(contenders, options.rounds, options.clock())
        rates = {name: moved / min(times) / 1e9 for name, times in seconds.items()}
        more = lambda name, _, rates=rates: {"GB_per_s": rates[name], "of_copy": rates[name] / copied}  # noqa: E731
        rows += harness.rows_of(f"{case.name} {case.size} {what}", seconds, "C++ kernel", more)
    return rows


def copy_rate(options: Options) -> float:
    """GB/s, read plus written, of copying an array far larger than the caches."""
    a = torch.zeros(32 * 2**20)
    b = torch.empty_like(a)
    seconds = harness.rounds({"copy": lambda: b.copy_(a)}, options.rounds, options.clock())
    return 2 * a.nbytes / min(seconds["copy"]) / 1e9


def main(options: Options) -> None:
    for library in LIBRARIES:
        if not native.available(library):
            raise SystemExit(f"no C++ compiler builds the {library} kernel here")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    copied = copy_rate(options)
    print(harness.machine_line(options.threads))
    print(f"{'float32' if options.float32 else 'bf16'}; copying moves {copied:.1f} GB/s")
    table = harness.Table()
    for case in cases(options):
        check_equal(case)
        table.add(rows_of(options, case, copied))
    harness.write_json(options.json, table.records, options, copy_GB_per_s=copied)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
