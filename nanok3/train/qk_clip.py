"""QK-Clip: attention logits that grow too large are scaled down at the weights that make them.

    S_h  = max over documents and i >= j of  q_hi . k_hj / sqrt(K)        largest logit of head h in a step
    g_h  = min(1, tau / S_h)                                              tau = 100; heads below it are not touched
    key part of its own     W_q,h <- g_h^alpha W_q,h,   W_k,h <- g_h^(1 - alpha) W_k,h        alpha = 1/2
    key part all share      W_q,h <- g_h W_q,h          (the shared key belongs to the other heads as well)

so that every logit of the head is multiplied by g_h exactly. Kimi K2 introduced it, K3 keeps it (report 3). Only MLA
needs it: KDA's queries and keys have unit length and no softmax. The query rows lie behind the norm of the query
latent and the key rows behind the norm of the key latent, so no norm undoes the scaling. It is applied to the float32
masters; the momentum of the optimizer is left alone.

The maximum costs a second pass over queries and keys, in tiles, without a T x T matrix. Ours: it may be taken on every
n-th step only (`every`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import product_dtype


def max_logits_reference(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], scale: float, cu_seqlens: Int[Tensor, " n1"] | None = None
) -> Float[Tensor, " H"]:
    """`max_logits` with the whole score matrix."""
    position = torch.arange(q.shape[1], device=q.device)
    allowed = position[:, None] >= position
    if cu_seqlens is not None:
        document = torch.bucketize(position, cu_seqlens[1:], right=True)
        allowed &= document[:, None] == document
    scores = scale * torch.einsum("bthk,bshk->bhts", q, k)
    return scores.masked_fill(~allowed, -torch.inf).amax((0, 2, 3)).to(_at_least_float32(q.dtype))


def max_logits(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    scale: float,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
    tile: int = 256,
) -> Float[Tensor, " H"]:
    """Largest scaled causal logit of each head; with `cu_seqlens` (B = 1) inside each packed document only.

    At most B x H x tile x tile logits exist at a time. -inf where there are no tokens. Multiplied in float32 where the
    machine has no fast product of bf16.
    """
    largest = q.new_full((q.shape[2],), -torch.inf, dtype=_at_least_float32(q.dtype))
    q, k = (x.to(product_dtype(x)).transpose(1, 2) for x in (q, k))
    bounds = [0, q.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        for i in range(begin, end, tile):
            rows = slice(i, min(i + tile, end))
            for j in range(begin, rows.stop, tile):
                columns = slice(j, min(j + tile, rows.stop))
                scores = q[:, :, rows] @ k[:, :, columns].mT
                if columns.stop > i + 1:  # the tile on the diagonal
                    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(i - j + 1)
                    scores = scores.masked_fill_(future, -torch.inf)
                largest = torch.maximum(largest, scores.amax((0, 2, 3)).to(largest.dtype) * scale)
    return largest


def clip_weights(
    q_weight: Float[Tensor, "HK C"],
    kv_weight: Float[Tensor, "HNV L"],
    factors: Float[Tensor, " H"],
    nope: int,
    alpha: float = 0.5,
) -> None:
    """Scale in place the logits of head h by `factors[h]`: q_weight holds [own | shared] rows of each head, kv_weight
    [key | value] rows; the first `nope` of each are the head's own query and key parts."""
    heads = len(factors)
    q, kv = q_weight.view(heads, -1, q_weight.shape[1]), kv_weight.view(heads, -1, kv_weight.shape[1])
    g = factors.to(q.dtype)[:, None, None]
    q[:, :nope] *= g**alpha
    q[:, nope:] *= g
    kv[:, :nope] *= g ** (1 - alpha)


def clip_factors(largest: Float[Tensor, "*b"], threshold: float) -> Float[Tensor, "*b"]:
    """g = min(1, threshold / S); 1 where S is not finite (nothing was seen, or the run has diverged anyway)."""
    over = (largest > threshold) & largest.isfinite()
    return torch.where(over, threshold / largest, 1.0)


