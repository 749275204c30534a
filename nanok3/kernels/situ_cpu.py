"""SiTU-GLU on a CPU: the torch face of `cpu/situ.cpp`, forward and backward.

    out = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)

The backward pass keeps gate and up only. What the kernel cannot take (other types or devices, no compiler) returns
NotImplemented, and the caller falls back to its torch form.
"""

from __future__ import annotations

import math
from types import NotImplementedType

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.kernels import rows


def situ_glu(
    gate: Float[Tensor, "*b f"],
    up: Float[Tensor, "*b f"],
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
) -> Float[Tensor, "*b f"] | NotImplementedType:
    """Differentiable in gate and up, float32 or bf16 (both the same); computed in float32, rounded once. A beta of
    None is the limit without that cap."""
    if gate.shape != up.shape or not rows.supported("situ", gate, up):
        return NotImplemented
    return _run(gate, up, beta, linear_beta)


def forward(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    run = rows.function("situ", "situ_forward", "pppntffn")
    run(gate.data_ptr(), up.data_ptr(), out.data_ptr(), *_settings(gate, beta, linear_beta))
    return out


def backward(d_out: Tensor, gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> list[Tensor]:
    """Gradients of gate and up."""
    inputs = [x.contiguous() for x in (d_out.to(gate.dtype), gate, up)]
    d_gate, d_up = torch.empty_like(inputs[1]), torch.empty_like(inputs[1])
    run = rows.function("situ", "situ_backward", "pppppntffn")
    pointers = [x.data_ptr() for x in (*inputs, d_gate, d_up)]
    run(*pointers, *_settings(gate, beta, linear_beta))
    return [d_gate, d_up]


def _settings(gate: Tensor, *betas: float | None) -> tuple[int | float, ...]:
    """What both C functions take after the tensors: how many numbers, their type, the caps, threads."""
    caps = (math.inf if beta is None else beta for beta in betas)
    return gate.numel(), rows.DTYPES[gate.dtype], *caps, torch.get_num_threads()


_run = rows.operator(
    "situ",
    "Tensor gate, Tensor up, float? beta, float? linear_beta",
    forward,
    backward,
    gradients=2,
    fake=lambda gate, *_: gate.new_empty(gate.shape),
)
