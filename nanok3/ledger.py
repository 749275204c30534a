"""What a config costs before anything is built: parameters, bytes, arithmetic and memory, from its numbers alone.

    weights(cfg)                       every tensor of a checkpoint, equal ones counted together
    parameters, active_parameters      the sums over it: 2.78 T and 104.2 B for the release
    flops_per_token(cfg, T, training)  2 x active matrix parameters + what the token mixers and the depth reads add
    state_bytes(cfg, T)                what a sequence of T tokens leaves behind
    activation_bytes(cfg)              what a training forward keeps for its backward

Arithmetic counts a multiply-add as two operations and leaves out what is elementwise (norms, activations, gates).
For one token, H heads of K = V channels, n tokens visible to it, S sources at a depth read, C = 16 tokens a chunk:

    matrices     2 P            P active matrix parameters: experts chosen, shared ones, router, head; not the embedding
    KDA          H (6 K V + C (6 K + 4 V))      in chunks (prefill, training)
                 H 7 K V                        one token at a time: retain, compare, write, read
    MLA          2 H n (192 + 128)              expanded keys and values (prefill, training; n is T/2 on average)
                 2 H n (576 + 512)              absorbed into the latent cache (decode)
    depth reads  4 D S          a score and a weighted sum per source
    convolution  2 W            per channel

The sources are the official shapes (architecture section 2), the book for the derived numbers, and for what a training
step keeps the modules of `nanok3.model` themselves, against which the tests measure it. Nothing here needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nanok3.config import K3Config
from nanok3.official import MXFP4_BLOCK

KDA_CHUNK = 16
"""Tokens per chunk of the chunked KDA, as in nanok3.model.kda."""
KDA_TOKENS_PER_STATE = 64
"""Tokens per state that KDA keeps for its backward, as in nanok3.kernels.kda_cpu."""
PRESETS = ("tiny", "small", "base", "k3")

EMBEDDING, HEAD, KDA, MLA, DENSE = "embedding", "head", "KDA", "gated MLA", "dense MLP"
ROUTED, SHARED, ROUTER, LATENT = "routed experts", "shared experts", "routers", "latent projections"
DEPTH, NORMS, VISION, PROJECTOR = "attention residuals", "norms", "vision tower", "projector"
PREDICTION = "prediction layer"
_OF_TEXT = (EMBEDDING, KDA, MLA, DENSE, ROUTED, SHARED, ROUTER, LATENT, DEPTH, NORMS, HEAD, PREDICTION)
COMPONENTS = (*_OF_TEXT, VISION, PROJECTOR)


# ---------------------------------------------------------------------- numbers as people write them

_COUNT_UNITS = {"": 1, "K": 1024, "M": 1024**2}
_BYTE_UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_NUMBER = re.compile(r"(?P<number>\d[\d_,]*(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)$")


def parse_count(field: str, text: str | int) -> int:
    """A number of tokens or sequences: '4096', '128K', '1M'. K is 1,024 and M is 1,048,576, as context lengths are
    quoted. ValueError names the field, the value and what is allowed."""
    return _parse(
        field, text, _COUNT_UNITS, "a whole number of at least 1, with K (1,024) or M (1,048,576) if you like"
    )


def parse_bytes(field: str, text: str | int) -> int:
    """A size in bytes: '192GiB' (powers of 1,024) or '80GB' (powers of 1,000). ValueError as in `parse_count`."""
    return _parse(field, text, _BYTE_UNITS, "a number with a unit, such as 80GB (1,000^3 bytes) or 192GiB (1,024^3)")


def _parse(field: str, text: str | int, units: dict[str, int], allowed: str) -> int:
    match = _NUMBER.match(str(text).strip())
    by_name = {name.lower(): size for name, size in units.items()}
    unit = by_name.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{field} is {text!r}; allowed: {allowed}")
    value = float(match["number"].replace(",", "").replace("_", "")) * unit
    if value < 1 or value != int(value):
        raise ValueError(f"{field} is {text!r}; allowed: {allowed}")
    return int(value)


def scaled(value: int | float, step: int = 1000, units: str = "kMBT") -> str:
    """Four digits and a prefix: 104,190,127,968 -> '104.2 B'. With step 1024: 434,110,464 -> '414 M'."""
    if abs(value) < step:
        return f"{value:.4g}"
    index = 0
    value /= step
    while abs(value) >= step * 0.99995 and index < len(units) - 1:
        value /= step
        index += 1
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {units[index]}"


def binary_bytes(value: int | float) -> str:
    """Memory, in powers of 1,024: '414 MiB'."""
    return f"{value:,.0f} B" if value < 1024 else scaled(value, 1024, "KMGTPE") + "iB"


def decimal_bytes(value: int | float) -> str:
    """Files, in powers of 1,000: '1.561 TB'."""
    return f"{value:,.0f} B" if value < 1000 else scaled(value, 1000, "kMGTPE") + "B"


def as_count(tokens: int) -> str:
    """The inverse of `parse_count`: 131072 -> '128K'."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def find_config(target: str) -> tuple[K3Config, Path | None]:
    """The config a user means, and its folder if it has one: a preset ('k3'), a preset at another depth ('small@12'),
    a checkpoint folder or config.json, or a run folder, whose final model, else its newest checkpoint, is taken.
    ValueError says what is allowed."""
    preset, at, depth = target.partition("@")
    if preset in PRESETS:
        cfg: K3Config = getattr(K3Config, preset)()
        if at and not depth.isdecimal():
            raise ValueError(f"config is {target!r}; after @ stands a number of layers, as in small@12")
        return (cfg.at_depth(int(depth)) if at else cfg), None
    path = Path(target)
    for folder in (path, path / "model", *_checkpoints(path)):
        if (folder / "config.json").is_file():
            return K3Config.from_json(folder / "config.json"), folder
    if path.is_file():
        return K3Config.from_json(path), path.parent if path.name == "config.json" else None
    presets = ", ".join(PRESETS)
    raise ValueError(
        f"config is {target!r}; allowed: a preset ({presets}), a preset at a depth (small@12), a checkpoint folder "
        "with a config.json, or a run folder with a model/ or checkpoints/step-N/model/ in it"
    )


