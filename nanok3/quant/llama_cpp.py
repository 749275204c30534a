"""K3 in llama.cpp's terms: its names for our numbers and matrices, architecture `kimi-k3`, text only.

    ours, layer l                              theirs, blk.l.
    self_attn.q_proj, k_proj, v_proj           attn_q, attn_k, attn_v
    self_attn.A_log                            ssm_a = -exp(A_log)
    *_res_norm and *_res_proj                  *_res_score, their product: only it is ever used
    self_attn.kv_b_proj                        attn_k_b, transposed, and attn_v_b, for absorbed attention
    experts.0.w1, experts.1.w1, ...            ffn_gate_exps, one stack; w2 is down, w3 is up

Matrices take the type asked for; vectors, the router and the convolutions stay float32, which that program's operators
ask for. Names and keys are those that its loader looks up (src/models/kimi-k3.cpp, llama-arch.cpp). It uses
rms_norm_eps for the two norms inside MLA and for the unit length of q and k, where K3 has 1e-6; the file has no place
for them, and the logits hardly notice (2e-6 of their size on random weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.config import K3Config
from nanok3.model.mxfp4 import BLOCK, dequantize_mxfp4, quantize_mxfp4
from nanok3.quant.gguf import BF16, F32, MXFP4, GGUFTensor, TensorType, Value, mxfp4_blocks

ARCHITECTURE = "kimi-k3"
MOST_LAYERS, MOST_EXPERTS = 512, 1024
PIECE = 1 << 22
"""Values converted at once."""
Reader = Callable[[str], Tensor]
"""Gives the tensor of an official name (without the prefix of the text part) as it is stored."""


@dataclass(frozen=True)
class FileType:
    """What a user asks for: the type of matrices, of routed experts, and llama.cpp's number for the mixture."""

    matrices: TensorType
    experts: TensorType
    number: int


FILE_TYPES = {"f32": FileType(F32, F32, 0), "bf16": FileType(BF16, BF16, 32), "mxfp4": FileType(BF16, MXFP4, 38)}


# ---------------------------------------------------------------------- what it can hold


def refusals(cfg: K3Config, dtype: str) -> list[str]:
    """Why llama.cpp could not run this model: a line for each reason."""
    rules = [
        (cfg.model_type == "kimi_k3", "model_type", "the architecture kimi-k3 is K3's only"),
        (cfg.hidden_act == "situ", "hidden_act", "kimi-k3 knows 'situ' only"),
        (not cfg.attn_res_full, "attn_res_full", "kimi-k3 banks whole blocks only"),
        (cfg.use_full_rank_gate, "use_full_rank_gate", "kimi-k3 has a gate of full rank"),
        (cfg.moe_layer_freq == 1, "moe_layer_freq", "kimi-k3 has experts in every layer after the dense ones"),
        (cfg.num_attention_heads == cfg.kda_num_heads, "num_attention_heads", f"must equal {cfg.kda_num_heads} of KDA"),
        (cfg.num_hidden_layers <= MOST_LAYERS, "num_hidden_layers", f"llama.cpp has room for {MOST_LAYERS}"),
        (cfg.num_experts <= MOST_EXPERTS, "num_experts", f"llama.cpp has room for {MOST_EXPERTS}"),
    ]
    if dtype == "mxfp4":
        widths = {"moe_intermediate_size": cfg.moe_intermediate_size, "routed_expert_hidden_size": cfg.latent_size}
        rules += [(width % BLOCK == 0, name, f"MXFP4 needs a multiple of {BLOCK}") for name, width in widths.items()]
    return [f"{name} is {getattr(cfg, name)!r}: {why}" for holds, name, why in rules if not holds]


