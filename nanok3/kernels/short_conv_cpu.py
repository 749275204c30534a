"""The short causal convolution with SiLU on a CPU: the torch face of `cpu/short_conv.cpp`, forward and backward.

    y_t = silu( sum_{j = 0 .. W-1} w[j] u_{t-W+1+j} )      for each channel; missing history is zero

A token with `position` p sees at most p tokens before it, so packed documents stay apart; what it may not see is not
read. The backward pass keeps the inputs only. What the kernel cannot take (other types or devices, no compiler, a
history with a gradient) returns NotImplemented, and the caller falls back to its torch form.
"""

from __future__ import annotations

import ctypes
from types import NotImplementedType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanok3.kernels import rows


class _Problem(ctypes.Structure):
    """`struct Problem` of cpu/short_conv.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("u", "history", "weight", "position")),
        *((name, ctypes.c_int64) for name in ("B", "T", "C", "taps", "threads")),
        ("type", ctypes.c_int32),
    ]


def short_conv(
    u: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C 1 W"],
    history: Float[Tensor, "B H C"] | None = None,
    position: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, "B T C"] | NotImplementedType:
    """Differentiable in u (float32 or bf16) and weight (any type); history: the W - 1 inputs before u."""
    if not rows.supported("short_conv", u) or not _fits(u, weight, history, position):
        return NotImplemented
    return _short_conv(u, weight, history, position)


def _fits(u: Tensor, weight: Tensor, history: Tensor | None, position: Tensor | None) -> bool:
    """The kernel reads raw memory, so every tensor and shape is checked."""
    B, T, C = u.shape
    taps = weight.shape[-1] if weight.ndim == 3 else 0
    if taps < 1 or weight.shape[:2] != (C, 1) or not rows.readable(weight):
        return False
    if position is not None and (position.shape != (T,) or not rows.readable(position)):
        return False
    if history is None:
        return True
    constant = not (history.requires_grad and torch.is_grad_enabled())
    return constant and history.shape == (B, taps - 1, C) and rows.readable(history)


def forward(u: Tensor, weight: Tensor, history: Tensor | None, position: Tensor | None) -> Tensor:
    kept = _kept(u, weight, history, position)
    out = torch.empty_like(kept[0])
    problem = _problem(*kept)
    rows.function("short_conv", "short_conv_forward", "pp")(ctypes.addressof(problem), out.data_ptr())
    return out


def backward(d_out: Tensor, u: Tensor, weight: Tensor, history: Tensor | None, position: Tensor | None) -> list[Tensor]:
    """Gradients of u and weight."""
    kept = _kept(u, weight, history, position)
    d_out, d_u, d_taps = d_out.to(u.dtype).contiguous(), torch.empty_like(kept[0]), torch.empty_like(kept[1])
    problem, run = _problem(*kept), rows.function("short_conv", "short_conv_backward", "pppp")
    run(ctypes.addressof(problem), d_out.data_ptr(), d_u.data_ptr(), d_taps.data_ptr())
    return [d_u, d_taps.t().unsqueeze(1).to(weight.dtype).contiguous()]


def _kept(
    u: Tensor, weight: Tensor, history: Tensor | None, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What C reads: contiguous, weight as (taps, C) float32, history in u's type, positions int64."""
    return (
        u.contiguous(),
        weight[:, 0].float().t().contiguous(),
        None if history is None else history.to(u.dtype).contiguous(),
        None if position is None else position.to(torch.int64).contiguous(),
    )


def _problem(u: Tensor, taps: Tensor, history: Tensor | None, position: Tensor | None) -> _Problem:
    return _Problem(
        u.data_ptr(),
        None if history is None else history.data_ptr(),
        taps.data_ptr(),
        None if position is None else position.data_ptr(),
        *u.shape,
        taps.shape[0],
        torch.get_num_threads(),
        rows.DTYPES[u.dtype],
    )


_short_conv = rows.operator(
    "short_conv",
    "Tensor u, Tensor weight, Tensor? history, Tensor? position",
    forward,
    backward,
    gradients=2,
    fake=lambda u, *_: u.new_empty(u.shape),
)
