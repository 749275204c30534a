"""Causal softmax attention on a CPU: the torch face of `cpu/attention.cpp`, forward and backward.

    o_t = sum_s a_ts v_s,    a_t = softmax over the keys s that token t sees of  scale q_t . k_s

Neither a matrix of scores nor a padded copy of the values is made: the backward pass keeps o and each token's logarithm
of the sum of e^score, and makes the scores again. Sums are float32, and so is the result. Both passes are torch custom
operators (`nanok3::attention_fwd`, `nanok3::attention_bwd`). What the kernel cannot take (other types or devices, no
compiler) returns NotImplemented, and the caller falls back to its torch form.

Threads take blocks of queries of a head; backward, whole heads of a sequence. Results are the same bits for any number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanok3.kernels import rows

MOST_CHANNELS = 256
"""Of a query or key: what one block of cpu/product.h holds."""


class _Factors(ctypes.Structure):
    """`struct Factors` of cpu/attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        ("type", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("q_bounds", "k_bounds")),
        *((name, ctypes.c_int64) for name in ("sequences", "H", "K", "V")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int64),
    ]


def causal_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H V"],
    scale: float,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
) -> Float[Tensor, "B T H V"] | NotImplementedType:
    """The last query sees all S keys, the one before it S - 1, ...; float32 or bf16 in, float32 out.

    For T = S differentiable in q, k and v, and cu_seqlens may pack documents into B = 1, which do not see each other.
    ValueError for boundaries that do not fit.
    """
    if not rows.supported("attention", q, k, v) or not _fit_together(q, k, v):
        return NotImplemented
    if cu_seqlens is not None and not (rows.readable(cu_seqlens) and cu_seqlens.ndim == 1):
        return NotImplemented
    if not rows.through_torch(q, k, v):
        return _run(q, k, v, cu_seqlens, scale, None)
    if q.shape[1] != k.shape[1]:
        return NotImplemented
    o: Tensor = torch.ops.nanok3.attention_fwd(q, k, v, cu_seqlens, scale)[0]
    return o


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """o, and log sum_s e^(scale q_t . k_s) of each token and head (B, T, H)."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    return _run(q, k, v, cu_seqlens, scale, lse), lse


def backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their type."""
    call = _Call(q, k, v, cu_seqlens, scale)
    inputs = [x.float().contiguous() for x in (o, d_o, lse)]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    pointers = [x.data_ptr() for x in (*inputs, dq, dk, dv)]
    rows.function("attention", "attention_backward", "ppppppp")(call.address, *pointers)
    return dq, dk, dv


def _run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, lse: Tensor | None) -> Tensor:
    call, out = _Call(q, k, v, cu_seqlens, scale), torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float32)
    run = rows.function("attention", "attention_causal", "ppp")
    run(call.address, out.data_ptr(), None if lse is None else lse.data_ptr())
    return out


def _fit_together(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """The kernel reads raw memory, so every shape is checked."""
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or q.shape[-1] > MOST_CHANNELS:
        return False
    return (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:]) and q.shape[1] <= k.shape[1]


class _Call:
    """The C record of a call, at `address`, and what it points to."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float) -> None:
        factors = [_tokens(x) for x in (q, k, v)]
        bounds = [_bounds(x, cu_seqlens) for x in (q, k)]
        self.kept = (factors, bounds)
        self.factors = _Factors(
            *(x.data_ptr() for x in factors),
            rows.DTYPES[q.dtype],
            *(ctypes.addressof(x) for x in bounds),
            len(bounds[0]) - 1,
            *q.shape[2:],
            v.shape[-1],
            *(step for x in factors for step in x.stride()[:2]),
            scale,
            torch.get_num_threads(),
        )
        self.address = ctypes.byref(self.factors)


def _tokens(x: Float[Tensor, "B T H C"]) -> Float[Tensor, "BT H C"]:
    """The sequences one after the other, where they are if they lie like that."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _bounds(x: Tensor, cu_seqlens: Tensor | None) -> ctypes.Array[ctypes.c_int64]:
    """Where each sequence begins, and where the last one ends. ValueError for boundaries that C must not follow."""
    batch, tokens = x.shape[:2]
    found: Sequence[int] = range(0, batch * tokens + 1, tokens) if tokens else [0]
    if cu_seqlens is not None:
        found = [int(bound) for bound in cu_seqlens.tolist()]
        rising = all(a <= b for a, b in zip(found, found[1:]))
        if batch != 1 or not found or found[0] != 0 or found[-1] != tokens or not rising:
            raise ValueError(f"cu_seqlens is {found}; it must rise from 0 to the {tokens} tokens of one row")
    return (ctypes.c_int64 * len(found))(*found)


_forward_op = torch.library.custom_op(
    "nanok3::attention_fwd",
    forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, float scale) -> (Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "nanok3::attention_bwd",
    backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? cu_seqlens, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)


@_forward_op.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    shape = q.shape[:3]
    return q.new_empty((*shape, v.shape[-1]), dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


@_backward_op.register_fake
def _backward_fake(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.scale = scale
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, d_o: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.nanok3.attention_bwd(d_o, *ctx.saved_tensors, ctx.scale), None, None


_forward_op.register_autograd(_autograd, setup_context=_keep_for_backward)
