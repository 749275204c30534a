"""The numbers behind gpu_check.py: each function is a section, takes a Bench and compares with float64 on the CPU.

Errors are relative in norm, |got - exact| / |exact|. Inputs are drawn on the CPU and rounded to the type under test
before the reference sees them, so that only arithmetic is compared. Bounds are far above rounding and far below a bug:

    float64 1e-10      float32 2e-5      float32 in TF32 5e-3      bfloat16 2e-2
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from nanok3.config import K3Config
from nanok3.kernels.gpu import fla, grouped, language, packed, situ_experts
from nanok3.model.attn_res import mix, mix_reference
from nanok3.model.basics import RMSNorm
from nanok3.model.decoder import K3
from nanok3.model.kda import OutputNorm, kda, kda_reference, l2_normalize, log_decay
from nanok3.model.latent_moe import Routing, routed, routed_reference
from nanok3.model.mla import causal_attention, causal_attention_reference, latent_attention
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.short_conv import short_conv, short_conv_reference
from nanok3.model.situ import situ_glu, situ_glu_reference
from nanok3.model.weights import load
from nanok3.train.loss import cross_entropy
from nanok3.train.muon import K3Optimizer, newton_schulz
from nanok3.train.quantile_balancing import QuantileBalancer

if TYPE_CHECKING:
    from gpu_check import Bench

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "text"
BOUND = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
TF32 = 5e-3


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact|; absolute where the exact one is zero."""
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    if got.shape != exact.shape:
        return math.inf
    norm = exact.norm().item()
    return (got - exact).norm().item() / (norm if norm else 1.0)


def exact(x: Tensor) -> Tensor:
    """The same number in float64 on the CPU, as a leaf."""
    return x.detach().cpu().double().requires_grad_(x.is_floating_point())


def there(bench: Bench, x: Tensor) -> Tensor:
    """The same on the device, as a leaf."""
    return x.detach().to(bench.device).requires_grad_(x.is_floating_point())


def compare(
    bench: Bench,
    what: str,
    form: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    bound: float,
    gradients: bool = True,
) -> None:
    """One check for the values and one for the worst gradient of `form` on the device."""
    mine, true = [there(bench, x) for x in inputs], [exact(x) for x in inputs]
    outs = [[y for y in _tuple(f(*a)) if y is not None] for f, a in ((form, mine), (reference, true))]
    bench.check(f"{what}, values", max(map(error, *outs)), bound)
    if not gradients:
        return
    upstream = [torch.randn_like(y) for y in outs[1]]
    got = torch.autograd.grad(outs[0], mine, [u.to(y) for u, y in zip(upstream, outs[0])])
    want = torch.autograd.grad(outs[1], true, upstream)
    bench.check(f"{what}, gradients", max(map(error, got, want)), 2 * bound)


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


# ---------------------------------------------------------------------- where we are


def environment(bench: Bench) -> None:
    """Hardware and versions; a first product, which also tells whether the GPU computes at all."""
    packages = ("torch", "triton", "fla-core", "einops", "numpy")
    for package in packages:
        bench.row(what=package, value=_version(package))
    bench.row(what="processor", value=harness.processor())
    bench.row(what="commit", value=str(harness.commit()))
    if bench.cuda:
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device (torch.cuda.is_available() is False)")
        card = torch.cuda.get_device_properties(0)
        bench.row(what="GPU", value=f"{card.name}, capability {card.major}.{card.minor}")
        bench.row(what="memory", value=f"{card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} processors")
        bench.row(what="CUDA of torch", value=str(torch.version.cuda))
        found = fla.load()
        bench.row(what="fla", value=found if isinstance(found, str) else "loaded")
        bench.check("fla-core is there", 0.0 if fla.available() else math.inf, 0.0)
    a, b = torch.randn(65, 70), torch.randn(70, 33)
    compare(bench, "a product in float32", torch.mm, torch.mm, [a, b], BOUND[torch.float32])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---------------------------------------------------------------------- KDA


