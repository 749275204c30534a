"""Attention residuals: each sub-layer chooses, token by token, which earlier computation it reads (report 2.2,
eq. 8-10; architecture 3.4).

Sources v_0 ... v_n are the embedding, the sums of finished blocks, and the running sum p of the current block. A
sub-layer owns one pseudo-query u and one norm weight w:

    s_i = (w * u) . v_i / sqrt(mean(v_i^2) + eps)        a = softmax(s)        m = sum_i a_i v_i

The values are taken as they are, only the scores see normalised ones; all in at least float32, m rounded once. This is
memory over depth within one forward call: nothing of it survives to the next token.

    `mix_reference`   stacks the sources; autograd keeps every intermediate
    `mix`             one source at a time; keeps the sources themselves and two numbers a token and source
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.model.basics import at_least_float32


def mix_reference(
    sources: Sequence[Float[Tensor, "B T D"]],
    norm: Float[Tensor, " D"],
    query: Float[Tensor, "1 D"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """The formula as written above."""
    values = torch.stack([at_least_float32(v) for v in sources])
    key = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    scores = key @ (at_least_float32(norm) * at_least_float32(query[0]))
    weights = scores.softmax(0)
    return torch.einsum("sbt,sbtd->btd", weights, values).to(sources[-1].dtype)


def depth_weights(
    sources: Sequence[Float[Tensor, "B T D"]],
    norm: Float[Tensor, " D"],
    query: Float[Tensor, "1 D"],
    eps: float,
) -> Float[Tensor, "S B T"]:
    """The softmax over sources alone, for pictures and tests."""
    combined = at_least_float32(norm) * at_least_float32(query[0])
    scores = [at_least_float32(v) @ combined * _rsqrt_mean(at_least_float32(v), eps) for v in sources]
    return torch.stack(scores).softmax(0)


def _rsqrt_mean(v: Float[Tensor, "... D"], eps: float) -> Float[Tensor, ...]:
    return torch.rsqrt(torch.linalg.vector_norm(v, dim=-1).square() / v.shape[-1] + eps)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: Tensor, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        combined = at_least_float32(norm) * at_least_float32(query[0])
        values = [at_least_float32(v) for v in sources]
        inverse = torch.stack([_rsqrt_mean(v, eps) for v in values])
        scores = torch.stack([v @ combined for v in values]) * inverse
        weights = scores.softmax(0)
        mixed = weights[0].unsqueeze(-1) * values[0]
        for a, v in zip(weights[1:], values[1:]):
            mixed.addcmul_(a.unsqueeze(-1), v)
        ctx.save_for_backward(norm, query, weights, inverse, scores, *sources)
        return mixed.to(sources[-1].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        norm, query, weights, inverse, scores, *sources = ctx.saved_tensors
        combined = at_least_float32(norm) * at_least_float32(query[0])
        dm = at_least_float32(grads[0])
        values = [at_least_float32(v) for v in sources]
        da = torch.stack([torch.linalg.vecdot(dm, v) for v in values])
        ds = weights * (da - (weights * da).sum(0))
        along_query = ds * inverse  # d score / d v = inverse * combined - score * inverse^2 / D * v
        along_value = ds * scores * inverse.square() / norm.numel()
        dsources = []
        for i, v in enumerate(values):
            dv = weights[i].unsqueeze(-1) * dm
            dv.addcmul_(along_query[i].unsqueeze(-1), combined).addcmul_(along_value[i].unsqueeze(-1), v, value=-1)
            dsources.append(dv.to(sources[i].dtype))
        dcombined = sum(w.flatten() @ v.flatten(0, -2) for w, v in zip(along_query, values))
        assert isinstance(dcombined, Tensor)
        dnorm = (dcombined * query[0]).to(norm.dtype)
        return dnorm, (dcombined * norm).to(query.dtype).unsqueeze(0), None, *dsources


def mix(
    sources: Sequence[Float[Tensor, "B T D"]],
    norm: Float[Tensor, " D"],
    query: Float[Tensor, "1 D"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """`mix_reference` without stacking the sources; in one pass on a CPU, and on CUDA where fla-core is installed."""
    mixed = (_mix_fla if sources[0].is_cuda else _mix_cpu)(sources, norm, query, eps)
    return _Mix.apply(norm, query, eps, *sources) if mixed is None else mixed


def _mix_cpu(sources: Sequence[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor | None:
    """The C++ form, or None where it does not apply: another device, float64, no compiler."""
    from nanok3.kernels import attn_res_cpu

    mixed = attn_res_cpu.mix(sources, norm, query, eps)
    return None if mixed is NotImplemented else mixed


def _mix_fla(sources: Sequence[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor | None:
    """fla-core's kernel, or None where it does not apply: float64, a width that is no multiple of 16, no fla-core."""
    from nanok3.kernels.gpu import fla

    mixed = fla.mix(sources, norm, query, eps)
    return None if mixed is NotImplemented else mixed


class DepthSources:
    """What a layer can read: the bank of closed sums (the embedding first) and the running sum of module outputs."""

    def __init__(self, embedding: Float[Tensor, "B T D"]) -> None:
        self.bank: list[Tensor] = []
        self.running: Tensor | None = embedding

    def add(self, output: Float[Tensor, "B T D"]) -> None:
        self.running = output if self.running is None else self.running + output

    def close(self) -> None:
        """Bank the raw running sum (not a mix of it) and start the next one from nothing."""
        assert self.running is not None
        self.bank.append(self.running)
        self.running = None

    def sources(self) -> list[Tensor]:
        """In the order of depth, the running sum last."""
        return self.bank if self.running is None else [*self.bank, self.running]
