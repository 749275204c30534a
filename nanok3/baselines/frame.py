"""What every rung of the ladder shares, so that one rung differs from the next by its token mixer.

    x      = embedding of the tokens
    x     <- x + mixer(norm(x))          the rung
    x     <- x + mlp(norm(x))
    logits = head(norm(x))

A baseline has the face that training and measuring ask of K3: `hidden_states(input_ids, cu_seqlens=...)`, `lm_head`,
`compute_dtype`, documents packed into one row that do not see each other. It has no memory to carry over calls: it is
trained and measured, not served.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.model.basics import Linear, RMSNorm, check_cu_seqlens, position_in_document
from nanok3.model.decoder import Embedding, Output


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Shapes of one baseline."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    mlp_ratio: int = 4
    """Inner width of the MLP over the model's."""
    norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if str(f.type) == "int" and value < 1:
                raise ValueError(f"field {f.name!r} is {value}; it must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"field 'hidden_size' is {self.hidden_size}; it must divide by num_attention_heads")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class Row:
    """Where the documents of a batch begin: the bounds of a packed row (None: every row is one document), and each
    token's place in its own document."""

    cu_seqlens: Int[Tensor, " n1"] | None
    position: Int[Tensor, " T"]

    def split(self, x: Float[Tensor, "B T ..."]) -> tuple[Tensor, ...]:
        """x cut into its documents, empty ones left out."""
        if self.cu_seqlens is None:
            return (x,)
        return tuple(part for part in x.split(self.cu_seqlens.diff().tolist(), dim=1) if part.shape[1])


def row_of(input_ids: Int[Tensor, "B T"], cu_seqlens: Int[Tensor, " n1"] | None) -> Row:
    """ValueError for bounds that do not cover the row."""
    tokens = input_ids.shape[1]
    if cu_seqlens is None:
        return Row(None, torch.arange(tokens, device=input_ids.device))
    check_cu_seqlens(cu_seqlens, *input_ids.shape)
    return Row(cu_seqlens, position_in_document(cu_seqlens, tokens))


def softmax_attention(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H K"], row: Row
) -> Float[Tensor, "B T H K"]:
    """Causal attention in the dtype of q, document by document, without a T x T matrix."""
    documents = zip(*(row.split(x) for x in (q, k, v)))
    attend = F.scaled_dot_product_attention
    parts = [attend(*(x.transpose(1, 2) for x in qkv), is_causal=True) for qkv in documents]  # type: ignore[misc]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


class Mixer(Protocol):
    """The rung: from a layer's normed input to what it adds."""

    def __call__(self, x: Tensor, row: Row) -> Tensor: ...

    def flops(self, context: int) -> float:
        """Operations a token besides the products with weights, forward only."""
        ...


class SquaredReLU(nn.Module):
    """W_down relu(W_up x)^2."""

    def __init__(self, cfg: BaselineConfig) -> None:
        super().__init__()
        self.up_proj = Linear(cfg.hidden_size, cfg.mlp_ratio * cfg.hidden_size)
        self.down_proj = Linear(cfg.mlp_ratio * cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        out: Tensor = self.down_proj(F.relu(self.up_proj(x)).square())
        return out


class Layer(nn.Module):
    """A mixer and a squared-ReLU MLP, each behind an RMSNorm."""

    def __init__(self, cfg: BaselineConfig, mixer: nn.Module) -> None:
        super().__init__()
        self.input_norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.mlp = SquaredReLU(cfg)

    def forward(self, x: Float[Tensor, "B T D"], row: Row) -> Float[Tensor, "B T D"]:
        x = x + self.mixer(self.input_norm(x), row)
        return x + self.mlp(self.mlp_norm(x))


class Baseline(nn.Module):
    """Embedding, layers, final norm, head. Matrices start as N(0, initializer_range), those that write into the
    residual stream (`o_proj`, `down_proj`) at zero, so that every layer begins as the identity."""

    def __init__(self, cfg: BaselineConfig, layers: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype: torch.dtype | None = None
        self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm or RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)

    def forward(self, input_ids: Int[Tensor, "B T"], cu_seqlens: Int[Tensor, " n1"] | None = None) -> Output:
        """cu_seqlens (n + 1): documents packed into one row (B = 1), none of which sees another."""
        return Output(self.lm_head(self.hidden_states(input_ids, cu_seqlens=cu_seqlens)))

    def hidden_states(
        self, input_ids: Int[Tensor, "B T"], *, cu_seqlens: Int[Tensor, " n1"] | None = None, state: None = None
    ) -> Float[Tensor, "B T D"]:
        """The final normed hidden, before the head."""
        row = row_of(input_ids, cu_seqlens)
        x = self.embed(input_ids, row).to(self.compute_dtype or self.embed_tokens.weight.dtype)
        for layer in self.layers:
            x = layer(x, row)
        normed: Tensor = self.norm(x)
        return normed

    def embed(self, input_ids: Int[Tensor, "B T"], row: Row) -> Float[Tensor, "B T D"]:
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def new_state(self, batch_size: int = 1) -> None:
        raise ValueError("a baseline carries nothing over from call to call; read each document in one row")

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Operations a token in a document of `context` tokens; a training step makes three times the forward's."""
        matrices = sum(p.numel() for name, p in self.named_parameters() if p.ndim == 2 and "embed_" not in name)
        if self.lm_head.weight is self.embed_tokens.weight:
            matrices += self.lm_head.weight.numel()
        mixers = sum(layer.mixer.flops(context) for layer in self.layers)  # type: ignore[operator, union-attr]
        return (2 * matrices + mixers) * (3 if training else 1)

    def reset_parameters(self) -> None:
        for name, module in self.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is None or module is self:
                continue
            reset(self.cfg.initializer_range)
            if name.endswith(("o_proj", "down_proj")):
                nn.init.zeros_(module.weight)
