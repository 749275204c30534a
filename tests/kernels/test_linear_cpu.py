"""Linear maps, grouped products and routed experts in C++ against float64: every storage form, awkward sizes,
gradients, neighbours full of NaN, any number of threads."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from nanok3.kernels import linear_cpu, native
from nanok3.kernels.linear_cpu import Packed
from nanok3.model import basics
from nanok3.model.basics import Linear
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.situ import situ_glu_reference

needs_kernel = pytest.mark.skipif(not native.available("linear"), reason="no C++ compiler builds the kernel here")
pytestmark = needs_kernel

FLOAT = (torch.float32, torch.bfloat16)
FORMS = ("float32", "bf16", "mxfp4")
BOUND = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
SIZES = [(1, 1), (3, 7), (33, 17), (40, 100), (64, 300), (300, 50), (600, 259)]  # inputs, outputs
COUNTS = ([0, 0, 0], [5, 0, 1], [0, 17, 0], [200, 8, 9], [3, 4, 193])


def stored(weight: Tensor, form: str) -> tuple[Tensor | Packed, Tensor]:
    """A weight in that form, and its exact value."""
    if form == "mxfp4":
        packed = Packed(*quantize_mxfp4(weight))
        return packed, dequantize_mxfp4(*packed, torch.float64)
    plain = weight.to(torch.float32 if form == "float32" else torch.bfloat16)
    return plain, plain.double()


def close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    assert (got.double() - want).norm() <= BOUND[dtype or got.dtype] * want.norm() + 1e-30


def surrounded_by_nan(x: Tensor) -> Tensor:
    """The same numbers in memory that is NaN before and after them."""
    room = torch.full((x.numel() + 128,), 0xFF, dtype=x.dtype) if x.dtype == torch.uint8 else None
    room = torch.full((x.numel() + 128,), torch.nan, dtype=x.dtype) if room is None else room
    return room[64 : 64 + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", FLOAT)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inputs,outputs", SIZES)
def test_linear(inputs: int, outputs: int, form: str, dtype: torch.dtype) -> None:
    inputs = (inputs + 31) // 32 * 32 if form == "mxfp4" else inputs
    weight, exact = stored(torch.randn(outputs, inputs), form)
    weight = Packed(*map(surrounded_by_nan, weight)) if isinstance(weight, Packed) else surrounded_by_nan(weight)
    for m in (0, 1, 3, 5, 8, 9, 17, 130, 400):
        x = surrounded_by_nan(torch.randn(m, inputs).to(dtype))
        y = linear_cpu.linear(x, weight)
        assert y.dtype == dtype
        close(y, x.double() @ exact.T)


def test_linear_takes_any_leading_shape() -> None:
    weight = torch.randn(9, 12)
    x = torch.randn(2, 3, 5, 12).transpose(0, 2)
    close(linear_cpu.linear(x, weight), x.double() @ weight.double().T)
    close(linear_cpu.linear(x[0, 0, 0], weight), weight.double() @ x[0, 0, 0].double())
    close(linear_cpu.linear(x, weight.T.contiguous().T), x.double() @ weight.double().T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped(counts: list[int], form: str) -> None:
    weight, exact = stored(torch.randn(3, 70, 96), form)
    x = surrounded_by_nan(torch.randn(sum(counts), 96))
    y = linear_cpu.grouped_linear(x, weight, torch.tensor(counts))
    close(y, torch.cat([a.double() @ w.T for a, w in zip(x.split(counts), exact)]))


def test_an_unchosen_expert_is_not_read() -> None:
    weight = torch.randn(3, 20, 40)
    weight[1] = torch.nan
    y = linear_cpu.grouped_linear(torch.randn(30, 40), weight, torch.tensor([20, 0, 10]))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype", FLOAT)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("inputs,outputs", [(7, 3), (40, 33), (300, 259)])
def test_gradients(inputs: int, outputs: int, counts: list[int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(sum(counts), inputs).to(dtype), torch.randn(3, outputs, inputs).to(dtype)
    d_out = torch.randn(sum(counts), outputs).to(dtype)
    leaves = [surrounded_by_nan(t).requires_grad_() for t in (x, weight)]
    y = linear_cpu.grouped_linear(*leaves, torch.tensor(counts))
    dx, dw = torch.autograd.grad(y, leaves, surrounded_by_nan(d_out))
    assert dx.dtype == dw.dtype == dtype
    pieces = list(zip(x.double().split(counts), d_out.double().split(counts), weight.double()))
    close(y.detach(), torch.cat([a @ w.T for a, _, w in pieces]))
    close(dx, torch.cat([d @ w for _, d, w in pieces]))
    close(dw, torch.stack([d.T @ a for a, d, _ in pieces]))


def test_expanded_gradients() -> None:
    leaves = [torch.randn(4, 5, 12, requires_grad=True), torch.randn(9, 12, requires_grad=True)]
    got = torch.autograd.grad(linear_cpu.linear(*leaves).sum(), leaves)
    want = torch.autograd.grad((leaves[0].double() @ leaves[1].double().T).sum(), leaves)
    for a, b in zip(got, want):
        close(a, b)


def test_a_row_is_the_same_in_any_company() -> None:
    """Above the few rows that read the weights differently; the sum's order depends on nothing but its length."""
    x, weight = torch.randn(400, 700), torch.randn(90, 700)
    y = linear_cpu.linear(x, weight)
    for some in (slice(0, 9), slice(7, 29), slice(100, 300)):
        assert torch.equal(linear_cpu.linear(x[some], weight), y[some])


