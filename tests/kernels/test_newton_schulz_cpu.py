"""Newton-Schulz in C++ against the torch form in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanok3.kernels import native, newton_schulz_cpu
from nanok3.train.muon import COEFFICIENTS, newton_schulz, newton_schulz_torch

pytestmark = pytest.mark.skipif(not native.available("newton_schulz"), reason="no C++ compiler builds the kernel here")

SHAPES = [(1, 1, 1), (3, 1, 17), (3, 17, 1), (2, 15, 16), (5, 16, 15), (2, 5, 7), (4, 31, 31), (2, 33, 65), (2, 65, 33)]
SHAPES += [(3, 64, 64), (2, 48, 128), (2, 128, 48), (1, 97, 300), (1, 300, 97), (1, 130, 131), (1, 256, 20)]


def ours(G: Tensor, steps: int = 5) -> Tensor:
    out = newton_schulz_cpu.newton_schulz(G, steps, COEFFICIENTS)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("steps", (1, 3, 5, 8))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_torch_in_float64(shape: tuple[int, int, int], steps: int) -> None:
    G = torch.randn(shape) * torch.logspace(-6, 6, shape[0])[:, None, None]
    want = newton_schulz_torch(G.double(), steps)
    for got, w in zip(ours(G, steps), want):
        assert (got - w).norm() <= 1e-4 * w.norm()


@pytest.mark.parametrize("rank", (1, 3, 39))
def test_singular_values_that_are_zero_or_tiny(rank: int) -> None:
    """Where A has eigenvalues below its rounding errors the result stays that of float64."""
    U, _, Vh = torch.linalg.svd(torch.randn(40, 60, dtype=torch.float64), full_matrices=False)
    tail = torch.logspace(-3, -9, 40 - rank, dtype=torch.float64)
    G = (U * torch.cat((torch.linspace(1, 2, rank, dtype=torch.float64), tail))) @ Vh
    want = newton_schulz_torch(G[None])
    assert (ours(G[None].float()) - want).norm() <= 3e-4 * want.norm()


def test_a_zero_matrix_stays_zero_and_nan_stays_where_it_is() -> None:
    G = torch.randn(5, 12, 20)
    alone = ours(G)
    G[1], G[3, 2, 4] = 0, torch.nan
    got = ours(G)
    assert not got[1].any() and got[3].isnan().all()
    assert all(torch.equal(got[i], alone[i]) for i in (0, 2, 4))


def test_every_number_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    G = torch.randn(3, 37, 21)
    clean, empty_like = ours(G), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))
    assert torch.equal(ours(G), clean)


def test_views() -> None:
    G = torch.randn(4, 30, 50)
    assert torch.equal(ours(G.mT.contiguous().mT), ours(G))
    assert torch.equal(ours(G[1:3, 2:19, 7:]), ours(G[1:3, 2:19, 7:].clone()))
    assert ours(G[:0]).shape == (0, 30, 50)


def test_same_bits_for_any_number_of_threads() -> None:
    G, before, results = torch.randn(7, 40, 24), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ours(G))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_optimizer_agrees_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    G = torch.randn(3, 24, 40)
    fast = newton_schulz(G, dtype=torch.float32)
    assert torch.equal(fast, ours(G))
    monkeypatch.setattr(native, "load", lambda name: None)
    assert newton_schulz_cpu.newton_schulz(G, 5, COEFFICIENTS) is NotImplemented
    torch.testing.assert_close(newton_schulz(G, dtype=torch.float32), fast, rtol=1e-4, atol=1e-4)


def test_what_it_does_not_take() -> None:
    G = torch.randn(2, 8, 8)
    for x, steps in ((G.double(), 5), (G.bfloat16(), 5), (G, 0), (torch.randn(1, 257, 257), 5), (G[:, :0], 5)):
        assert newton_schulz_cpu.newton_schulz(x, steps, COEFFICIENTS) is NotImplemented
    assert newton_schulz_cpu.newton_schulz(G.requires_grad_(), 5, COEFFICIENTS) is NotImplemented