def draw_kda(B: int, T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of this type; gates in float32, or in float64 for float64."""
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    gates = -5 * torch.rand(B, T, HV, K) ** 3, torch.rand(B, T, HV)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [q, k, torch.randn(B, T, HV, V).to(dtype), *(g.to(wide) for g in gates)]


def kda_forms(bench: Bench) -> list[tuple[str, str, torch.dtype, float]]:
    """(name, backend, dtype, bound) of every form that the device has."""
    f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16
    forms = [("torch float64", "torch", f64, BOUND[f64]), ("torch float32", "torch", f32, BOUND[f32])]
    if bench.cuda:
        fla_forms = [("fla bfloat16", "fla", bf16, BOUND[bf16]), ("fla float32", "fla", f32, TF32)]
        return [*fla_forms, *forms, ("auto bfloat16", "auto", bf16, BOUND[bf16])]
    return [*forms, ("auto float32", "auto", f32, BOUND[f32])]


def kda_values(bench: Bench) -> None:
    """Every form at awkward lengths, with value heads beyond key heads and K != V, states in and out."""
    own = [(2, 65, 2, 2, 64, 64), (1, 17, 1, 1, 128, 128), (1, 16, 2, 2, 60, 64), (1, 63, 1, 1, 256, 16)]
    # fla compiles a dozen kernels anew for each number of heads and width: few of those, many lengths.
    everywhere = [(1, T, 2, 2, 128, 128) for T in (130, 17, 1)] + [(1, 70, 2, 4, 32, 48)]
    for name, backend, dtype, bound in kda_forms(bench):
        form = functools.partial(_kda, backend=backend)
        for shape in everywhere if backend != "torch" or bench.quick else everywhere + own:
            if bench.time_left() < 0:
                return bench.skip(f"KDA {name}, further shapes", "no time left")
            B, T, H, HV, K, V = shape
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            inputs = [*draw_kda(*shape, dtype=dtype), torch.randn(B, HV, K, V, dtype=wide)]
            compare(bench, f"KDA {name}, T={T} H={H}/{HV} K={K} V={V}", form, _kda, inputs, bound)
        inputs = [*draw_kda(1, 100, 2, 2, 128, 128, dtype), torch.randn(5, 2, 128, 128, dtype=wide)]
        packed_form, reference = (functools.partial(f, bounds=[0, 1, 1, 65, 66, 100]) for f in (form, _kda))
        compare(bench, f"KDA {name}, packed with empty and short documents", packed_form, reference, inputs, bound)
    _fast_gates(bench)
    _decoding(bench)


def _kda(*inputs: Tensor, backend: Any = "reference", bounds: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=inputs[0].device)
    return kda(*inputs, True, cu_seqlens, backend=backend)


def _fast_gates(bench: Bench) -> None:
    """fla's tiles for gates that are vouched for."""
    if bench.cuda:
        inputs = [*draw_kda(1, 130, 2, 2, 128, 128, torch.bfloat16), torch.randn(1, 2, 128, 128)]
        form = functools.partial(fla.kda, output_final_state=True, bounded=True)
        reference = functools.partial(kda_reference, output_final_state=True)
        compare(bench, "KDA fla bounded gates, bfloat16", form, reference, inputs, BOUND[torch.bfloat16])


@torch.no_grad()
def _decoding(bench: Bench) -> None:
    """Forty tokens one by one through the state, against all at once."""
    for dtype, bound in ((torch.float32, BOUND[torch.float32]), (torch.bfloat16, BOUND[torch.bfloat16])):
        inputs = draw_kda(3, 40, 2, 2, 128, 128, dtype)
        want, final = kda_reference(*(exact(x) for x in inputs), output_final_state=True)
        state, outputs = torch.zeros(3, 2, 128, 128, device=bench.device), []
        for t in range(40):
            o, state = kda(*(x[:, t : t + 1].to(bench.device) for x in inputs), state, True)
            outputs.append(o)
        what = f"KDA step by step, {name_of(dtype)}"
        bench.check(what, max(error(torch.cat(outputs, 1), want), error(state, final)), bound)


@torch.no_grad()
def kda_invariants(bench: Bench) -> None:
    """What holds whatever the numbers are: prefixes, cuts, packing, repetition, extremes, poison."""
    names = [("torch", torch.float32, BOUND[torch.float32])]
    if bench.cuda:
        names.append(("fla", torch.bfloat16, BOUND[torch.bfloat16]))
    for backend, dtype, bound in names:
        run = functools.partial(kda, output_final_state=True, backend=backend)
        inputs = [x.to(bench.device) for x in draw_kda(1, 200, 2, 2, 128, 128, dtype)]
        whole, final = run(*inputs)
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, 101:] = x[:, 101:].flip(1)
        prefix = run(*changed)[0][:, :101]
        bench.check(f"{backend}: a prefix, bit for bit", float(not torch.equal(prefix, whole[:, :101])), 0.0)
        first, state = run(*(x[:, :77] for x in inputs))
        second, last = run(*(x[:, 77:] for x in inputs), state)
        cut = max(error(torch.cat((first, second), 1), whole), error(last, final))
        bench.check(f"{backend}: cut at 77 and read on", cut, bound)
        bounds = torch.tensor([0, 50, 51, 200], device=bench.device)
        packed_o, packed_s = run(*inputs, cu_seqlens=bounds)
        alone = [run(*(x[:, a:b] for x in inputs)) for a, b in ((0, 50), (50, 51), (51, 200))]
        parts = torch.cat([o for o, _ in alone], 1), torch.cat([s for _, s in alone])
        bench.check(f"{backend}: packed = alone", max(map(error, (packed_o, packed_s), parts)), bound)
        same = [x[:, :1].expand_as(x).contiguous() for x in inputs]
        same[3], same[4] = torch.full_like(same[3], -1e-3), torch.full_like(same[4], 0.999)
        want = kda_reference(*(exact(x) for x in same), output_final_state=True)
        bench.check(f"{backend}: all keys equal", max(map(error, run(*same), want)), 2 * bound)
        lowest = [*inputs[:3], torch.full_like(inputs[3], -5.0), inputs[4]]
        want = kda_reference(*(exact(x) for x in lowest), output_final_state=True)
        bench.check(f"{backend}: all gates at -5", max(map(error, run(*lowest), want)), 2 * bound)
        poisoned = [_amid_nan(x) for x in inputs]
        bench.check(f"{backend}: NaN all around", max(map(error, run(*poisoned), (whole, final))), 0.0)
        again = [run(*inputs)[0] for _ in range(10)]
        bench.check(f"{backend}: ten times the same", float(not all(torch.equal(o, whole) for o in again)), 0.0)


