"""Linear attention (Katharopoulos et al. 2020): the softmax replaced by a product of features, and so by a memory.

    o_i = sum_{j <= i} (f(q_i) . f(k_j)) v_j  /  sum_{j <= i} f(q_i) . f(k_j)          f(x) = elu(x) + 1 > 0
        = f(q_i)^T S_i / f(q_i) . z_i          S_i = S_{i-1} + f(k_i) v_i^T,   z_i = z_{i-1} + f(k_i)

The first line is what it means, the second what makes it linear in length: a matrix S that only ever adds. Nothing is
forgotten and nothing is corrected; the next rung, the delta rule, corrects. `linear_attention` goes C = 64 tokens at a
time: the chunk itself by the first line, all earlier ones by the second. The normaliser z rides along as one more value
channel that is always 1. No positions, as in K3. Everything around it is the modern GPT's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanok3.baselines.frame import Baseline, BaselineConfig, Layer, Row
from nanok3.model.basics import Linear, at_least_float32

CHUNK = 64


def features(x: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    return F.elu(x) + 1


def linear_attention_reference(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"]
) -> Float[Tensor, "B T H V"]:
    """The first line, with the whole score matrix."""
    scores = torch.einsum("bthk,bshk->bhts", features(q), features(k)).tril()
    return torch.einsum("bhts,bshv->bthv", scores / scores.sum(-1, keepdim=True), v)


def linear_attention(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"]
) -> Float[Tensor, "B T H V"]:
    """The same in chunks, in at least float32."""
    tokens, dtype = q.shape[1], v.dtype
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    q, k, v = (_chunks(x) for x in (features(q), features(k), F.pad(v, (0, 1), value=1.0)))
    written = k.mT @ v
    S = written.cumsum(2) - written  # what stood in memory before the chunk
    o = (q @ S + (q @ k.mT).tril() @ v).flatten(2, 3)[:, :, :tokens]
    return (o[..., :-1] / o[..., -1:]).transpose(1, 2).to(dtype)


def _chunks(x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B H M C D"]:
    missing = -x.shape[1] % CHUNK
    return F.pad(x, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, CHUNK))


class LinearAttention(nn.Module):
    def __init__(self, cfg: BaselineConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj, self.k_proj, self.v_proj = (Linear(cfg.hidden_size, cfg.hidden_size) for _ in range(3))
        self.o_proj = Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Float[Tensor, "B T D"], row: Row) -> Float[Tensor, "B T D"]:
        heads = (p(x).unflatten(-1, (-1, self.cfg.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        documents = zip(*(row.split(x) for x in heads))
        out: Tensor = self.o_proj(torch.cat([linear_attention(*d) for d in documents], dim=1).flatten(2))
        return out

    def flops(self, context: int) -> float:
        return 4 * self.cfg.hidden_size * (self.cfg.head_dim + CHUNK)


class LinearAttentionLM(Baseline):
    """`LinearAttentionLM(cfg)`: weights drawn anew."""

    def __init__(self, cfg: BaselineConfig) -> None:
        super().__init__(cfg, (Layer(cfg, LinearAttention(cfg)) for _ in range(cfg.num_hidden_layers)))
        self.reset_parameters()


def parameters(cfg: BaselineConfig) -> int:
    """The modern GPT's without norms on queries and keys."""
    D = cfg.hidden_size
    return 2 * cfg.vocab_size * D + cfg.num_hidden_layers * ((4 + 2 * cfg.mlp_ratio) * D * D + 2 * D) + D
