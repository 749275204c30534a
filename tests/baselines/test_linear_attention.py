"""Linear attention in chunks is linear attention."""

from __future__ import annotations

import pytest
import torch

from nanok3.baselines.linear_attention import features, linear_attention, linear_attention_reference


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_are_the_whole_matrix(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, tokens, 3, n, dtype=dtype, requires_grad=True) for n in (8, 8, 5)]
    chunked, whole = linear_attention(*inputs), linear_attention_reference(*inputs)
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(chunked, whole, **tolerance)
    gradient = torch.randn_like(whole)
    for ours, theirs in zip(
        torch.autograd.grad(chunked, inputs, gradient), torch.autograd.grad(whole, inputs, gradient)
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * tolerance["atol"])


def test_it_is_a_memory() -> None:
    """S and z, token by token."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 1, 4, dtype=torch.float64) for _ in range(3))
    S, z = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    expected = []
    for t in range(9):
        S = S + torch.outer(features(k[0, t, 0]), v[0, t, 0])
        z = z + features(k[0, t, 0])
        expected.append(S.T @ features(q[0, t, 0]) / (z @ features(q[0, t, 0])))
    torch.testing.assert_close(linear_attention(q, k, v)[0, :, 0], torch.stack(expected))


def test_equal_values_come_back() -> None:
    """The weights of a token sum to one."""
    q, k = torch.randn(1, 70, 1, 4), torch.randn(1, 70, 1, 4)
    torch.testing.assert_close(linear_attention(q, k, torch.full((1, 70, 1, 2), 3.0)), torch.full((1, 70, 1, 2), 3.0))