def hyperparameters(cfg: K3Config, dtype: str, name: str) -> dict[str, Value]:
    """The keys that describe the model, without those of the tokenizer."""
    own: dict[str, Value] = {
        "vocab_size": cfg.vocab_size,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "block_count": cfg.num_hidden_layers,
        "feed_forward_length": cfg.intermediate_size,
        "leading_dense_block_count": min(cfg.first_k_dense_replace, cfg.num_hidden_layers),
        "attn_res.block_size": cfg.attn_res_block_size or 0,
        "activation.situ_beta": float(cfg.activation_situ_beta or 1.0),
        "activation.situ_linear_beta": float(cfg.activation_situ_linear_beta or 0.0),
        **{f"attention.{key}": value for key, value in _attention(cfg).items()},
        "rope.dimension_count": cfg.qk_rope_head_dim,  # the width of the shared key part; nothing is rotated
        "ssm.conv_kernel": cfg.short_conv_kernel_size,
        "kda.head_dim": cfg.kda_head_dim,
        **{f"expert_{key}": value for key, value in _experts(cfg).items()},
    }
    if cfg.gate_lower_bound is not None:
        own["kda.gate_lower_bound"] = float(cfg.gate_lower_bound)
    general: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[dtype].number,
        "general.quantization_version": 2,
    }
    return general | {f"{ARCHITECTURE}.{key}": value for key, value in own.items()}


def _attention(cfg: K3Config) -> dict[str, Value]:
    """Absorbed MLA is attention with one key and value head, the latent; 0 such heads mark a KDA layer."""
    keys: dict[str, Value] = {
        "head_count": cfg.num_attention_heads,
        "head_count_kv": [int(kind == "mla") for kind in cfg.kinds],
        "layer_norm_rms_epsilon": cfg.rms_norm_eps,
        "key_length": cfg.latent_cache_size,
        "value_length": cfg.kv_lora_rank,
        "key_length_mla": cfg.qk_head_dim,
        "value_length_mla": cfg.v_head_dim,
        "kv_lora_rank": cfg.kv_lora_rank,
    }
    return keys | ({"q_lora_rank": cfg.q_lora_rank} if cfg.q_lora_rank is not None else {})


def _experts(cfg: K3Config) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "count": cfg.num_experts,
        "used_count": cfg.num_experts_per_token,
        "shared_count": cfg.num_shared_experts,
        "feed_forward_length": cfg.moe_intermediate_size,
        "weights_scale": float(cfg.routed_scaling_factor),
        "weights_norm": cfg.moe_renormalize,
        "gating_func": 2,  # sigmoid
    }
    latent = cfg.routed_expert_hidden_size
    return keys | ({"latent_length": latent} if latent is not None else {})


# ---------------------------------------------------------------------- which tensors there are


