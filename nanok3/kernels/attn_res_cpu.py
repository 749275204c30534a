"""Attention residuals on a CPU: the torch face of `cpu/attn_res.cpp`, forward and backward.

    a = softmax_i(c . v_i / sqrt(mean(v_i^2) + eps)),   m = sum_i a_i v_i,   c = norm * query

The backward pass keeps the sources, which the model keeps anyway, and three numbers a token and source. What the kernel
cannot take (other types or devices, no compiler) returns NotImplemented, and the caller falls back to its torch form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.kernels import rows


def mix(
    sources: Sequence[Float[Tensor, "*b D"]],
    norm: Float[Tensor, " D"],
    query: Float[Tensor, "1 D"],
    eps: float,
) -> Float[Tensor, "*b D"] | NotImplementedType:
    """Differentiable in everything; sources float32 or bf16 (all the same), norm and query of any type on the CPU."""
    if not rows.supported("attn_res", *sources) or not rows.readable(norm, query):
        return NotImplemented
    shape = sources[0].shape
    if norm.shape != shape[-1:] or query.shape != (1, *norm.shape) or any(x.shape != shape for x in sources):
        return NotImplemented
    combined = norm.float() * query[0].float()
    if rows.through_torch(combined, *sources):
        save = torch.is_grad_enabled()
        mixed, _ = torch.ops.nanok3.attn_res_fwd(list(sources), combined, eps, save)
    else:
        mixed, _ = forward(sources, combined, eps, False)
    return mixed


def forward(sources: Sequence[Tensor], combined: Tensor, eps: float, save_for_backward: bool) -> tuple[Tensor, Tensor]:
    """The mix, and (tokens, 3, S) float32 for `backward`: weights, inverse roots, scores (empty unless asked for)."""
    sources, combined = [x.contiguous() for x in sources], combined.contiguous()
    mixed, saved = _empty_outputs(sources, save_for_backward)
    rows.function("attn_res", "attn_res_forward", "pnpppnntfn")(
        _pointers(sources),
        len(sources),
        combined.data_ptr(),
        mixed.data_ptr(),
        saved.data_ptr() if save_for_backward else None,
        *_size(mixed),
        eps,
        torch.get_num_threads(),
    )
    return mixed, saved


def backward(d_mixed: Tensor, sources: Sequence[Tensor], combined: Tensor, saved: Tensor) -> list[Tensor]:
    """Gradients of the sources, then of `combined`."""
    sources, combined = [x.contiguous() for x in sources], combined.contiguous()
    d_mixed, d_combined = d_mixed.to(sources[0].dtype).contiguous(), torch.empty_like(combined)
    d_sources = [torch.empty_like(x) for x in sources]
    rows.function("attn_res", "attn_res_backward", "ppnppppnntn")(
        d_mixed.data_ptr(),
        _pointers(sources),
        len(sources),
        combined.data_ptr(),
        saved.data_ptr(),
        _pointers(d_sources),
        d_combined.data_ptr(),
        *_size(d_mixed),
        torch.get_num_threads(),
    )
    return [*d_sources, d_combined]


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def _size(x: Tensor) -> tuple[int, int, int]:
    """Tokens, width, type."""
    return x.shape[:-1].numel(), x.shape[-1], rows.DTYPES[x.dtype]


def _empty_outputs(sources: Sequence[Tensor], save_for_backward: bool) -> tuple[Tensor, Tensor]:
    mixed = sources[0].new_empty(sources[0].shape)
    tokens = mixed.shape[:-1].numel() if save_for_backward else 0
    return mixed, mixed.new_empty((tokens, 3, len(sources)), dtype=torch.float32)


_forward_op = torch.library.custom_op(
    "nanok3::attn_res_fwd",
    forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor[] sources, Tensor combined, float eps, bool save_for_backward) -> (Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "nanok3::attn_res_bwd",
    backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor d_mixed, Tensor[] sources, Tensor combined, Tensor saved) -> Tensor[]",
)


@_forward_op.register_fake
def _forward_fake(
    sources: Sequence[Tensor], combined: Tensor, eps: float, save_for_backward: bool
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(sources, save_for_backward)


@_backward_op.register_fake
def _backward_fake(d_mixed: Tensor, sources: Sequence[Tensor], combined: Tensor, saved: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*sources, combined)]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    sources, combined, _, _ = inputs
    ctx.save_for_backward(*sources, combined, output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, d_mixed: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    *sources, combined, saved = ctx.saved_tensors
    if d_mixed is None:
        return [None] * len(sources), None, None, None
    *d_sources, d_combined = torch.ops.nanok3.attn_res_bwd(d_mixed, sources, combined, saved)
    return d_sources, d_combined, None, None


_forward_op.register_autograd(_autograd, setup_context=_keep_for_backward)
