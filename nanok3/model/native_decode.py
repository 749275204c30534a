"""Decoding with one native call a step: the bridge from a `K3` to `kernels/cpu/decode.cpp`.

    decoder = NativeDecoder.of(model)              a str says why it cannot be, and torch must do
    out = decoder.step_state(ids, state)           a ModelState of any batch size, as model(ids, state=state) moves it
    out = decoder.step(ids, sequences, rows)       rows of any number of sequences, each with its own memory

At one token a step torch spends more time between its operators than in them; here the whole stack is a single call.
Its arithmetic is float32 throughout on weights as they are stored (float32, bf16, MXFP4), and nothing is rounded but
latents where they are kept in bf16: for a bf16 model the result is nearer to the exact one than torch's, and so not
equal to it. A row's numbers depend on its own sequence alone, bit for bit: neither on the other rows of the call, nor
on the number of threads, nor on the size of the pages.

Decoding reads weights; it is never recorded for a gradient.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import Linear, RMSNorm
from nanok3.model.cache import KDAState, LatentCache, ModelState
from nanok3.model.decoder import K3, Backbone, DecoderLayer, Embedding
from nanok3.model.kda import KDA, OutputNorm
from nanok3.model.latent_moe import Experts, LatentMoE, PackedExperts, Router
from nanok3.model.mla import GatedMLA
from nanok3.model.short_conv import ShortConv
from nanok3.model.situ import GatedMLP

if TYPE_CHECKING:
    from nanok3.kernels.decode_cpu import MemoryLayout, SequenceMemory


STEPS_TO_COMPARE = 16
ATTENTION = {"kda": (KDA,), "mla": (GatedMLA,)}
"""By the kind of a layer."""
MODULES = (
    *(Backbone, nn.ModuleList, DecoderLayer, Embedding, Linear, RMSNorm),
    *(KDA, ShortConv, OutputNorm, GatedMLA, GatedMLP, LatentMoE, Router, Experts, PackedExperts),
)
"""Whose arithmetic the kernel knows."""


@dataclass(frozen=True)
class Step:
    """logits: of the wanted rows, float32; hidden: of all rows after the final norm, if asked for; taps: what the
    attentions of the tapped layers read before their norm."""

    logits: Float[Tensor, "n vocab"]
    hidden: Float[Tensor, "N D"] | None = None
    taps: Float[Tensor, "N taps D"] | None = None


def refusal(model: K3) -> str | None:
    """Why this model cannot be decoded natively, in one line, or None if it can."""
    from nanok3.kernels import decode_cpu

    for name, module in [*model.model.named_modules(), ("lm_head", model.lm_head)]:
        reason = _module_refusal(module)
        if reason is not None:
            return f"{name or 'model'} {reason}"
    for name, weight in _weights(model):
        reason = decode_cpu.refusal(weight)
        if reason is not None:
            return f"{name}: {reason}"
    computes, stored = model.compute_dtype, model.model.embed_tokens.weight.dtype
    if computes not in (None, torch.float32, stored):
        return f"the model computes in {computes} on {stored} weights; the kernel reads weights as they are stored"
    return None if decode_cpu.available() else "the kernel could not be built here"


def _module_refusal(module: nn.Module) -> str | None:
    """What a module does beyond its weights is lost in the kernel: code of another class, and what hangs on a call."""
    if type(module) not in MODULES:
        return f"is a {type(module).__name__}, which the kernel does not know"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks, which one native call would pass by"
    if isinstance(module, DecoderLayer):
        for part, kinds in (("self_attn", ATTENTION[module.kind]), ("feed_forward", (GatedMLP, LatentMoE))):
            if type(getattr(module, part)) not in kinds:
                return f"has a {type(getattr(module, part)).__name__} as its {part}, where the kernel does not know it"
    return None


def _weights(model: K3) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of the language model."""
    named = [*model.model.named_parameters("model"), *model.model.named_buffers("model")]
    return [*named, *model.lm_head.named_parameters("lm_head")]


