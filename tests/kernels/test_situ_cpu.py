"""The C++ SiTU-GLU against the formula in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanok3.kernels import native, situ_cpu
from nanok3.model.situ import situ_glu, situ_glu_reference

needs_kernel = pytest.mark.skipif(not native.available("situ"), reason="no C++ compiler builds the kernel here")

WIDTHS = (1, 3, 8, 17, 96, 256, 1216)
CAPS = ((4.0, 25.0), (4.0, None), (None, 25.0), (None, None), (1.0, 0.5))
HALF_ULP = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-5}


def make(rows: int, width: int, dtype: torch.dtype, spread: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and the gradient of the result."""
    gate, up, d_out = (torch.randn(rows, width) * s for s in (spread, 3 * spread, 1.0))
    return gate.to(dtype), up.to(dtype), d_out.to(dtype)


def with_gradients(function, gate: Tensor, up: Tensor, d_out: Tensor, caps) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = function(gate, up, *caps)
    return [out.detach(), *torch.autograd.grad(out, (gate, up), d_out)]


def check(got: list[Tensor], want: list[Tensor]) -> None:
    """Each number is the exact one rounded once; where the slope of the gate crosses zero, to float32's last digits
    of what it is a difference of."""
    for name, a, b in zip(("out", "d_gate", "d_up"), got, want, strict=True):
        error = (a.double() - b).abs()
        assert (error <= HALF_ULP[a.dtype] * b.abs() + 1e-7 * b.abs().max()).all(), name


@needs_kernel
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", (1, 2, 65))
def test_equal_to_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    inputs = make(rows, width, dtype)
    got = with_gradients(situ_cpu.situ_glu, *inputs, (4.0, 25.0))
    assert all(x.dtype == dtype and x.shape == (rows, width) for x in got)
    check(got, with_gradients(situ_glu_reference, *(x.double() for x in inputs), (4.0, 25.0)))


@needs_kernel
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("caps", CAPS)
def test_caps_and_their_limits(caps: tuple[float | None, float | None], dtype: torch.dtype) -> None:
    inputs = make(3, 1000, dtype)
    got = with_gradients(situ_cpu.situ_glu, *inputs, caps)
    check(got, with_gradients(situ_glu_reference, *(x.double() for x in inputs), caps))


@needs_kernel
def test_every_digit_of_the_functions() -> None:
    """sigmoid and tanh over their whole range, relative to themselves: no cancellation near zero or in the tails."""
    x = torch.cat((torch.linspace(-86, 86, 200001), torch.logspace(-30, 0, 5001), -torch.logspace(-30, 0, 5001)))
    one = torch.ones_like(x)
    sigmoid = with_gradients(situ_cpu.situ_glu, x, one, one, (None, None))[0] / x
    tanh, slope = (with_gradients(situ_cpu.situ_glu, 50 * one, x, one, (None, 2.0))[i] / 50 for i in (0, 2))
    t = torch.tanh(x.double() / 2)
    exact_slope = 1 / torch.cosh(x.double() / 2) ** 2
    for got, want in ((sigmoid, torch.sigmoid(x.double())), (tanh, 2 * t), (slope, exact_slope)):
        known = want != 0
        assert ((got.double() - want).abs() / want.abs())[known & (x != 0)].max() < 5e-7


@needs_kernel
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_large_numbers_and_nan(dtype: torch.dtype) -> None:
    large = torch.tensor([-3e38, -1e4, -200.0, 200.0, 1e4, 3e38, math.inf, -math.inf]).to(dtype)
    got = with_gradients(situ_cpu.situ_glu, large, large.flip(0), torch.ones_like(large), (4.0, 25.0))
    want = with_gradients(
        situ_glu_reference, large.double(), large.flip(0).double(), torch.ones(8).double(), (4.0, 25.0)
    )
    assert all(torch.allclose(a.double(), b, rtol=HALF_ULP[dtype], atol=1e-30) for a, b in zip(got, want, strict=True))
    x = torch.ones(40).to(dtype)
    poisoned = x.clone()
    poisoned[[3, 33]] = math.nan
    for gate, up in ((poisoned, x), (x, poisoned)):
        for values in with_gradients(situ_cpu.situ_glu, gate, up, x, (4.0, 25.0)):
            assert torch.equal(values.isnan(), poisoned.isnan())


@needs_kernel
def test_any_layout_and_expanded_gradients() -> None:
    gate, up, _ = make(20, 33, torch.float32)
    turned = [x.t().contiguous().t() for x in (gate, up)]
    results = []
    for inputs in ((gate, up), turned):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = situ_cpu.situ_glu(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernel
def test_same_bits_for_any_number_of_threads() -> None:
    inputs = make(70, 999, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(situ_cpu.situ_glu, *inputs, (4.0, 25.0)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_kernel
def test_without_gradients_and_empty() -> None:
    gate, up, d_out = make(5, 7, torch.float32)
    assert torch.equal(situ_cpu.situ_glu(gate, up), with_gradients(situ_cpu.situ_glu, gate, up, d_out, (4.0, 25.0))[0])
    assert [x.shape for x in with_gradients(situ_cpu.situ_glu, gate[:0], up[:0], d_out[:0], (4.0, 25.0))] == [
        (0, 7)
    ] * 3


@needs_kernel
def test_operators_are_well_formed() -> None:
    gate, up, d_out = make(3, 17, torch.float32)
    leaves = gate.requires_grad_(), up.requires_grad_()
    torch.library.opcheck(torch.ops.nanok3.situ_fwd, (*leaves, 4.0, None))
    torch.library.opcheck(torch.ops.nanok3.situ_bwd, (d_out, gate.detach(), up.detach(), None, 25.0))


@needs_kernel
def test_what_it_does_not_take() -> None:
    gate, up, _ = make(2, 8, torch.float32)
    for pair in ((gate.double(), up.double()), (gate.half(), up.half()), (gate, up.bfloat16()), (gate.to("meta"),) * 2):
        assert situ_cpu.situ_glu(*pair) is NotImplemented


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_model_agrees_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(4, 96, dtype)
    fast = with_gradients(situ_glu, *inputs, (4.0, 25.0))
    monkeypatch.setattr(native, "load", lambda name: None)
    assert situ_cpu.situ_glu(*inputs[:2]) is NotImplemented
    for a, b in zip(fast, with_gradients(situ_glu, *inputs, (4.0, 25.0)), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2 * HALF_ULP[dtype], atol=1e-5)
