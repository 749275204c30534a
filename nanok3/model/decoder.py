"""The whole model: 93 layers of "read depth, mix tokens, read depth, mix channels" (architecture 3.4-3.7).

    depth = embedding of the tokens, with pictures spliced in
    each layer     h = read(depth);  bank the running sum at a block's first layer
                   depth += Attention(norm(h))            KDA three times out of four, else gated MLA
                   h = read(depth)
                   depth += FeedForward(norm(h))          dense in the first layer, then Stable LatentMoE
    logits         = head(norm(read(depth)))

`read` is the attention-residual mix; without attention residuals (kimi_linear) it is the running sum itself and this is
the ordinary pre-norm decoder.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.attn_res import DepthSources, mix
from nanok3.model.basics import Linear, RMSNorm, check_cu_seqlens
from nanok3.model.cache import KDAState, LatentCache, ModelState, PackedLatents, PackedState
from nanok3.model.kda import KDA
from nanok3.model.latent_moe import LatentMoE, Routing
from nanok3.model.mla import GatedMLA
from nanok3.model.moonvit import MoonViT, Projector
from nanok3.model.situ import GatedMLP
from nanok3.model.splice import splice


@dataclass
class Hidden:
    """What happened inside, when asked for. residual: the running sum after each layer; bank: AttnRes sources in order
    of writing; router: (layer, Routing) of each MoE layer."""

    residual: list[Float[Tensor, "B T D"]] = field(default_factory=list)
    bank: list[Float[Tensor, "B T D"]] = field(default_factory=list)
    router: dict[int, Routing] = field(default_factory=dict)
    final: Tensor | None = None
    """The final normed hidden that the head reads."""


@dataclass
class Output:
    """logits (B, T, vocab); state and hidden when they were passed or asked for."""

    logits: Float[Tensor, "B T V"]
    state: ModelState | None = None
    hidden: Hidden | None = None


class DecoderLayer(nn.Module):
    """One layer, named as in the official checkpoint."""

    def __init__(self, cfg: K3Config, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.kind = cfg.kinds[layer]
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = KDA(cfg) if self.kind == "kda" else GatedMLA(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if cfg.is_moe(layer):
            self.block_sparse_moe = LatentMoE(cfg)
        else:
            self.mlp = GatedMLP(cfg, cfg.intermediate_size)
        if cfg.attn_res_block_size is not None:
            self.self_attention_res_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            self.self_attention_res_proj = Linear(cfg.hidden_size, 1)
            self.mlp_res_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            self.mlp_res_proj = Linear(cfg.hidden_size, 1)

    @property
    def feed_forward(self) -> GatedMLP | LatentMoE:
        return self.block_sparse_moe if self.cfg.is_moe(self.layer) else self.mlp

    def forward(
        self,
        depth: DepthSources,
        cu_seqlens: Tensor | None = None,
        cache: KDAState | LatentCache | PackedLatents | None = None,
    ) -> None:
        """Advance `depth` by this layer's two outputs."""
        h = self._read(depth, "self_attention")
        block = self.cfg.attn_res_block_size
        if self.cfg.attn_res_full or (block is not None and self.layer % block == 0):
            depth.close()
        depth.add(self.attend(h, cu_seqlens, cache))
        h = self._read(depth, "mlp")
        if self.cfg.attn_res_full:
            depth.close()
        depth.add(self.feed(h))

    def attend(
        self,
        h: Float[Tensor, "B T D"],
        cu_seqlens: Tensor | None = None,
        cache: KDAState | LatentCache | PackedLatents | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Mix over tokens."""
        attended: Tensor = self.self_attn(self.input_layernorm(h), cu_seqlens, cache)
        return attended

    def feed(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Mix over channels."""
        return self.feed_forward(self.post_attention_layernorm(h))

    def _read(self, depth: DepthSources, side: str) -> Float[Tensor, "B T D"]:
        sources = depth.sources()
        if self.cfg.attn_res_block_size is None or len(sources) == 1:
            return sources[-1]  # layer 0 reads the embedding as it is
        norm, proj = getattr(self, f"{side}_res_norm"), getattr(self, f"{side}_res_proj")
        return mix(sources, norm.weight, proj.weight, norm.eps)


class Backbone(nn.Module):
    """Embedding, layers, and the last read over depth with the final norm."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg, l) for l in range(cfg.num_hidden_layers))
        if cfg.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            self.output_attn_res_proj = Linear(cfg.hidden_size, 1)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(
        self,
        embedded: Float[Tensor, "B T D"],
        cu_seqlens: Int[Tensor, " n1"] | None = None,
        state: ModelState | PackedState | None = None,
        hidden: Hidden | None = None,
    ) -> Float[Tensor, "B T D"]:
        depth = DepthSources(embedded)
        for l, layer in enumerate(self.layers):
            layer(depth, cu_seqlens, None if state is None else state.layers[l])
            if hidden is not None and depth.running is not None:
                hidden.residual.append(depth.running)
        if hidden is not None:
            hidden.bank = list(depth.bank)
        return self.norm(self._last_read(depth))

    def _last_read(self, depth: DepthSources) -> Tensor:
        if self.cfg.attn_res_block_size is None:
            return depth.sources()[-1]
        norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
        return mix(depth.sources(), norm.weight, proj.weight, norm.eps)


class Embedding(nn.Module):
    """Rows of a table, unscaled; the table is not tied to the head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return F.embedding(ids, self.weight)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)


