"""fla-core's own kernels through our glue, under Triton's interpreter, against our references in float64; run by
test_triton.py in a process of its own. This is the real wheel: names, layouts and gradients are the ones a GPU sees."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
import triton_interpreter

from nanok3.kernels.gpu import fla
from nanok3.model.attn_res import mix_reference
from nanok3.model.kda import kda_reference

assert isinstance(fla.load(), fla.Operators), fla.load()
from fla.ops.attnres import fused  # noqa: E402

triton_interpreter.run_fla()
# The wrapper wants CUDA tensors; its kernels do not mind.
_source = inspect.getsource(fused.fused_attnres_fwd).replace("if not residuals[0].is_cuda:", "if False:")
exec(compile(_source, fused.__file__, "exec"), fused.__dict__)


def wide(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def check(got, want, bound):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error <= bound, f"result {i}: {error:.1e}"


def draw(B, T, H, HV, K, V, dtype):
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    gates = -5 * torch.rand(B, T, HV, K) ** 3, torch.rand(B, T, HV)
    return [x.requires_grad_() for x in (q, k, torch.randn(B, T, HV, V).to(dtype), *gates)]


@pytest.mark.parametrize(
    "shape,bounded,bounds,dtype",
    [
        ((2, 33, 2, 2, 64, 64), True, None, torch.float32),
        ((1, 70, 1, 2, 16, 16), True, None, torch.float32),
        ((1, 70, 2, 2, 32, 20), False, None, torch.float32),
        ((1, 80, 1, 2, 32, 20), True, [0, 1, 1, 65, 80], torch.float32),
        ((1, 1, 2, 2, 32, 32), True, None, torch.float32),
        ((1, 70, 1, 2, 32, 32), True, None, torch.float16),
    ],
    ids=str,
)
def test_chunk_kda(shape, bounded, bounds, dtype):
    inputs = draw(*shape, dtype)
    sequences = shape[0] if bounds is None else len(bounds) - 1
    state = torch.randn(sequences, shape[3], shape[4], shape[5]).requires_grad_()
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    got = fla.kda(*inputs, state, True, cu_seqlens, bounded=bounded, tf32=True)
    exact = wide([*inputs, state])
    want = kda_reference(*exact, True, cu_seqlens)
    d = [torch.randn_like(x) for x in want]
    check(got, want, 1e-5 if dtype == torch.float32 else 1e-2)
    gradients = torch.autograd.grad(got, [*inputs, state], [x.to(y.dtype) for x, y in zip(d, got)])
    check(gradients, torch.autograd.grad(want, exact, d), 2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("shape", [(2, 1, 2, 4, 8, 16), (3, 1, 2, 2, 32, 20), (1, 1, 1, 1, 60, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_fused_recurrent_kda(shape, dtype):
    inputs = draw(*shape, dtype)
    state = torch.randn(shape[0], shape[3], shape[4], shape[5])
    before = state.clone()
    got = fla.kda(*inputs, state, True)
    check(got, kda_reference(*wide(inputs), state.double(), True), 1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(state, before) and got[1].dtype == torch.float32


@pytest.mark.parametrize("sources", [1, 2, 9])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_fused_attnres(sources, dtype, bound):
    values = [torch.randn(1, 5, 48).to(dtype).requires_grad_() for _ in range(sources)]
    norm, query = torch.rand(48).requires_grad_(), torch.randn(1, 48).requires_grad_()
    inputs = [*values, norm, query]
    got = fla.mix(values, norm, query, 1e-5)
    exact = wide(inputs)
    want = mix_reference(exact[:-2], exact[-2], exact[-1], 1e-5)
    d = torch.randn_like(want)
    got = [got, *torch.autograd.grad(got, inputs, d.to(dtype))]
    want = [want, *torch.autograd.grad(want, exact, d)]
    if sources == 1:  # one source has weight 1 whatever the query: its gradients are zero, up to rounding
        assert all(x.abs().max() < 1e-4 for x in got[-2:])
        got, want = got[:-2], want[:-2]
    check(got, want, bound)
