"""Gated multi-head latent attention without positions: exact global attention over compressed tokens (report 2.1,
architecture 3.3).

Each token leaves one row of L + R numbers behind (512 + 64 in K3): a normalised latent c and a key part r that all
heads share. Head h reads from it

    k_h = [W_k,h c | r]        v_h = W_v,h c        a = softmax_causal(q_h . k_h / sqrt(192))        o_h = a v_h

and the layer gives W_o (o * sigmoid(W_g x)). Nothing is rotated: the part that the official names call `rope` carries
no position. Two forms of the same numbers:

    expanded   make k and v for every head, then ordinary attention: cheapest when all tokens are new
    absorbed   move W_k into the query and W_v behind the sum, and attend to the rows themselves: what decoding wants,
               since q_h . W_k,h c = (W_k,h^T q_h) . c; the scale stays 192^-1/2

Absorbed queries and sums are L wide instead of 192 and 128: above some hundred new tokens it is cheaper to expand the
old rows once more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import Linear, RMSNorm, at_least_float32, check_cu_seqlens
from nanok3.model.cache import LatentCache, PackedLatents

SCORES_AT_ONCE = 1 << 26
"""Scores that the absorbed form holds at a time: 256 MiB in float32."""
EXPANDED_AT_MOST = 1 << 28
"""Numbers of keys and values that are made of rows read before."""


def causal_attention_reference(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S H K"], v: Float[Tensor, "B S H V"], scale: float
) -> Float[Tensor, "B T H V"]:
    """Softmax attention with the whole score matrix; the last query sees all S keys, the one before it S - 1, ..."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    scores = scale * torch.einsum("bthk,bshk->bhts", q, k)
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(k.shape[1] - q.shape[1] + 1)
    return torch.einsum("bhts,bshv->bthv", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def causal_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
) -> Float[Tensor, "B T H V"]:
    """The same for T = S without a T x T matrix, document by document. The result stays float32: rounding the output
    before the gate has a bias that training picks up (report 2.1)."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    o = attention_cpu(q, k, v, scale, cu_seqlens)
    if o is not None:
        return o
    # Split, not sliced: the backward of a split writes each gradient once, that of a slice fills the whole row anew.
    lengths = [end - start for start, end in zip(bounds, bounds[1:])]
    documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v)))
    parts = [_attend(a, b, c, scale) for a, b, c in documents if a.shape[1]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) if parts else at_least_float32(v)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One document. V is padded to K channels: torch's fused attention on a CPU wants both alike and else falls back to
    the whole matrix."""
    channels = v.shape[-1]
    v = F.pad(v, (0, max(0, q.shape[-1] - channels)))
    q, k, v = (at_least_float32(x).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :channels].transpose(1, 2)


def attention_cpu(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H V"],
    scale: float,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
) -> Float[Tensor, "B T H V"] | None:
    """`causal_attention_reference`, document by document, in C++; or None where it does not apply: another device,
    float64, no compiler, gradients with more keys than queries."""
    from nanok3.kernels import attention_cpu

    o = attention_cpu.causal_attention(q, k, v, scale, cu_seqlens)
    return None if o is NotImplemented else o


def latent_attention(
    q_nope: Float[Tensor, "B T H N"],
    q_rope: Float[Tensor, "B T H R"],
    latents: Float[Tensor, "B S LR"],
    kv_b: Float[Tensor, "H NV L"],
    scale: float,
) -> Float[Tensor, "B T H V"]:
    """The absorbed form: q reads the S cached rows directly; kv_b holds W_k,h (first N rows) and W_v,h of each head.
    Scores, softmax and sums in at least float32."""
    nope, rank = q_nope.shape[-1], kv_b.shape[-1]
    q_nope, q_rope, rows, kv_b = (at_least_float32(x) for x in (q_nope, q_rope, latents, kv_b))
    queries = torch.cat((torch.einsum("bthn,hnl->bthl", q_nope, kv_b[:, :nope]), q_rope), dim=-1)
    before = rows.shape[1] - queries.shape[1]
    size = max(1, SCORES_AT_ONCE // (rows.shape[0] * queries.shape[2] * max(rows.shape[1], 1)))
    read = []
    for start in range(0, queries.shape[1], size):
        block = queries[:, start : start + size]
        visible = rows[:, : before + start + block.shape[1]]
        scores = scale * torch.einsum("bthl,bsl->bhts", block, visible)
        if block.shape[1] > 1:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=rows.device).triu(before + start + 1)
            scores = scores.masked_fill(future, -torch.inf)
        read.append(torch.einsum("bhts,bsl->bthl", scores.softmax(-1), visible[..., :rank]))
    return torch.einsum("bthl,hvl->bthv", torch.cat(read, dim=1), kv_b[:, nope:])