class K3(nn.Module):
    """A Kimi K3 of any size.

        model = K3(cfg)                     weights drawn anew; under torch.device("meta") it has shapes only
        out = model(input_ids)              (B, T) -> out.logits (B, T, vocab)
        state = model.new_state(B)          out = model(next_ids, state=state) reads on from there

    Parameters are float32 masters unless loaded otherwise; `compute_dtype` (None: that of the embedding) is the
    precision in which the forward runs.
    """

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype: torch.dtype | None = None
        self.model = Backbone(cfg)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)
        if cfg.has_vision:
            self.vision_tower = MoonViT(cfg)
            self.mm_projector = Projector(cfg)
        self.reset_parameters()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        pixel_values: Float[Tensor, "N 3 P P"] | None = None,
        grid_thw: Int[Tensor, "items 3"] | None = None,
        cu_seqlens: Int[Tensor, " n1"] | None = None,
        state: ModelState | None = None,
        return_hidden: bool = False,
    ) -> Output:
        """input_ids: tokens, with one placeholder per picture or one per feature row. cu_seqlens (n + 1): documents
        packed into one row (B = 1), none of which sees another. state: read on from it; it is advanced."""
        hidden = Hidden() if return_hidden else None
        with _wholly(state):
            final = self._run(input_ids, pixel_values, grid_thw, cu_seqlens, state, hidden, None)
            logits = self.lm_head(final)
        if hidden is not None:
            hidden.final = final
        return Output(logits, state, hidden)

    def hidden_states(
        self,
        input_ids: Int[Tensor, "B T"],
        pixel_values: Float[Tensor, "N 3 P P"] | None = None,
        grid_thw: Int[Tensor, "items 3"] | None = None,
        cu_seqlens: Int[Tensor, " n1"] | None = None,
        state: ModelState | PackedState | None = None,
        features: Float[Tensor, "rows D"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The final normed hidden, before the head: what a loss in chunks, or a draft, reads. features: what `vision`
        made of the pictures before, in place of their pixels. state: with cu_seqlens a packed one, a document each."""
        with _wholly(state):
            return self._run(input_ids, pixel_values, grid_thw, cu_seqlens, state, None, features)

    def vision(
        self, pixel_values: Float[Tensor, "N 3 P P"], grid_thw: Int[Tensor, "items 3"]
    ) -> Float[Tensor, "rows D"]:
        """The projected features of all pictures, one after the other."""
        if not self.cfg.has_vision:
            raise ValueError("this model has no vision tower (vt_hidden_size is null); it cannot read pictures")
        features: Tensor = self.mm_projector(self.vision_tower(pixel_values.to(self._dtype()), grid_thw))
        return features

    def new_state(self, batch_size: int = 1) -> ModelState:
        """Empty memory for `batch_size` sequences."""
        return ModelState.empty(self.cfg, batch_size, self._dtype(), self.lm_head.weight.device)

    def reset_parameters(self) -> None:
        """Matrices and embeddings N(0, initializer_range); norms one; pseudo-queries over depth zero, so that every
        source starts with the same weight; convolutions and gates by their own rules. Does nothing on meta."""
        if self.lm_head.weight.is_meta:
            return  # drawing would cost a millisecond a tensor and give nothing
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None and not isinstance(module, K3):
                reset(self.cfg.initializer_range)
            if isinstance(module, KDA):
                module.reset_gates()
        for name, parameter in self.named_parameters():
            if name.endswith("_res_proj.weight"):
                nn.init.zeros_(parameter)

    def _run(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None,
        grid_thw: Tensor | None,
        cu_seqlens: Tensor | None,
        state: ModelState | PackedState | None,
        hidden: Hidden | None,
        features: Tensor | None,
    ) -> Tensor:
        self._check(input_ids, cu_seqlens, state)
        embedded = self.model.embed_tokens(input_ids).to(self._dtype())
        if pixel_values is not None or features is not None:
            if grid_thw is None:
                raise ValueError("pixel_values were given without grid_thw; each picture needs its (t, h, w) row")
            if pixel_values is not None:
                features = self.vision(pixel_values, grid_thw)
            assert features is not None
            embedded = self._with_pictures(embedded, input_ids, features, grid_thw, cu_seqlens)
        elif state is None and self.cfg.has_vision and _can_look(input_ids):  # with a state, a guess may be read
            self._check_no_pictures(input_ids)
        with _RouterTap(self.model.layers, hidden):
            final = self.model(embedded, cu_seqlens, state, hidden)
        if state is not None:
            state.tokens += embedded.shape[1]
        return final

    def _with_pictures(
        self,
        embedded: Tensor,
        input_ids: Tensor,
        features: Tensor,
        grid_thw: Tensor,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        assert self.cfg.merge_kernel_size and self.cfg.media_placeholder_token_id is not None
        merged = self.cfg.merge_kernel_size[0] * self.cfg.merge_kernel_size[1]
        rows = [int(h) * int(w) // merged for _, h, w in grid_thw.tolist()]
        spliced, _ = splice(embedded, input_ids, features, rows, self.cfg.media_placeholder_token_id)
        if cu_seqlens is not None and spliced.shape[1] != embedded.shape[1]:
            raise ValueError("packed rows need one placeholder per feature row: cu_seqlens counts expanded tokens")
        return spliced

    def _check_no_pictures(self, input_ids: Tensor) -> None:
        pad = self.cfg.media_placeholder_token_id
        assert pad is not None
        pads = int((input_ids == pad).sum())
        if pads:
            raise ValueError(
                f"input_ids holds {pads} placeholders (id {pad}) and no pictures were given; each needs a feature row"
            )

    def _check(self, input_ids: Tensor, cu_seqlens: Tensor | None, state: ModelState | PackedState | None) -> None:
        if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}; it must be int64 or int32 of shape "
                f"(batch, tokens)"
            )
        if input_ids.numel() == 0:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; there must be at least one token")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, *input_ids.shape)
            if isinstance(state, ModelState):
                raise ValueError(
                    "cu_seqlens and state exclude each other: packed documents start from empty memory, or from a "
                    "PackedState"
                )
        if state is not None:
            state.check(self.cfg, self._dtype())
            packed = isinstance(state, PackedState)
            sequences = input_ids.shape[0] if not packed else 0 if cu_seqlens is None else len(cu_seqlens) - 1
            if state.batch_size != sequences:
                what = "cu_seqlens" if packed else "input_ids"
                raise ValueError(f"the state holds {state.batch_size} sequences, {what} {sequences}")
        if _can_look(input_ids):
            least, most = (int(bound) for bound in input_ids.aminmax())
            if least < 0 or most >= self.cfg.vocab_size:
                wrong = least if least < 0 else most
                raise ValueError(f"input_ids holds {wrong}; ids must be from 0 to {self.cfg.vocab_size - 1}")

    def _dtype(self) -> torch.dtype:
        return self.compute_dtype or self.model.embed_tokens.weight.dtype


def _can_look(ids: Tensor) -> bool:
    """Elsewhere, looking at values would wait for the GPU, break a traced graph, or find none."""
    return type(ids) is Tensor and ids.is_cpu and not torch.compiler.is_compiling()


def _wholly(state: ModelState | PackedState | None) -> AbstractContextManager[None]:
    """A block that advances `state`, if there is one, wholly or not at all."""
    return nullcontext() if state is None else state.unless_it_fails()


class _RouterTap:
    """Collects each router's output into `hidden.router` while a forward runs; nothing when hidden is None."""

    def __init__(self, layers: nn.ModuleList, hidden: Hidden | None) -> None:
        self.layers, self.hidden = layers, hidden
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        if self.hidden is None:
            return
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if isinstance(layer.feed_forward, LatentMoE):
                self.handles.append(layer.feed_forward.gate.register_forward_hook(self._hook(layer.layer)))

    def _hook(self, layer: int):  # type: ignore[no-untyped-def]
        def keep(_module: nn.Module, _inputs: object, routing: Routing) -> None:
            assert self.hidden is not None
            self.hidden.router[layer] = routing

        return keep

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
