"""What the row kernels share: torch.compile, activation checkpoints, and gradients of gradients around them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from nanok3.kernels import attn_res_cpu, native, norms_cpu, rows, short_conv_cpu, situ_cpu
from nanok3.model.kda import l2_normalize

LIBRARIES = ("situ", "attn_res", "norms", "short_conv")
needs_kernels = pytest.mark.skipif(
    not all(map(native.available, LIBRARIES)), reason="no C++ compiler builds the kernels here"
)

COMPILED = """
import torch
from nanok3.kernels import attn_res_cpu, norms_cpu, short_conv_cpu, situ_cpu

def block(x, conv, norm, query, A_log, bias):
    y = short_conv_cpu.short_conv(x, conv)
    y = attn_res_cpu.mix([x, 2 * y], norm, query, 1e-5)
    y = situ_cpu.situ_glu(norms_cpu.rms_norm(y, norm, 1e-5), y)
    heads = norms_cpu.l2_normalize(norms_cpu.gated_norm(y, x, norm, 1e-5)).unflatten(-1, (4, 8))
    return norms_cpu.log_decay(heads, A_log, bias, -5.0).sin().sum()

x = torch.randn(2, 9, 32)
weights = torch.randn(32, 1, 4), torch.randn(32), torch.randn(1, 32), torch.randn(4), torch.randn(32)
for f in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
    leaves = [x.detach().requires_grad_() for x in (x, *weights)]
    print(float(sum(g.double().square().sum() for g in torch.autograd.grad(f(*leaves), leaves))))
    with torch.no_grad():
        print(float(f(*leaves)))
"""


@needs_kernels
def test_torch_compile_works_around_them() -> None:
    """In a process of its own: the type checks that tests add to annotated functions cannot be traced."""
    result = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120)
    numbers = result.stdout.split()
    assert len(numbers) == 4 and numbers[:2] == numbers[2:], result.stderr


def small_block(x: Tensor, weight: Tensor) -> Tensor:
    y = situ_cpu.situ_glu(norms_cpu.rms_norm(x, weight, 1e-5), short_conv_cpu.short_conv(x, weight[:, None, None]))
    return attn_res_cpu.mix([x, y], weight, weight[None], 1e-5)


@needs_kernels
def test_activation_checkpoints() -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        leaves = [torch.randn(2, 9, 32, requires_grad=True), torch.randn(32, requires_grad=True)]
        out = checkpoint(small_block, *leaves, use_reentrant=False) if recompute else small_block(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernels
def test_a_second_derivative_is_refused() -> None:
    """There is none, and it must not pass for zero."""
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(norms_cpu.l2_normalize(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(grad.sum(), x)


def test_which_calls_go_through_torch() -> None:
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    assert rows.through_torch(x, leaf)
    assert not rows.through_torch(x, None, 1.0)
    with torch.no_grad():
        assert not rows.through_torch(x, leaf)


@needs_kernels
def test_only_ordinary_tensors() -> None:
    class Wrapped(Tensor):
        pass

    x = torch.ones(2)
    assert rows.supported("norms", x, nn.Parameter(x))
    assert not rows.supported("norms", x, x.as_subclass(Wrapped))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3, 8))
        assert not rows.supported("norms", fake)
        assert l2_normalize(fake).shape == (3, 8)  # the model takes its torch form
