"""Training for four bits: the forward pass sees what serving will see (K3 report 4; training spec 1.6).

    y = Q4(W) Q8(x)            weights of the routed experts in MXFP4; their inputs, in mode w4a8, in MXFP8
    dL/dW := dL/dQ4(W)         straight through: the gradient at the rounded weight moves the master
    dL/dx := dL/dQ8(x)

Attention, routers, latent projections, shared experts and everything else keep their precision. Nothing of this is in
the model's code; it is applied to a built model:

    QAT(model, "w4a8")         for the length of a forward and backward pass the experts' parameters hold Q4(W), made
                               once a step; outside, the optimizer and checkpoints find the masters as they were
    mxfp8_inputs(model)        W4A8 alone, also for a model loaded with packed experts; W4A16 is a model as loaded

The three matrices of an expert are tensors of their own with the input last, so a block never spans two of them. Both
inputs of an expert are rounded: the latent that w1 and w3 read and the hidden that w2 reads. Whether K3 rounds the
second is not said; a product of MXFP4 with MXFP8 needs it.

W4A8 runs by grouped products with a rounding before each. The single call that decodes the experts natively, and
native decoding as a whole, are for inputs as they come and step aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.latent_moe import Experts, LatentMoE, PackedExperts, grouped_linear, routed_sorted
from nanok3.model.mxfp4 import BLOCK, SCALE_RULES
from nanok3.model.situ import activation
from nanok3.model.streamed_experts import stream_of
from nanok3.quant.mxfp import MXFP4, MXFP8, project

MODES = ("off", "w4a16", "w4a8")
MATRICES = ("w1", "w2", "w3")


def check(mode: str, rule: str) -> None:
    """ValueError for a mode or scale rule that does not exist."""
    if mode not in MODES:
        raise ValueError(f"qat is {mode!r}; allowed: {', '.join(map(repr, MODES))}")
    if rule not in SCALE_RULES:
        raise ValueError(f"qat_scale_rule is {rule!r}; allowed: {', '.join(map(repr, SCALE_RULES))}")


def moe_layers(model: nn.Module) -> dict[str, LatentMoE]:
    """The layers with routed experts by name. ValueError if there is none, or where the experts' widths are not whole
    blocks."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, LatentMoE)}
    cfg = getattr(model, "cfg", None)
    if not found or not isinstance(cfg, K3Config):
        raise ValueError(f"{type(model).__name__} has no routed experts; only those are kept in MXFP4")
    if stream_of(model) is not None:
        raise ValueError("the model's experts are streamed; load with experts='resident' to round them or their inputs")
    for field, width in (("latent width", cfg.latent_size), ("moe_intermediate_size", cfg.moe_intermediate_size)):
        if width % BLOCK:
            raise ValueError(f"{field} is {width}; with MXFP4 experts it must be a multiple of {BLOCK}")
    return found


# ---------------------------------------------------------------------- weights


class QAT:
    """Quantization-aware training of one model; mode 'off' does nothing.

    with qat.projected():       forward, backward, validation, samples, and saving what will be served
        ...
    optimizer.step()
    qat.stepped()               the masters have moved: project anew when next needed
    """

    def __init__(self, model: nn.Module, mode: str = "off", rule: str = "ceil") -> None:
        check(mode, rule)
        self.mode, self.rule = mode, rule
        self._masters: list[nn.Parameter] = []
        self._projections: list[Tensor] | None = None
        if mode == "off":
            return
        for name, moe in moe_layers(model).items():
            if isinstance(moe.experts, PackedExperts):
                raise ValueError(f"{name} holds packed experts, which have no masters to train; load with a dtype")
            self._masters += [moe.experts.get_parameter(matrix) for matrix in MATRICES]
        if mode == "w4a8":
            mxfp8_inputs(model, rule)

    def stepped(self) -> None:
        self._projections = None

    @contextmanager
    def projected(self) -> Iterator[None]:
        """The experts' parameters hold Q4(W) inside, the very masters afterwards. Gradients collect in the parameters
        as ever, which is the straight-through rule."""
        if self._projections is None:
            with torch.no_grad():
                self._projections = [project(_finite(p), MXFP4, self.rule) for p in self._masters]
        masters = [p.data for p in self._masters]
        try:
            for p, projection in zip(self._masters, self._projections, strict=True):
                p.data = projection
            yield
        finally:
            for p, master in zip(self._masters, masters, strict=True):
                p.data = master


def _finite(p: nn.Parameter) -> Tensor:
    if not bool(torch.isfinite(p).all()):
        raise ValueError("an expert's weight is inf or NaN, for which MXFP4 has no code")
    return p.detach()