def _checkpoints(run: Path) -> list[Path]:
    """The models of a run's checkpoints, newest first."""
    steps = [(int(p.name.removeprefix("step-")), p) for p in run.glob("checkpoints/step-*") if p.name[5:].isdecimal()]
    return [path / "model" for _, path in sorted(steps, reverse=True)]


# ---------------------------------------------------------------------- the ledger


@dataclass(frozen=True)
class Weight:
    """`copies` equal tensors; a token of text multiplies with, or reads from, `used` of them."""

    component: str
    part: str
    name: str
    """The official name, with * for the numbers of layers, vision blocks and experts."""
    shape: tuple[int, ...]
    copies: int = 1
    used: int = 1
    multiplies: bool = False
    """A matrix: two operations per parameter and token."""
    float32: bool = False
    """Kept in float32 whatever the rest is stored in."""
    trained: bool = True
    """Moved by gradients; the routers' correction bias is not."""
    disk_shape: tuple[int, ...] | None = None
    """Where the file pads what the model does not."""

    @property
    def parameters(self) -> int:
        return self.copies * math.prod(self.shape)

    @property
    def active(self) -> int:
        return self.used * math.prod(self.shape)


def _matrix(component: str, part: str, name: str, rows: int, columns: int) -> Weight:
    return Weight(component, part, f"{name}.weight", (rows, columns), multiplies=True)


def _vector(component: str, part: str, name: str, *shape: int) -> Weight:
    return Weight(component, part, name, shape)