def _amid_nan(x: Tensor) -> Tensor:
    """x as a window of a buffer of NaN."""
    buffer = torch.full((x.numel() + 2048,), torch.nan, dtype=x.dtype, device=x.device)
    buffer[1024:-1024] = x.flatten()
    return buffer[1024:-1024].view(x.shape)


# ---------------------------------------------------------------------- depth, experts, packed weights


def depth(bench: Bench) -> None:
    """Attention residuals."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for sources, width in ((2, 64), (9, 7168 if bench.cuda else 256), (5, 70), (1, 32)):
            values = [torch.randn(2, 33, width).to(dtype) for _ in range(sources)]
            inputs = [torch.rand(width), torch.randn(1, width) / width**0.5, *values]
            if dtype == torch.float64:
                inputs = [x.double() for x in inputs]
            what = f"depth, {sources} sources of {width}, {name_of(dtype)}"
            # With one source the gradients of norm and query are zero in exact arithmetic: nothing to compare.
            compare(
                bench,
                what,
                lambda n, q, *v: mix(v, n, q, 1e-5),
                lambda n, q, *v: mix_reference(v, n, q, 1e-5),
                inputs,
                BOUND[dtype],
                gradients=sources > 1,
            )


COUNTS = ([3, 0, 17, 1], [0, 0, 5], [200, 130, 0, 64, 1])


def product_reference(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(list(counts)), weight)])


def mlp_reference(z: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts: Sequence[int], betas: Any) -> Tensor:
    hidden = situ_glu_reference(product_reference(z, w1, counts), product_reference(z, w3, counts), *betas)
    return product_reference(hidden, w2, counts)


def experts(bench: Bench) -> None:
    """Our grouped products and SiTU experts in Triton."""
    assert language.available(), "triton is not installed"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for counts in COUNTS:
            m, E, there_counts = sum(counts), len(counts), torch.tensor(counts, device=bench.device)
            for O, I in ((20, 33), (128, 192), (1, 1)):
                inputs = [torch.randn(m, I).to(dtype), (torch.randn(E, O, I) / I**0.5).to(dtype)]
                form = functools.partial(grouped.grouped_linear, counts=there_counts)
                reference = functools.partial(product_reference, counts=counts)
                compare(
                    bench, f"grouped product {counts} {O}x{I}, {name_of(dtype)}", form, reference, inputs, BOUND[dtype]
                )
            for (L, width), betas in (((96, 64), (4.0, 25.0)), ((20, 33), (4.0, None)), ((64, 48), (None, None))):
                inputs = [
                    torch.randn(m, L),
                    *(torch.randn(E, *s) / s[1] ** 0.5 for s in ((width, L), (L, width), (width, L))),
                ]
                compare(
                    bench,
                    f"SiTU experts {counts} {width}x{L} {betas}, {name_of(dtype)}",
                    lambda *x, c=there_counts, b=betas: situ_experts.expert_mlp(*x, c, *b),
                    lambda *x, c=counts, b=betas: mlp_reference(*x, c, b),
                    [x.to(dtype) for x in inputs],
                    BOUND[dtype],
                )


@torch.no_grad()
def packed_experts(bench: Bench) -> None:
    """Products with packed MXFP4 weights."""
    assert language.available(), "triton is not installed"
    for dtype in (torch.float32, torch.bfloat16):
        for counts in COUNTS:
            m, E, there_counts = sum(counts), len(counts), torch.tensor(counts, device=bench.device)
            for F_, L in ((64, 96), (96, 32), (512, 512)):
                z = torch.randn(m, L).to(dtype)
                stored = [quantize_mxfp4(torch.randn(E, *s) / s[1] ** 0.5) for s in ((F_, L), (L, F_), (F_, L))]
                w1, w2, w3 = (dequantize_mxfp4(*w, torch.float64) for w in stored)
                moved = [tuple(x.to(bench.device) for x in w) for w in stored]
                what = f"{counts} {F_}x{L}, {name_of(dtype)}"
                got = packed.packed_linear(z.to(bench.device), *moved[0], there_counts)
                bench.check(
                    f"packed product {what}", error(got, product_reference(z.double(), w1, counts)), BOUND[dtype]
                )
                got = packed.packed_expert_mlp(z.to(bench.device), *moved, there_counts)
                want = mlp_reference(z.double(), w1, w2, w3, counts, (4.0, 25.0))
                bench.check(f"packed experts {what}", error(got, want), BOUND[dtype])
    eye = torch.eye(512, device=bench.device)
    codes = torch.arange(256, dtype=torch.uint8).expand(1, 16, 256).contiguous()
    scale = torch.randint(40, 200, (1, 16, 16), dtype=torch.uint8)
    got = packed.packed_linear(
        eye, codes.to(bench.device), scale.to(bench.device), torch.tensor([512], device=bench.device)
    )
    want = dequantize_mxfp4(codes, scale, torch.float64)[0].T
    bench.check("every code and scale, exactly", error(got, want), 0.0)


# ---------------------------------------------------------------------- what torch computes


def elementwise(bench: Bench) -> None:
    """Gates, norms, convolutions, routing: torch's own operators on the device."""
    for dtype in (torch.float32, torch.bfloat16):
        x, gate = torch.randn(2, 33, 4, 64).to(dtype), torch.randn(2, 33, 4, 64).to(dtype)
        bound, kind = BOUND[dtype], name_of(dtype)
        compare(bench, f"SiTU-GLU, {kind}", situ_glu, situ_glu_reference, [4 * x, 30 * gate], bound)
        norm, true = RMSNorm(64, 1e-5).to(bench.device), RMSNorm(64, 1e-5).double()
        compare(bench, f"RMSNorm, {kind}", norm, true, [x], bound)
        gated, true_gated = OutputNorm(64, 1e-5).to(bench.device), OutputNorm(64, 1e-5).double()
        compare(bench, f"gated norm, {kind}", gated, true_gated, [x, gate], bound)
        compare(bench, f"l2 norm, {kind}", l2_normalize, l2_normalize, [x], bound)
        parameters = [torch.randn(4), torch.randn(256)]
        for lowest in (-5.0, None):
            form = functools.partial(log_decay, lower_bound=lowest)
            compare(bench, f"log decay, bound {lowest}, {kind}", form, form, [x, *parameters], bound)
        u, weight, before = x.flatten(2), torch.randn(256, 1, 4), torch.randn(2, 3, 256)
        compare(bench, f"short convolution, {kind}", short_conv, short_conv_reference, [u, weight, before], bound)
    _routing(bench)


