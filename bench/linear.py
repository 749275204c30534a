"""Linear layers, grouped experts, causal attention and Newton-Schulz: our kernels beside torch and the measured peak.

    python bench/linear.py --threads 1

    linear      one product y = x W^T; torch in the same type, and ours on float32, bf16 and MXFP4 weights
    experts     the routed experts of a layer for inference; torch sorts the tokens and runs three grouped products
    training    a grouped product with both gradients
    attention   causal attention of a prompt; torch with values padded to the keys' width
    training attention   the same with gradients, of packed documents; work counts the scores made again
    Newton-Schulz   five steps on a stack of matrices; work is that of the plain form, of which ours does less

Ours reads bf16 and MXFP4 as stored and sums in float32, so one peak, the float32 multiply-adds of a core, serves all
rows. Torch's bf16 is timed only where the processor has instructions for it, or with `--slow`: it takes 60 times as
long elsewhere. On a machine with other work use `--cpu-time --threads 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from nanok3.kernels import attention_cpu, linear_cpu, native, newton_schulz_cpu, roofline
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.situ import situ_glu
from nanok3.train.muon import COEFFICIENTS, newton_schulz_torch

Contenders = dict[str, Callable[[], Tensor]]


@dataclass
class Options(harness.Options):
    rounds: int = 7
    slow: bool = False
    """Time torch's bf16 on a processor that has no instructions for it."""
    json: Path = Path("runs/bench/linear.json")


@dataclass
class Case:
    """The first contender is ours. `operations` counts a multiply-add as two; `bound` is how far all may differ."""

    name: str
    operations: float
    contenders: Contenders
    bound: float = 1e-5


def linear_cases(bf16: bool) -> Iterator[Case]:
    for m, inputs, outputs in ((1, 512, 1536), (16, 512, 1536), (512, 512, 512), (2048, 512, 1536)):
        x, weight = torch.randn(m, inputs), torch.randn(outputs, inputs) / inputs**0.5
        work, shape = 2 * m * inputs * outputs, f"{m} x {inputs} x {outputs}"
        ours = partial_linear(x, weight)
        yield Case(f"linear f32 {shape}", work, {"ours": ours, "torch": lambda x=x, w=weight: F.linear(x, w)})
        short, narrow = x.bfloat16(), weight.bfloat16()
        forms: Contenders = {"ours": partial_linear(short, narrow)}
        if bf16:
            forms["torch"] = lambda x=short, w=narrow: F.linear(x, w)
        yield Case(f"linear bf16 {shape}", work, forms, 2e-2)
        packed = linear_cpu.Packed(*quantize_mxfp4(weight))
        decoded = lambda x=x, p=packed: F.linear(x, dequantize_mxfp4(*p, torch.float32))  # noqa: E731
        yield Case(f"linear mxfp4 {shape}", work, {"ours": partial_linear(x, packed), "torch, decoding": decoded})


def partial_linear(x: Tensor, weight: linear_cpu.Weight) -> Callable[[], Tensor]:
    return lambda: linear_cpu.linear(x, weight)


