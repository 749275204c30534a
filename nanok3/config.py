"""One flat, frozen record of everything that defines a K3: `K3Config`.

Field names are the official ones. On disk they are nested (`text_config`, `linear_attn_config`, `vision_config`);
here they are flat, and two that would collide carry a prefix: `linear_attn_config.num_heads` is `kda_num_heads`,
`linear_attn_config.head_dim` is `kda_head_dim`. Fields marked *ours* do not exist in the release; they are written
to a file only where they differ from their default, so an official file comes back exactly as it was.

    cfg = K3Config.k3()                 the release, to the last field that matters
    cfg = K3Config.tiny().at_depth(9)   the same shape at another depth: one dial for a family of sizes
    cfg = K3Config.from_json(path)      an official config.json (kimi_k3 or the older, flat kimi_linear)

There is no `K3Config()` without arguments: the official class has defaults that differ from the release, and a
field dropped on the way would silently build another model.
"""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from nanok3.official import MXFP4_BLOCK, mxfp4_quantization, release, template

_REQUIRED = object()


@dataclass(frozen=True)
class _Key:
    """Where a field lives in the file: its section path and key, and the value an absent key stands for."""

    path: tuple[str, ...]
    absent: Any = _REQUIRED
    ours: bool = False


def _text(name: str, absent: Any = _REQUIRED, ours: bool = False) -> _Key:
    return _Key(("text_config", name), absent, ours)


def _linear(name: str, absent: Any = _REQUIRED) -> _Key:
    return _Key(("text_config", "linear_attn_config", name), absent)