def routing(tokens: int, experts: int, per_token: int) -> tuple[Tensor, Tensor]:
    return torch.rand(tokens, experts).topk(per_token).indices, torch.rand(tokens, per_token)


def routed_exactly(z, chosen, weights, matrices, betas) -> Tensor:
    w1, w2, w3 = matrices
    y = torch.zeros(z.shape, dtype=torch.float64)
    for t, (experts, p) in enumerate(zip(chosen.tolist(), weights.double())):
        for e, share in zip(experts, p):
            a = z[t].double()
            y[t] += share * (w2[e] @ situ_glu_reference(w1[e] @ a, w3[e] @ a, *betas))
    return y


@pytest.mark.parametrize("dtype", FLOAT)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens,experts,per_token", [(0, 4, 2), (1, 8, 3), (6, 2, 2), (40, 5, 1), (70, 3, 3)])
def test_routed(tokens: int, experts: int, per_token: int, form: str, dtype: torch.dtype) -> None:
    L, F = (64, 96) if form == "mxfp4" else (50, 37)
    shapes = (experts, F, L), (experts, L, F), (experts, F, L)
    matrices, exact = zip(*(stored(torch.randn(s) / 4, form) for s in shapes))
    z = surrounded_by_nan(torch.randn(tokens, L).to(dtype))
    for betas in ((4.0, 25.0), (None, None), (1.5, None)):
        arguments = (z, *routing(tokens, experts, per_token))
        y = linear_cpu.routed(*arguments, matrices, betas)
        assert y.dtype == dtype
        close(y, routed_exactly(*arguments, exact, betas))


def test_routed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = tuple(torch.randn(s) for s in ((4, 20, 12), (4, 12, 20), (4, 20, 12)))
    arguments = torch.randn(90, 12), *routing(90, 4, 2), matrices, (4.0, 25.0)
    whole = linear_cpu.routed(*arguments)
    monkeypatch.setattr(linear_cpu, "PARTS_AT_ONCE", 31 * 2 * 12)
    close(linear_cpu.routed(*arguments), whole.double())


