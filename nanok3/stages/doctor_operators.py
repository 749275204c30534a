"""The operators that `nanok3 doctor` looks at, one entry each: the model's function, its plain form, its inputs.

A new operator is a new entry of OPERATORS and nothing else: the report finds out by itself which backend it takes, the
checks compare it with its reference, and the measurements time it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.eval.exactness import Draw, Operator
from nanok3.eval.exactness_model import awkward_model
from nanok3.model import moonvit
from nanok3.model.attn_res import mix, mix_reference
from nanok3.model.basics import Linear, RMSNorm, rms_normalize
from nanok3.model.cache import ModelState
from nanok3.model.decoder import K3
from nanok3.model.kda import OutputNorm, kda, kda_reference, l2_normalize, log_decay
from nanok3.model.latent_moe import Experts, PackedExperts, Routing, routed, routed_reference
from nanok3.model.mla import causal_attention, causal_attention_reference, latent_attention
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.native_decode import NativeDecoder
from nanok3.model.short_conv import short_conv, short_conv_reference
from nanok3.model.situ import situ_glu, situ_glu_reference
from nanok3.train.loss import IGNORE, cross_entropy, cross_entropy_reference

EPS = 1e-5
CHUNK = 16


# ---------------------------------------------------------------------- KDA


def draw_kda(draw: Draw) -> tuple[Any, ...]:
    """K != V, two value heads a key head, a state, packed documents of 1, 16, 0, 33 and 17 tokens."""
    H, HV, K, V, lengths = (8, 8, 64, 64, [512]) if draw.large else (2, 4, 20, 28, [1, 16, 0, 33, 17])
    T = sum(lengths)
    q, k = (F.normalize(draw.wide(1, T, H, K), dim=-1).to(draw.dtype) for _ in range(2))
    gates = -5 * draw.uniform(1, T, HV, K) ** 4, draw.uniform(1, T, HV)
    state = draw.wide(len(lengths), HV, K, V) / K**0.5
    bounds = torch.tensor([0, *lengths], device=draw.device).cumsum(0)
    return q, k, draw(1, T, HV, V), *gates, state, True, bounds


def draw_step(draw: Draw) -> tuple[Any, ...]:
    B, H, HV, K, V = (1, 8, 8, 64, 64) if draw.large else (3, 2, 4, 20, 28)
    q, k = (F.normalize(draw.wide(B, 1, H, K), dim=-1).to(draw.dtype) for _ in range(2))
    gates = -5 * draw.uniform(B, 1, HV, K) ** 4, draw.uniform(B, 1, HV)
    return q, k, draw(B, 1, HV, V), *gates, draw.wide(B, HV, K, V) / K**0.5, True


def kda_flops(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> float:
    """Of the chunk form: products with the state, and pairs of tokens of a chunk."""
    K, V = q.shape[-1], v.shape[-1]
    return 2.0 * v.shape[:-1].numel() * (3 * K * V + CHUNK * (K + V))


# ---------------------------------------------------------------------- what stands around it


def draw_conv(draw: Draw) -> tuple[Any, ...]:
    B, T, C = (1, 16384, 512) if draw.large else (2, 37, 45)
    return draw(B, T, C), draw.wide(C, 1, 4)


def l2_reference(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def draw_gate(draw: Draw) -> tuple[Any, ...]:
    T, H, K = (16384, 8, 64) if draw.large else (37, 3, 20)
    return draw(1, T, H, K), draw.wide(H), draw.wide(H * K), -5.0


def gate_reference(z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
    return bound * torch.sigmoid(A_log.exp()[:, None] * (z + dt_bias.view(z.shape[-2:])))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.func.functional_call(RMSNorm(x.shape[-1], EPS), {"weight": weight}, (x,))
    return out


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.func.functional_call(OutputNorm(o.shape[-1], EPS), {"weight": weight}, (o, gate))
    return out


def draw_norm(draw: Draw) -> tuple[Any, ...]:
    T, D = (16384, 256) if draw.large else (37, 45)
    return draw(1, T, D), draw.wide(D)


def draw_gated_norm(draw: Draw) -> tuple[Any, ...]:
    T, H, V = (16384, 8, 64) if draw.large else (37, 3, 20)
    return draw(1, T, H, V), draw(1, T, H, V), draw.wide(V)


def gated_norm_reference(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return rms_normalize(o, EPS) * weight * torch.sigmoid(gate)


def draw_situ(draw: Draw) -> tuple[Any, ...]:
    n, inner = (16384, 512) if draw.large else (37, 45)
    return draw(n, inner), draw(n, inner)


def draw_mix(draw: Draw) -> tuple[Any, ...]:
    T, D, S = (16384, 256, 4) if draw.large else (37, 45, 3)
    return draw.wide(D), draw.wide(1, D) / D**0.5, *(draw(1, T, D) for _ in range(S))


def mixed(norm: Tensor, query: Tensor, *sources: Tensor) -> Tensor:
    return mix(sources, norm, query, EPS)


def mixed_reference(norm: Tensor, query: Tensor, *sources: Tensor) -> Tensor:
    return mix_reference(sources, norm, query, EPS)


# ---------------------------------------------------------------------- products


def linear(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.func.functional_call(Linear(*reversed(weight.shape)), {"weight": weight}, (x,))
    return out


def draw_linear(draw: Draw) -> tuple[Any, ...]:
    n, i, o = (512, 512, 512) if draw.large else (37, 45, 51)
    return draw(n, i), draw(o, i) / i**0.5


def moe_config(draw: Draw) -> K3Config:
    return K3Config.small() if draw.large else awkward_model().cfg


def draw_experts(draw: Draw) -> tuple[Any, ...]:
    """Experts' weights in the model's order (w1, w2, w3), one expert without tokens."""
    cfg, n = moe_config(draw), 512 if draw.large else 37
    E, inner, latent = cfg.num_experts, cfg.moe_intermediate_size, cfg.latent_size
    up, down = (E, inner, latent), (E, latent, inner)
    weights = [nn.Parameter(draw(*shape) / shape[-1] ** 0.5, requires_grad=False) for shape in (up, down, up)]
    scores = draw.uniform(n, E)
    scores[:, 1] = 0
    chosen = scores.topk(cfg.num_experts_per_token, dim=-1).indices
    return cfg, draw(n, latent), chosen, scores.gather(1, chosen), *weights


def experts(cfg: K3Config, z: Tensor, chosen: Tensor, p: Tensor, *weights: Tensor) -> Tensor:
    return routed(_experts(cfg, weights), z, Routing(p, chosen, p))


def experts_reference(cfg: K3Config, z: Tensor, chosen: Tensor, p: Tensor, *weights: Tensor) -> Tensor:
    return routed_reference(_experts(cfg, weights), z, Routing(p, chosen, p))


def _experts(cfg: K3Config, weights: tuple[Tensor, ...]) -> Experts:
    with torch.device("meta"):
        module = Experts(cfg)
    for name, weight in zip(("w1", "w2", "w3"), weights):
        delattr(module, name)
        setattr(module, name, weight)
    return module


def expert_flops(_cfg: K3Config, _z: Tensor, chosen: Tensor, _p: Tensor, w1: Tensor, *_: Tensor) -> float:
    return 6.0 * chosen.numel() * w1[0].numel()


def draw_packed(draw: Draw) -> tuple[Any, ...]:
    """Widths are multiples of the 32 weights that share a scale. Large: one token that every expert works for."""
    tiny = K3Config.tiny(num_experts=5, num_experts_per_token=2)
    large = replace(tiny, num_experts_per_token=5, moe_intermediate_size=1024, routed_expert_hidden_size=1024)
    cfg, n = (large, 1) if draw.large else (tiny, 13)
    E, inner, latent = cfg.num_experts, cfg.moe_intermediate_size, cfg.latent_size
    shapes = (E, inner, latent), (E, latent, inner), (E, inner, latent)
    packed = [x for shape in shapes for x in quantize_mxfp4(draw.wide(*shape) / shape[-1] ** 0.5)]
    chosen = draw.uniform(n, E).topk(cfg.num_experts_per_token, dim=-1).indices
    return cfg, draw(n, latent), chosen, draw.uniform(*chosen.shape), *packed


def packed_experts(cfg: K3Config, z: Tensor, chosen: Tensor, p: Tensor, *packed: Tensor) -> Tensor:
    with torch.device("meta"):
        module = PackedExperts(cfg).eval()
    names = [f"{w}_{part}" for w in ("w1", "w2", "w3") for part in ("packed", "scale")]
    for name, tensor in zip(names, packed):
        setattr(module, name, tensor)
    return routed(module, z, Routing(p, chosen, p))


def packed_reads(_cfg: K3Config, _z: Tensor, _chosen: Tensor, _p: Tensor, *packed: Tensor) -> float:
    return float(sum(x.nbytes for x in packed))


def packed_reference(cfg: K3Config, z: Tensor, chosen: Tensor, p: Tensor, *packed: Tensor) -> Tensor:
    weights = [dequantize_mxfp4(w, scale, z.dtype) for w, scale in zip(packed[::2], packed[1::2])]
    return experts_reference(cfg, z, chosen, p, *weights)


# ---------------------------------------------------------------------- attention and loss


def draw_attention(draw: Draw) -> tuple[Any, ...]:
    """V narrower than K, packed documents."""
    T, H, K, V, lengths = (1024, 4, 80, 64, [1024]) if draw.large else (67, 3, 32, 20, [1, 33, 33])
    bounds = torch.tensor([0, *lengths], device=draw.device).cumsum(0)
    return draw(1, T, H, K), draw(1, T, H, K), draw(1, T, H, V), bounds


def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    return causal_attention(q, k, v, q.shape[-1] ** -0.5, bounds)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    parts = zip(*(x.split(bounds.diff().tolist(), dim=1) for x in (q, k, v)))
    return torch.cat([causal_attention_reference(a, b, c, q.shape[-1] ** -0.5) for a, b, c in parts], dim=1)


def attention_flops(q: Tensor, _k: Tensor, v: Tensor, _bounds: Tensor) -> float:
    _, T, H, K = q.shape
    return T * T * H * float(K + v.shape[-1])


def draw_latent(draw: Draw) -> tuple[Any, ...]:
    B, T, S, H, N, R, L = (1, 1, 4096, 4, 64, 32, 64) if draw.large else (2, 3, 37, 3, 20, 12, 36)
    return draw(B, T, H, N), draw(B, T, H, R), draw(B, S, L + R), draw(H, 2 * N, L) / L**0.5, (N + R) ** -0.5


def latent_reference(q_nope: Tensor, q_rope: Tensor, rows: Tensor, kv_b: Tensor, scale: float) -> Tensor:
    """Keys and values of every head, then ordinary attention."""
    N, L = q_nope.shape[-1], kv_b.shape[-1]
    k = torch.einsum("bsl,hnl->bshn", rows[..., :L], kv_b[:, :N])
    v = torch.einsum("bsl,hvl->bshv", rows[..., :L], kv_b[:, N:])
    shared = rows[..., None, L:].expand(-1, -1, k.shape[2], -1)
    return causal_attention_reference(torch.cat((q_nope, q_rope), -1), torch.cat((k, shared), -1), v, scale)


def draw_loss(draw: Draw) -> tuple[Any, ...]:
    n, D, vocab = (1024, 256, 4096) if draw.large else (37, 45, 301)
    targets = (draw.uniform(n) * vocab).long()
    targets[3] = IGNORE
    return draw(n, D), draw(vocab, D) / D**0.5, targets


# ---------------------------------------------------------------------- pictures


def draw_patches(draw: Draw) -> tuple[Any, ...]:
    """Packed items: a clip, the smallest picture, one that fills no block."""
    H, K, grids = (4, 32, [(1, 32, 32)]) if draw.large else (3, 20, [(2, 4, 4), (1, 2, 2), (1, 6, 10)])
    lengths = [t * h * w for t, h, w in grids]
    turn = torch.cat([moonvit.turns(grid, K, torch.empty(0, device=draw.device)) for grid in grids])
    return draw(sum(lengths), 3, H, K), turn, lengths


def patch_flops(qkv: Tensor, _turn: Tensor, lengths: list[int]) -> float:
    return sum(4.0 * length * length for length in lengths) * qkv[0, 0].numel()


def draw_gelu(draw: Draw) -> tuple[Any, ...]:
    n, inner = (16384, 512) if draw.large else (37, 45)
    return (draw(n, inner),)


def gelu_reference(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# ---------------------------------------------------------------------- a token through all layers


def draw_token(draw: Draw) -> tuple[Any, ...]:
    """A model, what reads its next token here, the text, and the state before the text's last token."""
    model = K3(K3Config.small()).eval().requires_grad_(False) if draw.large else awkward_model()
    model = model.to(draw.device, draw.dtype)
    ids = (draw.uniform(1 if draw.large else 2, 20) * model.cfg.vocab_size).long()
    state = model.new_state(len(ids))
    with torch.no_grad():
        model(ids[:, :-1], state=state)
    return model, NativeDecoder.of(model), ids, state