@torch.no_grad()
def _routing(bench: Bench) -> None:
    """The routed experts as the model calls them, against token by token."""
    cfg = K3Config.tiny()
    model = K3(cfg)
    moe: Any = next(layer.feed_forward for layer in model.model.layers if cfg.is_moe(layer.layer))
    z = torch.randn(50, cfg.latent_size)
    scores = torch.rand(50, cfg.num_experts)
    chosen = scores.topk(cfg.num_experts_per_token).indices
    routing = Routing(scores, chosen, scores.gather(1, chosen))
    want = routed_reference(
        moe.experts.double(), z.double(), Routing(scores.double(), chosen, routing.weights.double())
    )
    for dtype in (torch.float32, torch.bfloat16):
        on = moe.experts.to(bench.device, dtype)
        got = routed(on, z.to(bench.device, dtype), Routing(*(x.to(bench.device) for x in routing)))
        bench.check(f"routed experts, {name_of(dtype)}", error(got, want), BOUND[dtype])


def attention(bench: Bench) -> None:
    """MLA: ordinary attention, and the absorbed form over latents."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k = (torch.randn(2, 65, 4, 192).to(dtype) for _ in range(2))
        v = torch.randn(2, 65, 4, 128).to(dtype)
        form = functools.partial(causal_attention, scale=192**-0.5)
        reference = functools.partial(causal_attention_reference, scale=192**-0.5)
        compare(bench, f"causal attention, {name_of(dtype)}", form, reference, [q, k, v], BOUND[dtype])
        inputs = [
            torch.randn(2, 3, 4, 128),
            torch.randn(2, 3, 4, 64),
            torch.randn(2, 70, 512 + 64),
            torch.randn(4, 256, 512) / 23,
        ]
        form = functools.partial(latent_attention, scale=192**-0.5)
        compare(bench, f"latent attention, {name_of(dtype)}", form, form, [x.to(dtype) for x in inputs], BOUND[dtype])


# ---------------------------------------------------------------------- the whole model


@torch.no_grad()
def golden(bench: Bench) -> None:
    """The official code's logits: small checkpoints with random weights, whole, in pieces, and token by token."""
    folders = sorted(p.parent for p in FIXTURES.glob("*/expected.safetensors"))
    for folder in folders[1:2] if bench.quick else folders:
        expected = load_file(folder / "expected.safetensors")
        for dtype, bound in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
            model = load(folder, dtype=dtype, device=bench.device).eval()
            for case in ("len003", "len065", "len130"):
                ids, want = expected[f"{case}.input_ids"][None].to(bench.device), expected[f"{case}.logits"]
                bench.check(f"{folder.name} {case}, {name_of(dtype)}", _logit_error(model(ids).logits[0], want), bound)
            ids, want = expected["len065.input_ids"][None].to(bench.device), expected["len065.logits"]
            state, logits = model.new_state(1), []
            for piece in (ids[:, :40], *ids[:, 40:].split(1, dim=1)):
                logits.append(model(piece, state=state).logits[0])
            what = f"{folder.name} 40 tokens, then one by one, {name_of(dtype)}"
            bench.check(what, _logit_error(torch.cat(logits), want), bound)
    _in_bfloat16(bench)


