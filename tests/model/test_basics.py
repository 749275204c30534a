"""The shared pieces: the bias-free map, the norm and where it rounds, and the boundaries of packed documents."""

from __future__ import annotations

import pytest
import torch

from nanok3.kernels import linear_cpu
from nanok3.model import basics
from nanok3.model.basics import (
    Linear,
    RMSNorm,
    at_least_float32,
    check_cu_seqlens,
    position_in_document,
    product_dtype,
    rms_normalize,
)


def test_the_shape_checks_of_the_test_options_are_on():
    """pyproject's pytest options check every jaxtyping annotation of the package with beartype."""
    with pytest.raises(TypeError, match="Type-check error"):
        rms_normalize(torch.zeros(3, dtype=torch.int64), 1e-5)
    with pytest.raises(TypeError, match="Type-check error"):
        position_in_document(torch.tensor([0.0, 3.0]), 3)


@pytest.mark.parametrize(
    ("given", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32)]
    + [(torch.float64, torch.float64)],
)
def test_at_least_float32(given, wide):
    x = torch.randn(3).to(given)
    assert at_least_float32(x).dtype == wide and torch.equal(at_least_float32(x), x.to(wide))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_linear_computes_in_the_dtype_of_its_input(dtype):
    layer = Linear(5, 3)
    layer.reset_parameters(0.02)
    x = torch.randn(2, 4, 5).to(dtype)
    y = layer(x)
    assert y.dtype == dtype and layer.weight.dtype == torch.float32
    torch.testing.assert_close(y, x @ layer.weight.to(dtype).T)
    assert [n for n, _ in layer.named_parameters()] == ["weight"], "no bias"
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32, "the master's gradient is float32"


def test_linear_draws_its_weights_with_the_given_deviation():
    layer = Linear(200, 300)
    layer.reset_parameters(0.02)
    assert abs(layer.weight.std().item() - 0.02) < 1e-3 and abs(layer.weight.mean().item()) < 1e-3


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_is_its_formula(eps):
    norm = RMSNorm(7, eps).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 7, dtype=torch.float64) * 0.1
    expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rms_normalize(x, eps), expected / norm.weight, rtol=1e-12, atol=1e-13)


def test_rms_norm_rounds_before_the_weight_as_the_official_code_does():
    """Architecture 3.1: normalised in float32, rounded to the input's dtype, then multiplied in that dtype."""
    norm = RMSNorm(64, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(50, 64).bfloat16()
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), normalised.bfloat16() * norm.weight.bfloat16())
    fused = (normalised * norm.weight.bfloat16().float()).bfloat16()
    assert not torch.equal(norm(x), fused), "the order of rounding is visible"


def test_rms_norm_of_a_large_bfloat16_row_does_not_overflow():
    x = torch.full((1, 8), 1e30).bfloat16()
    assert torch.isfinite(rms_normalize(torch.full((1, 8), 1e15).bfloat16(), 1e-5)).all()
    assert RMSNorm(8, 1e-5)(x).dtype == torch.bfloat16


def test_rms_norm_starts_at_one():
    norm = RMSNorm(4, 1e-5)
    torch.nn.init.zeros_(norm.weight)
    norm.reset_parameters(0.02)
    assert torch.equal(norm.weight, torch.ones(4))


@pytest.mark.parametrize("bounds", [[0, 5], [0, 2, 5], [0, 0, 5], [0, 5, 5], [0, 0, 2, 2, 2, 5]])
def test_boundaries_that_cover_the_row_are_accepted(bounds):
    for dtype in (torch.int64, torch.int32):
        assert check_cu_seqlens(torch.tensor(bounds, dtype=dtype), 1, 5) == bounds


@pytest.mark.parametrize("bounds", [[0, 4], [1, 5], [0, 6], [0, 3, 2, 5], [0], [], [-1, 5], [5, 0]])
def test_boundaries_that_do_not_are_refused(bounds):
    with pytest.raises(ValueError) as error:
        check_cu_seqlens(torch.tensor(bounds, dtype=torch.int64), 1, 5)
    assert str(error.value) == f"cu_seqlens must rise from 0 to the row's 5 tokens, got {bounds}"


def test_packed_documents_stand_in_one_row():
    with pytest.raises(ValueError, match="cu_seqlens describes one packed row, but the batch holds 2"):
        check_cu_seqlens(torch.tensor([0, 5]), 2, 5)


def test_long_boundaries_are_shortened_in_the_message():
    with pytest.raises(ValueError, match=r"got \[0, 1, 2, 3, \.\.\., 97, 98, 99\]"):
        check_cu_seqlens(torch.arange(100), 1, 5)


@pytest.mark.parametrize("bounds", [[0, 6], [0, 1, 6], [0, 0, 3, 3, 4, 6, 6], [0, 2, 4, 6]])
def test_position_in_document(bounds):
    expected = [t for a, b in zip(bounds, bounds[1:]) for t in range(b - a)]
    assert position_in_document(torch.tensor(bounds), 6).tolist() == expected


def test_boundaries_are_read_once_and_again_after_they_change():
    cu_seqlens = torch.tensor([0, 2, 6])
    first = basics._read_once(cu_seqlens, basics._version(cu_seqlens))
    assert basics._read_once(cu_seqlens, basics._version(cu_seqlens)) is first and first == [0, 2, 6]
    cu_seqlens[1] = 3
    assert basics._read_once(cu_seqlens, basics._version(cu_seqlens)) == [0, 3, 6]
    with torch.inference_mode():
        assert basics._version(torch.tensor([0, 6])) == 0


def test_products_that_are_no_layer_are_made_in_a_type_with_instructions(monkeypatch):
    short = torch.zeros(2).bfloat16()
    for slow in (True, False):
        monkeypatch.setattr(linear_cpu, "preferred", lambda dtype, slow=slow: slow)
        assert product_dtype(short) == (torch.float32 if slow else torch.bfloat16)
        assert product_dtype(short.to("meta")) == torch.bfloat16
        assert product_dtype(short.double()) == torch.float64
