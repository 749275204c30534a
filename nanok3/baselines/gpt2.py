"""GPT-2 (Radford et al. 2019): softmax attention over all earlier tokens, learned positions.

    x      = token embedding + position embedding
    x     <- x + W_o softmax_causal(q k^T / sqrt(K)) v + b_o        q, k, v one biased product of LayerNorm(x)
    x     <- x + W_down gelu(W_up LayerNorm(x) + b_up) + b_down
    logits = E LayerNorm(x)                                          the head is the embedding

Initialised as the released code does: N(0, 0.02), positions N(0, 0.01), biases zero, and what writes into the residual
stream divided by sqrt(2 layers). No dropout: no text is read twice here. Ours: a position is a token's place in its
own document of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.baselines.frame import Baseline, BaselineConfig, Row, softmax_attention
from nanok3.model.decoder import Embedding


@dataclass(frozen=True, kw_only=True)
class GPT2Config(BaselineConfig):
    """GPT-2 small is 12 layers of 768 with 12 heads."""

    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True


class BiasedLinear(nn.Module):
    """y = x W^T + b, both cast to x's dtype at use."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)


class LayerNorm(nn.Module):
    """w * (x - mean) / sqrt(var + eps) + b."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Queries, keys and values from one product."""

    def __init__(self, cfg: GPT2Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.qkv_proj = BiasedLinear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.o_proj = BiasedLinear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Float[Tensor, "B T D"], row: Row) -> Float[Tensor, "B T D"]:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, -1, self.cfg.head_dim)).unbind(2)
        out: Tensor = self.o_proj(softmax_attention(q, k, v, row).flatten(2))
        return out

    def flops(self, context: int) -> float:
        return 4 * self.cfg.hidden_size * (context + 1) / 2


class MLP(nn.Module):
    def __init__(self, cfg: GPT2Config) -> None:
        super().__init__()
        self.up_proj = BiasedLinear(cfg.hidden_size, cfg.mlp_ratio * cfg.hidden_size)
        self.down_proj = BiasedLinear(cfg.mlp_ratio * cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        out: Tensor = self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))
        return out


class GPT2Layer(nn.Module):
    def __init__(self, cfg: GPT2Config) -> None:
        super().__init__()
        self.input_norm = LayerNorm(cfg.hidden_size, cfg.norm_eps)
        self.mixer = Attention(cfg)
        self.mlp_norm = LayerNorm(cfg.hidden_size, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Float[Tensor, "B T D"], row: Row) -> Float[Tensor, "B T D"]:
        x = x + self.mixer(self.input_norm(x), row)
        return x + self.mlp(self.mlp_norm(x))


class GPT2(Baseline):
    """`GPT2(cfg)`: weights drawn anew. ValueError, when called, for a document longer than the table of positions."""

    cfg: GPT2Config

    def __init__(self, cfg: GPT2Config) -> None:
        layers = (GPT2Layer(cfg) for _ in range(cfg.num_hidden_layers))
        super().__init__(cfg, layers, LayerNorm(cfg.hidden_size, cfg.norm_eps))
        self.embed_positions = Embedding(cfg.max_position_embeddings, cfg.hidden_size)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def embed(self, input_ids: Int[Tensor, "B T"], row: Row) -> Float[Tensor, "B T D"]:
        longest, allowed = int(row.position.max()) + 1, self.cfg.max_position_embeddings
        if longest > allowed:
            raise ValueError(f"a document has {longest} tokens; GPT-2 knows {allowed} positions")
        embedded: Tensor = self.embed_tokens(input_ids) + self.embed_positions(row.position[None])
        return embedded

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.embed_positions.weight, std=self.cfg.initializer_range / 2)
        residual = self.cfg.initializer_range / (2 * self.cfg.num_hidden_layers) ** 0.5
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(p, std=residual)


def parameters(cfg: GPT2Config) -> int:
    """Tokens (twice where the head has its own table), positions, and a layer's matrices, biases and two norms."""
    D, r = cfg.hidden_size, cfg.mlp_ratio
    layer = (4 + 2 * r) * D * D + (3 + 1 + r + 1) * D + 4 * D
    tables = cfg.vocab_size * (1 if cfg.tie_word_embeddings else 2) + cfg.max_position_embeddings
    return tables * D + cfg.num_hidden_layers * layer + 2 * D
