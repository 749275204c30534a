"""Per-head Muon for matrices, AdamW for the rest: which parameter gets which rule, and the optimizer that applies it.

Muon (report 2.5; Moonlight) turns the momentum of a matrix into the nearest matrix with orthogonal rows or columns:

    M <- mu M + G                     momentum, mu = 0.95
    N  = G + mu M                     Nesterov
    O  = newton_schulz(N)             five steps of  X <- a X + (b A + c A A) X,  A = X X^T,  from  X = N / |N|
    W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) O

An orthogonal matrix has entries of size 1 / sqrt(max(rows, columns)), so every entry of an update is about 0.2 lr, as
with AdamW: one learning rate serves both.

*Per head*: a projection onto many heads is not one matrix but one per head. Orthogonalised together, strong heads
would take the norm and weak heads would hardly move; K3 cuts the momentum of its Q, K and V projections along the
heads. `parameter_rules` cuts every stored parameter into its logical matrices, never more and never less:

    KDA q k v g, f_b, (g_b)           one matrix a head
    MLA q_b (q), g                    one matrix a head
    MLA kv_b                          two a head: rows of the key, rows of the value
    MLA kv_a                          two: the latent's rows and the shared key's rows (splitting them is ours)
    experts                           one an expert, for each of w1, w2, w3
    other projections, router         the whole matrix
    KDA b_proj                        AdamW: its rows are scalars of one head each
    embedding, head, vision, norms, convolutions, A_log, dt_bias, AttnRes queries: AdamW

Weight decay 0.1 (report 3) acts on matrices, under AdamW too (b_proj, vision). Ours: the embedding and the head are
not decayed by default (`embedding_weight_decay`); vectors, convolutions, AttnRes queries and positions never are.
Learning-rate scales of the AdamW part are ours as well; K3's Adam betas are unknown, these are Moonlight's. The tower
has the smallest: before the text looks, its gradient is noise, and AdamW steps as far by noise as by a gradient that
knows the way (docs/vision.md has what was measured, and when more is right).

The baselines have a map of their own: every matrix whole, as Muon was published. `matrices="adamw"` gives all matrices
of any model to AdamW instead, for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from rich.table import Table
from torch import Tensor, nn

from nanok3.baselines.frame import BaselineConfig
from nanok3.config import K3Config

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the Newton-Schulz step: tuned for speed, they leave singular values between about 0.7 and 1.2."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Everything the two rules need besides the model."""

    matrices: Literal["muon", "adamw"] = "muon"
    """The rule for matrices; with adamw there is only one rule."""
    lr: float = 4e-3
    """Learning rate of both rules until `K3Optimizer.lr` is set (ours)."""
    weight_decay: float = 0.1
    """Of matrices (report 3)."""
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    adam_lr_scale: float = 1.0
    """AdamW's learning rate relative to Muon's (ours)."""
    embedding_lr_scale: float = 1.0
    """On top of adam_lr_scale, for the embedding (ours)."""
    head_lr_scale: float = 1.0
    """On top of adam_lr_scale, for the head (ours)."""
    embedding_weight_decay: float = 0.0
    """Of the embedding and the head (ours)."""
    vision_lr_scale: float = 0.025
    """On top of adam_lr_scale, for what AdamW updates of the vision tower and its projector (ours)."""
    vision_matrices: Literal["muon", "adamw"] = "adamw"
    """The rule for the matrices of the tower's blocks and of the projector; K3's is not known."""


# ---------------------------------------------------------------------- Newton-Schulz


def newton_schulz(
    G: Float[Tensor, "n r c"], steps: int = 5, dtype: torch.dtype | None = None
) -> Float[Tensor, "n r c"]:
    """Each of the n matrices with its singular values moved to about 1, in the dtype of G. A zero matrix stays zero.

    Every matrix is scaled by its own Frobenius norm, so none depends on its neighbours. Computes in `dtype`; None
    means bfloat16 where that is fast, else float32 (float64 for float64 input).
    """
    X = G.to(dtype or _product_dtype(G))
    O = _newton_schulz_cpu(X, steps)
    return newton_schulz_torch(X, steps).to(G.dtype) if O is None else O.to(G.dtype)