def memory_layout(cfg: K3Config) -> MemoryLayout:
    """The shapes of one sequence's memory."""
    from nanok3.kernels.decode_cpu import MemoryLayout

    heads, dim = cfg.kda_num_heads, cfg.kda_head_dim
    conv, recurrent = (3, cfg.short_conv_kernel_size - 1, heads * dim), (heads, dim, dim)
    return MemoryLayout(cfg.kinds.count("kda"), cfg.kinds.count("mla"), conv, recurrent, cfg.latent_cache_size)


class NativeDecoder:
    """A model and the record of its weights' addresses, made anew when a weight has moved. All weights are compared
    when a new sequence begins, else a few at a step and all within STEPS_TO_COMPARE; until then the old one is kept
    and read. Not for two threads at once: calls share one workspace."""

    def __init__(self, model: K3) -> None:
        reason = refusal(model)
        if reason is not None:
            raise ValueError(f"no native decoding: {reason}")
        self.model, self.layout = model, memory_layout(model.cfg)
        self._tensors: list[Tensor] = []
        self._sequences: list[SequenceMemory] = []
        self._build()

    @classmethod
    def of(cls, model: K3) -> NativeDecoder | str:
        """A decoder, or why there is none."""
        reason = refusal(model)
        return cls(model) if reason is None else reason

    def memory(
        self,
        conv: Sequence[Tensor],
        recurrent: Sequence[Tensor],
        latents: Sequence[Tensor],
        pages: Sequence[int] = (),
        tokens: int = 0,
    ) -> SequenceMemory:
        """One sequence's memory by address; see kernels/decode_cpu.py for what is asked of the tensors."""
        from nanok3.kernels.decode_cpu import SequenceMemory

        self._begins = True
        return SequenceMemory(self.layout, conv, recurrent, latents, pages, tokens)

    def step(
        self,
        ids: Int[Tensor, " N"],
        sequences: Sequence[SequenceMemory],
        rows: Sequence[int] | None = None,
        wanted: Sequence[int] | None = None,
        hidden: bool = False,
        tapped: Sequence[int] = (),
    ) -> Step:
        """Read rows[i] tokens (1 each by default) of every sequence, one sequence after the other in `ids`.

        wanted: rows whose logits are returned, by default the last of each sequence; () for none. tapped: layers whose
        input is wanted, the number of layers for the last read. The memories are moved on in place, but for those with
        a tape (`SequenceMemory.record_on`). ValueError on bad input, and then nothing has moved.
        """
        rows = [1] * len(sequences) if rows is None else rows
        if wanted is None:
            wanted = [end - 1 for end in itertools.accumulate(rows)]
        if self._moved():
            self._build()
        return Step(*self._decoder.run(ids, sequences, rows, wanted, hidden, tapped))

    def guess(
        self,
        chain: Any,
        features: Float[Tensor, "N D"],
        ids: Sequence[int],
        sequences: Sequence[SequenceMemory],
        rows: Sequence[int],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """Read rows of every sequence, each with the feature before it, and go on guessing: counts[i] tokens of
        sequences[i], which must not rise; see kernels/decode_cpu.py. chain: what a draft has before its block, from
        `chain_record`."""
        if self._moved():
            self._build()
        return self._decoder.guess(chain, features, ids, sequences, rows, counts)

    def tape(self, rows: int) -> Float[Tensor, "layers rows width"]:
        """One with room for as many rows of a sequence."""
        from nanok3.kernels.decode_cpu import TAPE

        return torch.empty(self.layout.kda_layers, rows, TAPE * self.layout.conv[2])

    def replay(self, sequences: Sequence[SequenceMemory], rows: Sequence[int]) -> None:
        """Move the KDA memory of each sequence on by the first rows[i] rows of its tape: bit for bit what reading them
        one by one would have made of it."""
        self._decoder.replay(sequences, rows)

    def step_state(
        self,
        ids: Int[Tensor, "B T"],
        state: ModelState,
        every_row: bool = False,
        hidden: bool = False,
        tapped: Sequence[int] = (),
    ) -> Step:
        """Read T tokens of every sequence of a state, which is advanced in place: logits (B, vocab) of the last token,
        or of every row, (B * T, vocab). Whatever shares memory with the state's tensors sees them change; clones and
        snapshots do not."""
        if ids.ndim != 2 or ids.shape[0] != state.batch_size or ids.shape[1] < 1:
            raise ValueError(
                f"ids has shape {tuple(ids.shape)}; it must be ({state.batch_size}, tokens), at least one token"
            )
        B, T = ids.shape
        sequences = self._memories(state, T)
        wanted = range(B * T) if every_row else range(T - 1, B * T, T)
        out = self.step(ids.flatten(), sequences, [T] * B, wanted, hidden, tapped)
        for layer in state.layers:
            if isinstance(layer, LatentCache):
                layer.tokens += T
        state.tokens += T
        return out

    def try_state(
        self, ids: Int[Tensor, "1 T"], state: ModelState, tapped: Sequence[int] = ()
    ) -> tuple[Step, Callable[[int], None]]:
        """Read tokens of one sequence on trial: the logits after each, and what to call once, before anything else is
        read: the state, until then as it was, moves on by the first so many of them."""
        count, before = ids.shape[1], state.tokens
        (memory,) = self._memories(state, count)
        memory.record_on(self.tape(count))
        step = self.step(ids.flatten(), [memory], [count], range(count), tapped=tapped)

        def keep(tokens: int) -> None:
            memory.tokens = before
            if tokens:
                self.replay([memory], [tokens])
            memory.record_on(None)
            for layer in state.layers:
                if isinstance(layer, LatentCache):
                    layer.tokens = before + tokens
            state.tokens = before + tokens

        return step, keep

    def _memories(self, state: ModelState, rows: int) -> list[SequenceMemory]:
        """Those of the last call, as long as the state still consists of the same tensors."""
        for layer in state.layers:
            if isinstance(layer, LatentCache):
                layer._reserve(layer.tokens + rows)
        tensors = _tensors(state)
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            state.check(self.model.cfg, self.model._dtype())
            self._sequences = self._new_memories(state)
            self._tensors = _tensors(state)
        for memory in self._sequences:
            memory.tokens = state.tokens
        return self._sequences

    def _new_memories(self, state: ModelState) -> list[SequenceMemory]:
        kda = [layer for layer in state.layers if isinstance(layer, KDAState)]
        for layer in kda:
            layer.conv, layer.recurrent = layer.conv.contiguous(), layer.recurrent.contiguous()
        buffers = [layer._buffer for layer in state.layers if isinstance(layer, LatentCache)]
        room = min((buffer.shape[1] for buffer in buffers), default=0)
        pools = [buffer[:, :room] for buffer in buffers]
        return [
            self.memory(
                [layer.conv[b] for layer in kda],
                [layer.recurrent[b] for layer in kda],
                [pool[b : b + 1] for pool in pools],
                [0] if pools else [],
            )
            for b in range(state.batch_size)
        ]

    def _build(self) -> None:
        from nanok3.kernels.decode_cpu import Decoder

        reason = refusal(self.model)
        if reason is not None:
            raise ValueError(f"no native decoding: {reason}")
        self._places = _places(self.model)
        self._kept = [owner[name].detach() for owner, name in self._places]  # read until a move is noticed
        self._addresses = [weight.data_ptr() for weight in self._kept]
        self._decoder = Decoder(_model_record(self.model), self.layout)
        size = len(self._places) // STEPS_TO_COMPARE + 1
        starts = range(0, len(self._places), size)
        self._portions = itertools.cycle([slice(start, start + size) for start in starts])
        self._begins = True

    def _moved(self) -> bool:
        """Whether a weight was found to lie elsewhere than when the record was made: replaced, converted, or loaded
        anew. Looking at all of them takes as long as a layer."""
        portion = slice(None) if self._begins else next(self._portions)
        moved = self._addresses[portion] != [owner[name].data_ptr() for owner, name in self._places[portion]]
        self._begins = moved
        return moved


def _tensors(state: ModelState) -> list[Tensor]:
    """What a state consists of at the moment."""
    found = []
    for layer in state.layers:
        if isinstance(layer, LatentCache):
            found.append(layer._buffer)
        else:
            found += (layer.conv, layer.recurrent)
    return found


def _places(model: K3) -> list[tuple[Any, str]]:
    """Where modules keep their weights: (dictionary, name)."""
    modules = [*model.model.modules(), *model.lm_head.modules()]
    owners = [owner for module in modules for owner in (module._parameters, module._buffers)]
    return [(owner, name) for owner in owners for name, value in owner.items() if value is not None]


# ---------------------------------------------------------------------- which weight goes where


def _model_record(model: K3) -> Any:
    from nanok3.kernels.decode_cpu import Layer, Model, matrix, vector

    cfg, backbone = model.cfg, model.model
    layers = (Layer * cfg.num_hidden_layers)(*(_layer_record(layer) for layer in backbone.layers))
    record = Model(
        layers=ctypes.cast(layers, ctypes.POINTER(Layer)),
        layer_count=cfg.num_hidden_layers,
        hidden=cfg.hidden_size,
        vocab=cfg.vocab_size,
        embedding=matrix(backbone.embed_tokens.weight),
        head=matrix(model.lm_head.weight),
        final_norm=vector(backbone.norm.weight),
        block=-1 if cfg.attn_res_full else cfg.attn_res_block_size or 0,
        **_sizes(cfg),
    )
    if cfg.attn_res_block_size is not None:
        record.final_mix_norm = vector(backbone.output_attn_res_norm.weight)
        record.final_mix_query = vector(backbone.output_attn_res_proj.weight)
    record.kept = layers  # the pointer alone would not keep them
    return record


def chain_record(table: Tensor, combine: Tensor, token_norm: Tensor, feature_norm: Tensor) -> Any:
    """Of a draft: the model's embedding, the matrix over a token and the feature before it, and their norms; by
    address, so it is to be made anew where a weight may have moved."""
    from nanok3.kernels.decode_cpu import Chain, matrix, vector

    norms = {"token_norm": vector(token_norm), "feature_norm": vector(feature_norm)}
    return Chain(table=matrix(table), combine=matrix(combine), **norms)


def _sizes(cfg: K3Config) -> dict[str, Any]:
    silu = cfg.hidden_act == "silu"
    return {
        "kda_heads": cfg.kda_num_heads,
        "kda_dim": cfg.kda_head_dim,
        "taps": cfg.short_conv_kernel_size,
        "mla_heads": cfg.num_attention_heads,
        "nope": cfg.qk_nope_head_dim,
        "rope": cfg.qk_rope_head_dim,
        "v_dim": cfg.v_head_dim,
        "rank": cfg.kv_lora_rank,
        "q_rank": cfg.q_lora_rank or 0,
        "intermediate": cfg.intermediate_size,
        "experts": cfg.num_experts,
        "top_k": cfg.num_experts_per_token,
        "inner": cfg.moe_intermediate_size,
        "latent": cfg.latent_size,
        "shared": cfg.shared_size,
        "eps": cfg.rms_norm_eps,
        "qk_eps": cfg.qk_norm_eps,
        "gate_bound": cfg.gate_lower_bound or 0.0,
        "beta": 0.0 if silu else cfg.activation_situ_beta or 1.0,
        "linear_beta": 0.0 if silu else cfg.activation_situ_linear_beta or 0.0,
        "routed_scale": cfg.routed_scaling_factor,
        "renormalize": cfg.moe_renormalize,
    }


def _layer_record(layer: nn.Module) -> Any:
    from nanok3.kernels.decode_cpu import Layer, vector

    assert isinstance(layer, DecoderLayer)
    record = Layer(is_mla=layer.kind == "mla", is_moe=layer.cfg.is_moe(layer.layer))
    record.input_norm = vector(layer.input_layernorm.weight)
    record.post_norm = vector(layer.post_attention_layernorm.weight)
    if layer.cfg.attn_res_block_size is not None:
        record.attention_mix_norm = vector(layer.self_attention_res_norm.weight)
        record.attention_mix_query = vector(layer.self_attention_res_proj.weight)
        record.mlp_mix_norm, record.mlp_mix_query = vector(layer.mlp_res_norm.weight), vector(layer.mlp_res_proj.weight)
    attention = layer.self_attn
    if isinstance(attention, KDA):
        _fill_kda(record, attention)
    else:
        _fill_mla(record, attention)
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, LatentMoE):
        _fill_moe(record, feed_forward)
    else:
        _fill_mlp(record, feed_forward)
    return record


