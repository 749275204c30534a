"""The C++ norms and the decay gate against their formulas in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanok3.kernels import native, norms_cpu
from nanok3.model.basics import RMSNorm
from nanok3.model.kda import OutputNorm, l2_normalize, log_decay

needs_kernel = pytest.mark.skipif(not native.available("norms"), reason="no C++ compiler builds the kernels here")

WIDTHS = (1, 3, 8, 17, 96, 256, 1216)
ROWS = (1, 2, 65)
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}  # half a unit in the last place of what is stored
BAND = 3e-6


def rms_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def gated_reference(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return rms_reference(x, weight) * torch.sigmoid(gate)


def l2_reference(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def decay_reference(z: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    return -5 * torch.sigmoid(A_log.exp()[:, None] * (z + dt_bias.view(z.shape[-2:])))


KERNELS = {
    "rms": (lambda x, w: norms_cpu.rms_norm(x, w, EPS), rms_reference),
    "gated": (lambda x, gate, w: norms_cpu.gated_norm(x, gate, w, EPS), gated_reference),
    "l2": (norms_cpu.l2_normalize, l2_reference),
    "decay": (lambda z, A_log, dt_bias: norms_cpu.log_decay(z, A_log, dt_bias, -5.0), decay_reference),
}


def make(name: str, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs in the order of the kernel's arguments; weights are float32 numbers that bf16 holds exactly."""
    weight = (1 + torch.randn(width) / 4).bfloat16().float()
    x, gate = torch.randn(rows, width).to(dtype), (4 * torch.randn(rows, width)).to(dtype)
    if name == "decay":
        return [torch.randn(rows, 3, width).to(dtype), torch.randn(3), torch.randn(3 * width)]
    return {"rms": [x, weight], "gated": [x, gate, weight], "l2": [x]}[name]