def _vision(name: str, absent: Any = None, ours: bool = False) -> _Key:
    return _Key(("vision_config", name), absent, ours)


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Shapes and switches of one model (spec: the official config.json of revision 9f62e4e). Widths are in numbers,
    layer lists are 1-based as in the official file; `kinds` gives the schedule 0-based."""

    # text backbone
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    attn_res_block_size: int | None = 12
    attn_res_full: bool = False
    """Ours to choose: every module output is a depth source of its own (the report's full form)."""

    # KDA, the editable memory
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0
    use_full_rank_gate: bool = True

    # gated MLA without positions
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    qk_norm_eps: float = 1e-6
    """Ours to name: the eps of q_a_layernorm and kv_a_layernorm, which the official code builds with its class
    default instead of rms_norm_eps."""

    # Stable LatentMoE
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool = True
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int = 0

    # vision; vt_hidden_size None means a model without eyes
    vt_hidden_size: int | None = None
    vt_num_hidden_layers: int | None = None
    vt_num_attention_heads: int | None = None
    qkv_hidden_size: int | None = None
    vt_intermediate_size: int | None = None
    patch_size: int | None = None
    init_pos_emb_height: int | None = None
    init_pos_emb_width: int | None = None
    init_pos_emb_time: int | None = None
    merge_kernel_size: tuple[int, int] | None = None
    mm_hidden_size: int | None = None
    text_hidden_size: int | None = None
    projector_ln_eps: float | None = None
    vision_norm_eps: float = 1.1920928955078125e-07
    """Ours to name: what torch.nn.RMSNorm with eps=None uses, the float32 epsilon."""

    # identifiers
    model_type: str = "kimi_k3"
    dtype: str = "bfloat16"
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_placeholder_token_id: int | None = None
    source: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The document this config was read from; fields unknown to us live only here."""

    def __post_init__(self) -> None:
        for name in ("kda_layers", "full_attn_layers", "merge_kernel_size"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        _validate(self)

    # ------------------------------------------------------------------ what follows from the fields

    @property
    def kinds(self) -> tuple[str, ...]:
        """'kda' or 'mla' for each layer, 0-based."""
        full = set(self.full_attn_layers)
        return tuple("mla" if l + 1 in full else "kda" for l in range(self.num_hidden_layers))

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based layer has experts instead of one dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def latent_size(self) -> int:
        """Width in which the routed experts work."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_size(self) -> int:
        """Inner width of the shared experts, which are one fused MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_cache_size(self) -> int:
        """Values an MLA layer keeps per token: the latent and the shared key part (576 in K3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_vision(self) -> bool:
        return self.vt_hidden_size is not None

    @property
    def text_prefix(self) -> str:
        """What stands before `model.` and `lm_head.` in the checkpoint's tensor names."""
        return "language_model." if self.model_type == "kimi_k3" else ""

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The official quantization section (inside text_config; at the top level in flat files), or None."""
        return _section(self.source, self.model_type).get("quantization_config")

    @property
    def expert_format(self) -> str | None:
        """'mxfp4-pack-quantized' where the routed experts are stored packed, None where they are plain."""
        quantization = self.quantization_config
        return quantization.get("format") if quantization else None

    # ------------------------------------------------------------------ the family

    at_depth: ClassVar[Callable[..., K3Config]]  # set below: one dial, on the class and on an instance

    @classmethod
    def tiny(cls, **changes: Any) -> K3Config:
        """Seconds on a CPU: 5 layers, 128 wide, 8 experts."""
        return _family(5, width=128, kda_head_dim=32, mla_heads=4, experts=8, top_k=2, vocab=1024, **changes)

    @classmethod
    def small(cls, **changes: Any) -> K3Config:
        """Minutes on a CPU: 9 layers, 256 wide, 32 experts."""
        return _family(9, width=256, kda_head_dim=64, mla_heads=4, experts=32, top_k=4, vocab=4096, **changes)

    @classmethod
    def base(cls, **changes: Any) -> K3Config:
        """One GPU: 25 layers, 1024 wide, 64 experts."""
        return _family(25, width=1024, kda_head_dim=64, mla_heads=16, experts=64, top_k=4, vocab=32768, **changes)

    @classmethod
    def vision_tiny(cls, **changes: Any) -> K3Config:
        """The demo's: `small` at 4 layers, with a tower of 2 layers, 128 wide. Both learn within minutes on a CPU."""
        return replace(cls.small().at_depth(4, **_tower(128, layers=2)), **changes)

    @classmethod
    def vision_small(cls, **changes: Any) -> K3Config:
        """Half an hour on a CPU: 3 layers, 128 wide, with a tower of 2 layers, 128 wide. A text of half the width and
        one head does not get to forms while it is asked for numbers, too (docs/vision.md)."""
        tower = _tower(128, layers=2) | {"text_hidden_size": 128}
        text = _family(3, width=128, kda_head_dim=32, mla_heads=4, experts=8, top_k=2, vocab=4096, **tower)
        return replace(text, **changes)

    @classmethod
    def k3(cls, **changes: Any) -> K3Config:
        """The release: 93 layers, 7168 wide, 896 experts, 2.78 T parameters."""
        return replace(_from_document(release()), **changes)

    def with_vocabulary(self, vocab_size: int) -> K3Config:
        """This config for a tokenizer of `vocab_size` ids, the last 256 of them reserved in the official order."""
        return replace(self, vocab_size=vocab_size, **_special_ids(vocab_size))

    # ------------------------------------------------------------------ files

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> K3Config:
        """Read an official config.json (or a folder that holds one). ValueError names a missing or wrong field."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; expected an official config.json") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(document, dict):
            raise ValueError(f"{path}: expected a JSON object, found {type(document).__name__}")
        try:
            return _from_document(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The official nested document: the source with every field that differs from it written in."""
        document = copy.deepcopy(self.source) or template(self.model_type)
        if self.has_vision:
            document["vision_config"] = document.get("vision_config") or {}
        elif "vt_hidden_size" in (document.get("vision_config") or {}):
            del document["vision_config"]  # read from a model with eyes, which this one has no longer
        for name, key in _KEYS.items():
            if key.path[0] == "vision_config" and not self.has_vision:
                continue
            _write(document, _where(key, self.model_type), getattr(self, name), key)
        return document

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The document as JSON text; with a path it is also written there (a new file replaces the old one whole)."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        if path is not None:
            _replace_file(Path(path), text)
        return text


# ---------------------------------------------------------------------- fields and their places in the file

_KEYS: dict[str, _Key] = {
    "vocab_size": _text("vocab_size"),
    "hidden_size": _text("hidden_size"),
    "num_hidden_layers": _text("num_hidden_layers"),
    "intermediate_size": _text("intermediate_size"),
    "hidden_act": _text("hidden_act"),
    "activation_situ_beta": _text("activation_situ_beta", None),
    "activation_situ_linear_beta": _text("activation_situ_linear_beta", None),
    "rms_norm_eps": _text("rms_norm_eps"),
    "max_position_embeddings": _text("max_position_embeddings", 4096),
    "tie_word_embeddings": _text("tie_word_embeddings", False),
    "initializer_range": _text("initializer_range", 0.02),
    "attn_res_block_size": _text("attn_res_block_size", None),
    "attn_res_full": _text("attn_res_full", False, ours=True),
    "kda_layers": _linear("kda_layers"),
    "full_attn_layers": _linear("full_attn_layers"),
    "kda_num_heads": _linear("num_heads"),
    "kda_head_dim": _linear("head_dim"),
    "short_conv_kernel_size": _linear("short_conv_kernel_size"),
    "gate_lower_bound": _linear("gate_lower_bound", None),
    "use_full_rank_gate": _linear("use_full_rank_gate", False),
    "num_attention_heads": _text("num_attention_heads"),
    "num_key_value_heads": _text("num_key_value_heads"),
    "q_lora_rank": _text("q_lora_rank", None),
    "kv_lora_rank": _text("kv_lora_rank"),
    "qk_nope_head_dim": _text("qk_nope_head_dim"),
    "qk_rope_head_dim": _text("qk_rope_head_dim"),
    "v_head_dim": _text("v_head_dim"),
    "mla_use_nope": _text("mla_use_nope", False),
    "mla_use_output_gate": _text("mla_use_output_gate", False),
    "qk_norm_eps": _text("qk_norm_eps", 1e-6, ours=True),
    "num_experts": _text("num_experts"),
    "num_experts_per_token": _text("num_experts_per_token"),
    "num_shared_experts": _text("num_shared_experts", 0),
    "moe_intermediate_size": _text("moe_intermediate_size"),
    "routed_expert_hidden_size": _text("routed_expert_hidden_size", None),
    "latent_moe_use_norm": _text("latent_moe_use_norm", False),
    "first_k_dense_replace": _text("first_k_dense_replace", 0),
    "moe_layer_freq": _text("moe_layer_freq", 1),
    "moe_router_activation_func": _text("moe_router_activation_func", "sigmoid"),
    "moe_renormalize": _text("moe_renormalize", True),
    "routed_scaling_factor": _text("routed_scaling_factor", 1.0),
    "num_expert_group": _text("num_expert_group", 1),
    "topk_group": _text("topk_group", 1),
    "num_nextn_predict_layers": _text("num_nextn_predict_layers", 0),
    "vt_hidden_size": _vision("vt_hidden_size"),
    "vt_num_hidden_layers": _vision("vt_num_hidden_layers"),
    "vt_num_attention_heads": _vision("vt_num_attention_heads"),
    "qkv_hidden_size": _vision("qkv_hidden_size"),
    "vt_intermediate_size": _vision("vt_intermediate_size"),
    "patch_size": _vision("patch_size"),
    "init_pos_emb_height": _vision("init_pos_emb_height"),
    "init_pos_emb_width": _vision("init_pos_emb_width"),
    "init_pos_emb_time": _vision("init_pos_emb_time"),
    "merge_kernel_size": _vision("merge_kernel_size"),
    "mm_hidden_size": _vision("mm_hidden_size"),
    "text_hidden_size": _vision("text_hidden_size"),
    "projector_ln_eps": _vision("projector_ln_eps"),
    "vision_norm_eps": _vision("vision_norm_eps", 1.1920928955078125e-07, ours=True),
    "model_type": _Key(("model_type",)),
    "dtype": _Key(("dtype",), "bfloat16"),
    "bos_token_id": _Key(("bos_token_id",)),
    "eos_token_id": _Key(("eos_token_id",)),
    "pad_token_id": _Key(("pad_token_id",)),
    "media_placeholder_token_id": _Key(("media_placeholder_token_id",), None),
}
_VISION_FIELDS = [name for name, key in _KEYS.items() if key.path[0] == "vision_config" and not key.ours]


def _where(key: _Key, model_type: str) -> tuple[str, ...]:
    """A flat file (kimi_linear) has the text section's keys at the top."""
    if model_type == "kimi_linear" and key.path[0] == "text_config":
        return key.path[1:]
    return key.path


def _section(document: dict[str, Any], model_type: str) -> dict[str, Any]:
    return document if model_type == "kimi_linear" else document.get("text_config") or {}


def _read(document: dict[str, Any], path: tuple[str, ...], absent: Any) -> Any:
    node: Any = document
    for step in path:
        if not isinstance(node, dict) or step not in node:
            if absent is _REQUIRED:
                raise ValueError(f"field {'.'.join(path)!r} is missing")
            return absent
        node = node[step]
    return tuple(node) if isinstance(node, list) else node


def _write(document: dict[str, Any], path: tuple[str, ...], value: Any, key: _Key) -> None:
    if _read(document, path, key.absent if key.absent is not _REQUIRED else None) == value:
        present = _read(document, path, _REQUIRED) if key.absent is _REQUIRED else value
        if present == value:
            return
    node = document
    for step in path[:-1]:
        node = node.setdefault(step, {})
    node[path[-1]] = list(value) if isinstance(value, tuple) else value
    section = document.get("text_config")
    if len(path) == 1 and isinstance(section, dict) and path[0] in section:
        section[path[0]] = value  # the official file repeats the ids and the dtype inside text_config


def _from_document(document: dict[str, Any]) -> K3Config:
    model_type = document.get("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ValueError(f"field 'model_type' is {model_type!r}; allowed: 'kimi_k3' or 'kimi_linear'")
    if model_type == "kimi_k3" and not isinstance(document.get("text_config"), dict):
        raise ValueError("field 'text_config' is missing; a kimi_k3 file nests the language model's fields in it")
    sections = {"vision_config": document, "quantization_config": _section(document, model_type)}
    for name, where in sections.items():
        if where.get(name) is not None and not isinstance(where[name], dict):
            raise ValueError(f"field {name!r} is {where[name]!r}; it must be an object or null")
    values = {name: _read(document, _where(key, model_type), key.absent) for name, key in _KEYS.items()}
    if document.get("vision_config") is None:
        values.update(dict.fromkeys(_VISION_FIELDS))
    return K3Config(**values, source=copy.deepcopy(document))


def _replace_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


# ---------------------------------------------------------------------- rules

_LARGEST = 2**31 - 1
_DEEPEST = 100_000
_KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a text",
    "tuple[int, ...]": "a list of whole numbers",
    "tuple[int, int]": "a list of two whole numbers",
    "None": "null",
}
_AT_LEAST_1 = (
    "vocab_size hidden_size num_hidden_layers intermediate_size kda_num_heads kda_head_dim short_conv_kernel_size "
    "num_attention_heads num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim num_experts "
    "num_experts_per_token moe_intermediate_size routed_expert_hidden_size moe_layer_freq attn_res_block_size "
    "max_position_embeddings"
).split() + [name for name in _VISION_FIELDS if name not in ("merge_kernel_size", "projector_ln_eps")]
_AT_LEAST_0 = (
    "qk_rope_head_dim num_shared_experts first_k_dense_replace num_nextn_predict_layers initializer_range"
).split()
_ABOVE_0 = (
    "rms_norm_eps qk_norm_eps vision_norm_eps projector_ln_eps activation_situ_beta activation_situ_linear_beta "
    "routed_scaling_factor"
).split()
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _validate(cfg: K3Config) -> None:
    """Refuse what cannot be built. Every message gives field, value and rule."""

    def refuse(name: str, rule: str) -> None:
        raise ValueError(f"field {name!r} is {getattr(cfg, name)!r}; {rule}")

    for f in fields(cfg):
        allowed = str(f.type).split(" | ")
        if f.name != "source" and not any(_is_a(getattr(cfg, f.name), kind) for kind in allowed):
            refuse(f.name, "it must be " + " or ".join(_KINDS[kind] for kind in allowed))
        if f.name != "source" and _is_huge(getattr(cfg, f.name)):
            refuse(f.name, f"a whole number may not be above {_LARGEST} in size")
    for least, names in ((1, _AT_LEAST_1), (0, _AT_LEAST_0)):
        for name in names:
            value = getattr(cfg, name)
            if value is not None and value < least:
                refuse(name, f"it must be at least {least}")
    for name in _ABOVE_0:
        value = getattr(cfg, name)
        if value is not None and not value > 0:
            refuse(name, "it must be above 0")
    if cfg.num_hidden_layers > _DEEPEST:
        refuse("num_hidden_layers", f"it must be at most {_DEEPEST}")
    _validate_schedule(cfg, refuse)
    _validate_text(cfg, refuse)
    _validate_vision(cfg, refuse)


def _is_a(value: Any, kind: str) -> bool:
    """Whether a value is of an annotated kind; true and false are no numbers, nor are NaN and infinity."""
    if kind == "None":
        return value is None
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    if kind.startswith("tuple"):
        whole = isinstance(value, tuple) and all(_is_a(v, "int") for v in value)
        return whole and (kind == "tuple[int, ...]" or len(value) == 2)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind == "float" and isinstance(value, float) and math.isfinite(value))


def _is_huge(value: Any) -> bool:
    """Whether a whole number would sooner be an error of memory, or of a C integer, than a size."""
    if isinstance(value, tuple):
        return any(map(_is_huge, value))
    return isinstance(value, int) and abs(value) > _LARGEST


def _validate_schedule(cfg: K3Config, refuse: Callable[[str, str], None]) -> None:
    every = set(range(1, cfg.num_hidden_layers + 1))
    kda, full = set(cfg.kda_layers), set(cfg.full_attn_layers)
    if kda & full:
        refuse(
            "kda_layers",
            f"layers {sorted(kda & full)} are also in full_attn_layers; the lists may not overlap",
        )
    missing = sorted(every - kda - full)
    if missing:
        few = str(missing if len(missing) <= 8 else [*missing[:8], ...]).replace("Ellipsis", "...")
        refuse(
            "kda_layers",
            f"of num_hidden_layers = {cfg.num_hidden_layers}, layers {few} (counted from 1) are in neither kda_layers "
            f"nor full_attn_layers",
        )
    beyond = sorted(l for l in (kda | full) - every if l < 1)
    if beyond or len(cfg.kda_layers) != len(kda) or len(cfg.full_attn_layers) != len(full):
        refuse("full_attn_layers", "with kda_layers it must list each layer once, counted from 1")
    # Lists may name layers past the end: a config cut to fewer layers keeps the release's lists.


def _validate_text(cfg: K3Config, refuse: Callable[[str, str], None]) -> None:
    if cfg.num_experts_per_token > cfg.num_experts:
        refuse("num_experts_per_token", f"it may not be above num_experts = {cfg.num_experts}")
    if cfg.num_key_value_heads != cfg.num_attention_heads:
        refuse("num_key_value_heads", f"MLA needs as many as num_attention_heads = {cfg.num_attention_heads}")
    if cfg.hidden_act not in ("situ", "silu"):
        refuse("hidden_act", "allowed: 'situ' or 'silu'")
    if cfg.moe_router_activation_func != "sigmoid":
        refuse("moe_router_activation_func", "allowed: 'sigmoid'")
    for name in ("num_expert_group", "topk_group"):
        if getattr(cfg, name) != 1:
            refuse(name, "only 1 is supported (the release routes without groups)")
    if cfg.tie_word_embeddings:
        refuse("tie_word_embeddings", "only false is supported: the head has a table of its own")
    if not cfg.mla_use_nope:
        refuse("mla_use_nope", "only true is supported: no position is encoded in these attention layers")
    if cfg.gate_lower_bound is not None and not -5.0 <= cfg.gate_lower_bound < 0:
        refuse(
            "gate_lower_bound",
            "it must lie in [-5, 0), so that a 16-token tile stays within e^80, or be null",
        )
    if cfg.model_type == "kimi_k3" and cfg.attn_res_block_size is None:
        refuse("attn_res_block_size", "kimi_k3 needs a block size of at least 1")
    if cfg.attn_res_full and cfg.attn_res_block_size is None:
        refuse("attn_res_full", "it needs attention residuals: attn_res_block_size is null")
    if cfg.model_type not in ("kimi_k3", "kimi_linear"):
        refuse("model_type", "allowed: 'kimi_k3' or 'kimi_linear'")
    if cfg.dtype not in _DTYPES:
        refuse("dtype", f"allowed: {', '.join(_DTYPES)}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
        value = getattr(cfg, name)
        if value is not None and not 0 <= value < cfg.vocab_size:
            refuse(name, f"it must be an id below vocab_size = {cfg.vocab_size}")
    if cfg.num_nextn_predict_layers > 1:
        refuse("num_nextn_predict_layers", "only 0 and 1 are supported: K3 was trained with one prediction layer")
    if cfg.expert_format == "mxfp4-pack-quantized":
        for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
            value = getattr(cfg, name) or cfg.hidden_size
            if value % MXFP4_BLOCK:
                refuse(name, f"with MXFP4 experts it must be a multiple of {MXFP4_BLOCK} (one scale per block)")
    elif cfg.expert_format is not None:
        raise ValueError(
            f"field 'quantization_config.format' is {cfg.expert_format!r}; allowed: 'mxfp4-pack-quantized' or none"
        )


def _validate_vision(cfg: K3Config, refuse: Callable[[str, str], None]) -> None:
    if not cfg.has_vision:
        for name in _VISION_FIELDS:
            if getattr(cfg, name) is not None:
                refuse(name, "vt_hidden_size is null, and a model without a vision tower has no such field")
        return
    for name in _VISION_FIELDS:
        if getattr(cfg, name) is None:
            refuse(name, f"a model with a vision tower (vt_hidden_size = {cfg.vt_hidden_size}) needs it")
    assert cfg.qkv_hidden_size and cfg.vt_num_attention_heads and cfg.merge_kernel_size
    if min(cfg.merge_kernel_size) < 1:
        refuse("merge_kernel_size", "both numbers must be at least 1")
    if cfg.qkv_hidden_size % cfg.vt_num_attention_heads:
        refuse("qkv_hidden_size", f"it must divide by vt_num_attention_heads = {cfg.vt_num_attention_heads}")
    if (cfg.qkv_hidden_size // cfg.vt_num_attention_heads) % 4:
        refuse("qkv_hidden_size", "its head width must divide by 4 (a rotation by column and one by row)")
    if cfg.text_hidden_size != cfg.hidden_size:
        refuse("text_hidden_size", f"it must equal hidden_size = {cfg.hidden_size}")
    if cfg.mm_hidden_size != cfg.vt_hidden_size:
        refuse("mm_hidden_size", f"it must equal vt_hidden_size = {cfg.vt_hidden_size}")


# ---------------------------------------------------------------------- presets


def _schedule(depth: int) -> dict[str, Any]:
    """Every fourth layer is MLA, and so is the last one; the others are KDA (report 2.1)."""
    full = tuple(l for l in range(1, depth + 1) if l % 4 == 0 or l == depth)
    return {"full_attn_layers": full, "kda_layers": tuple(l for l in range(1, depth + 1) if l not in full)}


def _blocks(depth: int) -> int:
    """Layers per AttnRes block that keep the release's eight blocks (12 of 93 layers)."""
    return max(1, -(-depth // 8))


def _family(
    depth: int,
    *,
    width: int,
    kda_head_dim: int,
    mla_heads: int,
    experts: int,
    top_k: int,
    vocab: int,
    **changes: Any,
) -> K3Config:
    """A K3 in miniature. The ratios are the release's where it has one (latent = width / 2, shared experts 2, expert
    width 3/7 of the model's rounded to 32); the head widths are ours, since 128 would leave a small model one head."""
    nope, rope = kda_head_dim, kda_head_dim // 2
    cfg = K3Config(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=_round(width * 33792 / 7168, 64),
        attn_res_block_size=_blocks(depth),
        kda_num_heads=width // kda_head_dim,
        kda_head_dim=kda_head_dim,
        num_attention_heads=mla_heads,
        num_key_value_heads=mla_heads,
        q_lora_rank=_round(width * 1536 / 7168, 32),
        kv_lora_rank=max(32, _round(width * 512 / 7168, 32)),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=nope,
        num_experts=experts,
        num_experts_per_token=top_k,
        num_shared_experts=2,
        moe_intermediate_size=_round(width * 3072 / 7168, 32),
        routed_expert_hidden_size=_round(width / 2, 32),
        **_special_ids(vocab),
        **_schedule(depth),
    )
    return replace(cfg, **changes)


def _tower(width: int, layers: int) -> dict[str, Any]:
    """A vision tower in miniature: the release's patches, merge and MLP ratio; head width and table are ours. The
    projector's width follows the text's (`_at_depth`)."""
    return {
        "vt_hidden_size": width,
        "vt_num_hidden_layers": layers,
        "vt_num_attention_heads": width // 32,
        "qkv_hidden_size": width,
        "vt_intermediate_size": 4 * width,
        "patch_size": 14,
        "init_pos_emb_height": 16,
        "init_pos_emb_width": 16,
        "init_pos_emb_time": 4,
        "merge_kernel_size": (2, 2),
        "mm_hidden_size": width,
        "projector_ln_eps": 1e-5,
    }


def _special_ids(vocab: int) -> dict[str, Any]:
    """The official offsets into the 256 reserved ids that end the vocabulary."""
    first = vocab - 256
    return {
        "bos_token_id": first,
        "eos_token_id": first + 2,
        "pad_token_id": first + 255,
        "media_placeholder_token_id": first + 21,
    }


def _round(value: float, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)


def _at_depth(cfg: K3Config, depth: int, **changes: Any) -> K3Config:
    """`cfg` at another depth with its proportions kept: width and heads grow with depth (the ratio of width to depth
    stays), the schedule keeps 3:1 and the closing MLA layer, experts and top-k keep their ratio, AttnRes its number of
    blocks. Head widths stay, as they do across the K-family. Keyword arguments override single fields."""
    if not isinstance(depth, int) or depth < 1:
        raise ValueError(f"at_depth({depth!r}): the depth must be a whole number of at least 1")
    if depth > _DEEPEST:
        raise ValueError(f"at_depth({depth!r}): the depth must be at most {_DEEPEST}")
    scale = depth / cfg.num_hidden_layers
    heads = max(1, round(cfg.kda_num_heads * scale))
    width = max(32, _round(cfg.hidden_size / cfg.kda_num_heads * heads, 32))
    mla_heads = max(1, round(cfg.num_attention_heads * scale))
    top_k = max(1, round(cfg.num_experts_per_token * scale))
    grown: dict[str, Any] = {
        "num_hidden_layers": depth,
        **_schedule(depth),
        "hidden_size": width,
        "intermediate_size": _round(cfg.intermediate_size * width / cfg.hidden_size, 32),
        "kda_num_heads": heads,
        "num_attention_heads": mla_heads,
        "num_key_value_heads": mla_heads,
        "q_lora_rank": cfg.q_lora_rank and _round(cfg.q_lora_rank * width / cfg.hidden_size, 32),
        "kv_lora_rank": _round(cfg.kv_lora_rank * width / cfg.hidden_size, 32),
        "num_experts": round(top_k * cfg.num_experts / cfg.num_experts_per_token),
        "num_experts_per_token": top_k,
        "moe_intermediate_size": _round(cfg.moe_intermediate_size * width / cfg.hidden_size, 32),
        "routed_expert_hidden_size": cfg.routed_expert_hidden_size
        and _round(cfg.routed_expert_hidden_size * width / cfg.hidden_size, 32),
        "first_k_dense_replace": min(cfg.first_k_dense_replace, depth),
    }
    if cfg.attn_res_block_size is not None:
        blocks = -(-cfg.num_hidden_layers // cfg.attn_res_block_size)
        grown["attn_res_block_size"] = max(1, -(-depth // blocks))
    if cfg.has_vision or changes.get("vt_hidden_size"):
        grown["text_hidden_size"] = width
    return replace(cfg, **(grown | changes))


class _Dial:
    """`cfg.at_depth(n)` scales that config; `K3Config.at_depth(n)` scales `small`, the middle of the family."""

    def __get__(self, cfg: K3Config | None, owner: type[K3Config]) -> Callable[..., K3Config]:
        def at_depth(depth: int, **changes: Any) -> K3Config:
            return _at_depth(cfg if cfg is not None else owner.small(), depth, **changes)

        at_depth.__doc__ = _at_depth.__doc__
        return at_depth


K3Config.at_depth = _Dial()  # type: ignore[assignment]


def with_expert_format(cfg: K3Config, experts: str | None) -> K3Config:
    """`cfg` with the quantization section of packed experts ('mxfp4') or without one (None or 'bf16')."""
    document = cfg.to_dict()
    section = _section(document, cfg.model_type)
    if experts == "mxfp4":
        if cfg.expert_format is None:
            section["quantization_config"] = mxfp4_quantization()
    else:
        section.pop("quantization_config", None)
    return _from_document(document)


assert {f.name for f in fields(K3Config)} == {*_KEYS, "source"}, "every field has a place in the file"