def expert_cases() -> Iterator[Case]:
    experts, per_token, latent, inner = 32, 4, 256, 256
    w1, w2, w3 = (torch.randn(experts, *s) / 16 for s in ((inner, latent), (latent, inner), (inner, latent)))
    packed = tuple(linear_cpu.Packed(*quantize_mxfp4(w)) for w in (w1, w2, w3))
    for tokens in (1, 512, 2048):
        z, weights = torch.randn(tokens, latent), torch.rand(tokens, per_token)
        chosen = torch.rand(tokens, experts).topk(per_token).indices
        work = 6 * tokens * per_token * latent * inner

        def sorted_by_expert(z: Tensor = z, chosen: Tensor = chosen, weights: Tensor = weights) -> Tensor:
            order = chosen.flatten().argsort(stable=True)
            counts = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).int()
            rows = z.index_select(0, order // per_token)
            gate, up = (F.grouped_mm(rows, w.mT, offs=counts) for w in (w1, w3))
            out = F.grouped_mm(situ_glu(gate, up), w2.mT, offs=counts)
            by_token = torch.empty_like(out).index_copy_(0, order, out).view(len(z), per_token, -1)
            return torch.einsum("nk,nkl->nl", weights, by_token)

        for form, matrices in (
            ("f32", (w1, w2, w3)),
            ("bf16", tuple(w.bfloat16() for w in (w1, w2, w3))),
            ("mxfp4", packed),
        ):
            forms: Contenders = {
                "ours": lambda z=z, c=chosen, p=weights, m=matrices: linear_cpu.routed(z, c, p, m, (4.0, 25.0))
            }
            if form == "f32":
                forms["torch"] = sorted_by_expert
            yield Case(f"experts {form} {tokens} tokens, 4 of 32", work, forms)


def training_cases() -> Iterator[Case]:
    for m, experts, inputs, outputs in ((2048, 32, 256, 256), (16384, 32, 128, 96), (8192, 8, 256, 256)):
        leaves = [torch.randn(m, inputs, requires_grad=True), torch.randn(experts, outputs, inputs, requires_grad=True)]
        share = torch.rand(experts) + 0.5
        counts = (share / share.sum() * m).long()
        counts[0] += m - counts.sum()
        d_out = torch.randn(m, outputs)

        def gradients(product: Callable[[], Tensor], leaves: list[Tensor] = leaves, d_out: Tensor = d_out) -> Tensor:
            return torch.cat([g.flatten() for g in torch.autograd.grad(product(), leaves, d_out)])

        def ours(leaves: list[Tensor] = leaves, counts: Tensor = counts) -> Tensor:
            return linear_cpu.grouped_linear(*leaves, counts)

        def torchs(leaves: list[Tensor] = leaves, counts: Tensor = counts) -> Tensor:
            return F.grouped_mm(leaves[0], leaves[1].mT, offs=counts.cumsum(0).int())

        forms = {"ours": lambda f=gradients, p=ours: f(p), "torch": lambda f=gradients, p=torchs: f(p)}
        yield Case(f"training {m} rows, {experts} x {inputs} x {outputs}", 6 * m * inputs * outputs, forms)


def attention_cases() -> Iterator[Case]:
    heads, width, values = 8, 96, 64
    for tokens in (512, 2048, 8192):
        q, k, v = (torch.randn(1, tokens, heads, c) for c in (width, width, values))
        work = tokens * (tokens + 1) * heads * (width + values)

        padded = lambda q=q, k=k, v=v: padded_attention(q, k, v)  # noqa: E731
        ours = lambda q=q, k=k, v=v: attention_cpu.causal_attention(q, k, v, 0.1)  # noqa: E731
        yield Case(f"attention {tokens} tokens", work, {"ours": ours, "torch": padded})


def attention_training_cases() -> Iterator[Case]:
    for documents, length, heads, width, values in ((5, 400, 2, 96, 64), (1, 2048, 4, 96, 64), (1, 2048, 4, 192, 128)):
        tokens = documents * length
        leaves = [torch.randn(1, tokens, heads, c, requires_grad=True) for c in (width, width, values)]
        bounds, d_o = torch.arange(0, tokens + 1, length), torch.randn(1, tokens, heads, values)
        work = tokens * (length + 1) * heads * (4 * width + 3 * values)

        def gradients(form: Callable[..., Tensor], leaves: list[Tensor] = leaves, d_o: Tensor = d_o) -> Tensor:
            return torch.cat([g.flatten() for g in torch.autograd.grad(form(*leaves), leaves, d_o)])

        def ours(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor = bounds) -> Tensor:
            return attention_cpu.causal_attention(q, k, v, 0.1, bounds)

        def torchs(q: Tensor, k: Tensor, v: Tensor, length: int = length) -> Tensor:
            parts = [padded_attention(*document) for document in zip(*(x.split(length, 1) for x in (q, k, v)))]
            return torch.cat(parts, 1)

        forms = {"ours": lambda f=gradients, p=ours: f(p), "torch": lambda f=gradients, p=torchs: f(p)}
        yield Case(f"training attention {documents} x {length}, {heads} x {width}, {values}", work, forms)


def padded_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values filled up to the keys' width, as torch's fused attention on a CPU wants it."""
    a, b, c = (x.transpose(1, 2) for x in (q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1]))))
    o = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.1)
    return o[..., : v.shape[-1]].transpose(1, 2)


def newton_schulz_cases() -> Iterator[Case]:
    for n, rows, columns in ((192, 64, 64), (36, 64, 128), (256, 96, 128), (16, 128, 128), (2, 608, 128)):
        stack, small = torch.randn(n, rows, columns), min(rows, columns)
        work = 5 * n * small**2 * (4 * max(rows, columns) + 2 * small)
        forms: Contenders = {
            "ours": lambda G=stack: newton_schulz_cpu.newton_schulz(G, 5, COEFFICIENTS),
            "torch": lambda G=stack: newton_schulz_torch(G),
        }
        yield Case(f"Newton-Schulz {n} x {rows} x {columns}", work, forms, 1e-4)


def check(case: Case) -> None:
    results = [form().detach().double() for form in case.contenders.values()]
    for other in results[1:]:
        harness.must_agree(case.name, ((results[0] - other).norm() / other.norm()).item(), case.bound)


def main(options: Options) -> None:
    for library in ("linear", "attention", "situ", "newton_schulz"):
        if not native.available(library):
            raise SystemExit(f"no C++ compiler builds the {library} kernel here")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    core = roofline.peak_flops()
    assert core is not None
    peak = core * options.threads
    print(harness.machine_line(options.threads))
    print(f"float32 peak of {options.threads} core(s): {peak / 1e9:.0f} GFLOP/s")
    bf16 = options.slow or not linear_cpu.preferred(torch.bfloat16)
    table = harness.Table()
    cases = [*linear_cases(bf16), *expert_cases(), *training_cases(), *attention_cases()]
    cases += [*attention_training_cases(), *newton_schulz_cases()]
    for case in cases:
        with torch.set_grad_enabled(case.name.startswith("training")):
            check(case)
            seconds = harness.rounds(case.contenders, options.rounds, options.clock())

        def rate(_: str, median: float, work: float = case.operations) -> harness.Record:
            return {"gflops": work / median / 1e9, "of_peak": work / median / peak}

        table.add(harness.rows_of(case.name, seconds, "ours", rate))
    harness.write_json(options.json, table.records, options, peak_flops=peak)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