def _in_bfloat16(bench: Bench) -> None:
    """For information: a near-tie of a router sends a token to other experts, and random weights magnify that."""
    folder = FIXTURES / "e_k3_5l_realheads"
    expected = load_file(folder / "expected.safetensors")
    model = load(folder, dtype=torch.bfloat16, device=bench.device).eval()
    logits = model(expected["len065.input_ids"][None].to(bench.device)).logits[0]
    away = _logit_error(logits, expected["len065.logits"])
    bench.row(what=f"{folder.name} len065, bfloat16: distance from float64", value=f"{away:.2g}")


def _logit_error(got: Tensor, want: Tensor) -> float:
    """Some fixtures keep the last positions only."""
    want = want.reshape(-1, want.shape[-1])
    return error(got[-len(want) :], want)


def small_model() -> K3:
    torch.manual_seed(1)
    return K3(K3Config.tiny())


def loss_of(model: K3, ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    hidden = model.hidden_states(ids, cu_seqlens=cu_seqlens)
    total, count = cross_entropy(hidden, model.lm_head.weight, ids.roll(-1, 1))
    return total / count


def gradients(bench: Bench) -> None:
    """Loss and all gradients of a small model on packed rows, against float64 on the CPU."""
    ids, bounds = torch.randint(0, 1024, (1, 130)), torch.tensor([0, 1, 70, 130])
    true = small_model().double()
    want = loss_of(true, ids, bounds)
    want.backward()
    for dtype, bound in ((torch.float64, 1e-8), (torch.float32, 1e-3), (torch.bfloat16, 0.3)):
        model = small_model().to(bench.device, torch.float64 if dtype == torch.float64 else torch.float32)
        model.compute_dtype = dtype if dtype == torch.bfloat16 else None
        got = loss_of(model, ids.to(bench.device), bounds.to(bench.device))
        got.backward()
        mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        exact_ = torch.cat([p.grad.flatten() for p in true.parameters() if p.grad is not None])
        bench.check(f"loss, {name_of(dtype)}", error(got, want), bound / 10)
        bench.check(f"gradients of all parameters, {name_of(dtype)}", error(mine, exact_), bound)


def training(bench: Bench) -> None:
    """Newton-Schulz, and a few whole steps beside the same steps on the CPU."""
    matrices = torch.randn(5, 40, 96, dtype=torch.float64)
    want = newton_schulz(matrices)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        got = newton_schulz(matrices.to(bench.device), dtype=dtype)
        bench.check(f"Newton-Schulz, {name_of(dtype)}", error(got, want), bound)
    ids = torch.randint(0, 1024, (2, 65))
    losses = {device: _losses(device, ids, None, steps=4) for device in dict.fromkeys(("cpu", bench.device))}
    bench.check("losses of four steps, float32", error(losses[bench.device], losses["cpu"]), 2e-2)
    fallen = _losses(bench.device, ids, torch.bfloat16, steps=20)
    bench.row(what="loss over 20 steps, bfloat16", value=f"{fallen[0]:.3f} to {fallen[-1]:.3f}")
    bench.check("the loss falls, bfloat16", float(fallen[-1] / fallen[0]), 0.8)


def _losses(device: str, ids: Tensor, precision: torch.dtype | None, steps: int) -> Tensor:
    model = small_model().to(device)
    model.compute_dtype = precision
    optimizer, balancer = K3Optimizer(model, lr=5e-3), QuantileBalancer(model)
    return torch.stack([_step(model, optimizer, balancer, ids.to(device)) for _ in range(steps)]).cpu()


def _step(model: K3, optimizer: K3Optimizer, balancer: QuantileBalancer, ids: Tensor) -> Tensor:
    with balancer.observe():
        loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    balancer.step()
    return loss.detach()


def resume(bench: Bench) -> None:
    """A checkpoint written and read on the device goes on as if nothing had been, bit for bit."""
    from nanok3.train.checkpoint import latest, load_checkpoint, save_checkpoint

    ids = torch.randint(0, 1024, (2, 65)).to(bench.device)
    model = small_model().to(bench.device)
    optimizer, balancer = K3Optimizer(model, lr=5e-3), QuantileBalancer(model)
    for _ in range(2):
        _step(model, optimizer, balancer, ids)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(
            Path(folder), 2, model, {"optimizer": optimizer.state_dict(), "balancer": balancer.state_dict()}
        )
        found, problems = latest(Path(folder))
        assert found is not None and not problems
        again, state = load_checkpoint(found)
    again.to(bench.device).train()
    optimizer2, balancer2 = K3Optimizer(again, lr=5e-3), QuantileBalancer(again)
    optimizer2.load_state_dict(state["optimizer"])
    balancer2.load_state_dict(state["balancer"])
    weights = [(a.detach() - b.detach()).abs().max().item() for a, b in zip(model.parameters(), again.parameters())]
    bench.check("weights written and read", max(weights), 0.0)
    pairs = [(_step(model, optimizer, balancer, ids), _step(again, optimizer2, balancer2, ids)) for _ in range(3)]
    # The scattered sums of an embedding's gradient come in any order on a GPU.
    bench.check("losses after resuming", max(abs(float(a - b)) for a, b in pairs), 1e-3 if bench.cuda else 0.0)


@torch.no_grad()
def generation(bench: Bench) -> None:
    """Greedy decoding through the state says what whole forwards say."""
    model = small_model().to(bench.device).eval()
    ids = torch.randint(0, 1024, (1, 9), device=bench.device)
    state, piece, logits = model.new_state(1), ids, []
    for _ in range(12):
        logits.append(model(piece, state=state).logits[:, -1])
        piece = logits[-1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, piece), dim=1)
    whole = model(ids[:, :-1]).logits[0, 8:]
    bench.check("logits of 12 decoded tokens, float32", error(torch.cat(logits), whole), 1e-3)
    batch = model.new_state(3)
    three = ids.expand(3, -1)
    model(three[:, :8], state=batch)
    together = model(three[:, 8:9], state=batch).logits[2, -1]
    bench.check("a batch of three = one", error(together, logits[0][0]), 1e-3)
    copy = batch.clone()
    one, other = model(three[:, 9:10], state=batch).logits, model(three[:, 9:10], state=copy).logits
    bench.check("a cloned state = the state", error(one, other), 0.0)