class QKClip:
    """Watches the MLA layers of a model and clips them once per optimizer step.

        with clip.observe():                around the forward of each microbatch
            hidden = model.hidden_states(ids)
        ...
        logits = clip.step()                after the optimizer's step

    An MLA layer is a submodule with a method `queries_keys(x)`, called as `layer(x, cu_seqlens, cache)`. Only forwards
    in training mode count, and only every `every`-th step is watched, the first one included. `clip=False` reports
    without touching a weight.
    """

    def __init__(
        self, model: nn.Module, threshold: float = 100.0, alpha: float = 0.5, every: int = 1, clip: bool = True
    ) -> None:
        for name, value, allowed in (
            ("threshold", threshold, threshold > 0),
            ("alpha", alpha, 0 <= alpha <= 1),
            ("every", every, every >= 1),
        ):
            if not allowed:
                raise ValueError(f"{name} is {value}; allowed: threshold > 0, alpha in [0, 1], every >= 1")
        self.layers = {name: m for name, m in model.named_modules() if hasattr(m, "queries_keys")}
        self.threshold, self.alpha, self.every, self.clip = threshold, alpha, every, clip
        self.steps = 0
        self._largest: dict[str, Tensor] = {}
        if self.layers:
            cfg = getattr(model, "cfg", None)
            if not isinstance(cfg, K3Config):
                raise ValueError(f"model.cfg is {cfg!r}; QK-Clip needs a K3Config to tell the parts of a head")
            self.nope, self.scale = cfg.qk_nope_head_dim, cfg.qk_head_dim**-0.5

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Take the largest logits of the forwards inside, if this step is one to watch."""
        watched = self.layers if self.steps % self.every == 0 else {}
        handles = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, layer in watched.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def step(self, all_reduce_max: Callable[[Tensor], Any] | None = None) -> dict[str, Float[Tensor, " H"]]:
        """Clip, forget, and return the largest logits seen by layer name, before clipping; nothing on other steps.

        `all_reduce_max` takes the maximum in place over all ranks that saw different tokens; it is called once.
        """
        self.steps += 1
        if not self._largest:
            return {}
        names = [name for name in self.layers if name in self._largest]
        largest = torch.stack([self._largest[name] for name in names])
        self._largest = {}
        if all_reduce_max is not None:
            all_reduce_max(largest)
        if self.clip:
            factors = clip_factors(largest, self.threshold)
            for i in (factors < 1).any(1).nonzero().flatten().tolist():
                layer: Any = self.layers[names[i]]
                q_proj = layer.q_b_proj if hasattr(layer, "q_b_proj") else layer.q_proj
                clip_weights(q_proj.weight, layer.kv_b_proj.weight, factors[i], self.nope, self.alpha)
        return dict(zip(names, largest, strict=True))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        @torch.no_grad()
        def watch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A checkpointed forward that runs again in backward would give the same maximum, at the same cost.
            if not layer.training or torch._C._current_graph_task_id() != -1:
                return
            x, cu_seqlens = _arguments(*args, **kwargs)
            q, k = layer.queries_keys(x)
            seen = max_logits(q, k, self.scale, cu_seqlens)
            self._largest[name] = torch.maximum(self._largest[name], seen) if name in self._largest else seen

        return watch

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Which step it is, and the maxima in the middle of one."""
        return {"steps": self.steps, "largest": {name: t.clone() for name, t in self._largest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError for layers this model does not have."""
        unknown = sorted(set(state["largest"]) - set(self.layers))
        if unknown:
            raise ValueError(f"QK-Clip state names layers {unknown}; this model has {list(self.layers)}")
        self.steps = state["steps"]
        devices = {name: next(layer.parameters()).device for name, layer in self.layers.items()}
        self._largest = {name: t.to(devices[name], copy=True) for name, t in state["largest"].items()}


def _arguments(x: Tensor, cu_seqlens: Tensor | None = None, cache: Any = None) -> tuple[Tensor, Tensor | None]:
    """What the maximum needs of the arguments of an MLA layer."""
    return x, cu_seqlens


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