@cache
def weights(cfg: K3Config) -> tuple[Weight, ...]:
    """Every tensor of a checkpoint of `cfg`, equal ones together, in the order of COMPONENTS."""
    kda = cfg.kinds.count("kda")
    moe = sum(cfg.is_moe(l) for l in range(cfg.num_hidden_layers))
    groups: list[tuple[int, Iterator[Weight]]] = [
        (1, _ends(cfg)),
        (cfg.num_hidden_layers, _frame(cfg)),
        (kda, _kda(cfg)),
        (cfg.num_hidden_layers - kda, _mla(cfg)),
        (cfg.num_hidden_layers - moe, _mlp(cfg, DENSE, "mlp", cfg.intermediate_size)),
        (moe, _moe(cfg)),
        (cfg.num_nextn_predict_layers, _prediction(cfg)),
        (1, _vision(cfg)),
    ]
    found = [replace(w, copies=w.copies * n, used=w.used * n) for n, group in groups for w in group if n]
    return tuple(sorted(found, key=lambda w: COMPONENTS.index(w.component)))


def layer_weights(cfg: K3Config, layer: int) -> list[Weight]:
    """The tensors of one (0-based) layer."""
    mixer = _kda(cfg) if cfg.kinds[layer] == "kda" else _mla(cfg)
    channels = _moe(cfg) if cfg.is_moe(layer) else _mlp(cfg, DENSE, "mlp", cfg.intermediate_size)
    return [*_frame(cfg), *mixer, *channels]


def _layer(cfg: K3Config, name: str) -> str:
    return f"{cfg.text_prefix}model.layers.*.{name}"


def _ends(cfg: K3Config) -> Iterator[Weight]:
    """What stands before the first layer and after the last."""
    text, D = cfg.text_prefix, cfg.hidden_size
    yield _vector(EMBEDDING, "table", f"{text}model.embed_tokens.weight", cfg.vocab_size, D)
    yield _vector(NORMS, "final", f"{text}model.norm.weight", D)
    if cfg.attn_res_block_size is not None:
        yield _vector(DEPTH, "norms", f"{text}model.output_attn_res_norm.weight", D)
        yield _vector(DEPTH, "pseudo-queries", f"{text}model.output_attn_res_proj.weight", 1, D)
    yield _matrix(HEAD, "head", f"{text}lm_head", cfg.vocab_size, D)


def _frame(cfg: K3Config) -> Iterator[Weight]:
    """What every layer has around its two modules."""
    D = cfg.hidden_size
    yield _vector(NORMS, "before the mixer", _layer(cfg, "input_layernorm.weight"), D)
    yield _vector(NORMS, "before the channels", _layer(cfg, "post_attention_layernorm.weight"), D)
    if cfg.attn_res_block_size is not None:
        for side in ("self_attention", "mlp"):
            yield _vector(DEPTH, "norms", _layer(cfg, f"{side}_res_norm.weight"), D)
            yield _vector(DEPTH, "pseudo-queries", _layer(cfg, f"{side}_res_proj.weight"), 1, D)