def test_same_bits_for_any_number_of_threads() -> None:
    x, weight, counts = torch.randn(900, 70), torch.randn(4, 300, 70), torch.tensor([3, 700, 0, 197])
    matrices = tuple(torch.randn(s) for s in ((6, 40, 70), (6, 70, 40), (6, 40, 70)))
    chosen, p = routing(900, 6, 2)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            y = linear_cpu.grouped_linear(*leaves, counts)
            gradients = torch.autograd.grad(y, leaves, y.detach())
            results.append([y, *gradients, linear_cpu.routed(x, chosen, p, matrices, (4.0, 25.0))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_operators_are_well_formed() -> None:
    x, weight = torch.randn(11, 8, requires_grad=True), torch.randn(2, 5, 8, requires_grad=True)
    counts, d_out = torch.tensor([4, 7]), torch.randn(11, 5)
    torch.library.opcheck(torch.ops.nanok3.grouped_linear_fwd, (x, weight, counts))
    torch.library.opcheck(torch.ops.nanok3.grouped_linear_bwd, (d_out, x.detach(), weight.detach(), counts))
    torch.library.opcheck(torch.ops.nanok3.linear_fwd, (x, weight[0].detach().requires_grad_()))
    torch.library.opcheck(torch.ops.nanok3.linear_bwd, (d_out, x.detach(), weight[0].detach()))
    torch.library.opcheck(torch.ops.nanok3.linear_of_data_fwd, (weight[0].detach().requires_grad_(), x.detach()))
    torch.library.opcheck(torch.ops.nanok3.linear_of_data_bwd, (d_out, weight[0].detach(), x.detach()))


@pytest.mark.parametrize("dtype", FLOAT)
def test_weights_of_data_get_the_same_gradient(dtype: torch.dtype) -> None:
    """To the last bit, whether or not x wants one, too."""
    x, d_out = torch.randn(2, 17, 40).to(dtype), torch.randn(2, 17, 33).to(dtype)
    weight = torch.randn(33, 40).to(dtype).requires_grad_()
    results = [
        torch.autograd.grad(linear_cpu.linear(y, weight), weight, d_out) for y in (x, x.clone().requires_grad_())
    ]
    assert torch.equal(*(gradient for (gradient,) in results))


def test_what_it_does_not_take() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    for pair in ((x.double(), weight.double()), (x.half(), weight), (x, weight.half()), (x[:, 1:], weight)):
        assert linear_cpu.linear(*pair) is NotImplemented
    assert linear_cpu.linear(x.requires_grad_(), weight.bfloat16()) is NotImplemented
    packed = Packed(*quantize_mxfp4(torch.randn(5, 32)))
    assert linear_cpu.linear(torch.randn(2, 32, requires_grad=True), packed) is NotImplemented
    stack = torch.randn(2, 5, 8)
    assert linear_cpu.grouped_linear(x, stack, torch.tensor([3])) is NotImplemented
    assert linear_cpu.grouped_linear(x, stack, torch.tensor([1, 2], dtype=torch.int32)) is NotImplemented
    z, chosen, p = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    mixed = (stack, torch.randn(2, 8, 5), stack.bfloat16())
    assert linear_cpu.routed(z, chosen, p, mixed, (4.0, 25.0)) is NotImplemented
    matrices = (stack, torch.randn(2, 8, 5), stack.clone())
    assert linear_cpu.routed(z.requires_grad_(), chosen, p, matrices, (4.0, 25.0)) is NotImplemented


@pytest.mark.parametrize("counts", [[1, 1], [4, -1], [0, 9]])
def test_counts_that_would_leave_the_rows_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="it must hold no negative number and add up to 3 rows"):
        linear_cpu.grouped_linear(torch.randn(3, 8), torch.randn(2, 5, 8), torch.tensor(counts))


def test_an_expert_that_is_not_there_is_refused() -> None:
    matrices = tuple(torch.randn(s) for s in ((2, 5, 8), (2, 8, 5), (2, 5, 8)))
    with pytest.raises(ValueError, match="chosen holds an expert outside 0"):
        linear_cpu.routed(torch.randn(1, 8), torch.tensor([[2]]), torch.ones(1, 1), matrices, (4.0, 25.0))


# ------------------------------------------------------------------ who takes which


@pytest.mark.parametrize(
    ("described", "bf16", "groups", "float32"),
    [
        ("x86_64\nflags\t\t: fpu avx2 fma\nmodel name\t: AMD EPYC", True, True, False),
        ("x86_64\nflags\t\t: fpu avx512f avx512_bf16\nmodel name\t: AMD EPYC", False, True, True),
        ("x86_64\nflags\t\t: fpu avx512f\nmodel name\t: Intel(R) Xeon(R)", True, True, False),
        ("x86_64\nflags\t\t: avx512f avx512_bf16 amx_bf16\nmodel name\t: Intel(R) Xeon(R)", False, False, False),
        ("aarch64\nFeatures\t: fp asimd bf16", False, False, False),
        ("arm64", True, True, False),
    ],
)
def test_the_choice_is_the_processors(described: str, bf16: bool, groups: bool, float32: bool, monkeypatch) -> None:
    monkeypatch.setattr(linear_cpu, "_features", lambda: set(described.lower().replace(":", " ").split()))
    assert linear_cpu.preferred_for_groups() is groups
    assert linear_cpu.preferred(torch.bfloat16) is bf16 and linear_cpu.preferred(torch.float32) is float32
    assert not linear_cpu.preferred(torch.float64)


@pytest.mark.parametrize("dtype", FLOAT)
def test_the_models_layer_agrees_with_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Linear(40, 24), torch.randn(2, 5, 40).to(dtype)
    layer.reset_parameters(0.3)
    results = []
    for ours in (True, False):
        monkeypatch.setattr(linear_cpu, "preferred", lambda _, ours=ours: ours)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        assert (basics._linear_cpu(x, layer.weight.detach().to(dtype)) is not None) == ours
        results.append([y, *torch.autograd.grad(y, (leaf, layer.weight), y.detach())])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        close(a.detach(), b.detach().double(), dtype)


def test_counts_are_cut_into_blocks_of_rows() -> None:
    """More rows than one block of any processor holds, for one expert and across several."""
    counts = [1000, 1, 0, 333]
    x, weight = torch.randn(sum(counts), 33), torch.randn(4, 18, 33)
    y = linear_cpu.grouped_linear(x, weight, torch.tensor(counts))
    for start, count, w in zip(accumulate([0, *counts]), counts, weight):
        close(y[start : start + count], x[start : start + count].double() @ w.double().T)
