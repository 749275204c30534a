"""Stable LatentMoE: many narrow experts, a few of them per token (report 2.3, eq. 11; architecture 3.6).

    s = sigmoid(W_gate x)                         router, on the full-width x, in float32
    chosen = top-N of s + bias                    the bias balances the load and touches nothing else
    p_e = s_e / (sum of chosen s + 1e-20)         mixture weights from the raw scores, times the scaling factor
    z = W_down x                                  the latent in which the experts work
    y = W_up RMSNorm( sum_e p_e Expert_e(z) ) + Shared(x),     Expert_e(z) = w2 SiTU(w1 z, w3 z)

`routed_reference` goes token by token. `routed` does the same for all tokens of an expert at once: for inference in one
native call that reads the chosen experts' weights as they are stored, else (training, other devices) by sorting the
tokens and three grouped products. Without a latent (kimi_linear) z = x, and W_up and the norm are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import Linear, RMSNorm, at_least_float32
from nanok3.model.mxfp4 import BLOCK, dequantize_mxfp4
from nanok3.model.situ import GatedMLP, activation


class Routing(NamedTuple):
    """scores: sigmoid scores without bias; chosen: expert ids; weights: their mixture weights, summing to the scaling
    factor."""

    scores: Float[Tensor, "n E"]
    chosen: Int[Tensor, "n N"]
    weights: Float[Tensor, "n N"]


class Router(nn.Module):
    """The gate. `e_score_correction_bias` is a buffer: it is set by Quantile Balancing, never by a gradient."""

    e_score_correction_bias: Tensor

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.num_experts, dtype=torch.float32))

    def forward(self, x: Float[Tensor, "n D"]) -> Routing:
        # Scores in bfloat16 would send one token in twenty to other experts.
        scores = torch.sigmoid(F.linear(at_least_float32(x), self.weight.to(at_least_float32(x).dtype)))
        biased = scores.detach() + self.e_score_correction_bias
        chosen = biased.topk(self.cfg.num_experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.cfg.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(scores, chosen, weights * self.cfg.routed_scaling_factor)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        self.e_score_correction_bias.zero_()


class Experts(nn.Module):
    """All routed experts, stacked: w1 gate, w3 up (E, F, L), w2 down (E, L, F)."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        E, inner, latent = cfg.num_experts, cfg.moe_intermediate_size, cfg.latent_size
        self.w1 = nn.Parameter(torch.empty(E, inner, latent))
        self.w2 = nn.Parameter(torch.empty(E, latent, inner))
        self.w3 = nn.Parameter(torch.empty(E, inner, latent))

    def forward(self, z: Float[Tensor, "m L"], counts: Int[Tensor, " E"]) -> Float[Tensor, "m L"]:
        """z: token copies sorted by expert, the first counts[0] for expert 0, and so on."""
        w1, w2, w3 = (w.to(z.dtype) for w in (self.w1, self.w2, self.w3))
        y = _experts_cuda(self.cfg, z, (w1, w2, w3), counts)
        if y is not None:
            return y
        hidden = activation(self.cfg, grouped_linear(z, w1, counts), grouped_linear(z, w3, counts))
        return grouped_linear(hidden, w2, counts)

    def expert(self, e: int, z: Float[Tensor, "n L"]) -> Float[Tensor, "n L"]:
        """One expert alone."""
        w1, w2, w3 = (w[e].to(z.dtype) for w in (self.w1, self.w2, self.w3))
        return F.linear(activation(self.cfg, F.linear(z, w1), F.linear(z, w3)), w2)

    def reset_parameters(self, std: float) -> None:
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=std)