def _kda(cfg: K3Config) -> Iterator[Weight]:
    D, H, K = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim
    released = cfg.model_type == "kimi_k3"  # kimi_linear rounds convolutions and output norms to the file's dtype
    for x in "qkv":
        yield _matrix(KDA, "q, k, v", _layer(cfg, f"self_attn.{x}_proj"), H * K, D)
    for x in "qkv":
        conv = _vector(
            KDA, "short convolutions", _layer(cfg, f"self_attn.{x}_conv1d.weight"), H * K, 1, cfg.short_conv_kernel_size
        )
        yield replace(conv, float32=released)
    yield _matrix(KDA, "decay", _layer(cfg, "self_attn.f_a_proj"), K, D)
    yield _matrix(KDA, "decay", _layer(cfg, "self_attn.f_b_proj"), H * K, K)
    padded = (-(-H // 128) * 128,) if released else (1, 1, H, 1)
    A_log = _vector(KDA, "decay", _layer(cfg, "self_attn.A_log"), H)
    yield replace(A_log, float32=True, disk_shape=padded)
    yield replace(_vector(KDA, "decay", _layer(cfg, "self_attn.dt_bias"), H * K), float32=True)
    yield _matrix(KDA, "write strength", _layer(cfg, "self_attn.b_proj"), H, D)
    if cfg.use_full_rank_gate:
        yield _matrix(KDA, "output gate", _layer(cfg, "self_attn.g_proj"), H * K, D)
    else:
        yield _matrix(KDA, "output gate", _layer(cfg, "self_attn.g_a_proj"), K, D)
        yield _matrix(KDA, "output gate", _layer(cfg, "self_attn.g_b_proj"), H * K, K)
    yield replace(_vector(KDA, "output norm", _layer(cfg, "self_attn.o_norm.weight"), K), float32=released)
    yield _matrix(KDA, "output", _layer(cfg, "self_attn.o_proj"), D, H * K)


def _mla(cfg: K3Config) -> Iterator[Weight]:
    D, H, V = cfg.hidden_size, cfg.num_attention_heads, cfg.v_head_dim
    if cfg.q_lora_rank is None:
        yield _matrix(MLA, "queries", _layer(cfg, "self_attn.q_proj"), H * cfg.qk_head_dim, D)
    else:
        yield _matrix(MLA, "queries", _layer(cfg, "self_attn.q_a_proj"), cfg.q_lora_rank, D)
        yield _vector(MLA, "queries", _layer(cfg, "self_attn.q_a_layernorm.weight"), cfg.q_lora_rank)
        yield _matrix(MLA, "queries", _layer(cfg, "self_attn.q_b_proj"), H * cfg.qk_head_dim, cfg.q_lora_rank)
    yield _matrix(MLA, "latents", _layer(cfg, "self_attn.kv_a_proj_with_mqa"), cfg.latent_cache_size, D)
    yield _vector(MLA, "latents", _layer(cfg, "self_attn.kv_a_layernorm.weight"), cfg.kv_lora_rank)
    rows = H * (cfg.qk_nope_head_dim + V)
    yield _matrix(MLA, "keys and values", _layer(cfg, "self_attn.kv_b_proj"), rows, cfg.kv_lora_rank)
    if cfg.mla_use_output_gate:
        yield _matrix(MLA, "output gate", _layer(cfg, "self_attn.g_proj"), H * V, D)
    yield _matrix(MLA, "output", _layer(cfg, "self_attn.o_proj"), D, H * V)


def _mlp(cfg: K3Config, component: str, module: str, inner: int) -> Iterator[Weight]:
    yield _matrix(component, "gate", _layer(cfg, f"{module}.gate_proj"), inner, cfg.hidden_size)
    yield _matrix(component, "up", _layer(cfg, f"{module}.up_proj"), inner, cfg.hidden_size)
    yield _matrix(component, "down", _layer(cfg, f"{module}.down_proj"), cfg.hidden_size, inner)


def _moe(cfg: K3Config) -> Iterator[Weight]:
    D, L, F, E = cfg.hidden_size, cfg.latent_size, cfg.moe_intermediate_size, cfg.num_experts
    for part, name, rows, columns in (("gate", "w1", F, L), ("down", "w2", L, F), ("up", "w3", F, L)):
        one = _matrix(ROUTED, part, _layer(cfg, f"block_sparse_moe.experts.*.{name}"), rows, columns)
        yield replace(one, copies=E, used=cfg.num_experts_per_token)
    yield _matrix(ROUTER, "scores", _layer(cfg, "block_sparse_moe.gate"), E, D)
    bias = _vector(ROUTER, "correction bias", _layer(cfg, "block_sparse_moe.gate.e_score_correction_bias"), E)
    yield replace(bias, float32=True, trained=False)
    if cfg.routed_expert_hidden_size is not None:
        yield _matrix(LATENT, "down", _layer(cfg, "block_sparse_moe.routed_expert_down_proj"), L, D)
        if cfg.latent_moe_use_norm:
            yield _vector(LATENT, "norm", _layer(cfg, "block_sparse_moe.routed_expert_norm.weight"), L)
        yield _matrix(LATENT, "up", _layer(cfg, "block_sparse_moe.routed_expert_up_proj"), D, L)
    if cfg.num_shared_experts:
        yield from _mlp(cfg, SHARED, "block_sparse_moe.shared_experts", cfg.shared_size)


def _prediction(cfg: K3Config) -> Iterator[Weight]:
    """One MLA layer with experts, and what joins a feature to a token (model/mtp.py): it learns beside the model, which
    says a token without it."""
    D = cfg.hidden_size
    own = [_vector(NORMS, "norms", _layer(cfg, f"{n}.weight"), D) for n in ("enorm", "hnorm", "shared_head.norm")]
    own += [_vector(NORMS, "norms", _layer(cfg, f"{n}_layernorm.weight"), D) for n in ("input", "post_attention")]
    own.append(_matrix(PREDICTION, "token and feature", _layer(cfg, "eh_proj"), D, 2 * D))
    for weight in (*own, *_mla(cfg), *_moe(cfg)):
        yield replace(weight, component=PREDICTION, used=0)


def _merged(cfg: K3Config) -> int:
    """Patches that become one token."""
    return math.prod(cfg.merge_kernel_size or (1,))


def _vision(cfg: K3Config) -> Iterator[Weight]:
    """The tower and the projector; text uses none of it."""
    if not cfg.has_vision:
        return
    assert cfg.vt_hidden_size and cfg.vt_num_hidden_layers and cfg.qkv_hidden_size and cfg.vt_intermediate_size
    assert cfg.patch_size and cfg.init_pos_emb_height and cfg.init_pos_emb_width
    D, inner, merged = cfg.vt_hidden_size, cfg.vt_intermediate_size, _merged(cfg) * cfg.vt_hidden_size
    block = "vision_tower.encoder.blocks.*"
    patches = _vector(VISION, "patches", "vision_tower.patch_embed.proj.weight", D, 3, cfg.patch_size, cfg.patch_size)
    rows, columns = cfg.init_pos_emb_height, cfg.init_pos_emb_width
    ends = [
        replace(patches, multiplies=True),
        _vector(VISION, "positions", "vision_tower.patch_embed.pos_emb.weight", rows, columns, D),
        _vector(VISION, "norms", "vision_tower.encoder.final_layernorm.weight", D),
        _matrix(PROJECTOR, "in", "mm_projector.proj.0", merged, merged),
        _matrix(PROJECTOR, "out", "mm_projector.proj.2", cfg.hidden_size, merged),
        _vector(PROJECTOR, "norm", "mm_projector.post_norm.weight", cfg.hidden_size),
    ]
    blocks = [
        _vector(VISION, "norms", f"{block}.norm0.weight", D),
        _vector(VISION, "norms", f"{block}.norm1.weight", D),
        _matrix(VISION, "attention", f"{block}.wqkv", 3 * cfg.qkv_hidden_size, D),
        _matrix(VISION, "attention", f"{block}.wo", D, cfg.qkv_hidden_size),
        _matrix(VISION, "MLP", f"{block}.mlp.fc0", inner, D),
        _matrix(VISION, "MLP", f"{block}.mlp.fc1", D, inner),
    ]
    yield from (replace(w, used=0) for w in ends)
    yield from (replace(w, copies=cfg.vt_num_hidden_layers, used=0) for w in blocks)


def parameters(cfg: K3Config) -> int:
    """All of them, the routers' correction biases included (as the reported 2.78 T does)."""
    return sum(w.parameters for w in weights(cfg))


def active_parameters(cfg: K3Config, embedding: bool = False) -> int:
    """Those one token of text uses. Two conventions: without the embedding table, of which a token reads one row (the
    reported 104.2 B), or with it. The vision part counts in neither."""
    return sum(w.active for w in weights(cfg) if embedding or w.component != EMBEDDING)


# ---------------------------------------------------------------------- bytes

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Precision:
    """plain: bytes of an ordinary number; packed: routed experts in MXFP4, 4 bits and one byte per 32 of them."""

    name: str
    plain: int
    packed: bool

    def nbytes(self, weight: Weight, on_disk: bool = False) -> int:
        """Bytes of all copies, in memory or as padded in a file."""
        shape = weight.disk_shape if on_disk and weight.disk_shape else weight.shape
        numbers = weight.copies * math.prod(shape)
        if self.packs(weight):
            return numbers // 2 + numbers // MXFP4_BLOCK
        return numbers * (max(4, self.plain) if weight.float32 else self.plain)

    def packs(self, weight: Weight) -> bool:
        return self.packed and weight.component == ROUTED


def stored_precision(cfg: K3Config) -> Precision:
    """What `cfg` says its checkpoint holds. ValueError for a dtype that checkpoints do not have."""
    if cfg.dtype not in _DTYPE_BYTES:
        raise ValueError(f"field 'dtype' is {cfg.dtype!r}; allowed: {', '.join(_DTYPE_BYTES)}")
    packed = cfg.expert_format is not None
    return Precision(f"MXFP4 experts, {cfg.dtype}" if packed else cfg.dtype, _DTYPE_BYTES[cfg.dtype], packed)


def checkpoint_bytes(cfg: K3Config) -> int:
    """The tensors of a checkpoint, without the files' headers (the index's `total_size`)."""
    stored = stored_precision(cfg)
    return sum(stored.nbytes(w, on_disk=True) for w in weights(cfg))


def checkpoint_tensors(cfg: K3Config) -> int:
    """How many there are; a packed matrix is two, its values and its scales."""
    stored = stored_precision(cfg)
    return sum(w.copies * (2 if stored.packs(w) else 1) for w in weights(cfg))


# ---------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Flops:
    """Operations for one token, by where they go."""

    matrices: float
    kda: float
    mla: float
    depth: float
    convolution: float

    @property
    def total(self) -> float:
        return self.matrices + self.kda + self.mla + self.depth + self.convolution


def prefill_flops(cfg: K3Config, tokens: int) -> Flops:
    """The mean over the tokens of one sequence read from its start: KDA in chunks, MLA expanded, token t seeing t."""
    K = cfg.kda_head_dim
    per_head = 6 * K * K + KDA_CHUNK * 10 * K
    return _flops(cfg, per_head, 2 * (cfg.qk_head_dim + cfg.v_head_dim) * (tokens + 1) / 2)


def decode_flops(cfg: K3Config, visible: int, absorbed: bool = True) -> Flops:
    """One new token that sees `visible` tokens, itself among them: KDA step by step, MLA absorbed into the latent
    cache, or over a cache of expanded keys and values as in the released Python."""
    K = cfg.kda_head_dim
    per_row = cfg.latent_cache_size + cfg.kv_lora_rank if absorbed else cfg.qk_head_dim + cfg.v_head_dim
    return _flops(cfg, 7 * K * K, 2 * per_row * visible)


def flops_per_token(cfg: K3Config, context: int, training: bool = False) -> float:
    """Operations a token in a sequence of `context` tokens: the forward, or forward and backward (three times as much:
    the backward makes two products for each of the forward's). Recomputation is not counted."""
    return prefill_flops(cfg, context).total * (3 if training else 1)


def prediction_flops(cfg: K3Config, context: int) -> float:
    """Operations a token of the prediction layer, and of the head that reads it, in the forward of training."""
    D, expert = cfg.hidden_size, 3 * cfg.moe_intermediate_size * cfg.latent_size
    once = sum(w.parameters for w in (*_mla(cfg), *_moe(cfg)) if w.multiplies and w.component != ROUTED)
    matrices = once + 2 * D * D + cfg.num_experts_per_token * expert + cfg.vocab_size * D
    return 2.0 * matrices + cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) * (context + 1)


def vision_flops(cfg: K3Config, patches: int) -> float:
    """The tower and the projector on one picture of so many patches. ValueError for a model without eyes."""
    if not cfg.has_vision:
        raise ValueError("this config has no vision tower (vt_hidden_size is null)")
    assert cfg.qkv_hidden_size and cfg.vt_num_hidden_layers
    rows = patches / _merged(cfg)
    seen = [(patches if w.component == VISION else rows, w) for w in weights(cfg) if w.component in (VISION, PROJECTOR)]
    matrices = sum(2 * times * w.parameters for times, w in seen if w.multiplies)
    return matrices + cfg.vt_num_hidden_layers * 4 * cfg.qkv_hidden_size * patches**2


def _flops(cfg: K3Config, kda_per_head: int, mla_per_head: int | float) -> Flops:
    kda = cfg.kinds.count("kda")
    mla = cfg.num_hidden_layers - kda
    return Flops(
        matrices=2.0 * sum(w.active for w in weights(cfg) if w.multiplies),
        kda=float(kda * cfg.kda_num_heads * kda_per_head),
        mla=float(mla * cfg.num_attention_heads * mla_per_head),
        depth=4.0 * cfg.hidden_size * sum(depth_reads(cfg)),
        convolution=2.0 * kda * 3 * cfg.short_conv_kernel_size * cfg.kda_num_heads * cfg.kda_head_dim,
    )


def bank_writes(cfg: K3Config, layer: int) -> bool:
    """Whether the (0-based) layer closes the running sum into the bank before its token mixer."""
    block = cfg.attn_res_block_size
    return cfg.attn_res_full or (block is not None and layer % block == 0)


def depth_reads(cfg: K3Config) -> list[int]:
    """Sources at each read over depth, in order: two a layer and the last one. A read of a single source is none."""
    if cfg.attn_res_block_size is None:
        return []
    bank, reads = 0, []
    for layer in range(cfg.num_hidden_layers):
        reads.append(bank + 1)
        bank += bank_writes(cfg, layer)
        reads.append(bank + 1)
        bank += cfg.attn_res_full
    return [n for n in [*reads, bank + 1] if n > 1]


def depth_sources(cfg: K3Config) -> int:
    """Sources of the last read, the most there are: 9 in the release. 1 without attention residuals."""
    return depth_reads(cfg)[-1] if cfg.attn_res_block_size is not None else 1


# ---------------------------------------------------------------------- what a sequence leaves behind


def recurrent_values(cfg: K3Config) -> int:
    """KDA's matrix S, numbers a layer and sequence: 1,572,864 in the release, 3 MiB in bfloat16."""
    return cfg.kda_num_heads * cfg.kda_head_dim**2


def convolution_values(cfg: K3Config) -> int:
    """The last inputs of the q, k and v convolutions, numbers a KDA layer and sequence."""
    return 3 * (cfg.short_conv_kernel_size - 1) * cfg.kda_num_heads * cfg.kda_head_dim


def expanded_values(cfg: K3Config) -> int:
    """Keys and values of every head, numbers an MLA layer and token (30,720), where the latent is 576."""
    return cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim)


