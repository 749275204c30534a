"""A modern dense GPT: the same attention as GPT-2's, and everything around it as small models train best today.

    q, k   <- rms_norm(W_q x), rms_norm(W_k x) per head, then rotated by position (RoPE)
    y       = W_o softmax_causal(q k^T / sqrt(K)) v
    mlp     = W_down relu(W_up x)^2

No biases, RMSNorm before each half, the head not tied to the embedding, outputs into the residual stream start at
zero, matrices trained with Muon. None of it is K3's: it is the strongest plain rival of its size that we know how to
build. Rotary positions: Su et al. 2021; norms on queries and keys: Henry et al. 2020; squared ReLU: So et al. 2021.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.baselines.frame import Baseline, BaselineConfig, Layer, Row, softmax_attention
from nanok3.model.basics import Linear, RMSNorm

ROPE_BASE = 10_000.0


def rotate(x: Float[Tensor, "B T H K"], position: Int[Tensor, " T"]) -> Float[Tensor, "B T H K"]:
    """Channel pairs (i, i + K/2) turned by position * base^(-2i/K): q . k then depends on the distance alone."""
    half = x.shape[-1] // 2
    rates = ROPE_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position.float()[:, None] * rates
    cos, sin = (f(angle).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class RotaryAttention(nn.Module):
    """Softmax attention with normed, rotated queries and keys."""

    def __init__(self, cfg: BaselineConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj, self.k_proj, self.v_proj = (Linear(cfg.hidden_size, cfg.hidden_size) for _ in range(3))
        self.q_norm, self.k_norm = (RMSNorm(cfg.head_dim, cfg.norm_eps) for _ in range(2))
        self.o_proj = Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Float[Tensor, "B T D"], row: Row) -> Float[Tensor, "B T D"]:
        q, k, v = (p(x).unflatten(-1, (-1, self.cfg.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), row.position), rotate(self.k_norm(k), row.position)
        out: Tensor = self.o_proj(softmax_attention(q, k, v, row).flatten(2))
        return out

    def flops(self, context: int) -> float:
        return 4 * self.cfg.hidden_size * (context + 1) / 2


class ModernGPT(Baseline):
    """`ModernGPT(cfg)`: weights drawn anew. ValueError for heads of odd width."""

    def __init__(self, cfg: BaselineConfig) -> None:
        if cfg.head_dim % 2:
            raise ValueError(f"hidden_size / num_attention_heads is {cfg.head_dim}; rotary positions need it even")
        super().__init__(cfg, (Layer(cfg, RotaryAttention(cfg)) for _ in range(cfg.num_hidden_layers)))
        self.reset_parameters()


def parameters(cfg: BaselineConfig) -> int:
    """Embedding and head; four square matrices, the MLP's two and four norms a layer; the final norm."""
    D, K = cfg.hidden_size, cfg.head_dim
    layer = (4 + 2 * cfg.mlp_ratio) * D * D + 2 * D + 2 * K
    return 2 * cfg.vocab_size * D + cfg.num_hidden_layers * layer + D