class PackedExperts(nn.Module):
    """The routed experts in their stored MXFP4 bytes, decoded only where tokens arrive for an expert. For inference:
    0.53 bytes a weight, and an expert nobody chose costs nothing."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        E, inner, latent = cfg.num_experts, cfg.moe_intermediate_size, cfg.latent_size
        for name, rows, columns in (("w1", inner, latent), ("w2", latent, inner), ("w3", inner, latent)):
            self.register_buffer(f"{name}_packed", torch.empty(E, rows, columns // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.empty(E, rows, columns // BLOCK, dtype=torch.uint8))

    def forward(self, z: Float[Tensor, "m L"], counts: Int[Tensor, " E"]) -> Float[Tensor, "m L"]:
        if self.training and torch.is_grad_enabled():
            raise ValueError("packed experts are for inference; load with a dtype to train")
        y = _experts_cuda(self.cfg, z, tuple(self.stored(name) for name in ("w1", "w2", "w3")), counts)
        if y is not None:
            return y
        parts, start = [], 0
        for e, count in enumerate(counts.tolist()):
            if count:
                parts.append(self.expert(e, z[start : start + count]))
            start += count
        return torch.cat(parts) if parts else z

    def expert(self, e: int, z: Float[Tensor, "n L"]) -> Float[Tensor, "n L"]:
        hidden = activation(self.cfg, F.linear(z, self.weight("w1", e, z)), F.linear(z, self.weight("w3", e, z)))
        return F.linear(hidden, self.weight("w2", e, z))

    def weight(self, name: str, e: int, like: Tensor) -> Tensor:
        packed, scale = self.stored(name)
        return dequantize_mxfp4(packed[e], scale[e], like.dtype)

    def stored(self, name: str) -> tuple[UInt8[Tensor, "E O half"], UInt8[Tensor, "E O blocks"]]:
        """A stack of matrices as bytes: nibbles and scales."""
        return self.get_buffer(f"{name}_packed"), self.get_buffer(f"{name}_scale")

    def reset_parameters(self, std: float) -> None:
        raise ValueError("packed experts hold stored bytes and cannot be initialised; build the model without them")


def grouped_linear(
    x: Float[Tensor, "m I"], weight: Float[Tensor, "E O I"], counts: Int[Tensor, " E"]
) -> Float[Tensor, "m O"]:
    """Rows of expert e times weight[e]^T; rows are sorted by expert. One grouped product, ours on a CPU and else
    torch's where it has one (rows of a multiple of 16 bytes, not float64), or a loop over the experts with rows."""
    product = _grouped_cpu(x, weight, counts)
    if product is not None:
        return product
    whole_rows = x.shape[1] * x.element_size() % 16 == 0 and weight.shape[1] * x.element_size() % 16 == 0
    if x.dtype in (torch.float32, torch.bfloat16) and whole_rows and x.shape[0]:
        return _grouped_product(x, weight, counts)
    parts = [F.linear(rows, w) for rows, w in zip(x.split(counts.tolist()), weight)]
    return torch.cat(parts)


def _grouped_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    product: Tensor = _Contiguous.apply(F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32)))
    return product