def kda_state_bytes(cfg: K3Config) -> int:
    """One sequence's KDA state as this package holds it: S and the convolutions' history in float32."""
    return 4 * cfg.kinds.count("kda") * (recurrent_values(cfg) + convolution_values(cfg))


def latent_bytes(cfg: K3Config, plain: int = 2) -> int:
    """What one token adds to the MLA caches, at `plain` bytes a number: 27,648 in the release."""
    return plain * cfg.kinds.count("mla") * cfg.latent_cache_size


def state_bytes(cfg: K3Config, tokens: int, plain: int = 2) -> int:
    """Everything one sequence of so many tokens leaves behind."""
    return kda_state_bytes(cfg) + tokens * latent_bytes(cfg, plain)


# ---------------------------------------------------------------------- what a training forward keeps


@cache
def activation_bytes(cfg: K3Config, plain: int = 2, recompute: bool = False) -> int:
    """Bytes a token that stay until the backward: `plain` bytes (bfloat16 2, float32 4) for what runs in the compute
    dtype, 4 for the float32 islands.

    It holds, to the byte, for the CPU kernels (nanok3.kernels.*_cpu), which keep their inputs and make the rest again;
    for KDA heads whose width is a multiple of 32, and MLA values no wider than its keys (fused attention keeps no
    scores). The forms in torch, for other devices or without a compiler, keep more: 1.4 to 1.8 times as much in small.

    recompute: of each half of a layer only what it reads, and one whole half while it is computed again.
    """
    D, sums, reads = cfg.hidden_size, 1 + 2 * cfg.num_hidden_layers, depth_reads(cfg)
    # Ids, the running sums (the embedding first), the mixes read from them at three numbers a source, the final norm.
    depth = 8 + D * plain * (sums + len(reads) + 1) + 12 * sum(reads)
    halves = [layer_activations(cfg, l, plain) for l in range(cfg.num_hidden_layers)]
    return depth + (max(max(pair) for pair in halves) if recompute else sum(sum(pair) for pair in halves))


