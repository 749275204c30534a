"""SiTU-GLU: a gated activation whose two factors are softly capped (report 2.3.2, eq. 12 and appendix B).

    SiTU(g, u) = [b1 tanh(g / b1) sigmoid(g)] * [b2 tanh(u / b2)],    b1 = 4, b2 = 25

Near zero it is SwiGLU to first order; its size never exceeds b1 * b2 = 100, so a coincidence of two large factors
cannot produce the outliers that break low precision. The sigmoid reads the uncapped gate. Without b2 the second factor
is u itself; the older `silu` is the limit b1, b2 -> infinity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import Linear, at_least_float32


def situ_glu_reference(
    gate: Float[Tensor, "*b f"],
    up: Float[Tensor, "*b f"],
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
) -> Float[Tensor, "*b f"]:
    """The formula, in at least float32, rounded once to the dtype of `gate`. beta None stands for the limit (silu)."""
    g, u = at_least_float32(gate), at_least_float32(up)
    capped_gate = g if beta is None else beta * torch.tanh(g / beta)
    capped_up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (capped_gate * torch.sigmoid(g) * capped_up).to(gate.dtype)


class _SituGLU(torch.autograd.Function):
    """Keeps only gate and up for the backward; autograd would keep six float32 tensors of their size."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        return situ_glu_reference(gate, up, beta, linear_beta)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        g, u, d = at_least_float32(gate), at_least_float32(up), at_least_float32(grads[0])
        s = torch.sigmoid(g)
        if beta is None:
            a, da = g * s, s + g * s * (1 - s)
        else:
            t = torch.tanh(g / beta)
            a, da = beta * t * s, s * (1 - t * t + beta * t * (1 - s))
        if linear_beta is None:
            b, db = u, None
        else:
            t = torch.tanh(u / linear_beta)
            b, db = linear_beta * t, 1 - t * t
        d_up = d * a if db is None else d * a * db
        return (d * b * da).to(gate.dtype), d_up.to(up.dtype), None, None


def situ_glu(
    gate: Float[Tensor, "*b f"],
    up: Float[Tensor, "*b f"],
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
) -> Float[Tensor, "*b f"]:
    """`situ_glu_reference` with a backward of its own; in one pass on a CPU."""
    result = _situ_cpu(gate, up, beta, linear_beta)
    return _SituGLU.apply(gate, up, beta, linear_beta) if result is None else result


def _situ_cpu(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor | None:
    """The C++ form, or None where it does not apply: another device, float64, no compiler."""
    from nanok3.kernels import situ_cpu

    result = situ_cpu.situ_glu(gate, up, beta, linear_beta)
    return None if result is NotImplemented else result


def activation(cfg: K3Config, gate: Float[Tensor, "*b f"], up: Float[Tensor, "*b f"]) -> Float[Tensor, "*b f"]:
    """The gated activation that `cfg` names: SiTU-GLU, or SwiGLU for kimi_linear checkpoints."""
    if cfg.hidden_act == "silu":
        return F.silu(gate) * up
    # The official class reads a missing beta as 1.
    return situ_glu(gate, up, cfg.activation_situ_beta or 1.0, cfg.activation_situ_linear_beta)


class GatedMLP(nn.Module):
    """W_down act(W_gate x, W_up x): the dense first layer and the shared experts."""

    def __init__(self, cfg: K3Config, inner: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate_proj = Linear(cfg.hidden_size, inner)
        self.up_proj = Linear(cfg.hidden_size, inner)
        self.down_proj = Linear(inner, cfg.hidden_size)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        out: Tensor = self.down_proj(activation(self.cfg, self.gate_proj(x), self.up_proj(x)))
        return out
