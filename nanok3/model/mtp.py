"""The prediction layer: one block more, which from the model's last thought and the next token says the one after
(report, table 1 and 4; architecture 3.10).

    row t:   x_t = W [norm(embedding of token t) ; norm(feature of token t - 1)],   zero before a document's first
             h_t = block(x)_t                         gated MLA without positions, then LatentMoE; no AttnRes
             logits of token t + 1 = head(norm(h_t))  the model's own head and embedding

It learns beside the model (train/mtp.py), of which it is a part then: `attach` hangs it on, `save_prediction` and
`load_prediction` keep it beside the model's weights.

    mtp.safetensors       model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm, self_attn.*, block_sparse_moe.*, ...}
    config.json           num_nextn_predict_layers = 1             N = num_hidden_layers, one past the last layer

The feature is what the model read of its depth for the last time, before its final norm. A draft mixes in two earlier
ones, what the first layers behind AttnRes blocks 1 and 4 read, through a matrix that begins as [0 0 I], so that it
starts out as the prediction layer; after its first guess it goes on with its own h in place of the feature.

K3's prediction layer is in no release. The names are those that vLLM reads (enorm, hnorm, eh_proj, mtp_block,
shared_head.norm); in a file the block's stand without `mtp_block`, as in DeepSeek-V3's. Ours: which read of depth a
block's output is, the feature before a document, where there are not eight blocks, the half of them in place of the
fourth, and that the layer has a file of its own, which those who want the model alone need not open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.attn_res import DepthSources
from nanok3.model.basics import Linear, RMSNorm
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3, DecoderLayer
from nanok3.model.weights import _publish, write_tensors


def layer_config(cfg: K3Config) -> K3Config:
    """A model of one MLA layer with experts and without attention residuals, otherwise as `cfg`."""
    one = replace(cfg, num_hidden_layers=1, kda_layers=(), full_attn_layers=(1,), first_k_dense_replace=0)
    return replace(one, model_type="kimi_linear", attn_res_block_size=None, attn_res_full=False)


def tapped_layers(cfg: K3Config) -> tuple[int, int, int]:
    """Layers whose attention reads the outputs of an early, a middle and the last AttnRes block; the last read of all
    goes by the number of layers."""
    layers = cfg.num_hidden_layers
    block = cfg.attn_res_block_size or max(1, layers // 8)
    blocks = -(-layers // block)
    return min(block, layers), min(block * -(-blocks // 2), layers), layers


@contextmanager
def taps(model: K3, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What the attentions of these layers read before their norm, by layer, while the model runs; the number of layers
    means the last read."""
    found: dict[int, Tensor] = {}

    def watch(place: int) -> torch.utils.hooks.RemovableHandle:
        last = place == len(model.model.layers)
        norm = model.model.norm if last else model.model.layers[place].input_layernorm
        assert isinstance(norm, nn.Module)
        return norm.register_forward_pre_hook(lambda _, inputs: found.update({place: inputs[0]}))

    handles = [watch(place) for place in set(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class PredictionLayer(nn.Module):
    """One block over a token and the feature before it."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.enorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = Linear(2 * cfg.hidden_size, cfg.hidden_size)
        self.mtp_block = DecoderLayer(layer_config(cfg), 0)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)})

    def combine(self, embedded: Float[Tensor, "B T D"], feature: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The block's input."""
        x: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(feature)), dim=-1))
        return x

    def forward(
        self,
        embedded: Float[Tensor, "B T D"],
        feature: Float[Tensor, "B T D"],
        cu_seqlens: Int[Tensor, " n1"] | None = None,
        cache: LatentCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """h; row t of `feature` is that of token t - 1. A cache is advanced by the rows."""
        depth = DepthSources(self.combine(embedded, feature))
        self.mtp_block(depth, cu_seqlens, cache)
        assert depth.running is not None
        return depth.running

    @property
    def normed_weight(self) -> nn.Parameter:
        """Of the norm before the head."""
        weight = self.shared_head["norm"].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def normed(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """What the model's head reads."""
        x: Tensor = self.shared_head["norm"](h)
        return x


# ---------------------------------------------------------------------- on a model, and in its folder

NAME, FILE = "prediction", "mtp.safetensors"
_STACKED = re.compile(r"(?P<stem>.*experts)\.(?P<matrix>w[123])$")


def attach(model: K3) -> PredictionLayer:
    """Hang a layer with fresh weights on a model, as its submodule `prediction`; the model's own forward passes it by.
    On the device of the model, in float32."""
    layer = PredictionLayer(model.cfg)
    draw(layer, model.cfg.initializer_range)
    model.add_module(NAME, layer.to(model.lm_head.weight.device))
    return layer


def prediction_of(model: nn.Module) -> PredictionLayer | None:
    """The layer that hangs on a model, if one does."""
    layer = model._modules.get(NAME)
    assert layer is None or isinstance(layer, PredictionLayer)
    return layer


def draw(layer: PredictionLayer, std: float) -> None:
    """Fresh weights by the model's rules."""
    for module in layer.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset(std)


def save_prediction(model: K3, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Add the layer to a folder in which the model was saved; nothing without one. Written aside, flushed and
    renamed, the config last."""
    layer = prediction_of(model)
    if layer is None:
        return
    tensors: dict[str, Tensor] = {}
    for name, value in layer.state_dict().items():
        wide = torch.promote_types(dtype, torch.float32) if name.endswith("e_score_correction_bias") else dtype
        kept = value.detach().to(device="cpu", dtype=wide)
        for file_name, part in _in_file(model.cfg, name, kept):
            tensors[file_name] = part.contiguous()
    with TemporaryDirectory(dir=folder, prefix=".saving-") as aside:
        write_tensors(tensors, Path(aside) / FILE)
        _publish(Path(aside) / FILE, folder / FILE)
    replace(K3Config.from_json(folder), num_nextn_predict_layers=1).to_json(folder / "config.json")


def load_prediction(model: K3, folder: Path) -> PredictionLayer | None:
    """Attach the layer that lies beside a model's weights, in float32; None where its config names none. ValueError
    for a file that is missing or another model's."""
    if not K3Config.from_json(folder).num_nextn_predict_layers:
        return None
    layer = attach(model)
    try:
        found = load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / FILE}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    for name, value in layer.state_dict().items():
        for file_name, part in _in_file(model.cfg, name, value):
            stored = found.pop(file_name, None)
            if stored is None or stored.shape != part.shape:
                wrong = "is missing" if stored is None else f"is {list(stored.shape)}, expected {list(part.shape)}"
                raise ValueError(f"{folder / FILE}: {file_name} {wrong}")
            if not bool(torch.isfinite(stored).all()):
                raise ValueError(f"{folder / FILE}: {file_name} holds inf or NaN")
            part.copy_(stored)
    if found:
        raise ValueError(f"{folder / FILE}: {len(found)} tensors are unknown, the first is {min(found)}")
    return layer


def _in_file(cfg: K3Config, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file that one of the layer's is, as views of it: experts one by one."""
    stem = f"{cfg.text_prefix}model.layers.{cfg.num_hidden_layers}.{name.removeprefix('mtp_block.')}"
    experts = _STACKED.match(stem)
    if experts is None:
        yield stem, value
        return
    for e, matrix in enumerate(value):
        yield f"{experts['stem']}.{e}.{experts['matrix']}.weight", matrix


# ---------------------------------------------------------------------- the draft


class Draft(nn.Module):
    """A prediction layer that reads three depths of the model."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.fusion = Linear(3 * cfg.hidden_size, cfg.hidden_size)
        self.layer = PredictionLayer(cfg)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `K3`; the fusion takes the last feature alone."""
        draw(self.layer, self.cfg.initializer_range)
        D = self.cfg.hidden_size
        with torch.no_grad():
            self.fusion.weight.zero_()[:, 2 * D :].copy_(torch.eye(D))

    def fuse(self, features: Float[Tensor, "*b 3 D"]) -> Float[Tensor, "*b D"]:
        """One feature a token of the three."""
        x: Tensor = self.fusion(features.flatten(-2))
        return x
