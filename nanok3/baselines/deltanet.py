"""DeltaNet (Yang et al. 2024): a memory that corrects what it holds, gated or not.

    e_i = v_i - S_{i-1}^T k_i          the error of what memory says for this key
    S_i = S_{i-1} + b_i k_i e_i^T      b = sigmoid(W_b x), unit keys and queries
    o_i = S_i^T q_i

With `gated` (Gated DeltaNet, Yang et al. 2025) the whole memory first fades by one number a head and token, e^g; KDA,
the next rung, gives every key channel a number of its own. So both are the KDA operator with a decay that is zero, or
the same for all channels. Queries, keys and values pass a short convolution, the output a norm per head, as published.
Ours: the gate has K3's bounded form, g = -5 sigmoid(e^A (W_a x + c)), so that the two rungs differ in nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanok3.baselines.frame import Baseline, BaselineConfig, Layer, Row
from nanok3.model.basics import Linear, RMSNorm, at_least_float32
from nanok3.model.kda import CHUNK, LOWEST_BOUNDED_GATE, kda, l2_normalize, log_decay
from nanok3.model.short_conv import ShortConv


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(BaselineConfig):
    gated: bool = False
    """Whether memory fades."""
    short_conv_kernel_size: int = 4


class DeltaRule(nn.Module):
    """One mixer; `a_proj`, `A_log` and `dt_bias` exist where it is gated."""

    def __init__(self, cfg: DeltaNetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        D, H, taps = cfg.hidden_size, cfg.num_attention_heads, cfg.short_conv_kernel_size
        self.q_proj, self.k_proj, self.v_proj = (Linear(D, D) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(D, taps) for _ in range(3))
        self.b_proj = Linear(D, H)
        if cfg.gated:
            self.a_proj = Linear(D, H)
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(H))
        self.o_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.o_proj = Linear(D, D)

    def forward(self, x: Float[Tensor, "B T D"], row: Row) -> Float[Tensor, "B T D"]:
        position = None if row.cu_seqlens is None else row.position
        q, k, v = (
            conv(proj(x), None, position).unflatten(-1, (-1, self.cfg.head_dim))
            for proj, conv in (
                (self.q_proj, self.q_conv1d),
                (self.k_proj, self.k_conv1d),
                (self.v_proj, self.v_conv1d),
            )
        )
        b = torch.sigmoid(at_least_float32(self.b_proj(x)))
        o, _ = kda(l2_normalize(q), l2_normalize(k), v, self.decay(x, k), b, cu_seqlens=row.cu_seqlens)
        out: Tensor = self.o_proj(self.o_norm(o).flatten(2))
        return out

    def decay(self, x: Float[Tensor, "B T D"], k: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        """g of every key channel: zero, or the head's."""
        if not self.cfg.gated:
            return torch.zeros_like(at_least_float32(k))
        g = log_decay(self.a_proj(x).unsqueeze(-1), self.A_log, self.dt_bias, LOWEST_BOUNDED_GATE)
        return g.expand(k.shape).contiguous()

    @torch.no_grad()
    def reset_gates(self) -> None:
        """As in KDA: A = 0, and a step drawn log-uniformly from [0.001, 0.1] behind the softplus."""
        if self.cfg.gated:
            self.A_log.zero_()
            step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def flops(self, context: int) -> float:
        K = self.cfg.head_dim
        return self.cfg.num_attention_heads * (6 * K * K + CHUNK * 10 * K)


class DeltaNet(Baseline):
    """`DeltaNet(cfg)`: weights drawn anew."""

    def __init__(self, cfg: DeltaNetConfig) -> None:
        super().__init__(cfg, (Layer(cfg, DeltaRule(cfg)) for _ in range(cfg.num_hidden_layers)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, DeltaRule):
                module.reset_gates()


def parameters(cfg: DeltaNetConfig) -> int:
    """Linear attention's, with three convolutions, the write strength, the output norm, and the gate where it is."""
    D, H = cfg.hidden_size, cfg.num_attention_heads
    mixer = 4 * D * D + 3 * D * cfg.short_conv_kernel_size + D * H + cfg.head_dim
    if cfg.gated:
        mixer += D * H + 2 * H
    layer = mixer + 2 * cfg.mlp_ratio * D * D + 2 * D
    return 2 * cfg.vocab_size * D + cfg.num_hidden_layers * layer + D