def _fill_kda(record: Any, kda: KDA) -> None:
    from nanok3.kernels.decode_cpu import matrix, vector

    for field, module in (("q", kda.q_proj), ("k", kda.k_proj), ("v", kda.v_proj), ("f_a", kda.f_a_proj)):
        setattr(record, field, matrix(module.weight))
    for field, module in (("f_b", kda.f_b_proj), ("b", kda.b_proj), ("o", kda.o_proj)):
        setattr(record, field, matrix(module.weight))
    if kda.cfg.use_full_rank_gate:
        record.g_b = matrix(kda.g_proj.weight)
    else:
        record.g_a, record.g_b = matrix(kda.g_a_proj.weight), matrix(kda.g_b_proj.weight)
    for field, conv in (("q_conv", kda.q_conv1d), ("k_conv", kda.k_conv1d), ("v_conv", kda.v_conv1d)):
        setattr(record, field, vector(conv.weight))
    record.A_log, record.dt_bias, record.o_norm = vector(kda.A_log), vector(kda.dt_bias), vector(kda.o_norm.weight)


def _fill_mla(record: Any, mla: GatedMLA) -> None:
    from nanok3.kernels.decode_cpu import matrix, vector

    if mla.cfg.q_lora_rank is None:
        record.q_b = matrix(mla.q_proj.weight)
    else:
        record.q_a, record.q_b = matrix(mla.q_a_proj.weight), matrix(mla.q_b_proj.weight)
        record.q_norm = vector(mla.q_a_layernorm.weight)
    record.kv_a, record.kv_norm = matrix(mla.kv_a_proj_with_mqa.weight), vector(mla.kv_a_layernorm.weight)
    record.kv_b, record.o = matrix(mla.kv_b_proj.weight), matrix(mla.o_proj.weight)
    if mla.cfg.mla_use_output_gate:
        record.g_b = matrix(mla.g_proj.weight)