def newton_schulz_torch(G: Float[Tensor, "n r c"], steps: int = 5) -> Float[Tensor, "n r c"]:
    """The same in batched products, all in the dtype of G."""
    a, b, c = COEFFICIENTS
    X = G
    if G.shape[1] > G.shape[2]:
        X = X.mT  # the Gram matrix of the smaller side
    norms = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=torch.promote_types(X.dtype, torch.float32))
    X = X * (1 / (norms + 1e-7)).to(X.dtype)
    done = []
    for x in X.split(_matrices_at_once(X)):
        for _ in range(steps):
            A = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(A, A, A, beta=b, alpha=c), x, beta=a)
        done.append(x)
    X = torch.cat(done) if len(done) > 1 else done[0]
    return X.mT if G.shape[1] > G.shape[2] else X


def _newton_schulz_cpu(G: Tensor, steps: int) -> Tensor | None:
    """The same in C++, a matrix at a time in the cache, or None where that does not apply: another device or dtype,
    large matrices, no compiler."""
    from nanok3.kernels import newton_schulz_cpu

    O = newton_schulz_cpu.newton_schulz(G, steps, COEFFICIENTS)
    return None if O is NotImplemented else O


def fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 have hardware of their own there."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
        return any(check() for check in checks if check)
    return False


