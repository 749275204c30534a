"""Causal attention in C++, values and gradients, against the whole matrix of scores in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanok3.kernels import attention_cpu, native
from nanok3.model.mla import causal_attention, causal_attention_reference

pytestmark = pytest.mark.skipif(not native.available("attention"), reason="no C++ compiler builds the kernel here")

LENGTHS = [(1, 1), (1, 300), (2, 2), (17, 17), (95, 97), (97, 97), (130, 400), (257, 257), (600, 600)]  # new, all
CHANNELS = [(8, 8), (33, 17), (96, 64), (192, 128), (256, 40)]


def make(queries: int, keys: int, channels: tuple[int, int], dtype: torch.dtype, heads: int = 2) -> list[Tensor]:
    K, V = channels
    sizes = (queries, K), (keys, K), (keys, V)
    return [(2 * torch.randn(2, length, heads, width)).to(dtype) for length, width in sizes]


def check(o: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, bound: float = 3e-6) -> None:
    want = causal_attention_reference(q.double(), k.double(), v.double(), scale)
    assert o.dtype == torch.float32 and o.shape == want.shape
    assert (o - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("queries,keys", LENGTHS)
def test_equal_to_reference(queries: int, keys: int, channels: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make(queries, keys, channels, dtype)
    scale = channels[0] ** -0.5
    check(attention_cpu.causal_attention(*inputs, scale), *inputs, scale)


@pytest.mark.parametrize("size", (0.0, 1e-3, 30.0))
def test_flat_and_sharp_scores(size: float) -> None:
    """Scores of several hundred lose their last digits to float32 whatever computes them."""
    q, k, v = make(300, 300, (24, 16), torch.float32)
    check(attention_cpu.causal_attention(size * q, k, v, 1.0), size * q, k, v, 1.0, 1e-3 if size > 1 else 3e-6)
    ones, rising = torch.ones_like(q), torch.linspace(0, 8, 300)[None, :, None, None] * torch.ones_like(k)
    check(attention_cpu.causal_attention(ones, rising, v, 1.0), ones, rising, v, 1.0, 3e-5)


def test_a_token_does_not_feel_what_follows_it() -> None:
    """To the last bit, and keys of later blocks may be anything."""
    q, k, v = make(700, 700, (96, 64), torch.float32)
    whole = attention_cpu.causal_attention(q, k, v, 0.1)
    for n in (1, 5, 95, 97, 256, 257, 511):
        assert torch.equal(attention_cpu.causal_attention(q[:, :n], k[:, :n], v[:, :n], 0.1), whole[:, :n])
    k[:, 600:], v[:, 600:] = torch.nan, torch.nan
    assert torch.equal(attention_cpu.causal_attention(q, k, v, 0.1)[:, :576], whole[:, :576])


def test_views() -> None:
    """Values beside the keys in one tensor, and a layout of its own."""
    both, q = torch.randn(2, 70, 3, 40), torch.randn(2, 70, 3, 24)
    k, v = both.split((24, 16), dim=-1)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    o = attention_cpu.causal_attention(q, k, v, 0.2)
    check(o, q, k, v, 0.2)
    assert torch.equal(attention_cpu.causal_attention(*turned, 0.2), o)
    assert attention_cpu.causal_attention(q[:0], k[:0], v[:0], 0.2).shape == (0, 70, 3, 16)


def test_same_bits_for_any_number_of_threads() -> None:
    inputs = make(400, 500, (96, 64), torch.bfloat16, heads=3)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attention_cpu.causal_attention(*inputs, 0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# ---------------------------------------------------------------------- backward


def gradients(inputs: list[Tensor], d_o: Tensor, bounds: Tensor | None = None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = attention_cpu.causal_attention(*leaves, inputs[0].shape[-1] ** -0.5, bounds)
    assert isinstance(o, Tensor) and torch.equal(o.detach(), forward_alone(inputs, bounds))
    return list(torch.autograd.grad(o, leaves, d_o))


def forward_alone(inputs: list[Tensor], bounds: Tensor | None) -> Tensor:
    with torch.no_grad():
        return attention_cpu.causal_attention(*inputs, inputs[0].shape[-1] ** -0.5, bounds)


def wanted(inputs: list[Tensor], d_o: Tensor) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in inputs]
    o = causal_attention_reference(*leaves, inputs[0].shape[-1] ** -0.5)
    return list(torch.autograd.grad(o, leaves, d_o.double()))


def check_gradients(found: list[Tensor], want: list[Tensor], like: Tensor) -> None:
    bound = 1e-5 if like.dtype == torch.float32 else 4e-3
    assert all(g.dtype == like.dtype and g.shape == w.shape for g, w in zip(found, want, strict=True))
    largest = max(w.norm() for w in want)  # of a single token dq and dk are zero
    assert all((g - w).norm() <= bound * w.norm() + 1e-5 * largest for g, w in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("tokens,heads", [(1, 1), (2, 3), (7, 2), (65, 1), (96, 2), (97, 3), (257, 2)])
def test_gradients(tokens: int, heads: int, channels: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make(tokens, tokens, channels, dtype, heads)
    d_o = torch.randn(2, tokens, heads, channels[1])
    check_gradients(gradients(inputs, d_o), wanted(inputs, d_o), inputs[0])


def test_gradients_of_packed_documents_are_those_of_each_alone() -> None:
    """To the last bit, empty documents included."""
    inputs, d_o = [x[:1] for x in make(300, 300, (24, 40), torch.float32)], torch.randn(1, 300, 2, 40)
    bounds = [0, 0, 1, 120, 217, 300, 300]
    packed = gradients(inputs, d_o, torch.tensor(bounds))
    for a, b in zip(bounds, bounds[1:]):
        alone = gradients([x[:, a:b] for x in inputs], d_o[:, a:b])
        assert all(torch.equal(g[:, a:b], w) for g, w in zip(packed, alone))


def test_gradients_of_views_and_of_an_expanded_sum() -> None:
    both, q = torch.randn(2, 70, 3, 40, requires_grad=True), torch.randn(2, 70, 3, 24)
    k, v = both.split((24, 16), dim=-1)
    attention_cpu.causal_attention(q.transpose(1, 3).contiguous().transpose(1, 3), k, v, 24**-0.5).sum().backward()
    _, dk, dv = wanted([q, k.detach(), v.detach()], torch.ones(2, 70, 3, 16))
    torch.testing.assert_close(both.grad, torch.cat((dk, dv), -1).float(), rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_document_and_query() -> None:
    inputs, d_o = [x[:1] for x in make(250, 250, (24, 16), torch.float32)], torch.randn(1, 250, 2, 16)
    bounds = torch.tensor([0, 130, 250])
    clean = gradients(inputs, d_o, bounds)
    with_nan = d_o.clone()
    with_nan[:, 100] = torch.nan
    dirty = gradients(inputs, with_nan, bounds)
    assert all(torch.equal(a[:, 130:], b[:, 130:]) for a, b in zip(clean, dirty))
    assert torch.equal(clean[0][:, :100], dirty[0][:, :100]) and torch.equal(clean[0][:, 101:], dirty[0][:, 101:])
    assert all(x[:, :101].isnan().all() for x in dirty[1:])


def test_same_gradients_for_any_number_of_threads() -> None:
    inputs, d_o = make(230, 230, (96, 64), torch.float32, heads=3), torch.randn(2, 230, 3, 64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.cat([g.flatten() for g in gradients(inputs, d_o)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_operators_are_well_formed() -> None:
    q, k, v = (x.requires_grad_() for x in make(9, 9, (8, 5), torch.float32))
    o, lse = attention_cpu.forward(q.detach(), k.detach(), v.detach(), None, 0.3)
    saved = [x.detach() for x in (q, k, v)] + [o, lse]
    torch.library.opcheck(torch.ops.nanok3.attention_fwd, (q, k, v, None, 0.3))
    torch.library.opcheck(torch.ops.nanok3.attention_bwd, (torch.randn_like(o), *saved, None, 0.3))
    bounds, row = torch.tensor([0, 4, 9]), [x[:1].detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.nanok3.attention_fwd, (*row, bounds, 0.3))


@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5], [0, 9, 5], []])
def test_boundaries_that_would_leave_the_row_are_refused(bounds: list[int]) -> None:
    inputs = [x[:1] for x in make(5, 5, (8, 8), torch.float32)]
    with pytest.raises(ValueError, match="it must rise from 0 to the 5 tokens of one row"):
        attention_cpu.causal_attention(*inputs, 1.0, torch.tensor(bounds, dtype=torch.int64))


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_model_agrees_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, bounds = [x[:1] for x in make(130, 130, (24, 16), dtype)], torch.tensor([0, 0, 3, 100, 130])
    fast = [causal_attention(*inputs, 0.2), causal_attention(*inputs, 0.2, bounds)]
    monkeypatch.setattr(native, "load", lambda name: None)
    assert attention_cpu.causal_attention(*inputs, 0.2) is NotImplemented
    for a, b in zip(fast, [causal_attention(*inputs, 0.2), causal_attention(*inputs, 0.2, bounds)]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_take() -> None:
    q, k, v = make(5, 5, (8, 8), torch.float32)
    assert attention_cpu.causal_attention(q.double(), k.double(), v.double(), 1.0) is NotImplemented
    assert attention_cpu.causal_attention(q, k[:, :4], v[:, :4], 1.0) is NotImplemented
    assert attention_cpu.causal_attention(q, k.bfloat16(), v, 1.0) is NotImplemented
    assert attention_cpu.causal_attention(q[:, 1:].requires_grad_(), k, v, 1.0) is NotImplemented
    assert attention_cpu.causal_attention(*make(2, 2, (257, 8), torch.float32), 1.0) is NotImplemented