def _fill_mlp(record: Any, mlp: GatedMLP) -> None:
    from nanok3.kernels.decode_cpu import matrix

    record.gate, record.up = matrix(mlp.gate_proj.weight), matrix(mlp.up_proj.weight)
    record.down = matrix(mlp.down_proj.weight)


def _fill_moe(record: Any, moe: LatentMoE) -> None:
    from nanok3.kernels.decode_cpu import matrix, vector

    record.router, record.correction = matrix(moe.gate.weight), vector(moe.gate.e_score_correction_bias)
    if moe.cfg.routed_expert_hidden_size is not None:
        record.latent_down = matrix(moe.routed_expert_down_proj.weight)
        record.latent_up = matrix(moe.routed_expert_up_proj.weight)
        if moe.cfg.latent_moe_use_norm:
            record.latent_norm = vector(moe.routed_expert_norm.weight)
    if moe.cfg.num_shared_experts:
        _fill_mlp(record, moe.shared_experts)
    for name in ("w1", "w2", "w3"):
        setattr(record, name, _expert_matrix(moe.experts, name))


def _expert_matrix(experts: Experts | PackedExperts, name: str) -> Any:
    from nanok3.kernels.decode_cpu import matrix

    if isinstance(experts, PackedExperts):
        return matrix(experts.get_buffer(f"{name}_packed"), experts.get_buffer(f"{name}_scale"))
    return matrix(experts.get_parameter(name))