def next_token(model: K3, decoder: NativeDecoder | str, ids: Tensor, state: ModelState) -> Tensor:
    """As `nanok3 generate` decodes."""
    state = state.clone()
    if isinstance(decoder, NativeDecoder):
        return decoder.step_state(ids[:, -1:], state).logits
    return model(ids[:, -1:], state=state).logits[:, 0]


def next_token_reference(model: K3, _decoder: NativeDecoder | str, ids: Tensor, _state: ModelState) -> Tensor:
    """The whole text at once, in float64."""
    return copy.deepcopy(model).cpu().double()(ids.cpu()).logits[:, -1]


def token_reads(model: K3, *_: Any) -> float:
    """Every weight once, but of the embedding a row and of the experts those that are chosen."""
    cfg, total = model.cfg, 0.0
    for name, weight in model.named_parameters():
        chosen = cfg.num_experts_per_token / cfg.num_experts if ".experts." in name else 1.0
        total += 0 if "embed_tokens" in name else chosen * weight.nbytes
    return total


OPERATORS: tuple[Operator, ...] = (
    Operator("KDA", kda, kda_reference, draw_kda, flops=kda_flops),
    Operator("KDA, one token", kda, kda_reference, draw_step),
    Operator("short convolution", short_conv, short_conv_reference, draw_conv),
    Operator("key norm", l2_normalize, l2_reference, lambda draw: draw_gate(draw)[:1]),
    Operator("decay gate", log_decay, gate_reference, draw_gate),
    Operator("RMSNorm", rms_norm, lambda x, w: rms_normalize(x, EPS) * w, draw_norm),
    Operator("gated output norm", gated_norm, gated_norm_reference, draw_gated_norm),
    Operator("SiTU-GLU", situ_glu, situ_glu_reference, draw_situ),
    Operator("depth mix", mixed, mixed_reference, draw_mix),
    Operator(
        "linear",
        linear,
        F.linear,
        draw_linear,
        flops=lambda x, w: 2.0 * len(x) * w.numel(),
        why_torch="torch's product is the faster one on this processor",
    ),
    Operator("experts", experts, experts_reference, draw_experts, flops=expert_flops),
    Operator("experts in MXFP4", packed_experts, packed_reference, draw_packed, gradients=False, reads=packed_reads),
    Operator("attention, prefill", attention, attention_reference, draw_attention, flops=attention_flops),
    Operator(
        "attention, decode",
        latent_attention,
        latent_reference,
        draw_latent,
        why_torch="torch's; within a model see `token, all layers`",
    ),
    Operator("attention, pictures", moonvit.attention, moonvit.attention_reference, draw_patches, flops=patch_flops),
    Operator("GELU, pictures", moonvit.gelu, gelu_reference, draw_gelu),
    Operator(
        "token, all layers", next_token, next_token_reference, draw_token, False, (torch.float32,), reads=token_reads
    ),
    Operator(
        "loss",
        cross_entropy,
        cross_entropy_reference,
        draw_loss,
        flops=lambda h, w, _: 2.0 * len(h) * w.numel(),
        why_torch="torch's products, some of the tokens at a time",
    ),
)