def _grouped_cpu(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor | None:
    """The C++ form, or None where it does not apply: another device, float64, no compiler; or where torch's bf16 is
    faster."""
    from nanok3.kernels import linear_cpu

    if x.dtype == torch.bfloat16 and not linear_cpu.preferred_for_groups():
        return None
    product = linear_cpu.grouped_linear(x, weight, counts)
    return None if product is NotImplemented else product


class _Contiguous(torch.autograd.Function):
    """grouped_mm's backward needs a contiguous gradient; an expanded one (from a sum) is copied here."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def routed_reference(
    experts: Experts | PackedExperts, z: Float[Tensor, "n L"], routing: Routing
) -> Float[Tensor, "n L"]:
    """sum_e p_e Expert_e(z), token by token; expert outputs are summed in at least float32 and rounded once."""
    rows = []
    for token, chosen, weights in zip(z, routing.chosen.tolist(), routing.weights):
        parts = [p * at_least_float32(experts.expert(e, token[None])[0]) for e, p in zip(chosen, weights)]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows).to(z.dtype)


def routed(experts: Experts | PackedExperts, z: Float[Tensor, "n L"], routing: Routing) -> Float[Tensor, "n L"]:
    """`routed_reference`, all tokens of an expert at once."""
    y = _routed_cpu(experts, z, routing)
    return routed_sorted(experts, z, routing) if y is None else y


def _routed_cpu(experts: Experts | PackedExperts, z: Tensor, routing: Routing) -> Tensor | None:
    """Everything in one call of C++ that sums in float32 and rounds once, or None where it does not apply: gradients,
    another device, float64, no compiler."""
    from nanok3.kernels import linear_cpu

    w1, w2, w3 = (
        linear_cpu.Packed(*experts.stored(name)) if isinstance(experts, PackedExperts) else experts.get_parameter(name)
        for name in ("w1", "w2", "w3")
    )
    y = linear_cpu.routed(z, routing.chosen, routing.weights, (w1, w2, w3), caps(experts.cfg))
    return None if y is NotImplemented else y


def caps(cfg: K3Config) -> tuple[float | None, float | None]:
    """The two caps of the activation; without both it is SwiGLU."""
    return (
        (None, None) if cfg.hidden_act == "silu" else (cfg.activation_situ_beta or 1.0, cfg.activation_situ_linear_beta)
    )


def _experts_cuda(cfg: K3Config, z: Tensor, weights: tuple[Any, ...], counts: Tensor) -> Tensor | None:
    """All experts on sorted rows in two Triton kernels, weights plain or as (nibbles, scales), or None where that does
    not apply: another device, float64, no Triton."""
    if not z.is_cuda or z.dtype == torch.float64:
        return None
    from nanok3.kernels.gpu import language, packed, situ_experts

    if not language.available():
        return None
    (w1, w2, w3), (beta, linear_beta) = weights, caps(cfg)
    form: Callable[..., Tensor] = situ_experts.expert_mlp if isinstance(w1, Tensor) else packed.packed_expert_mlp
    return form(z, w1, w2, w3, counts, beta, linear_beta)


def tally(index: Int[Tensor, " n"], size: int) -> Int[Tensor, " size"]:
    """How often each of 0 .. size - 1 occurs. On a GPU bincount would wait to learn the largest entry."""
    if index.is_cpu:
        return torch.bincount(index, minlength=size)
    index = index.long()
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))


def routed_sorted(experts: Experts | PackedExperts, z: Float[Tensor, "n L"], routing: Routing) -> Float[Tensor, "n L"]:
    """Sort by expert, run the experts, sort back, sum."""
    tokens, per_token = routing.chosen.shape
    flat = routing.chosen.flatten()
    order = flat.argsort(stable=True)
    counts = tally(flat, experts.cfg.num_experts)
    out = experts(z.index_select(0, order // per_token), counts)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    by_token = at_least_float32(out.index_select(0, place)).view(tokens, per_token, -1)
    # No einsum: torch would make a batch of tiny products of it, one a token.
    return (routing.weights.to(by_token.dtype).unsqueeze(-1) * by_token).sum(1).to(z.dtype)


class LatentMoE(nn.Module):
    """Router, latent projections, routed experts and the shared experts (one fused MLP on the full-width input)."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = Router(cfg)
        self.experts: Experts | PackedExperts = Experts(cfg)
        if cfg.routed_expert_hidden_size is not None:
            self.routed_expert_down_proj = Linear(cfg.hidden_size, cfg.latent_size)
            if cfg.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(cfg.latent_size, cfg.rms_norm_eps)
            self.routed_expert_up_proj = Linear(cfg.latent_size, cfg.hidden_size)
        if cfg.num_shared_experts:
            self.shared_experts = GatedMLP(cfg, cfg.shared_size)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        flat = x.flatten(0, 1)
        routing = self.gate(flat)
        y = self._to_model(routed(self.experts, self._to_latent(flat), routing)).view_as(x)
        return y + self.shared_experts(x) if self.cfg.num_shared_experts else y

    def _to_latent(self, x: Tensor) -> Tensor:
        return x if self.cfg.routed_expert_hidden_size is None else self.routed_expert_down_proj(x)

    def _to_model(self, y: Tensor) -> Tensor:
        if self.cfg.routed_expert_hidden_size is None:
            return y
        # The norm acts on the weighted sum: a sum of norms would be another model.
        return self.routed_expert_up_proj(self.routed_expert_norm(y) if self.cfg.latent_moe_use_norm else y)
