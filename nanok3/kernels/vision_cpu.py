"""The vision tower between its products on a CPU: the torch face of `cpu/vision.cpp`, forward and backward.

    attention   o = softmax(K^-1/2 q k^T) v within each item, in both directions; q and k turned by the patch's place
    gelu_tanh   x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

Attention reads q, k and v where the product has left them, side by side, and makes neither turned copies of them nor a
matrix of scores; the backward pass keeps its inputs, o and each patch's logarithm of the sum of e^score. Sums and the
softmax are float32. What the kernel cannot take (other types or devices, no compiler) returns NotImplemented, and the
caller falls back to its torch form.

Threads take blocks of queries of a head; backward, whole heads of an item. Results are the same bits for any number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from types import NotImplementedType
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from nanok3.kernels import rows

MOST_CHANNELS = 256
"""Of a head: what one block of cpu/product.h holds."""


class _Factors(ctypes.Structure):
    """`struct Factors` of cpu/vision.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "turn")),
        ("type", ctypes.c_int32),
        ("bounds", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("items", "H", "K")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int64),
    ]


# ---------------------------------------------------------------------- attention


def attention(
    qkv: Float[Tensor, "N 3 H K"], turn: Complex[Tensor, "N pairs"], lengths: Sequence[int]
) -> Float[Tensor, "N H K"] | NotImplementedType:
    """Differentiable in qkv (float32 or bf16, and so is the result). Channels 2m and 2m + 1 of q and k are turned by
    turn[:, m]; the items have so many patches each, one item after the other.

    ValueError for lengths that do not add up to N.
    """
    if not rows.supported("vision", qkv) or not rows.readable(turn) or turn.dtype != torch.complex64:
        return NotImplemented
    if qkv.ndim != 4 or qkv.shape[1] != 3 or not 0 < qkv.shape[3] <= MOST_CHANNELS or qkv.shape[3] % 2:
        return NotImplemented
    if turn.shape != (qkv.shape[0], qkv.shape[3] // 2):
        return NotImplemented
    if sum(lengths) != len(qkv) or min(lengths, default=0) < 0:
        raise ValueError(
            f"lengths is {list(lengths)}; it must hold no negative number and add up to {len(qkv)} patches"
        )
    pairs = torch.view_as_real(turn.detach().resolve_conj())
    if not rows.through_torch(qkv):
        return _attend(qkv, pairs, lengths, None)
    o: Tensor = torch.ops.nanok3.vision_attention_fwd(qkv, pairs, lengths)[0]
    return o


def attention_forward(qkv: Tensor, pairs: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """o, and log sum_s e^(K^-1/2 q_t . k_s) of each patch and head (N, H). pairs (N, K / 2, 2): cosines and sines."""
    lse = torch.empty(qkv.shape[0], qkv.shape[2], dtype=torch.float32)
    return _attend(qkv, pairs, lengths, lse), lse


def attention_backward(
    d_o: Tensor, qkv: Tensor, pairs: Tensor, o: Tensor, lse: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Gradient of qkv."""
    call, d_qkv = _Call(qkv, pairs, lengths), qkv.new_empty(qkv.shape)
    inputs = [o.contiguous(), d_o.to(qkv.dtype).contiguous(), lse.contiguous()]
    run = rows.function("vision", "vision_attention_backward", "ppppp")
    run(call.address, *(x.data_ptr() for x in inputs), d_qkv.data_ptr())
    return d_qkv


def _attend(qkv: Tensor, pairs: Tensor, lengths: Sequence[int], lse: Tensor | None) -> Tensor:
    call, out = _Call(qkv, pairs, lengths), qkv.new_empty(qkv[:, 0].shape)
    run = rows.function("vision", "vision_attention", "ppp")
    run(call.address, out.data_ptr(), None if lse is None else lse.data_ptr())
    return out


class _Call:
    """The C record of a call, at `address`, and what it points to."""

    def __init__(self, qkv: Tensor, pairs: Tensor, lengths: Sequence[int]) -> None:
        qkv, pairs = qkv.contiguous(), pairs.contiguous()
        bounds = (ctypes.c_int64 * (len(lengths) + 1))(0, *accumulate(lengths))
        self.kept = (qkv, pairs, bounds)
        _, _, H, K = qkv.shape
        pointers = qkv.data_ptr(), pairs.data_ptr(), rows.DTYPES[qkv.dtype], ctypes.addressof(bounds)
        self.factors = _Factors(*pointers, len(lengths), H, K, K**-0.5, torch.get_num_threads())
        self.address = ctypes.byref(self.factors)


_forward_op = torch.library.custom_op(
    "nanok3::vision_attention_fwd",
    attention_forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor qkv, Tensor pairs, int[] lengths) -> (Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "nanok3::vision_attention_bwd",
    attention_backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor d_o, Tensor qkv, Tensor pairs, Tensor o, Tensor lse, int[] lengths) -> Tensor",
)


@_forward_op.register_fake
def _forward_fake(qkv: Tensor, pairs: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    N, _, H, K = qkv.shape
    return qkv.new_empty(N, H, K), qkv.new_empty((N, H), dtype=torch.float32)


@_backward_op.register_fake
def _backward_fake(d_o: Tensor, qkv: Tensor, pairs: Tensor, o: Tensor, lse: Tensor, lengths: Sequence[int]) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, pairs, ctx.lengths = inputs
    ctx.save_for_backward(qkv, pairs, *output)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, d_o: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.nanok3.vision_attention_bwd(d_o, *ctx.saved_tensors, ctx.lengths), None, None


_forward_op.register_autograd(_autograd, setup_context=_keep_for_backward)


# ---------------------------------------------------------------------- GELU


def gelu_tanh(x: Float[Tensor, "*b f"]) -> Float[Tensor, "*b f"] | NotImplementedType:
    """Differentiable in x, float32 or bf16; computed in float32, rounded once."""
    return _gelu(x) if rows.supported("vision", x) else NotImplemented


def gelu_forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    run = rows.function("vision", "gelu_forward", "ppntn")
    run(x.data_ptr(), out.data_ptr(), x.numel(), rows.DTYPES[x.dtype], torch.get_num_threads())
    return out


def gelu_backward(d_out: Tensor, x: Tensor) -> list[Tensor]:
    """Gradient of x."""
    x, d_out = x.contiguous(), d_out.to(x.dtype).contiguous()
    d_x = torch.empty_like(x)
    run = rows.function("vision", "gelu_backward", "pppntn")
    pointers = [y.data_ptr() for y in (d_out, x, d_x)]
    run(*pointers, x.numel(), rows.DTYPES[x.dtype], torch.get_num_threads())
    return [d_x]


_gelu = rows.operator(
    "gelu_tanh",
    "Tensor x",
    gelu_forward,
    gelu_backward,
    gradients=1,
    fake=lambda x: x.new_empty(x.shape),
)
