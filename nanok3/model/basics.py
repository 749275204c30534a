"""What every mechanism uses: a bias-free linear map, RMSNorm, and the rule for float32 islands.

Masters may be float32 while the model computes in bfloat16: `Linear` and `RMSNorm` cast their weight to the dtype of
their input, so the dtype of the embedding output decides the precision of the whole forward, without a global context.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is float64: the precision of gates, scores, norms and states."""
    return x if x.dtype == torch.float64 else x.float()


class Linear(nn.Module):
    """y = x W^T without bias; the weight (out, in) is cast to x's dtype at use."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        return linear(x, self.weight.to(x.dtype))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)


def linear(x: Float[Tensor, "... i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "... o"]:
    """x W^T by torch, or by our own product on a processor for which torch has no fast one: bf16 without instructions
    for bf16 above all."""
    y = _linear_cpu(x, weight)
    return F.linear(x, weight) if y is None else y


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which torch multiplies numbers like x fast: theirs, or float32 for bf16 on a CPU without instructions
    for it. For products that are no layer."""
    from nanok3.kernels import linear_cpu

    slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and linear_cpu.preferred(torch.bfloat16)
    return torch.float32 if slow else x.dtype


def _linear_cpu(x: Tensor, weight: Tensor) -> Tensor | None:
    """Our own product, or None where it does not apply or is not the faster one."""
    from nanok3.kernels import linear_cpu

    y = linear_cpu.linear(x, weight) if linear_cpu.preferred(x.dtype) else NotImplemented
    return None if y is NotImplemented else y


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps): normalised in float32, rounded to x's dtype, then multiplied by w (as the
    official code rounds it)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        normed = _rms_norm_cpu(x, self.weight, self.eps)
        return rms_normalize(x, self.eps).to(x.dtype) * self.weight.to(x.dtype) if normed is None else normed

    def reset_parameters(self, std: float) -> None:
        nn.init.ones_(self.weight)


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """The same in one pass, or None where that does not apply: another device, float64, no compiler."""
    from nanok3.kernels import norms_cpu

    normed = norms_cpu.rms_norm(x, weight, eps)
    return None if normed is NotImplemented else normed


def rms_normalize(x: Float[Tensor, "... d"], eps: float) -> Float[Tensor, "... d"]:
    """x / sqrt(mean(x^2) + eps) over the last axis, in at least float32."""
    return F.rms_norm(at_least_float32(x), (x.shape[-1],), eps=eps)


def check_cu_seqlens(cu_seqlens: Int[Tensor, " n"], batch: int, tokens: int) -> list[int]:
    """The document boundaries of a packed row as a list; ValueError unless they cover it from 0 to its end."""
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must be a list of boundaries (n + 1,), got the shape {tuple(cu_seqlens.shape)}")
    bounds = _read_once(cu_seqlens, _version(cu_seqlens)) if cu_seqlens.is_cuda else _read(cu_seqlens)
    if batch != 1:
        raise ValueError(f"cu_seqlens describes one packed row, but the batch holds {batch}; flatten it to 1 first")
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to the row's {tokens} tokens, got {_shortened(bounds)}")
    return bounds


def _read(cu_seqlens: Tensor) -> list[int]:
    return [int(b) for b in cu_seqlens.tolist()]


_read_once = functools.lru_cache(maxsize=4)(lambda cu_seqlens, version: _read(cu_seqlens))
"""For all layers of a forward, since reading waits for the GPU; the version tells a tensor written into since."""


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _shortened(bounds: list[int]) -> str:
    return str(bounds if len(bounds) <= 8 else [*bounds[:4], "...", *bounds[-3:]]).replace("'", "")


def position_in_document(cu_seqlens: Int[Tensor, " n"], tokens: int) -> Int[Tensor, " t"]:
    """For each token of a packed row, how many tokens of its own document stand before it."""
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens.device) - starts