def layer_activations(cfg: K3Config, layer: int, plain: int) -> tuple[int, int]:
    """What the two halves of a (0-based) layer keep besides their inputs, bytes a token: norm and token mixer, norm
    and channels. The form is that of `activation_bytes`."""
    normed = cfg.hidden_size * plain
    mixer = _kda_activations(cfg, plain) if cfg.kinds[layer] == "kda" else _mla_activations(cfg, plain)
    dense = _mlp_activations(cfg, cfg.intermediate_size, plain)
    return normed + mixer, normed + (_moe_activations(cfg, plain) if cfg.is_moe(layer) else dense)


def _kda_activations(cfg: K3Config, plain: int) -> int:
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    bottlenecks = K * plain * (1 if cfg.use_full_rank_gate else 2)
    convolved = 3 + 2 + 2  # q, k, v before the convolutions; q and k before and after their norm
    gated = 3  # the operator's output, the gate, and the input of the output matrix
    # The decay's input; the softplus of the unbounded form is torch's and keeps its input and output in float32.
    decay = plain if cfg.gate_lower_bound is not None else 8
    operator = 4 + 4  # decays and errors, in float32
    states = 4 * K * K // KDA_TOKENS_PER_STATE
    return bottlenecks + H * (K * (plain * (convolved + gated) + decay + operator) + states + 4)


