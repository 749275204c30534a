"""The C++ attention residuals against the formula in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanok3.kernels import attn_res_cpu, native
from nanok3.model.attn_res import mix, mix_reference

needs_kernel = pytest.mark.skipif(not native.available("attn_res"), reason="no C++ compiler builds the kernel here")

WIDTHS = (1, 3, 8, 17, 96, 256, 1216)
EPS = 1e-5
BAND = 5e-6
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}  # half a unit in the last place of what is stored


def make(S: int, tokens: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Sources of growing size, norm, query, and the gradient of the mix. Scores are of order one."""
    sources = [(torch.randn(1, tokens, width) * (1 + s)).to(dtype) for s in range(S)]
    norm, query = 1 + 0.1 * torch.randn(width), torch.randn(1, width) * width**-0.5
    return sources, norm, query, torch.randn(1, tokens, width).to(dtype)


def with_gradients(function, sources, norm: Tensor, query: Tensor, d_mixed: Tensor) -> list[Tensor]:
    """The mix and the gradients of norm, query and every source."""
    leaves = [x.detach().requires_grad_() for x in (norm, query, *sources)]
    mixed = function(leaves[2:], leaves[0], leaves[1], EPS)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, d_mixed)]


def check(inputs, got: list[Tensor], want: list[Tensor]) -> None:
    """Relative to the largest number; a source's gradient also to the terms it is a difference of, some of which are
    of the size of 1 / rms(v)."""
    terms = [0.0, 0.0, 0.0, *(1 / x.double().square().mean(-1, keepdim=True).add(EPS).sqrt() for x in inputs[0])]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b.numel():
            size = b.abs().max() + terms[i]
            assert ((a.double() - b).abs() <= ROUNDING[a.dtype] * b.abs() + BAND * size + 1e-30).all(), i


def exact(inputs) -> list[Tensor]:
    sources, *others = inputs
    return with_gradients(mix_reference, [x.double() for x in sources], *(x.double() for x in others))


@needs_kernel
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("S", "tokens"), ((1, 2), (2, 65), (5, 1), (9, 65), (17, 2), (40, 3)))
def test_equal_to_reference(S: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    inputs = make(S, tokens, width, dtype)
    got = with_gradients(attn_res_cpu.mix, *inputs)
    assert [x.dtype for x in got] == [dtype, torch.float32, torch.float32] + [dtype] * S
    check(inputs, got, exact(inputs))


@needs_kernel
@pytest.mark.parametrize("factor", (0.0, 30.0, -1e4))
def test_uniform_and_saturated_weights(factor: float) -> None:
    """A zero query gives the mean of the sources; a large one picks a source and leaves no gradient but its own."""
    sources, norm, query, d_mixed = make(3, 20, 32, torch.float32)
    inputs = sources, norm, factor * query, d_mixed
    got = with_gradients(attn_res_cpu.mix, *inputs)
    check(inputs, got, exact(inputs))
    if factor == 0:
        assert torch.allclose(got[0], torch.stack(sources).mean(0), atol=1e-6)


@needs_kernel
def test_zero_and_tiny_sources() -> None:
    sources, norm, query, d_mixed = make(3, 4, 40, torch.float32)
    inputs = [torch.zeros_like(sources[0]), sources[1] * 1e-12, sources[2]], norm, query, d_mixed
    check(inputs, with_gradients(attn_res_cpu.mix, *inputs), exact(inputs))


@needs_kernel
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_nan_stays_with_its_token(dtype: torch.dtype) -> None:
    sources, norm, query, d_mixed = make(3, 6, 40, dtype)
    clean = with_gradients(attn_res_cpu.mix, sources, norm, query, d_mixed)
    sources[1][0, 2, 33] = math.nan
    got = with_gradients(attn_res_cpu.mix, sources, norm, query, d_mixed)
    others = [0, 1, 3, 4, 5]
    for a, b in zip((got[0], *got[3:]), (clean[0], *clean[3:]), strict=True):
        assert a[0, 2].isnan().all() and torch.equal(a[0, others], b[0, others])
    assert got[1].isnan().all() and got[2].isnan().all()


@needs_kernel
def test_any_layout() -> None:
    sources, norm, query, d_mixed = make(3, 20, 33, torch.float32)
    turned = [x.mT.contiguous().mT for x in sources]
    for a, b in zip(
        with_gradients(attn_res_cpu.mix, sources, norm, query, d_mixed),
        with_gradients(attn_res_cpu.mix, turned, norm, query, d_mixed.mT.contiguous().mT),
        strict=True,
    ):
        assert torch.equal(a, b)
    leaves = [x.requires_grad_() for x in turned]
    grads = torch.autograd.grad(attn_res_cpu.mix(leaves, norm, query, EPS).sum(), leaves)  # an expanded gradient
    want = with_gradients(attn_res_cpu.mix, sources, norm, query, torch.ones_like(d_mixed))[3:]
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


@needs_kernel
def test_same_bits_for_any_number_of_threads() -> None:
    inputs = make(4, 5000, 20, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(attn_res_cpu.mix, *inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_kernel
def test_only_some_gradients_asked_for() -> None:
    sources, norm, query, d_mixed = make(3, 7, 24, torch.float32)
    everything = with_gradients(attn_res_cpu.mix, sources, norm, query, d_mixed)
    sources[1].requires_grad_()
    mixed = attn_res_cpu.mix(sources, norm, query, EPS)
    assert torch.equal(torch.autograd.grad(mixed, sources[1], d_mixed)[0], everything[4])
    with torch.no_grad():
        assert torch.equal(attn_res_cpu.mix(sources, norm, query, EPS), everything[0])
    assert attn_res_cpu.forward(sources, norm, EPS, False)[1].numel() == 0


@needs_kernel
def test_empty() -> None:
    got = with_gradients(attn_res_cpu.mix, *make(2, 0, 8, torch.float32))
    assert got[0].shape == (1, 0, 8) and not got[1].any()


@needs_kernel
def test_operators_are_well_formed() -> None:
    sources, norm, query, d_mixed = make(3, 4, 17, torch.float32)
    combined = (norm * query[0]).requires_grad_()
    leaves = [x.requires_grad_() for x in sources]
    torch.library.opcheck(torch.ops.nanok3.attn_res_fwd, (leaves, combined, EPS, True))
    with torch.no_grad():
        plain, combined = [x.detach() for x in leaves], combined.detach()
        saved = attn_res_cpu.forward(plain, combined, EPS, True)[1]
    torch.library.opcheck(torch.ops.nanok3.attn_res_bwd, (d_mixed, plain, combined, saved))


@needs_kernel
def test_what_it_does_not_take() -> None:
    sources, norm, query, _ = make(2, 3, 8, torch.float32)
    for wrong in (
        [x.double() for x in sources],
        [sources[0], sources[1].bfloat16()],
        [x.to("meta") for x in sources],
    ):
        assert attn_res_cpu.mix(wrong, norm, query, EPS) is NotImplemented


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_model_agrees_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(5, 7, 96, dtype)
    fast = with_gradients(mix, *inputs)
    monkeypatch.setattr(native, "load", lambda name: None)
    assert attn_res_cpu.mix(*inputs[:3], EPS) is NotImplemented
    for a, b in zip(fast, with_gradients(mix, *inputs), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2 * ROUNDING[dtype] + 1e-5, atol=2e-5)
