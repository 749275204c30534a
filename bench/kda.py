"""The KDA operator side by side: the C++ kernel, torch forms of ours and of others, and softmax attention.

    python bench/kda.py --lengths 512 2048 8192 --dims 64 128 --threads 1

    torch C=16, 32, 64     our torch form. Its tile is 16 tokens; with larger chunks its products may overflow at strong
                           decays, so these two are timed only: a correct form of them would do more work
    fla naive              the chunk form in plain torch of fla-core 0.6.0
    transformers           what transformers 5.24.0 runs for kimi_linear where there is no GPU
    softmax attention      torch's own causal attention on the same heads
    token loop             our reference

All contenders get the same inputs, threads and clock, and take turns. Before anything is timed the forms are compared
with the token loop. The table gives median, spread and best, the time per token, the ratio to the kernel, and for the
kernel the share of the float32 peak measured in the same run (multiply-adds executed, recomputation included).

Every contender has the memory policy that serves it best: freed memory is kept, and large tensors lie in huge pages
(a head's rows are far apart, and small pages cost an address lookup each).

On a machine with other work use `--cpu-time --threads 1`: it counts the process's CPU seconds instead of the clock.
`--scaling` times the kernel alone on one thread and on `--threads`, for the share of a thread that is gained.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

import harness
import peers
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from nanok3.kernels import kda_cpu, native, roofline
from nanok3.model import kda as model_kda
from nanok3.train.machine import keep_freed_memory

OURS, CHUNK = "C++ kernel", 16


@dataclass
class Options(harness.Options):
    lengths: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    dims: list[int] = field(default_factory=lambda: [64, 128])
    """Key and value channels per head."""
    heads: int = 8
    bf16: bool = False
    """q, k, v in bf16, gates in float32, as in mixed-precision training."""
    loop_up_to: int = 512
    """The token loop and the peers' torch forms are left out of longer sequences: seconds, and gigabytes, a call."""
    peers: bool = True
    """Fetch and time fla's and transformers' torch forms."""
    scaling: bool = False
    json: Path = Path("runs/bench/kda.json")


Form = Callable[..., Tensor]
"""Of (q, k, v, log_decay, beta) to the output."""
Pass = Callable[[Form, list[Tensor], Tensor], None]


# ---------------------------------------------------------------------- contenders


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def peer_forms() -> dict[str, Form]:
    """The peers' functions, or a line that says why one is missing."""
    forms: dict[str, Form] = {}
    try:
        transformers = peers.ensure("transformers")
        sys.path += [str(path) for path in transformers.python.parents[1].glob("lib/python*/site-packages")]
        theirs = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
        forms["transformers"] = lambda *x: theirs.chunk_kimi_delta_attention(*x)[0]
        naive = module_of(peers.ensure("fla").folder / "fla" / "ops" / "kda" / "naive.py")
        forms["fla naive"] = lambda *x: naive.naive_chunk_kda(*x)[0]
    except (peers.Unavailable, ImportError) as error:
        print(f"without some peers: {error}", file=sys.stderr)
    return forms


