"""What a model does inside, in numbers small enough for a report: where each sub-layer reads, how long each memory
channel keeps, which experts work.

    depth_weights    mean over tokens of the softmax over AttnRes sources, one row a sub-layer       (report 2.2)
    kda_half_lives   ln 2 / -mean(g): tokens after which a channel has forgotten half by decay alone (report 2.1)
    expert_loads     share of the token-expert pairs that each routed expert received                (report 2.3)

The model is watched through forward hooks and left as it was: no gradient, evaluation mode (so that no balancing
statistic moves), mode restored. Layers are numbered from 0, as in the parameter names. The choice of these three, and
the mean as the summary, are ours. Everything returned is plain lists and numbers, ready for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model import attn_res
from nanok3.model.attn_res import DepthSources
from nanok3.model.decoder import K3, DecoderLayer
from nanok3.model.kda import KDA, log_decay
from nanok3.model.latent_moe import LatentMoE, Routing


def diagnose(model: K3, input_ids: Int[Tensor, "B T"]) -> dict[str, Any]:
    """The three pictures of one batch: {"depth_weights", "kda_half_lives", "expert_loads", "tokens"}."""
    return {
        "depth_weights": depth_weights(model, input_ids),
        "kda_half_lives": kda_half_lives(model, input_ids),
        "expert_loads": expert_loads(model, input_ids),
        "tokens": input_ids.numel(),
    }


# ---------------------------------------------------------------------- depth


def depth_weights(model: K3, input_ids: Int[Tensor, "B T"]) -> dict[str, Any]:
    """{"labels": one a sub-layer, in order of work, the last being what the head reads; "sources": one a source;
    "weights": for each sub-layer the mean weight of each source it could see, so that row i is as long as the bank
    had grown}. The last weight of a row belongs to the sum of its own block so far; every row sums to 1. All three
    are empty for a model without attention residuals."""
    cfg = model.cfg
    labels: list[str] = []
    rows: list[list[float]] = []
    depth: DepthSources

    def keep(label: str, owner: nn.Module, side: str) -> None:
        norm, query = getattr(owner, f"{side}_res_norm"), getattr(owner, f"{side}_res_proj")
        labels.append(label)
        rows.append(_mean_weights(depth.sources(), norm.weight, query.weight, norm.eps))

    def at_layer(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal depth
        assert isinstance(layer, DecoderLayer)
        depth = inputs[0]
        keep(f"{layer.layer} {layer.kind.upper()}", layer, "self_attention")

    def at_feed_forward(layer: DecoderLayer) -> Callable[..., None]:
        # By now the attention's output lies in the layer's DepthSources, and its mix is what the norm is given.
        return lambda *_: keep(f"{layer.layer} {_feed_forward_name(cfg, layer.layer)}", layer, "mlp")

    if cfg.attn_res_block_size is not None:
        hooks = [layer.register_forward_pre_hook(at_layer) for layer in _layers(model)]
        hooks += [
            layer.post_attention_layernorm.register_forward_pre_hook(at_feed_forward(layer)) for layer in _layers(model)
        ]
        hooks.append(model.model.norm.register_forward_pre_hook(lambda *_: keep("output", model.model, "output_attn")))
        _run(model, input_ids, hooks)
    return {"labels": labels, "sources": depth_sources(cfg) if labels else [], "weights": rows}


def depth_sources(cfg: K3Config) -> list[str]:
    """The name of each AttnRes source: the embedding, then one sum a block (or, in the full form, one output a
    sub-layer)."""
    layers = range(cfg.num_hidden_layers)
    if cfg.attn_res_full:
        outputs = [(f"{l} {cfg.kinds[l].upper()}", f"{l} {_feed_forward_name(cfg, l)}") for l in layers]
        return ["embedding", *(name for pair in outputs for name in pair)]
    assert cfg.attn_res_block_size is not None
    starts = layers[:: cfg.attn_res_block_size]
    ends = [*starts[1:], cfg.num_hidden_layers]
    return ["embedding", *(f"layers {a}–{b - 1}" if b - a > 1 else f"layer {a}" for a, b in zip(starts, ends))]


def _feed_forward_name(cfg: K3Config, layer: int) -> str:
    return "MoE" if cfg.is_moe(layer) else "MLP"


def _mean_weights(sources: list[Tensor], norm: Tensor, query: Tensor, eps: float) -> list[float]:
    if len(sources) == 1:
        return [1.0]
    return attn_res.depth_weights(sources, norm, query, eps).double().mean((1, 2)).tolist()


# ---------------------------------------------------------------------- KDA's retention


def kda_half_lives(model: K3, input_ids: Int[Tensor, "B T"]) -> dict[str, Any]:
    """{"layers": ids of the KDA layers, "half_lives": for each layer, head and key channel the half-life in tokens
    under its mean log decay}. Decay alone: the delta rule also removes what it overwrites."""
    layers: list[int] = []
    lives: list[list[list[float]]] = []

    def after_gate(layer: int, kda: KDA) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, z: Tensor) -> None:
            g = log_decay(z.unflatten(-1, (kda.heads, kda.dim)), kda.A_log, kda.dt_bias, kda.cfg.gate_lower_bound)
            layers.append(layer)
            lives.append(half_life(g.double().mean((0, 1))).tolist())

        return keep

    kdas = [(layer.layer, layer.self_attn) for layer in _layers(model) if isinstance(layer.self_attn, KDA)]
    _run(model, input_ids, [kda.f_b_proj.register_forward_hook(after_gate(l, kda)) for l, kda in kdas])
    return {"layers": layers, "half_lives": lives}


def half_life(log_decay: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """ln 2 / -g tokens; at most 1e9, which stands for "never" (JSON has no infinity)."""
    return math.log(2) / (-log_decay).clamp(min=math.log(2) / 1e9)


# ---------------------------------------------------------------------- experts


def expert_loads(model: K3, input_ids: Int[Tensor, "B T"]) -> dict[str, Any]:
    """{"layers": ids of the MoE layers, "loads": for each of them the fraction of token-expert pairs per expert}.
    A row sums to 1; a balanced expert has 1 / E."""
    layers: list[int] = []
    loads: list[list[float]] = []

    def after_router(layer: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, routing: Routing) -> None:
            counts = torch.bincount(routing.chosen.flatten(), minlength=model.cfg.num_experts)
            layers.append(layer)
            loads.append((counts.double() / counts.sum()).tolist())

        return keep

    moes = [(layer.layer, layer.feed_forward) for layer in _layers(model) if isinstance(layer.feed_forward, LatentMoE)]
    _run(model, input_ids, [moe.gate.register_forward_hook(after_router(l)) for l, moe in moes])
    return {"layers": layers, "loads": loads}


# ---------------------------------------------------------------------- watching a model


def _layers(model: K3) -> list[DecoderLayer]:
    return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]


def _run(model: K3, input_ids: Tensor, hooks: list[Any]) -> None:
    """One forward with `hooks` in place; they are removed whatever happens."""
    try:
        with evaluating(model):
            model.hidden_states(input_ids)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients and evaluation mode inside; the mode of before afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