def with_gradients(function, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check(got: list[Tensor], want: list[Tensor], largest_inverse: float = 1.0, roundings: int = 1) -> None:
    """Each number is the exact one rounded; sums and differences to the last digits of their largest terms."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        size = b.abs().max() + (largest_inverse if i else 0.0)
        allowed = roundings * ROUNDING[a.dtype] * b.abs() + BAND * size
        assert a.shape == b.shape and ((a.double() - b).abs() <= allowed).all(), i


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", KERNELS)
def test_equal_to_reference(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    kernel, reference = KERNELS[name]
    inputs = make(name, rows, width, dtype)
    got, want = with_gradients(kernel, inputs), with_gradients(reference, [x.double() for x in inputs])
    # At width 1 the gradient of a norm is what eps leaves of a difference of numbers near 1 / |x|.
    inverse = float(1 / inputs[0].double().square().mean(-1).add(1e-6).sqrt().min())
    check(got, want, max(inverse, 3.0), roundings=2 if name == "rms" else 1)  # rms rounds before the weight and after
    assert [x.dtype for x in got[1:]] == [x.dtype for x in inputs]
    assert got[0].dtype == (torch.float32 if name == "decay" else dtype)


@needs_kernel
def test_rms_norm_rounds_like_the_official_code() -> None:
    """Normalised in float32, rounded, multiplied by the rounded weight, rounded: the same bits but for the few
    numbers whose float32 value lies within an ulp of a rounding boundary."""
    x, weight = torch.randn(200, 256).bfloat16(), 1 + torch.randn(256)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    official = normed.bfloat16() * weight.bfloat16()
    ours = norms_cpu.rms_norm(x, weight, EPS)
    once = (normed * weight).bfloat16()
    assert (ours != official).float().mean() < 1e-3 < 0.1 < (once != official).float().mean()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("rms", "gated", "l2"))
def test_zero_tiny_and_large_rows(name: str, dtype: torch.dtype) -> None:
    kernel, reference = KERNELS[name]
    inputs = make(name, 4, 40, dtype)
    inputs[0] = inputs[0] * torch.tensor([0.0, 1e-12, 1e6, 1e15])[:, None].to(dtype)
    inputs = [x.detach() for x in inputs]
    got, want = with_gradients(kernel, inputs), with_gradients(reference, [x.double() for x in inputs])
    check(got, want, 1e3, roundings=2)
    assert not got[0][0].any()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_nan_stays_in_its_row(name: str, dtype: torch.dtype) -> None:
    kernel, _ = KERNELS[name]
    inputs = make(name, 5, 40, dtype)
    clean = with_gradients(kernel, inputs)
    inputs[0][2, ..., 33] = math.nan
    got = with_gradients(kernel, inputs)
    for a, b in zip(got[:2], clean[:2], strict=True):
        row = a[2] if name != "decay" else a[2, :, 33]
        assert row.isnan().all() and torch.equal(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]])


@needs_kernel
def test_gate_far_from_zero() -> None:
    x, _, weight = make("gated", 1, 8, torch.float32)
    gate = torch.tensor([[-3e38, -100.0, -30.0, 0.0, 30.0, 100.0, 3e38, math.nan]])
    out, *grads = with_gradients(KERNELS["gated"][0], [x, gate, weight])
    want, *exact = with_gradients(gated_reference, [x.double(), gate.double(), weight.double()])
    assert torch.allclose(out.double(), want, rtol=1e-6, atol=1e-37, equal_nan=True)
    assert torch.allclose(grads[1].double(), exact[1], rtol=2e-6, atol=1e-15, equal_nan=True)


@needs_kernel
def test_decay_gate_with_a_huge_rate() -> None:
    """A_log of 100 is read as 80: saturated, finite everywhere, and without a gradient of its own."""
    z, dt_bias = torch.tensor([-1e4, -1.0, 0.0, 1e-34, 1e4]).view(5, 1, 1), torch.zeros(1)
    for A_log in (80.0, 100.0):
        out, *grads = with_gradients(KERNELS["decay"][0], [z, torch.tensor([A_log]), dt_bias])
        assert torch.equal(out.flatten()[[0, 1, 2, 4]], torch.tensor([0.0, 0.0, -2.5, -5.0]))
        assert -5 < out[3] < -2.5
        assert all(g.isfinite().all() for g in grads)
        assert (grads[1] != 0) == (A_log == 80)


@needs_kernel
def test_slices_and_turned_inputs() -> None:
    wide, weight = torch.randn(2, 30, 60), torch.randn(40)
    piece = wide[..., 10:50]
    for kernel, inputs in (
        ("rms", [piece, weight]),
        ("rms", [wide[:, ::2, :40], weight]),
        ("rms", [torch.randn(40, 9).t(), weight]),
        ("gated", [torch.randn(40, 9).t(), torch.randn(40, 9).t(), weight]),
        ("l2", [piece.transpose(0, 1)]),
        ("decay", [torch.randn(4, 5, 3).permute(2, 0, 1), torch.randn(4), torch.randn(5, 4).t().flatten()]),
    ):
        got = with_gradients(KERNELS[kernel][0], inputs)
        want = with_gradients(KERNELS[kernel][0], [x.contiguous().clone() for x in inputs])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    leaf = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(norms_cpu.l2_normalize(leaf).sum(), leaf)  # an expanded gradient
    (want,) = torch.autograd.grad((norms_cpu.l2_normalize(leaf) * torch.ones(3, 8)).sum(), leaf)
    assert torch.equal(grad, want)


@needs_kernel
@pytest.mark.parametrize("name", KERNELS)
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    inputs = make(name, 9000, 19, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(KERNELS[name][0], inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_kernel
@pytest.mark.parametrize("name", KERNELS)
def test_without_gradients_and_empty(name: str) -> None:
    kernel, _ = KERNELS[name]
    inputs = make(name, 5, 7, torch.float32)
    assert torch.equal(kernel(*inputs), with_gradients(kernel, inputs)[0])
    out, first, *others = with_gradients(kernel, [inputs[0][:0], *(x[:0] if x.dim() > 1 else x for x in inputs[1:])])
    assert out.shape == first.shape == inputs[0][:0].shape and not any(x.any() for x in others)


@needs_kernel
def test_operators_are_well_formed() -> None:
    for name, operator, setting in (
        ("rms", "rms_norm", EPS),
        ("gated", "gated_norm", EPS),
        ("l2", "l2_norm", 1e-6),
        ("decay", "log_decay", -5.0),
    ):
        inputs = make(name, 3, 17, torch.float32)
        forward, backward = (getattr(torch.ops.nanok3, f"{operator}_{way}") for way in ("fwd", "bwd"))
        out = forward(*inputs, setting)
        torch.library.opcheck(forward, (*(x.detach().requires_grad_() for x in inputs), setting))
        torch.library.opcheck(backward, (torch.randn_like(out), *inputs, setting))


@needs_kernel
@pytest.mark.parametrize("name", KERNELS)
def test_what_it_does_not_take(name: str) -> None:
    inputs = make(name, 2, 8, torch.float32)
    for change in (Tensor.double, Tensor.half, lambda x: x.to("meta")):
        assert KERNELS[name][0](*map(change, inputs)) is NotImplemented


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_agrees_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rms, output = RMSNorm(24, EPS), OutputNorm(24, EPS)
    x, gate = torch.randn(2, 5, 3, 24).to(dtype), torch.randn(2, 5, 3, 24).to(dtype)
    A_log, dt_bias = torch.randn(3), torch.randn(72)

    def run() -> list[Tensor]:
        leaves = [y.detach().requires_grad_() for y in (x, gate, A_log, dt_bias)]
        parts = rms(leaves[0]), output(*leaves[:2]), l2_normalize(leaves[0]), log_decay(leaves[0], *leaves[2:], -5.0)
        weights = [*leaves, rms.weight, output.weight]
        return [*parts, *torch.autograd.grad(sum(y.float().square().sum() for y in parts), weights)]

    fast = run()
    monkeypatch.setattr(native, "load", lambda name: None)
    assert norms_cpu.l2_normalize(x) is NotImplemented
    for a, b in zip(fast, run(), strict=True):
        # Torch sums rounded gradients: a few roundings between the two.
        assert (a.float() - b.float()).abs().max() <= (6 * ROUNDING[dtype] + 1e-5) * b.float().abs().max()