# ---------------------------------------------------------------------- activations


class _Rounded(torch.autograd.Function):
    """Q8(x), with the gradient of x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: str) -> Tensor:
        return project(x, MXFP8, rule)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def to_mxfp8(x: Float[Tensor, "*b columns"], rule: str = "ceil") -> Float[Tensor, "*b columns"]:
    """The nearest MXFP8 values; gradients pass as if nothing had been done."""
    rounded: Tensor = _Rounded.apply(x, rule)
    return rounded


def mxfp8_inputs(model: nn.Module, rule: str = "ceil") -> None:
    """From now on the routed experts of `model` read their inputs in MXFP8. Modules keep their parameters, buffers,
    names and hooks; they change their class. ValueError as in `moe_layers`."""
    check("w4a8", rule)
    layers = moe_layers(model)
    for name, moe in layers.items():
        if not isinstance(moe.experts, Experts | PackedExperts):
            kind = type(moe.experts).__name__
            raise ValueError(f"{name} has {kind}, which cannot read MXFP8; load its experts into memory")
    for moe in layers.values():
        moe.__class__ = LatentMoEOnMXFP8
        experts: Any = moe.experts
        experts.__class__ = PackedExpertsOnMXFP8 if isinstance(experts, PackedExperts) else ExpertsOnMXFP8
        experts.rule = rule


def inputs_rule(model: nn.Module) -> str | None:
    """The scale rule by which the routed experts of `model` read their inputs in MXFP8; None where they do not."""
    found = (m.experts for m in model.modules() if isinstance(m, LatentMoEOnMXFP8))
    return next((str(experts.rule) for experts in found), None)


class ExpertsOnMXFP8(Experts):
    """`Experts` on rounded inputs."""

    rule: str

    def forward(self, z: Float[Tensor, "m L"], counts: Int[Tensor, " E"]) -> Float[Tensor, "m L"]:
        z = to_mxfp8(z, self.rule)
        w1, w2, w3 = (w.to(z.dtype) for w in (self.w1, self.w2, self.w3))
        hidden = activation(self.cfg, grouped_linear(z, w1, counts), grouped_linear(z, w3, counts))
        return grouped_linear(to_mxfp8(hidden, self.rule), w2, counts)

    def expert(self, e: int, z: Float[Tensor, "n L"]) -> Float[Tensor, "n L"]:
        z = to_mxfp8(z, self.rule)
        w1, w2, w3 = (w[e].to(z.dtype) for w in (self.w1, self.w2, self.w3))
        return F.linear(to_mxfp8(activation(self.cfg, F.linear(z, w1), F.linear(z, w3)), self.rule), w2)


class PackedExpertsOnMXFP8(PackedExperts):
    """`PackedExperts` on rounded inputs."""

    rule: str

    def forward(self, z: Float[Tensor, "m L"], counts: Int[Tensor, " E"]) -> Float[Tensor, "m L"]:
        if self.training and torch.is_grad_enabled():
            raise ValueError("packed experts are for inference; load with a dtype to train")
        z = to_mxfp8(z, self.rule)
        hidden = activation(self.cfg, self._product(z, "w1", counts), self._product(z, "w3", counts))
        return self._product(to_mxfp8(hidden, self.rule), "w2", counts)

    def expert(self, e: int, z: Float[Tensor, "n L"]) -> Float[Tensor, "n L"]:
        z = to_mxfp8(z, self.rule)
        hidden = activation(self.cfg, F.linear(z, self.weight("w1", e, z)), F.linear(z, self.weight("w3", e, z)))
        return F.linear(to_mxfp8(hidden, self.rule), self.weight("w2", e, z))

    def _product(self, x: Tensor, name: str, counts: Tensor) -> Tensor:
        """Grouped, in C++ on the bytes as they are stored, or in torch on those of the experts that have rows."""
        from nanok3.kernels import linear_cpu

        y = linear_cpu.grouped_linear(x, linear_cpu.Packed(*self.stored(name)), counts)
        if isinstance(y, Tensor):
            return y
        groups = enumerate(x.split(counts.tolist()))
        return torch.cat([F.linear(rows, self.weight(name, e, x)) for e, rows in groups if len(rows)])


class LatentMoEOnMXFP8(LatentMoE):
    """`LatentMoE` whose experts are asked themselves, never read past their `forward`."""

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        flat = x.flatten(0, 1)
        routing = self.gate(flat)
        y = self._to_model(routed_sorted(self.experts, self._to_latent(flat), routing)).view_as(x)
        return y + self.shared_experts(x) if self.cfg.num_shared_experts else y