class GatedMLA(nn.Module):
    """One MLA layer. kimi_linear checkpoints have no query bottleneck (q_proj) and no output gate."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        heads, width = cfg.num_attention_heads, cfg.hidden_size
        self.heads, self.nope, self.rope, self.v_dim = (
            heads,
            cfg.qk_nope_head_dim,
            cfg.qk_rope_head_dim,
            cfg.v_head_dim,
        )
        self.scale = cfg.qk_head_dim**-0.5
        if cfg.q_lora_rank is None:
            self.q_proj = Linear(width, heads * cfg.qk_head_dim)
        else:
            self.q_a_proj = Linear(width, cfg.q_lora_rank)
            self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, cfg.qk_norm_eps)
            self.q_b_proj = Linear(cfg.q_lora_rank, heads * cfg.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(width, cfg.latent_cache_size)
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank, cfg.qk_norm_eps)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, heads * (self.nope + self.v_dim))
        if cfg.mla_use_output_gate:
            self.g_proj = Linear(width, heads * self.v_dim)
        self.o_proj = Linear(heads * self.v_dim, width)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        cu_seqlens: Int[Tensor, " n1"] | None = None,
        cache: LatentCache | PackedLatents | None = None,
    ) -> Float[Tensor, "B T D"]:
        """x: the normed layer input. A cache is advanced by x's tokens, which also read what it held before; with
        cu_seqlens it has one for each document."""
        q, latents = self.queries(x), self.latents(x)
        if isinstance(cache, PackedLatents):
            assert cu_seqlens is not None
            o = self._documents(q, latents, cu_seqlens, cache)
        else:
            o = self._read(q, latents, cu_seqlens, cache)
        o = o.flatten(2)
        if self.cfg.mla_use_output_gate:
            o = o * torch.sigmoid(at_least_float32(self.g_proj(x)))
        return self.o_proj(o.to(x.dtype))

    def _read(self, q: Tensor, latents: Tensor, cu_seqlens: Tensor | None, cache: LatentCache | None) -> Tensor:
        """What the tokens with these rows find among those that they see."""
        if cache is not None and cache.tokens:
            return self._with_earlier(q, cache.append(latents))
        if cache is not None:
            cache.append(latents)
        k, v = self.keys_values(latents)
        return causal_attention(q, k, v, self.scale, cu_seqlens)

    def _documents(self, q: Tensor, latents: Tensor, cu_seqlens: Tensor, cache: PackedLatents) -> Tensor:
        """Documents that go on from rows of their own; all at once where none has any."""
        bounds = check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
        lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        rows = latents.split(lengths, dim=1)
        if any(one.tokens for one in cache.each):
            documents = zip(q.split(lengths, dim=1), rows, cache.each, strict=True)
            return torch.cat([self._read(a, b, None, one) for a, b, one in documents if a.shape[1]], dim=1)
        for part, one in zip(rows, cache.each, strict=True):
            one.append(part)
        return self._read(q, latents, cu_seqlens, None)

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """[nope | rope] per head."""
        if self.cfg.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.heads, self.nope + self.rope))

    def latents(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T LR"]:
        """The row a token leaves behind: the latent, normalised, and the shared key part as it is."""
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.cfg.kv_lora_rank, self.rope), dim=-1)
        return torch.cat((self.kv_a_layernorm(latent), shared), dim=-1)

    def keys_values(
        self, latents: Float[Tensor, "B T LR"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H V"]]:
        """Every head's keys [nope | shared] and values from the rows."""
        latent, shared = latents.split((self.cfg.kv_lora_rank, self.rope), dim=-1)
        both = self.kv_b_proj(latent).unflatten(-1, (self.heads, self.nope + self.v_dim))
        k_nope, v = both.split((self.nope, self.v_dim), dim=-1)
        return torch.cat((k_nope, shared.unsqueeze(2).expand(-1, -1, self.heads, -1)), dim=-1), v

    def queries_keys(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
        """What the softmax compares; for observers such as QK-Clip."""
        return self.queries(x), self.keys_values(self.latents(x))[0]

    def _with_earlier(self, q: Tensor, latents: Tensor) -> Tensor:
        """The last queries of `latents`, in the form that multiplies less."""
        o = attention_cpu(q, *self.keys_values(latents), self.scale) if self._expansion_pays(q, latents) else None
        return self._absorbed(q, latents) if o is None else o

    def _expansion_pays(self, q: Tensor, latents: Tensor) -> bool:
        made = self.nope + self.v_dim
        saved_per_query = 2 * self.cfg.kv_lora_rank - made
        small = latents.shape[0] * latents.shape[1] * self.heads * (made + self.rope) <= EXPANDED_AT_MOST
        return small and q.shape[1] * saved_per_query > made * self.cfg.kv_lora_rank and not torch.is_grad_enabled()

    def _absorbed(self, q: Tensor, latents: Tensor) -> Tensor:
        kv_b = self.kv_b_proj.weight.to(q.dtype).unflatten(0, (self.heads, self.nope + self.v_dim))
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        return latent_attention(q_nope, q_rope, latents, kv_b, self.scale)