def waiting(bench: Bench) -> None:
    """Nowhere inside a layer does the host wait for the GPU; the places where it does are named."""
    model = small_model().to(bench.device)
    model.compute_dtype = torch.bfloat16
    ids = torch.randint(0, 1024, (2, 64), device=bench.device)
    for name, run in (
        ("forward and backward", lambda: model.hidden_states(ids).float().sum().backward()),
        ("decoding a token", functools.partial(_decode_once, model, ids)),
    ):
        run()  # compiles
        places = _waits(run)
        for place in places:
            bench.row(check=f"{name} waits at {place}", error=1.0, bound=0.0, ok=False)
        if not places:
            bench.check(f"{name} waits nowhere", 0.0, 0.0)


@torch.no_grad()
def _decode_once(model: K3, ids: Tensor) -> None:
    state = model.new_state(2)
    for t in range(3):
        model.hidden_states(ids[:, t : t + 1], state=state)


def _waits(run: Callable[[], object]) -> list[str]:
    """Lines of our files at which `run` waits, found by torch's own warnings."""
    import traceback
    import warnings

    places: dict[str, None] = {}

    def note(message: Any, *_: Any, **__: Any) -> None:
        ours = [f for f in traceback.extract_stack() if "nanok3" in f.filename and "gpu_numerics" not in f.filename]
        if "synchroniz" in str(message) and ours:
            places[f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before, warnings.showwarning = warnings.showwarning, note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = before
    return list(places)
