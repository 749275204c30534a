"""The vision tower's C++ between its products, values and gradients, against the torch forms in float64."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanok3.kernels import native, vision_cpu
from nanok3.model import moonvit
from nanok3.model.moonvit import attention, attention_reference, gelu, turns

needs_kernel = pytest.mark.skipif(not native.available("vision"), reason="no C++ compiler builds the kernel here")

DTYPES = (torch.float32, torch.bfloat16)
GRIDS = {
    "one of 2 x 2": [(1, 2, 2)],
    "mixed": [(1, 4, 6), (1, 2, 2), (1, 6, 4), (1, 2, 10)],
    "clips": [(2, 4, 4), (1, 2, 2), (3, 4, 6)],
    "a block and around it": [(1, 10, 19), (1, 12, 16), (1, 2, 97)],  # 190, 192 and 194 patches
    "several blocks": [(1, 22, 18), (1, 2, 2)],
}
HEADS = [(1, 4), (3, 16), (2, 32), (1, 44), (1, 80), (2, 128)]  # heads, channels


def make(grids: list[tuple[int, int, int]], heads: int, K: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
    lengths = [t * h * w for t, h, w in grids]
    turn = torch.cat([turns(grid, K, torch.empty(0)) for grid in grids])
    return (1.5 * torch.randn(sum(lengths), 3, heads, K)).to(dtype), turn, lengths


def with_gradient(form, qkv: Tensor, turn: Tensor, lengths: list[int], d_o: Tensor) -> list[Tensor]:
    qkv = qkv.detach().requires_grad_()
    o = form(qkv, turn, lengths)
    return [o.detach(), *torch.autograd.grad(o, qkv, d_o)]


def exact(qkv: Tensor, turn: Tensor, lengths: list[int], d_o: Tensor) -> list[Tensor]:
    return with_gradient(attention_reference, qkv.double(), turn.to(torch.complex128), lengths, d_o.double())


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """To the roundings of the result and, in bf16, of the factors of products."""
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    assert got.dtype == dtype and got.shape == want.shape
    assert (got - want).norm() <= bound * want.norm()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,K", HEADS)
@pytest.mark.parametrize("name", GRIDS)
def test_attention_equals_the_reference(name: str, heads: int, K: int, dtype: torch.dtype) -> None:
    inputs = make(GRIDS[name], heads, K, dtype)
    d_o = torch.randn(len(inputs[0]), heads, K).to(dtype)
    got, want = with_gradient(vision_cpu.attention, *inputs, d_o), exact(*inputs, d_o)
    close(got[0], want[0], dtype)
    for part in range(3):
        close(got[1][:, part], want[1][:, part], dtype)
    with torch.no_grad():
        assert torch.equal(vision_cpu.attention(*inputs), got[0])


@needs_kernel
@pytest.mark.parametrize("size", (0.0, 1e-3, 30.0))
def test_flat_and_sharp_scores(size: float) -> None:
    """Scores of several thousand lose their last digits to float32 whatever computes them."""
    qkv, turn, lengths = make([(1, 20, 20)], 2, 32, torch.float32)
    qkv[:, :2] *= size
    d_o = torch.randn(len(qkv), 2, 32)
    bound = 1e-2 if size > 1 else 2e-6
    for got, want in zip(with_gradient(vision_cpu.attention, qkv, turn, lengths, d_o), exact(qkv, turn, lengths, d_o)):
        assert (got - want).norm() <= bound * want.norm() + 1e-6


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_item_is_what_it_is_alone(dtype: torch.dtype) -> None:
    """To the last bit, and whatever its neighbours hold; items without patches are none."""
    qkv, turn, lengths = make(GRIDS["mixed"], 2, 32, dtype)
    d_o = torch.randn(len(qkv), 2, 32).to(dtype)
    for item, piece in enumerate(torch.arange(len(qkv)).split(lengths)):
        alone = with_gradient(vision_cpu.attention, qkv[piece], turn[piece], [len(piece)], d_o[piece])
        dirty = torch.full_like(qkv, math.nan)
        dirty[piece] = qkv[piece]
        packed = with_gradient(vision_cpu.attention, dirty, turn, [0, *lengths[:item], 0, *lengths[item:]], d_o)
        assert all(torch.equal(a, b[piece]) for a, b in zip(alone, packed, strict=True))
        assert all(
            b.isnan().any(dim=(1, 2) if b.ndim == 3 else (1, 2, 3)).sum() == len(qkv) - len(piece) for b in packed
        )


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    inputs = make(GRIDS["several blocks"] + GRIDS["mixed"], 3, 32, dtype)
    d_o, x = torch.randn(len(inputs[0]), 3, 32).to(dtype), torch.randn(5, 9001).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*with_gradient(vision_cpu.attention, *inputs, d_o), vision_cpu.gelu_tanh(x)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_kernel
def test_any_layout() -> None:
    qkv, turn, lengths = make(GRIDS["mixed"], 2, 16, torch.float32)
    d_o = torch.randn(len(qkv), 2, 16)
    plain = with_gradient(vision_cpu.attention, qkv, turn, lengths, d_o)
    turned = qkv.transpose(0, 3).contiguous().transpose(0, 3)
    other = with_gradient(vision_cpu.attention, turned, turn.conj_physical().conj(), lengths, d_o.mT.contiguous().mT)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    summed = with_gradient(vision_cpu.attention, qkv, turn, lengths, torch.ones(()).expand(d_o.shape))
    close(summed[1], exact(qkv, turn, lengths, torch.ones_like(d_o))[1], torch.float32)


@needs_kernel
@pytest.mark.parametrize("lengths", ([3], [2, 3], [5, -1], [2**62, 2**62, 2**62, 2**62, 4], []))
def test_lengths_that_would_leave_the_row_are_refused(lengths: list[int]) -> None:
    qkv, turn, _ = make([(1, 2, 2)], 1, 8, torch.float32)
    with pytest.raises(ValueError, match="it must hold no negative number and add up to 4 patches"):
        vision_cpu.attention(qkv, turn, lengths)


# ---------------------------------------------------------------------- GELU


def gelu_with_gradient(form, x: Tensor, d: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = form(x)
    return [y.detach(), *torch.autograd.grad(y, x, d)]


def exact_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1,), (3, 7), (17, 96), (2, 3, 4097)), ids=str)
def test_gelu_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, d = (2 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    got, want = gelu_with_gradient(vision_cpu.gelu_tanh, x, d), gelu_with_gradient(exact_gelu, x.double(), d.double())
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype and a.shape == shape
        # Below -5 a result is a small difference of numbers that float32 rounds.
        assert ((a - b).abs() <= rounding * b.abs() + 1e-6 * d.abs().max()).all()


@needs_kernel
def test_gelu_keeps_its_digits_in_the_tail() -> None:
    """x sigmoid(2u) and not x (1 + tanh u) / 2, which loses them where tanh is nearly -1."""
    x = torch.linspace(-6, 6, 10001)
    want = x.double() * torch.sigmoid(math.sqrt(8 / math.pi) * (x.double() + 0.044715 * x.double() ** 3))
    assert ((vision_cpu.gelu_tanh(x) - want).abs() <= 1e-5 * want.abs()).all()


@needs_kernel
def test_gelu_of_large_numbers_and_nan() -> None:
    x = torch.tensor([-1e15, -50.0, 50.0, 1e15, math.inf, math.nan])
    y, dx = gelu_with_gradient(vision_cpu.gelu_tanh, x, torch.ones(6))
    assert y[:5].tolist() == [0, 0, 50, x[3], math.inf] and y[5].isnan() and dx[5].isnan()
    assert dx[:4].tolist() == [0, 0, 1, 1]


# ---------------------------------------------------------------------- both


@needs_kernel
def test_operators_are_well_formed() -> None:
    qkv, turn, lengths = make(GRIDS["mixed"], 2, 8, torch.float32)
    pairs = torch.view_as_real(turn)
    o, lse = vision_cpu.attention_forward(qkv, pairs, lengths)
    torch.library.opcheck(torch.ops.nanok3.vision_attention_fwd, (qkv.clone().requires_grad_(), pairs, lengths))
    saved = (torch.randn_like(o), qkv, pairs, o, lse, lengths)
    torch.library.opcheck(torch.ops.nanok3.vision_attention_bwd, saved)
    x = torch.randn(3, 17)
    torch.library.opcheck(torch.ops.nanok3.gelu_tanh_fwd, (x.clone().requires_grad_(),))
    torch.library.opcheck(torch.ops.nanok3.gelu_tanh_bwd, (torch.randn(3, 17), x))


@needs_kernel
@pytest.mark.usefixtures("unchecked")
def test_what_it_does_not_take() -> None:
    qkv, turn, lengths = make([(1, 2, 2)], 2, 8, torch.float32)
    assert vision_cpu.attention(qkv.double(), turn, lengths) is NotImplemented
    assert vision_cpu.attention(qkv, turn.to(torch.complex128), lengths) is NotImplemented
    assert vision_cpu.attention(qkv.half(), turn, lengths) is NotImplemented
    assert vision_cpu.attention(qkv, turn[:, :3], lengths) is NotImplemented
    assert vision_cpu.attention(qkv[..., :7], turn[:, :3], lengths) is NotImplemented
    assert vision_cpu.attention(qkv[:, :2], turn, lengths) is NotImplemented
    assert vision_cpu.attention(*make([(1, 2, 2)], 1, 260, torch.float32)) is NotImplemented
    assert vision_cpu.gelu_tanh(qkv.double()) is NotImplemented


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_agrees_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(GRIDS["mixed"], 2, 32, dtype)
    d_o, x = torch.randn(len(inputs[0]), 2, 32).to(dtype), torch.randn(5, 40).to(dtype)
    fast = [*with_gradient(attention, *inputs, d_o), gelu(x)]
    monkeypatch.setattr(native, "load", lambda name: None)
    assert vision_cpu.attention(*inputs) is NotImplemented and vision_cpu.gelu_tanh(x) is NotImplemented
    for a, b in zip(fast, [*with_gradient(attention, *inputs, d_o), gelu(x)], strict=True):
        close(a, b.double(), dtype)


@needs_kernel
def test_the_tower_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies of q and k in torch."""
    monkeypatch.setattr(moonvit, "rotate", lambda *_: pytest.fail("turned in torch"))
    block = moonvit.Block(64, 2, 64, 128, 1e-6)
    turn = turns((1, 4, 6), 32, torch.empty(0))
    block(torch.randn(24, 64), turn, [24]).sum().backward()
    assert block.wqkv.weight.grad is not None


MEMORY = """
import resource, torch
from nanok3.kernels import vision_cpu
from nanok3.model.moonvit import turns

grid = (1, 96, 128)
turn, d_o = turns(grid, 32, torch.empty(0)), torch.randn(96 * 128, 1, 32)
qkv = torch.randn(96 * 128, 3, 1, 32, requires_grad=True)
vision_cpu.attention(qkv[:4], turn[:4], [4]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
vision_cpu.attention(qkv, turn, [96 * 128]).backward(d_o)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@needs_kernel
def test_attention_needs_memory_linear_in_patches() -> None:
    """One item of 12,288 patches, forward and backward: a matrix of its scores would be 604 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert 0 <= 1024 * int(done.stdout) < 60e6