def module_of(path: Path) -> ModuleType:
    """One file of a package whose other files need a GPU."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contenders(options: Options, tokens: int, others: dict[str, Form]) -> dict[str, tuple[Form, int]]:
    """Forms, and the chunk size ours in torch is to use."""
    forms = {OURS: (lambda *x: kda_cpu.kda(*x)[0], CHUNK)}
    forms |= {f"torch C={C}": (lambda *x: model_kda.kda_chunked(*x)[0], C) for C in (16, 32, 64)}
    forms |= {"softmax attention": (softmax_attention, CHUNK)}
    if tokens <= options.loop_up_to:
        forms |= {name: (form, CHUNK) for name, form in others.items()}
        forms |= {"token loop": (lambda *x: model_kda.kda_reference(*x)[0], CHUNK)}
    return forms


def make_inputs(options: Options, dim: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, options.heads, dim)
    q, k = (F.normalize(torch.randn(shape, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(shape, generator=generator)
    gates = [-5 * torch.rand(shape, generator=generator) ** 4, torch.rand(shape[:3], generator=generator)]
    return [x.bfloat16() if options.bf16 else x for x in (q, k, v)] + gates


def check_equal(options: Options, dim: int, others: dict[str, Form]) -> None:
    """Every form of KDA gives the same output; the bound is far above rounding and far below a bug."""
    inputs = make_inputs(options, dim, 192)
    expected = model_kda.kda_reference(*inputs)[0].double()
    for name, (form, chunk) in contenders(options, 0, others).items():
        if chunk == CHUNK and name != "softmax attention":
            error = ((form(*inputs).double() - expected).norm() / expected.norm()).item()
            harness.must_agree(f"{name} at D={dim}", error, 1e-2 if options.bf16 else 1e-5)


# ---------------------------------------------------------------------- what is timed


def forward(form: Form, inputs: list[Tensor], _: Tensor) -> None:
    with torch.no_grad():
        form(*inputs)


def forward_backward(form: Form, inputs: list[Tensor], gradient: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(form(*leaves), leaves, gradient, allow_unused=True)


PASSES: dict[str, Pass] = {"forward": forward, "forward+backward": forward_backward}


def in_chunks(chunk: int, run: Callable[[], None]) -> None:
    """With another chunk size in our torch form, forwards and backwards."""
    model_kda.CHUNK = chunk
    try:
        run()
    finally:
        model_kda.CHUNK = CHUNK


def multiply_adds(dim: int, what: str) -> int:
    """Of the kernel per token and head: products with the state, and pairs of tokens of a chunk."""
    forward_work = 3 * dim * dim + 2 * CHUNK * dim
    return forward_work if what == "forward" else forward_work + 8 * dim * dim + 6 * CHUNK * dim


def measure(
    options: Options, dim: int, tokens: int, what: str, peak: float | None, forms: dict[str, tuple[Form, int]]
) -> list[harness.Row]:
    inputs = make_inputs(options, dim, tokens)
    gradient = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1)).to(inputs[2].dtype)
    runs = {
        name: partial(in_chunks, chunk, partial(PASSES[what], form, inputs, gradient))
        for name, (form, chunk) in forms.items()
    }
    work = 2 * multiply_adds(dim, what) * tokens * options.heads

    def more(name: str, median: float) -> harness.Record:
        of_peak = work / median / peak if peak and name == OURS else None
        return {"us_per_token": median * 1e6 / tokens, "of_peak": of_peak}

    seconds = harness.rounds(runs, options.rounds, options.clock())
    return harness.rows_of(f"D={dim} T={tokens} {what}", seconds, OURS, more)


def scaling(options: Options, table: harness.Table) -> None:
    """The kernel on one thread and on all, in turns."""

    def on(threads: int, run: Callable[[], None]) -> None:
        torch.set_num_threads(threads)
        run()

    for heads in (options.heads, 1):
        for dim in options.dims:
            for what, run in PASSES.items():
                inputs = [x[:, :, :heads].contiguous() for x in make_inputs(options, dim, max(options.lengths))]
                once = partial(run, lambda *x: kda_cpu.kda(*x)[0], inputs, torch.ones_like(inputs[2]))
                runs = {f"{n} thread(s)": partial(on, n, once) for n in (options.threads, 1)}
                seconds = harness.rounds(runs, options.rounds, options.clock())
                case = f"H={heads} D={dim} T={max(options.lengths)} {what}"
                table.add(harness.rows_of(case, seconds, f"{options.threads} thread(s)"))


def main(options: Options) -> None:
    if not native.available("kda"):
        raise SystemExit("no C++ compiler builds the kernel here")
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch reads it at its first allocation
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    one_core = roofline.peak_flops()
    peak = one_core * options.threads if one_core else None
    print(harness.machine_line(options.threads))
    if peak:
        print(f"float32 peak of {options.threads} core(s): {peak / 1e9:.0f} GFLOP/s")
    table = harness.Table()
    if options.scaling:
        scaling(options, table)
    else:
        others = peer_forms() if options.peers else {}
        for dim in options.dims:
            check_equal(options, dim, others)
            for tokens in options.lengths:
                for what in PASSES:
                    forms = contenders(options, tokens, others)
                    table.add(measure(options, dim, tokens, what, peak, forms))
    harness.write_json(options.json, table.records, options)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
