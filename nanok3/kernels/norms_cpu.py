"""Normalised rows and the decay gate on a CPU: the torch face of `cpu/norms.cpp`, forward and backward.

    rms_norm       round(x / sqrt(mean(x^2) + eps)) * w      rounded to x's type before and after the weight
    gated_norm     x / sqrt(mean(x^2) + eps) * w * sigmoid(gate)      rounded once
    l2_normalize   x / sqrt(sum(x^2) + eps)
    log_decay      bound * sigmoid(e^A (z + bias))      float32

All act on the last axis, keep only their inputs for the backward pass, and compute in float32. What the kernels cannot
take (other types or devices, no compiler) returns NotImplemented, and the caller falls back to its torch form.
"""

from __future__ import annotations

from types import NotImplementedType

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.kernels import rows

LARGEST_LOG_RATE = 80.0
"""e^80 is far past saturation; a larger A_log is read as 80, with no gradient."""


# ---------------------------------------------------------------------- RMS norm


def rms_norm(
    x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "*b d"] | NotImplementedType:
    """Differentiable in x (float32 or bf16) and weight (any type; rounded to x's)."""
    if not rows.supported("norms", x) or not _fits(weight, x):
        return NotImplemented
    return _rms_norm(x, weight, eps)


def _fits(weight: Tensor, x: Tensor) -> bool:
    return rows.readable(weight) and x.ndim > 0 and weight.shape == x.shape[-1:]


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    lines, w, out = _lines(x), _rounded(weight, x), x.new_empty(x.shape)
    run = rows.function("norms", "rms_norm_forward", "pnppnntfn")
    run(lines.data_ptr(), lines.stride(0), w.data_ptr(), out.data_ptr(), *_size(lines), eps, torch.get_num_threads())
    return out