@dataclass(frozen=True)
class Plan:
    """How the tensors of one file are made: config, reader of the checkpoint, whether its experts are packed, types."""

    cfg: K3Config
    read: Reader
    packed: bool
    types: FileType

    def tensors(self) -> list[GGUFTensor]:
        """All of them, layer by layer, as they lie in a checkpoint."""
        found = [tensor for l in range(self.cfg.num_hidden_layers) for tensor in self._layer(l)]
        cfg, D, V = self.cfg, self.cfg.hidden_size, self.cfg.vocab_size
        found.append(self._matrix("token_embd.weight", "model.embed_tokens.weight", V, D))
        found.append(self._kept("output_norm.weight", "model.norm.weight", D))
        if cfg.attn_res_block_size is not None:
            found.append(self._score("output_res_score.weight", "model.output_attn_res"))
        found.append(self._matrix("output.weight", "lm_head.weight", V, D))
        return found

    def _layer(self, l: int) -> Iterator[GGUFTensor]:
        ours, theirs, D = f"model.layers.{l}", f"blk.{l}", self.cfg.hidden_size
        yield self._kept(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight", D)
        yield self._kept(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight", D)
        if self.cfg.attn_res_block_size is not None:
            yield self._score(f"{theirs}.attn_res_score.weight", f"{ours}.self_attention_res")
            yield self._score(f"{theirs}.ffn_res_score.weight", f"{ours}.mlp_res")
        mixer = self._kda if self.cfg.kinds[l] == "kda" else self._mla
        yield from mixer(f"{ours}.self_attn", theirs)
        if self.cfg.is_moe(l):
            yield from self._moe(f"{ours}.block_sparse_moe", theirs)
        else:
            yield from self._mlp(f"{ours}.mlp", theirs, "", self.cfg.intermediate_size)

    def _kda(self, ours: str, theirs: str) -> Iterator[GGUFTensor]:
        cfg, D, H, K = self.cfg, self.cfg.hidden_size, self.cfg.kda_num_heads, self.cfg.kda_head_dim
        matrices = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "ssm_g": "g_proj"}
        shapes = {their: (our, H * K, D) for their, our in matrices.items()}
        shapes |= {"ssm_f_a": ("f_a_proj", K, D), "ssm_f_b": ("f_b_proj", H * K, K)}
        shapes |= {"ssm_beta": ("b_proj", H, D), "attn_output": ("o_proj", D, H * K)}
        for their, (our, rows, columns) in shapes.items():
            yield self._matrix(f"{theirs}.{their}.weight", f"{ours}.{our}.weight", rows, columns)
        for letter in "qkv":
            their, our = f"{theirs}.ssm_conv1d_{letter}.weight", f"{ours}.{letter}_conv1d.weight"
            yield self._kept(their, our, 1, H * K, 1, cfg.short_conv_kernel_size)
        yield self._float32(f"{theirs}.ssm_a", (H,), lambda: self._rates(f"{ours}.A_log"))
        yield self._kept(f"{theirs}.ssm_dt.bias", f"{ours}.dt_bias", H * K)
        yield self._kept(f"{theirs}.ssm_norm.weight", f"{ours}.o_norm.weight", K)

    def _mla(self, ours: str, theirs: str) -> Iterator[GGUFTensor]:
        cfg, D, H = self.cfg, self.cfg.hidden_size, self.cfg.num_attention_heads
        shapes = {"attn_kv_a_mqa": ("kv_a_proj_with_mqa", cfg.latent_cache_size, D)}
        if cfg.q_lora_rank is None:
            shapes["attn_q"] = ("q_proj", H * cfg.qk_head_dim, D)
        else:
            yield self._kept(f"{theirs}.attn_q_a_norm.weight", f"{ours}.q_a_layernorm.weight", cfg.q_lora_rank)
            shapes["attn_q_a"] = ("q_a_proj", cfg.q_lora_rank, D)
            shapes["attn_q_b"] = ("q_b_proj", H * cfg.qk_head_dim, cfg.q_lora_rank)
        if cfg.mla_use_output_gate:
            shapes["attn_gate"] = ("g_proj", H * cfg.v_head_dim, D)
        shapes["attn_output"] = ("o_proj", D, H * cfg.v_head_dim)
        for their, (our, rows, columns) in shapes.items():
            yield self._matrix(f"{theirs}.{their}.weight", f"{ours}.{our}.weight", rows, columns)
        yield self._kept(f"{theirs}.attn_kv_a_norm.weight", f"{ours}.kv_a_layernorm.weight", cfg.kv_lora_rank)
        yield from self._keys_values(f"{ours}.kv_b_proj.weight", theirs)

    def _keys_values(self, ours: str, theirs: str) -> Iterator[GGUFTensor]:
        cfg, H, L = self.cfg, self.cfg.num_attention_heads, self.cfg.kv_lora_rank
        nope, V = cfg.qk_nope_head_dim, cfg.v_head_dim

        def keys() -> Tensor:
            return self.read(ours).view(H, nope + V, L)[:, :nope].transpose(1, 2)

        def values() -> Tensor:
            return self.read(ours).view(H, nope + V, L)[:, nope:]

        yield self._made(f"{theirs}.attn_k_b.weight", (H, L, nope), self.types.matrices, keys)
        yield self._made(f"{theirs}.attn_v_b.weight", (H, V, L), self.types.matrices, values)

    def _mlp(self, ours: str, theirs: str, ending: str, inner: int) -> Iterator[GGUFTensor]:
        D = self.cfg.hidden_size
        for part, rows, columns in (("gate", inner, D), ("up", inner, D), ("down", D, inner)):
            their = f"{theirs}.ffn_{part}{ending}.weight"
            yield self._matrix(their, f"{ours}.{part}_proj.weight", rows, columns)

    def _moe(self, ours: str, theirs: str) -> Iterator[GGUFTensor]:
        cfg, D, L, E = self.cfg, self.cfg.hidden_size, self.cfg.latent_size, self.cfg.num_experts
        # A router in bfloat16 would send some tokens to other experts.
        yield self._kept(f"{theirs}.ffn_gate_inp.weight", f"{ours}.gate.weight", E, D)
        yield self._kept(f"{theirs}.exp_probs_b.bias", f"{ours}.gate.e_score_correction_bias", E)
        if cfg.routed_expert_hidden_size is not None:
            for part, rows, columns in (("down", L, D), ("up", D, L)):
                their, our = f"{theirs}.ffn_routed_{part}.weight", f"{ours}.routed_expert_{part}_proj.weight"
                yield self._matrix(their, our, rows, columns)
            if cfg.latent_moe_use_norm:
                yield self._kept(f"{theirs}.ffn_routed_norm.weight", f"{ours}.routed_expert_norm.weight", L)
        if cfg.num_shared_experts:
            yield from self._mlp(f"{ours}.shared_experts", theirs, "_shexp", cfg.shared_size)
        inner = cfg.moe_intermediate_size
        for their, our, rows, columns in (("gate", "w1", inner, L), ("down", "w2", L, inner), ("up", "w3", inner, L)):
            stems = [f"{ours}.experts.{e}.{our}.weight" for e in range(E)]
            yield self._stack(f"{theirs}.ffn_{their}_exps.weight", stems, rows, columns)

    # ------------------------------------------------------------------ one tensor

    def _rates(self, ours: str) -> Tensor:
        """-e^A of every head, with the cap of `model.kda.log_decay`."""
        return -self.read(ours).flatten()[: self.cfg.kda_num_heads].double().clamp(max=80.0).exp()

    def _made(self, name: str, shape: tuple[int, ...], kind: TensorType, make: Callable[[], Tensor]) -> GGUFTensor:
        dtype = torch.float32 if kind is F32 else torch.bfloat16
        return GGUFTensor(name, shape, kind, lambda: _converted(make(), shape, dtype))

    def _matrix(self, name: str, ours: str, rows: int, columns: int) -> GGUFTensor:
        return self._made(name, (rows, columns), self.types.matrices, lambda: self.read(ours))

    def _float32(self, name: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> GGUFTensor:
        return self._made(name, shape, F32, make)

    def _kept(self, name: str, ours: str, *shape: int) -> GGUFTensor:
        """In float32, whatever the matrices are."""
        return self._float32(name, shape, lambda: self.read(ours))

    def _score(self, name: str, ours: str) -> GGUFTensor:
        def product() -> Tensor:
            return self.read(f"{ours}_norm.weight").double() * self.read(f"{ours}_proj.weight").double().flatten()

        return self._float32(name, (self.cfg.hidden_size,), product)

    def _stack(self, name: str, stems: list[str], rows: int, columns: int) -> GGUFTensor:
        """A layer's experts, one after the other."""
        kind, shape = self.types.experts, (len(stems), rows, columns)
        dtype = torch.float32 if kind is F32 else torch.bfloat16

        def parts() -> Iterator[Tensor]:
            for stem in stems:
                if kind is MXFP4:
                    yield mxfp4_blocks(*self._packed(stem))
                else:
                    yield from _converted(self._plain(stem), (rows, columns), dtype)

        return GGUFTensor(name, shape, kind, parts)

    def _packed(self, stem: str) -> tuple[Tensor, Tensor]:
        if self.packed:
            return self.read(f"{stem}_packed"), self.read(f"{stem}_scale")
        return quantize_mxfp4(self.read(stem))

    def _plain(self, stem: str) -> Tensor:
        if not self.packed:
            return self.read(stem)
        return dequantize_mxfp4(self.read(f"{stem}_packed"), self.read(f"{stem}_scale"))


def _converted(values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """The values in another precision, some at a time."""
    assert values.numel() == torch.Size(shape).numel(), f"{tuple(values.shape)} does not fill {shape}"
    for piece in values.contiguous().flatten().split(PIECE):
        yield piece.to(dtype)