def _mla_activations(cfg: K3Config, plain: int) -> int:
    H, K, N, V = cfg.num_attention_heads, cfg.qk_head_dim, cfg.qk_nope_head_dim, cfg.v_head_dim
    queries = 2 * plain * (cfg.q_lora_rank or 0)  # before and after the norm
    latents = 2 * plain * cfg.latent_cache_size
    # q and k; what keys and values are cut from; the output and the logarithm of each sum, in float32
    attention = plain * (2 * K + N + V) + 4 * V + 4
    if cfg.mla_use_output_gate:
        return queries + latents + H * (attention + 4 * V + plain * V)  # the gate, and their product
    return queries + latents + H * (attention + (plain * V if plain < 4 else 0))


def _mlp_activations(cfg: K3Config, inner: int, plain: int) -> int:
    """Gate, up and their product; SwiGLU is torch's own and keeps the activated gate too."""
    return plain * inner * (4 if cfg.hidden_act == "silu" else 3)


def _moe_activations(cfg: K3Config, plain: int) -> int:
    N, L, F = cfg.num_experts_per_token, cfg.latent_size, cfg.moe_intermediate_size
    scores = 4 * cfg.num_experts + (4 * cfg.hidden_size if plain < 4 else 0)  # the input again, in float32
    chosen = N * (8 + 8 + 8 + 4) + (4 * N + 4 if cfg.moe_renormalize else 0)  # ids, two permutations, weights
    experts = N * (L * plain + 4 * L) + _mlp_activations(cfg, N * F, plain)
    latent = 0
    if cfg.routed_expert_hidden_size is not None:
        latent = L * plain * (2 if cfg.latent_moe_use_norm else 1)
    return scores + chosen + experts + latent + _mlp_activations(cfg, cfg.shared_size, plain)
