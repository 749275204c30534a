"""Our Triton kernels under Triton's interpreter, against torch in float64; run by test_triton.py in its own process.

Sizes are awkward on purpose: widths that no tile divides, experts without rows, one row, more rows than a tile. Every
buffer is a window of a larger one filled with NaN, so that a read outside of it shows.
"""

from __future__ import annotations

import pytest
import torch
import triton_interpreter

from nanok3.config import K3Config
from nanok3.kernels.gpu import grouped, packed, situ_experts
from nanok3.model import latent_moe
from nanok3.model.latent_moe import grouped_linear
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.situ import situ_glu_reference

triton_interpreter.multiply_bfloat16()

COUNTS = ([3, 0, 17, 1], [0, 0, 5], [40, 33], [1], [0, 0, 0, 0, 0, 0, 2])
BOUND = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 4e-2}
DTYPES = list(BOUND)


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """x as the middle of a buffer of NaN (of 255 where it holds bytes)."""
    nothing = 255 if x.dtype == torch.uint8 else float("nan")
    buffer = torch.full((x.numel() + 128,), nothing, dtype=x.dtype)
    buffer[64:-64] = x.flatten()
    return buffer[64:-64].view(x.shape)


def draw(*shape: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
    return poisoned((spread * torch.randn(shape)).to(dtype)).requires_grad_()


def wide(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def with_gradients(function, inputs, d):
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs, d.to(y.dtype))]


def check(got, want, bound):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b).abs().max() if b.numel() else torch.tensor(0.0)
        assert error <= bound * max(b.abs().max(), 1e-3), f"result {i}: {error:.1e}"


def mlp(z, w1, w2, w3, counts, betas):
    hidden = situ_glu_reference(grouped_linear(z, w1, counts), grouped_linear(z, w3, counts), *betas)
    return grouped_linear(hidden, w2, counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("O,I", [(20, 33), (70, 64), (1, 1), (16, 100)])
def test_grouped_linear(counts, O, I, dtype):
    counts = torch.tensor(counts)
    x, w = draw(int(counts.sum()), I, dtype=dtype), draw(len(counts), O, I, dtype=dtype, spread=I**-0.5)
    d = poisoned(torch.randn(x.shape[0], O).to(dtype))
    got = with_gradients(lambda *a: grouped.grouped_linear(*a, counts), [x, w], d)
    check(got, with_gradients(lambda *a: grouped_linear(*a, counts), wide([x, w]), d), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, None)], ids=str)
def test_expert_mlp(counts, betas, dtype):
    counts, (L, F) = torch.tensor(counts), (20, 33)
    E = len(counts)
    z, w1 = draw(int(counts.sum()), L, dtype=dtype), draw(E, F, L, dtype=dtype, spread=2 * L**-0.5)
    w2, w3 = draw(E, L, F, dtype=dtype, spread=F**-0.5), draw(E, F, L, dtype=dtype, spread=9 * L**-0.5)
    d = torch.randn(z.shape).to(dtype)
    got = with_gradients(lambda *a: situ_experts.expert_mlp(*a, counts, *betas), [z, w1, w2, w3], d)
    want = with_gradients(lambda *a: mlp(*a, counts, betas), wide([z, w1, w2, w3]), d)
    check(got, want, BOUND[dtype])
    with torch.no_grad():  # without the copies that a backward would need
        check([situ_experts.expert_mlp(z, w1, w2, w3, counts, *betas)], want[:1], BOUND[dtype])


def test_expert_mlp_is_smooth_where_the_hyperbolic_tangent_changes_its_form():
    """gate and up on both sides of a quarter of the cap, and far out."""
    points = torch.cat((torch.linspace(-1.01, 1.01, 63), torch.tensor([-60.0, 60.0, 0.0])))
    counts, one = torch.tensor([len(points)]), torch.eye(1)[None]
    got = situ_experts.expert_mlp(points[:, None], one, one, one, counts, 4.0, 4.0)[:, 0]
    want = situ_glu_reference(points.double(), points.double(), 4.0, 4.0)
    assert ((got.double() - want).abs() <= 1e-6 * want.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("O,I", [(20, 32), (64, 96), (1, 160)])
def test_packed_linear(counts, O, I, dtype):
    counts = torch.tensor(counts)
    sizes = torch.logspace(-3, 3, len(counts))[:, None, None]
    bytes_, scale = (poisoned(x) for x in quantize_mxfp4(sizes * torch.randn(len(counts), O, I)))
    x = draw(int(counts.sum()), I, dtype=dtype).detach()
    want = grouped_linear(x.double(), dequantize_mxfp4(bytes_, scale, torch.float64), counts)
    got = packed.packed_linear(x, bytes_, scale, counts)
    # Experts differ by six orders of magnitude; each row is measured by its own size.
    error = (got.double() - want).abs().amax(1) / want.abs().amax(1).clamp(min=1e-12)
    assert (error <= 2 * BOUND[dtype]).all()


def test_every_code_and_every_scale_is_decoded_exactly():
    codes = torch.arange(16, dtype=torch.uint8)
    row = (codes[:, None] | codes[None, :] << 4).flatten()  # 256 bytes: 512 columns
    bytes_ = row.expand(1, 16, 256).contiguous()
    scale = torch.randint(40, 200, (1, 16, 16), dtype=torch.uint8)
    got = packed.packed_linear(torch.eye(512), bytes_, scale, torch.tensor([512]))
    assert torch.equal(got.T[None], dequantize_mxfp4(bytes_, scale, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_packed_expert_mlp(counts, dtype):
    counts, (L, F) = torch.tensor(counts), (96, 64)
    E = len(counts)
    weights = [quantize_mxfp4(torch.randn(E, *size) * size[1] ** -0.5) for size in ((F, L), (L, F), (F, L))]
    z = draw(int(counts.sum()), L, dtype=dtype).detach()
    w1, w2, w3 = (dequantize_mxfp4(*w, torch.float64) for w in weights)
    got = packed.packed_expert_mlp(z, *weights, counts)
    check([got], [mlp(z.double(), w1, w2, w3, counts, (4.0, 25.0))], BOUND[dtype])


class OnCuda(torch.Tensor):
    """A CPU tensor that says it lies on a GPU, so that the model takes the way it takes there."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_calls_them(dtype):
    cfg = K3Config.tiny()
    plain, stored = latent_moe.Experts(cfg), latent_moe.PackedExperts(cfg)
    for name in ("w1", "w2", "w3"):
        weight = plain.get_parameter(name)
        halves = quantize_mxfp4(torch.randn_like(weight) * weight.shape[2] ** -0.5)
        weight.data = dequantize_mxfp4(*halves, torch.float32)
        for half, value in zip(("packed", "scale"), halves):
            stored.get_buffer(f"{name}_{half}").copy_(value)
    counts = torch.tensor([3, 0, 1, 0, 0, 17, 2, 0])
    z = torch.randn(23, cfg.latent_size).to(dtype)
    with torch.no_grad():
        want = [plain.double()(z.double(), counts)]
        for experts in (plain.float(), stored):
            check([experts(z.as_subclass(OnCuda), counts).as_subclass(torch.Tensor)], want, BOUND[dtype])