def _product_dtype(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if fast_bfloat16(x.device) else torch.float32


def _matrices_at_once(X: Tensor) -> int:
    """A CPU works fastest on what its caches hold, about a million elements; a GPU wants more, within its memory."""
    elements = 2**20 if X.device.type == "cpu" else 2**27
    return max(1, elements // (X.shape[1] * X.shape[2]))


# ---------------------------------------------------------------------- which rule for which parameter


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated.

    `blocks` (Muon only) are the stacks (n, rows, columns) of logical matrices. All have the same n: read as rows, the
    parameter is n groups, and each group holds one matrix of every block, in order.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["muon", "adamw"]
    blocks: tuple[tuple[int, int, int], ...]
    weight_decay: float
    lr_scale: float

    def cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The blocks of a tensor of the parameter's shape, as views of it."""
        groups, _, columns = self.blocks[0]
        return tensor.view(groups, -1, columns).split([rows for _, rows, _ in self.blocks], dim=1)


def parameter_rules(model: nn.Module, settings: OptimizerSettings | None = None) -> list[Rule]:
    """One rule for every parameter of a K3 or a baseline, in the order of `named_parameters()`.

    ValueError for a model whose `cfg` is no config of theirs, for a parameter whose name the map does not know, and for
    one whose shape does not divide into its matrices: guessing would train a different model in silence.
    """
    cfg = getattr(model, "cfg", None)
    if not isinstance(cfg, K3Config | BaselineConfig):
        raise ValueError(f"model.cfg is {cfg!r}; the parameter map needs a K3Config to cut heads from")
    settings = settings or OptimizerSettings()
    return [_rule(name, tuple(p.shape), cfg, settings) for name, p in model.named_parameters()]


@dataclass(frozen=True)
class _Cut:
    """Muon: `groups` times one matrix of each height. An open number (None) is read off the parameter's shape."""

    groups: int | None = 1
    heights: tuple[int | None, ...] = (None,)


_WHOLE, _PER_EXPERT = _Cut(), _Cut(groups=None)
_VECTOR, _MATRIX, _EMBEDDING, _HEAD = "vector", "matrix", "embedding", "head"  # AdamW
_Treatment = _Cut | str

_TOP: dict[str, _Treatment] = {
    "model.embed_tokens.weight": _EMBEDDING,
    "lm_head.weight": _HEAD,
    "model.norm.weight": _VECTOR,
    "model.output_attn_res_norm.weight": _VECTOR,
    "model.output_attn_res_proj.weight": _VECTOR,
    "vision_tower.patch_embed.proj.weight": _MATRIX,
    "vision_tower.patch_embed.pos_emb.weight": _VECTOR,
    "vision_tower.encoder.final_layernorm.weight": _VECTOR,
    "vision_tower.encoder.blocks.*.wqkv.weight": _Cut(groups=3),
    **{f"vision_tower.encoder.blocks.*.{m}.weight": _WHOLE for m in ("wo", "mlp.fc0", "mlp.fc1")},
    **{f"vision_tower.encoder.blocks.*.{n}.weight": _VECTOR for n in ("norm0", "norm1")},
    **{f"mm_projector.{m}.weight": _WHOLE for m in ("proj.0", "proj.2")},
    "mm_projector.post_norm.weight": _VECTOR,
}

_LAYER: dict[str, _Treatment] = {
    **{f"{n}.weight": _VECTOR for n in ("input_layernorm", "post_attention_layernorm")},
    **{f"{part}_res_{n}.weight": _VECTOR for part in ("self_attention", "mlp") for n in ("norm", "proj")},
    **{f"mlp.{m}_proj.weight": _WHOLE for m in ("gate", "up", "down")},
    **{f"block_sparse_moe.shared_experts.{m}_proj.weight": _WHOLE for m in ("gate", "up", "down")},
    **{f"block_sparse_moe.experts.{m}": _PER_EXPERT for m in ("w1", "w2", "w3")},
    "block_sparse_moe.gate.weight": _WHOLE,
    "block_sparse_moe.routed_expert_down_proj.weight": _WHOLE,
    "block_sparse_moe.routed_expert_norm.weight": _VECTOR,
    "block_sparse_moe.routed_expert_up_proj.weight": _WHOLE,
}


def _kda(cfg: K3Config) -> dict[str, _Treatment]:
    per_head = _Cut(cfg.kda_num_heads, (cfg.kda_head_dim,))
    return {
        **{f"{m}_proj.weight": per_head for m in ("q", "k", "v", "g", "f_b", "g_b")},
        **{f"{m}_proj.weight": _WHOLE for m in ("f_a", "g_a", "o")},
        **{f"{m}_conv1d.weight": _VECTOR for m in ("q", "k", "v")},
        **dict.fromkeys(("A_log", "dt_bias", "o_norm.weight"), _VECTOR),
        "b_proj.weight": _MATRIX,
    }


def _mla(cfg: K3Config) -> dict[str, _Treatment]:
    heads, nope, rope, v = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    return {
        **{f"{m}_proj.weight": _Cut(heads, (nope + rope,)) for m in ("q", "q_b")},
        "kv_b_proj.weight": _Cut(heads, (nope, v)),
        "kv_a_proj_with_mqa.weight": _Cut(1, (cfg.kv_lora_rank, rope)),
        "g_proj.weight": _Cut(heads, (v,)),
        **{f"{m}_proj.weight": _WHOLE for m in ("q_a", "o")},
        **{f"{n}_a_layernorm.weight": _VECTOR for n in ("q", "kv")},
    }


_PREDICTION: dict[str, _Treatment] = {
    **{f"{n}.weight": _VECTOR for n in ("enorm", "hnorm", "shared_head.norm")},
    "eh_proj.weight": _WHOLE,
}


def _treatment(name: str, cfg: K3Config) -> _Treatment | None:
    if name.startswith("prediction."):
        own = name.removeprefix("prediction.").removeprefix("mtp_block.")
        if own.startswith("self_attn."):
            return _mla(cfg).get(own.removeprefix("self_attn."))
        return _LAYER.get(own, _PREDICTION.get(own))
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        return _TOP.get(re.sub(r"\.blocks\.\d+\.", ".blocks.*.", name))
    number, rest = int(layer[1]), layer[2]
    if number < cfg.num_hidden_layers and rest.startswith("self_attn."):
        attention = _kda(cfg) if cfg.kinds[number] == "kda" else _mla(cfg)
        return attention.get(rest.removeprefix("self_attn."))
    return _LAYER.get(rest)


def _baseline(cfg: BaselineConfig) -> dict[str, _Treatment]:
    norms = ("norm", "input_norm", "mlp_norm", "mixer.q_norm", "mixer.k_norm", "mixer.o_norm")
    return {
        "embed_tokens.weight": _EMBEDDING,
        "embed_positions.weight": _VECTOR,
        "lm_head.weight": _HEAD,
        **{f"{norm}.{x}": _VECTOR for norm in norms for x in ("weight", "bias")},
        **{f"mixer.{m}_proj.weight": _WHOLE for m in ("q", "k", "v", "o")},
        "mixer.qkv_proj.weight": _Cut(3, (cfg.hidden_size,)),
        **{f"mlp.{m}_proj.weight": _WHOLE for m in ("up", "down")},
        **{f"{m}_proj.bias": _VECTOR for m in ("mixer.qkv", "mixer.o", "mlp.up", "mlp.down")},
        **{f"mixer.{m}_conv1d.weight": _VECTOR for m in ("q", "k", "v")},
        **{f"mixer.{m}_proj.weight": _MATRIX for m in ("a", "b")},
        **dict.fromkeys(("mixer.A_log", "mixer.dt_bias"), _VECTOR),
    }


def _rule(name: str, shape: tuple[int, ...], cfg: K3Config | BaselineConfig, settings: OptimizerSettings) -> Rule:
    if isinstance(cfg, K3Config):
        treatment = _treatment(name, cfg)
    else:
        treatment = _baseline(cfg).get(re.sub(r"^layers\.\d+\.", "", name))
    eye = name.startswith(("vision_tower.", "mm_projector."))
    if isinstance(treatment, _Cut) and "adamw" in (settings.matrices, settings.vision_matrices if eye else None):
        treatment = _MATRIX
    if treatment is None:
        raise ValueError(f"parameter {name!r} of shape {list(shape)} is not in the optimizer's map (train/muon.py)")
    if isinstance(treatment, _Cut):
        return Rule(name, shape, "muon", _blocks(name, shape, treatment), settings.weight_decay, 1.0)
    decay = {
        _VECTOR: 0.0,
        _MATRIX: settings.weight_decay,
        _EMBEDDING: settings.embedding_weight_decay,
        _HEAD: settings.embedding_weight_decay,
    }
    scale = {_EMBEDDING: settings.embedding_lr_scale, _HEAD: settings.head_lr_scale}.get(treatment, 1.0)
    if eye:
        scale = settings.vision_lr_scale
    return Rule(name, shape, "adamw", (), decay[treatment], settings.adam_lr_scale * scale)


def _blocks(name: str, shape: tuple[int, ...], cut: _Cut) -> tuple[tuple[int, int, int], ...]:
    groups = shape[0] if cut.groups is None else cut.groups
    rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
    heights = [rows // groups if height is None else height for height in cut.heights]
    if groups * sum(heights) != rows:
        raise ValueError(
            f"parameter {name!r} has {rows} rows; the config asks for {groups} x {heights} = {groups * sum(heights)}"
        )
    return tuple((groups, height, shape[-1]) for height in heights if height)


def rules_table(rules: list[Rule]) -> Table:
    """One line for all layers that agree: which rule a parameter gets, its matrices, decay and learning-rate scale."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for rule in rules:
        number = re.search(r"\.(?:layers|blocks)\.(\d+)\.", rule.name)
        pattern = re.sub(r"\.(layers|blocks)\.\d+\.", r".\1.*.", rule.name)
        matrices = " + ".join(f"{n} x [{r}, {c}]" for n, r, c in rule.blocks)
        shape = f"[{', '.join(map(str, rule.shape))}]"
        key = (pattern, shape, rule.kind, matrices, f"{rule.weight_decay:g}", f"{rule.lr_scale:g}")
        lines.setdefault(key, []).append(number[1] if number else "")
    table = Table(title=f"{len(rules)} parameters, each with one rule")
    for column in ("parameter", "layers", "shape", "rule", "matrices", "decay", "lr x"):
        table.add_column(column, overflow="fold")
    for (pattern, *rest), layers in lines.items():
        table.add_row(pattern, _ranges(layers), *rest)
    return table


def _ranges(numbers: list[str]) -> str:
    """'0-2 4' for 0, 1, 2, 4."""
    runs: list[list[int]] = []
    for number in sorted(int(n) for n in numbers if n):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return " ".join("-".join(map(str, run)) for run in runs)


# ---------------------------------------------------------------------- the optimizer


class K3Optimizer:
    """Both rules in one object. Set `lr` before `step()`; a schedule is a function outside.

    Matrices of one shape are orthogonalised together, over all parameters, up to `BATCH` elements at a time.
    `orthogonalised` counts the matrices since the start. A parameter without gradient is left alone. State is made
    when a parameter first has a gradient, in the dtype and on the device of the parameter.
    """

    BATCH = 2**26

    def __init__(self, model: nn.Module, settings: OptimizerSettings | None = None, **changes: float) -> None:
        """`changes` replace single fields of the settings. ValueError as in `parameter_rules`."""
        self.settings = replace(settings or OptimizerSettings(), **changes)  # type: ignore[arg-type]
        self.lr = self.settings.lr
        self.rules = parameter_rules(model, self.settings)
        self.orthogonalised = 0
        self._parameters = dict(model.named_parameters())
        self._momentum: dict[str, Tensor] = {}
        self._stacks: dict[tuple[int, int], list[tuple[Rule, int]]] = {}
        for rule in self.rules:
            for i, (_, rows, columns) in enumerate(rule.blocks):
                self._stacks.setdefault((rows, columns), []).append((rule, i))
        self._adamw = self._make_adamw()

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        with torch.no_grad():
            self._update_momentum()
            for (rows, columns), members in self._stacks.items():
                for batch in self._batches(members):
                    self._muon_step(rows, columns, batch)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr * group["lr_scale"]
        self._adamw.step()

    def zero_grad(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def _update_momentum(self) -> None:
        for rule in self.rules:
            p = self._parameters[rule.name]
            if rule.kind == "muon" and p.grad is not None:
                if rule.name not in self._momentum:
                    self._momentum[rule.name] = torch.zeros_like(p, memory_format=torch.contiguous_format)
                self._momentum[rule.name].mul_(self.settings.momentum).add_(p.grad)

    def _batches(self, members: list[tuple[Rule, int]]) -> Iterator[list[tuple[Rule, int]]]:
        """Members that have a gradient, as many at a time as `BATCH` allows and at least one."""
        batch: list[tuple[Rule, int]] = []
        elements = 0
        for rule, i in members:
            if self._parameters[rule.name].grad is None:
                continue
            n, rows, columns = rule.blocks[i]
            if batch and elements + n * rows * columns > self.BATCH:
                yield batch
                batch, elements = [], 0
            batch.append((rule, i))
            elements += n * rows * columns
        if batch:
            yield batch

    def _muon_step(self, rows: int, columns: int, batch: list[tuple[Rule, int]]) -> None:
        counts = [rule.blocks[i][0] for rule, i in batch]
        like = self._parameters[batch[0][0].name]
        N = torch.empty(sum(counts), rows, columns, dtype=_product_dtype(like), device=like.device)
        for (rule, i), part in zip(batch, N.split(counts), strict=True):
            gradient = self._parameters[rule.name].grad
            assert gradient is not None
            momentum = rule.cut(self._momentum[rule.name])[i]
            torch.add(rule.cut(gradient.contiguous())[i], momentum, alpha=self.settings.momentum, out=part)
        O = newton_schulz(N, self.settings.newton_schulz_steps)
        self.orthogonalised += len(O)
        size = 0.2 * max(rows, columns) ** 0.5
        for (rule, i), update in zip(batch, O.split(counts), strict=True):
            W = rule.cut(self._parameters[rule.name].data)[i]
            W.mul_(1 - self.lr * rule.weight_decay).add_(update, alpha=-self.lr * size)

    # ------------------------------------------------------------------ AdamW

    def _make_adamw(self) -> torch.optim.AdamW:
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for rule in self.rules:
            if rule.kind == "adamw":
                groups.setdefault((rule.weight_decay, rule.lr_scale), []).append(self._parameters[rule.name])
        return torch.optim.AdamW(
            [{"params": p, "weight_decay": wd, "lr_scale": scale} for (wd, scale), p in groups.items()],
            lr=self.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            fused=True,
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Tensor]:
        """Momentum and moments by name, `<parameter>.momentum` or `.exp_avg`, `.exp_avg_sq`, `.step`; not copied. With
        it a run goes on bit for bit; `lr` and settings belong to the caller."""
        state = {f"{name}.momentum": tensor for name, tensor in self._momentum.items()}
        for rule in self.rules:
            for key, tensor in self._adamw.state.get(self._parameters[rule.name], {}).items():
                state[f"{rule.name}.{key}"] = tensor
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the whole state by a copy of `state`. ValueError for a key or shape this model does not have."""
        momentum: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        kinds = {rule.name: rule.kind for rule in self.rules}
        for key, tensor in state.items():
            name, _, what = key.rpartition(".")
            allowed = {"muon": ("momentum",), "adamw": ("step", "exp_avg", "exp_avg_sq")}.get(kinds.get(name, ""), ())
            if what not in allowed:
                raise ValueError(f"optimizer state {key!r} fits no parameter of this model")
            p = self._parameters[name]
            if what != "step" and tensor.shape != p.shape:
                raise ValueError(f"optimizer state {key!r} has shape {list(tensor.shape)}; expected {list(p.shape)}")
            copy = tensor.to(p.device, torch.float32 if what == "step" else p.dtype, copy=True)
            if what == "momentum":
                momentum[name] = copy
            else:
                moments.setdefault(name, {})[what] = copy
        self._momentum = momentum
        self._adamw.state.clear()
        for name, values in moments.items():
            self._adamw.state[self._parameters[name]] = values
