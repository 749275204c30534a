"""The short convolution: taps, history, packed documents, and the state that decoding carries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanok3.model.basics import position_in_document
from nanok3.model.short_conv import ShortConv, short_conv, short_conv_reference

C = 6


def draw(tokens, taps=4, batch=2, dtype=torch.float64):
    u = torch.randn(batch, tokens, C, dtype=dtype)
    weight = torch.randn(C, 1, taps, dtype=dtype)
    history = torch.randn(batch, taps - 1, C, dtype=dtype)
    return u, weight, history


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_history", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 17])
def test_fast_equals_the_reference(tokens, taps, with_history):
    inputs = [x.requires_grad_() for x in draw(tokens, taps)]
    u, weight, history = inputs[0], inputs[1], inputs[2] if with_history else None
    fast, slow = short_conv(u, weight, history), short_conv_reference(u, weight, history)
    close(fast, slow)
    wanted = inputs[: 3 if with_history else 2]
    upstream = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad(fast, wanted, upstream, allow_unused=True),
        torch.autograd.grad(slow, wanted, upstream, allow_unused=True),
    ):
        assert (a is None) == (b is None) or a.numel() == 0
        if a is not None and b is not None:
            close(a, b)


def test_it_is_a_causal_convolution_with_silu():
    """Against torch's own convolution."""
    u, weight, _ = draw(11)
    padded = F.pad(u.transpose(1, 2), (3, 0))
    close(short_conv(u, weight), F.silu(F.conv1d(padded, weight, groups=C)).transpose(1, 2))


def test_the_last_tap_meets_the_current_token():
    u, _, _ = draw(5)
    weight = torch.zeros(C, 1, 4, dtype=torch.float64)
    weight[:, 0, 3] = 1
    close(short_conv(u, weight), F.silu(u))
    weight = weight.roll(-1, dims=2)
    close(short_conv(u, weight)[:, 1:], F.silu(u)[:, :-1])
    assert short_conv(u, weight)[:, 0].abs().max() == 0, "missing history is zero"


BOUNDS = [[0, 9], [0, 1, 2, 9], [0, 0, 4, 4, 5, 9, 9], [0, 3, 6, 9]]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_item_15_packed_documents_equal_each_alone(bounds):
    """Item 15: conv state must not leak between packed documents."""
    u, weight, _ = draw(9, batch=1)
    position = position_in_document(torch.tensor(bounds), 9)
    alone = [short_conv(u[:, a:b], weight) for a, b in zip(bounds, bounds[1:]) if b > a]
    for form in (short_conv, short_conv_reference):
        close(form(u, weight, None, position), torch.cat(alone, dim=1))


@pytest.mark.parametrize("form", [short_conv, short_conv_reference])
def test_a_nan_stays_in_its_document(form):
    u, weight, _ = draw(9, batch=1)
    position = position_in_document(torch.tensor([0, 3, 5, 9]), 9)
    clean = form(u, weight, None, position)
    u[:, 3:5] = torch.nan
    poisoned = form(u, weight, None, position)
    assert torch.equal(poisoned[:, :3], clean[:, :3]) and torch.equal(poisoned[:, 5:], clean[:, 5:])
    assert poisoned[:, 3:5].isnan().all()


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8], [5, 6]])
def test_item_15_split_anywhere(cuts):
    """Item 15: chunked reading equals one pass, also in calls shorter than three tokens."""
    u, weight, history = draw(9)
    whole = short_conv(u, weight, history)
    parts, seen = [], history
    for a, b in zip([0, *cuts], [*cuts, 9]):
        parts.append(short_conv(u[:, a:b], weight, seen))
        seen = torch.cat((seen, u[:, a:b]), dim=1)[:, -3:]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_the_sum_is_float32_under_bfloat16():
    u, weight, history = draw(20, dtype=torch.float32)
    u, history = u.bfloat16(), history.bfloat16()
    out = short_conv(u, weight, history)
    assert out.dtype == torch.bfloat16
    exact = short_conv_reference(u.double(), weight.double(), history.double())
    close(out.double(), exact.bfloat16().double(), 2**-7)
    rounded = (out.double() - exact).abs() / exact.abs()
    assert rounded.max() < 2**-8, "one rounding, at the end"


def test_a_later_token_changes_nothing_before_it():
    u, weight, _ = draw(9)
    before = short_conv(u, weight)
    u[:, 6:] = 1e30
    assert torch.equal(short_conv(u, weight)[:, :6], before[:, :6])


def test_the_module_keeps_float32_weights_and_starts_within_its_bound():
    conv = ShortConv(C, 4)
    conv.reset_parameters(0.02)
    assert conv.weight.shape == (C, 1, 4) and conv.weight.dtype == torch.float32
    assert conv.weight.abs().max() <= 0.5 and conv.weight.std() > 0.1
    u, _, history = draw(5, dtype=torch.float32)
    assert torch.equal(conv(u, history), short_conv(u, conv.weight, history))
