"""The C++ short convolution against the loop over tokens in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanok3.kernels import native, short_conv_cpu
from nanok3.model.basics import position_in_document
from nanok3.model.short_conv import short_conv, short_conv_reference

needs_kernel = pytest.mark.skipif(not native.available("short_conv"), reason="no C++ compiler builds the kernel here")

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (1, 3, 8, 17, 96, 256, 1216)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}  # half a unit in the last place of what is stored
BAND = 3e-6


def make(B: int, T: int, C: int, dtype: torch.dtype, taps: int = 4) -> list[Tensor]:
    """u, weight, history, and the gradient of the result."""
    u, history, d_out = torch.randn(B, T, C), torch.randn(B, taps - 1, C), torch.randn(B, T, C)
    return [u.to(dtype), torch.randn(C, 1, taps), history.to(dtype), d_out.to(dtype)]


def with_gradients(function, u: Tensor, weight: Tensor, history: Tensor | None, position, d_out: Tensor):
    leaves = [u.detach().requires_grad_(), weight.detach().requires_grad_()]
    out = function(*leaves, history, position)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check(inputs: list[Tensor], position: Tensor | None = None, with_history: bool = False) -> None:
    u, weight, history, d_out = inputs
    history = history if with_history else None
    got = with_gradients(short_conv_cpu.short_conv, u, weight, history, position, d_out)
    wide = [None if x is None else x.double() for x in (u, weight, history, d_out)]
    want = with_gradients(short_conv_reference, *wide[:3], position, wide[3])
    assert [x.dtype for x in got] == [u.dtype, u.dtype, torch.float32]
    for name, a, b in zip(("out", "d_u", "d_weight"), got, want, strict=True):
        allowed = ROUNDING[a.dtype] * b.abs() + BAND * b.abs().max()
        assert a.shape == b.shape and ((a.double() - b).abs() <= allowed).all(), name


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", WIDTHS)
@pytest.mark.parametrize(("B", "T"), ((1, 1), (2, 2), (1, 65)))
def test_equal_to_reference(B: int, T: int, C: int, dtype: torch.dtype) -> None:
    for with_history in (False, True):
        check(make(B, T, C, dtype), with_history=with_history)


@needs_kernel
@pytest.mark.parametrize("taps", (1, 2, 3, 4, 7))
@pytest.mark.parametrize("T", (1, 3, 63, 64, 130))
def test_any_number_of_taps(T: int, taps: int) -> None:
    """Also across the blocks of 64 tokens in which the kernel works, and rows of a batch that share a block."""
    for with_history in (False, True):
        check(make(3, T, 18, torch.float32, taps), with_history=with_history)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", ((1, 1, 1), (64, 64, 2), (2, 0, 61, 3, 1, 63)))
def test_packed_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    position = position_in_document(bounds, sum(lengths))
    inputs = make(1, sum(lengths), 20, dtype)
    u, weight, d_out = inputs[0], inputs[1], inputs[3]
    check(inputs, position)
    check(inputs, position.to(torch.int32))
    check(inputs, position, with_history=True)
    got = with_gradients(short_conv_cpu.short_conv, u, weight, None, position, d_out)
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        alone = with_gradients(short_conv_cpu.short_conv, u[:, a:b], weight, None, None, d_out[:, a:b])
        assert torch.equal(got[0][:, a:b], alone[0]) and torch.equal(got[1][:, a:b], alone[1])


@needs_kernel
def test_any_positions() -> None:
    """Positions need not be those of a packed row: each token sees as many as its own says."""
    position = torch.tensor([3, 0, 9, 1, 0, 2, 2, 1, 5, 0, 3])
    check(make(2, 11, 20, torch.float32), position)
    check(make(2, 11, 20, torch.float32), position, with_history=True)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_only_who_sees_it(dtype: torch.dtype) -> None:
    position = position_in_document(torch.tensor([0, 5, 12]), 12)
    u, weight, _, d_out = make(1, 12, 20, dtype)
    clean = with_gradients(short_conv_cpu.short_conv, u, weight, None, position, d_out)
    u[0, 3:5, 7] = math.nan
    out, d_u, d_weight = with_gradients(short_conv_cpu.short_conv, u, weight, None, position, d_out)
    seen, hit = torch.zeros(12, 20, dtype=torch.bool), torch.zeros(12, 20, dtype=torch.bool)
    seen[3:5, 7], hit[0:5, 7] = True, True  # the gradient also reaches the tokens that share an output with it
    assert torch.equal(out[0].isnan(), seen) and torch.equal(d_u[0].isnan(), hit)
    assert torch.equal(out[0][~seen], clean[0][0][~seen]) and torch.equal(d_u[0][~hit], clean[1][0][~hit])
    others = torch.arange(20) != 7
    assert d_weight[7].isnan().all() and torch.equal(d_weight[others], clean[2][others])
    d_out[0, 11, 3] = math.nan
    _, d_u, _ = with_gradients(short_conv_cpu.short_conv, u, weight, None, position, d_out)
    assert torch.equal(d_u[0, :, 3].isnan(), torch.arange(12) >= 8)


@needs_kernel
def test_large_numbers() -> None:
    u = torch.tensor([-3e38, -200.0, -88.0, 0.0, 88.0, 200.0, 3e38]).view(1, -1, 1)
    got = with_gradients(short_conv_cpu.short_conv, u, torch.ones(1, 1, 1), None, None, torch.ones_like(u))
    silu = u.double() * torch.sigmoid(u.double())
    assert torch.allclose(got[0].double(), silu, rtol=1e-6, atol=1e-30)
    assert torch.equal(got[1].flatten()[[0, 1, 3, 5, 6]], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


@needs_kernel
def test_split_anywhere() -> None:
    """The last inputs of one call are the history of the next."""
    u, weight, history, _ = make(2, 40, 20, torch.bfloat16)
    whole = short_conv_cpu.short_conv(u, weight, history)
    for cut in (1, 2, 3, 20, 39):
        seen = torch.cat((history, u[:, :cut]), 1)
        parts = [short_conv_cpu.short_conv(u[:, :cut], weight, history)]
        parts.append(short_conv_cpu.short_conv(u[:, cut:], weight, seen[:, -3:]))
        assert torch.equal(torch.cat(parts, 1), whole)


@needs_kernel
def test_any_layout_and_expanded_gradients() -> None:
    u, weight, history, _ = make(2, 9, 20, torch.float32)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (u, weight, history)]
    results = []
    for inputs in ((u, weight, history.double()), turned):
        leaves = [x.detach().requires_grad_() for x in inputs[:2]]
        out = short_conv_cpu.short_conv(*leaves, inputs[2])
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernel
def test_same_bits_for_any_number_of_threads() -> None:
    u, weight, history, d_out = make(3, 1000, 19, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(short_conv_cpu.short_conv, u, weight, history, None, d_out))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_kernel
def test_without_gradients_and_empty() -> None:
    u, weight, _, d_out = make(2, 5, 7, torch.float32)
    full = with_gradients(short_conv_cpu.short_conv, u, weight, None, None, d_out)
    assert torch.equal(short_conv_cpu.short_conv(u, weight), full[0])
    out, d_u, d_weight = with_gradients(short_conv_cpu.short_conv, u[:, :0], weight, None, None, d_out[:, :0])
    assert out.shape == d_u.shape == (2, 0, 7) and not d_weight.any()


@needs_kernel
def test_operators_are_well_formed() -> None:
    u, weight, history, d_out = make(1, 6, 9, torch.float32)
    position = torch.tensor([0, 1, 2, 0, 1, 2])
    for extra in ((None, position), (history, None)):
        leaves = u.detach().requires_grad_(), weight.detach().requires_grad_()
        torch.library.opcheck(torch.ops.nanok3.short_conv_fwd, (*leaves, *extra))
        torch.library.opcheck(torch.ops.nanok3.short_conv_bwd, (d_out, u, weight, *extra))


@needs_kernel
def test_what_it_does_not_take() -> None:
    u, weight, history, _ = make(1, 6, 8, torch.float32)
    refused = short_conv_cpu.short_conv
    assert refused(u.double(), weight) is NotImplemented
    assert refused(u.half(), weight) is NotImplemented
    assert refused(u.to("meta"), weight.to("meta")) is NotImplemented
    assert refused(u, weight, history[:, 1:]) is NotImplemented
    assert refused(u, weight, history.detach().requires_grad_()) is NotImplemented
    assert short_conv_cpu._fits(u, weight, history, torch.arange(6))
    for wrong in ((u, weight[:4], None, None), (u, weight, None, torch.arange(5)), (u, weight, history[..., :4], None)):
        assert not short_conv_cpu._fits(*wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_agrees_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    u, weight, history, d_out = make(1, 20, 24, dtype)
    position = position_in_document(torch.tensor([0, 7, 20]), 20)
    cases = ((None, position), (history, None), (None, None))
    fast = [with_gradients(short_conv, u, weight, *case, d_out) for case in cases]
    monkeypatch.setattr(native, "load", lambda name: None)
    assert short_conv_cpu.short_conv(u, weight) is NotImplemented
    for case, results in zip(cases, fast, strict=True):
        for a, b in zip(results, with_gradients(short_conv, u, weight, *case, d_out), strict=True):
            # Torch adds the four rounded parts of a gradient: a few roundings between the two.
            assert (a.float() - b.float()).abs().max() <= (4 * ROUNDING[dtype] + 1e-5) * b.float().abs().max()


@needs_kernel
def test_history_with_a_gradient_takes_the_torch_form() -> None:
    u, weight, history, d_out = make(1, 6, 8, torch.float32)
    history.requires_grad_()
    (grad,) = torch.autograd.grad(short_conv(u, weight, history), history, d_out)
    wide = history.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(short_conv_reference(u.double(), weight.double(), wide), wide, d_out.double())
    assert torch.allclose(grad.double(), want, rtol=1e-5, atol=1e-5)