def rms_norm_backward(d_out: Tensor, x: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
    lines, w, d_out = _lines(x), _rounded(weight, x), d_out.to(x.dtype).contiguous()
    d_x, d_weight = x.new_empty(x.shape), torch.empty_like(w)
    rows.function("norms", "rms_norm_backward", "ppnpppnntfn")(
        d_out.data_ptr(),
        lines.data_ptr(),
        lines.stride(0),
        w.data_ptr(),
        d_x.data_ptr(),
        d_weight.data_ptr(),
        *_size(lines),
        eps,
        torch.get_num_threads(),
    )
    return [d_x, d_weight.to(weight.dtype)]


def _lines(x: Tensor) -> Tensor:
    """x as (rows, D) with contiguous rows that may lie apart: a slice of the last axis is read where it is."""
    lines = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return lines if lines.stride(1) == 1 else lines.contiguous()


def _rounded(weight: Tensor, x: Tensor) -> Tensor:
    return weight.to(x.dtype).float().contiguous()


def _size(x: Tensor) -> tuple[int, int, int]:
    """Rows, width, type."""
    return x.shape[:-1].numel(), x.shape[-1], rows.DTYPES[x.dtype]


_rms_norm = rows.operator(
    "rms_norm",
    "Tensor x, Tensor weight, float eps",
    rms_norm_forward,
    rms_norm_backward,
    gradients=2,
    fake=lambda x, *_: x.new_empty(x.shape),
)


# ---------------------------------------------------------------------- RMS norm with a sigmoid gate


def gated_norm(
    x: Float[Tensor, "*b d"], gate: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "*b d"] | NotImplementedType:
    """Differentiable in x, gate (float32 or bf16, both the same) and weight (any type)."""
    if not rows.supported("norms", x, gate) or gate.shape != x.shape or not _fits(weight, x):
        return NotImplemented
    return _gated_norm(x, gate, weight, eps)


def gated_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, gate, w = x.contiguous(), gate.contiguous(), weight.float().contiguous()
    out = torch.empty_like(x)
    pointers = [y.data_ptr() for y in (x, gate, w, out)]
    rows.function("norms", "gated_norm_forward", "ppppnntfn")(*pointers, *_size(x), eps, torch.get_num_threads())
    return out


def gated_norm_backward(d_out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
    x, gate, w = x.contiguous(), gate.contiguous(), weight.float().contiguous()
    d_out = d_out.to(x.dtype).contiguous()
    d_x, d_gate, d_weight = (torch.empty_like(y) for y in (x, gate, w))
    pointers = [y.data_ptr() for y in (d_out, x, gate, w, d_x, d_gate, d_weight)]
    rows.function("norms", "gated_norm_backward", "pppppppnntfn")(*pointers, *_size(x), eps, torch.get_num_threads())
    return [d_x, d_gate, d_weight.to(weight.dtype)]


_gated_norm = rows.operator(
    "gated_norm",
    "Tensor x, Tensor gate, Tensor weight, float eps",
    gated_norm_forward,
    gated_norm_backward,
    gradients=3,
    fake=lambda x, *_: x.new_empty(x.shape),
)


# ---------------------------------------------------------------------- l2


def l2_normalize(x: Float[Tensor, "*b d"], eps: float = 1e-6) -> Float[Tensor, "*b d"] | NotImplementedType:
    """Differentiable in x (float32 or bf16); eps is added to the sum of squares."""
    return _l2_normalize(x, eps) if x.ndim and rows.supported("norms", x) else NotImplemented


def l2_normalize_forward(x: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    run = rows.function("norms", "l2_norm_forward", "ppnntfn")
    run(x.data_ptr(), out.data_ptr(), *_size(x), eps, torch.get_num_threads())
    return out


def l2_normalize_backward(d_out: Tensor, x: Tensor, eps: float) -> list[Tensor]:
    x, d_out = x.contiguous(), d_out.to(x.dtype).contiguous()
    d_x = torch.empty_like(x)
    run = rows.function("norms", "l2_norm_backward", "pppnntfn")
    run(d_out.data_ptr(), x.data_ptr(), d_x.data_ptr(), *_size(x), eps, torch.get_num_threads())
    return [d_x]


_l2_normalize = rows.operator(
    "l2_norm",
    "Tensor x, float eps",
    l2_normalize_forward,
    l2_normalize_backward,
    gradients=1,
    fake=lambda x, _: x.new_empty(x.shape),
)


# ---------------------------------------------------------------------- the bounded decay gate


def log_decay(
    z: Float[Tensor, "*b H K"], A_log: Float[Tensor, " H"], dt_bias: Float[Tensor, " HK"], lower_bound: float
) -> Float[Tensor, "*b H K"] | NotImplementedType:
    """Differentiable in z (float32 or bf16), A_log and dt_bias (any type); the result is float32."""
    if not rows.supported("norms", z) or not rows.readable(A_log, dt_bias):
        return NotImplemented
    if z.ndim < 2 or A_log.shape != z.shape[-2:-1] or dt_bias.numel() != z.shape[-2] * z.shape[-1]:
        return NotImplemented
    return _log_decay(z, A_log, dt_bias, lower_bound)


def log_decay_forward(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    z, rate, bias = z.contiguous(), _rate(A_log, z), dt_bias.float().contiguous()
    out = torch.empty_like(z, dtype=torch.float32)
    pointers = [x.data_ptr() for x in (z, rate, bias, out)]
    run = rows.function("norms", "decay_forward", "ppppnntfn")
    run(*pointers, *_size(z.flatten(-2)), lower_bound, torch.get_num_threads())
    return out


def log_decay_backward(d_out: Tensor, z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> list[Tensor]:
    z, rate, bias = z.contiguous(), _rate(A_log, z), dt_bias.float().contiguous()
    d_out, d_z = d_out.float().contiguous(), torch.empty_like(z)
    d_bias, d_log_rate = torch.empty_like(bias), torch.empty_like(rate)
    pointers = [x.data_ptr() for x in (d_out, z, rate, bias, d_z, d_bias, d_log_rate)]
    run = rows.function("norms", "decay_backward", "pppppppnntfn")
    run(*pointers, *_size(z.flatten(-2)), lower_bound, torch.get_num_threads())
    d_A = d_log_rate.sum(-1).masked_fill(A_log > LARGEST_LOG_RATE, 0)
    return [d_z, d_A.to(A_log.dtype), d_bias.to(dt_bias.dtype).view(dt_bias.shape)]


def _rate(A_log: Tensor, z: Tensor) -> Tensor:
    """e^A of each head in every one of its columns (H, K)."""
    return A_log.float().clamp(max=LARGEST_LOG_RATE).exp()[:, None].expand(z.shape[-2:]).contiguous()


_log_decay = rows.operator(
    "log_decay",
    "Tensor z, Tensor A_log, Tensor dt_bias, float lower_bound",
    log_decay_forward,
    log_decay_backward,
    gradients=3,
    fake=lambda z, *_: z.new_empty(z.shape, dtype=torch.float32),
)
