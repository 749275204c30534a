"""Routed experts into the bytes of the release, and what that costs: post-hoc rounding, one matrix at a time.

W -> nibbles and scale bytes        model/mxfp4.py; for a model trained with quant/qat.py this rounds nothing new
error = |Q(W) - W| / |W|            of each stack of matrices: gate (w1), up (w3), down (w2) of every layer
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.model.decoder import K3
from nanok3.model.latent_moe import PackedExperts
from nanok3.model.mxfp4 import BLOCK, MAGNITUDES, SCALE_BIAS, dequantize_mxfp4, quantize_mxfp4
from nanok3.quant.qat import MATRICES, moe_layers

PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up"}


@dataclass
class Rounding:
    """What rounding did to the experts' matrices of one kind in one layer. rms_error: relative to the root mean square
    of the weights, as is `max_error`; saturated: share of weights beyond the largest value of their block; zeros: share
    of weights that were not zero and have become it."""

    layer: int
    projection: str
    rms_error: float
    max_error: float
    saturated: float
    zeros: float


def pack_experts(
    model: K3, rule: str = "ceil", progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Rounding]:
    """Replace the experts of every layer by packed ones, in place: the model is for inference from then on. ValueError
    for a model without routed experts, with experts that are packed, or with a width that is no whole number of
    blocks."""
    layers, found = moe_layers(model), []
    for done, (name, moe) in enumerate(layers.items()):
        experts = moe.experts
        if isinstance(experts, PackedExperts):
            raise ValueError(f"{name}: the experts are packed already")
        with torch.device("meta"):
            packed = PackedExperts(model.cfg)
        for matrix in MATRICES:
            stack = experts.get_parameter(matrix).detach()
            halves = [quantize_mxfp4(weight, rule) for weight in stack]  # float64 of one expert at a time
            packed._buffers[f"{matrix}_packed"] = torch.stack([nibbles for nibbles, _ in halves])
            packed._buffers[f"{matrix}_scale"] = torch.stack([scale for _, scale in halves])
            layer = re.search(r"layers\.(\d+)", name)
            number = int(layer[1]) if layer else model.cfg.num_hidden_layers  # the one that guesses ahead
            found.append(rounding(number, matrix, stack, *packed.stored(matrix)))
        moe.experts = packed.train(experts.training)
        progress(done + 1, len(layers))
    return found


def rounding(layer: int, matrix: str, weight: Tensor, packed: Tensor, scale: Tensor) -> Rounding:
    """Of a stack of matrices (E, O, I)."""
    sums = torch.zeros(4, dtype=torch.float64)
    largest = torch.zeros((), dtype=torch.float64)
    for w, nibbles, s in zip(weight, packed, scale):
        w, q = w.double(), dequantize_mxfp4(nibbles, s, torch.float64)
        top = torch.ldexp(torch.full_like(s, MAGNITUDES[-1], dtype=torch.float64), s.int() - SCALE_BIAS)
        beyond = w.unflatten(-1, (-1, BLOCK)).abs() > top.unsqueeze(-1)
        lost = (q == 0) & (w != 0)
        sums += torch.stack([(q - w).square().sum(), w.square().sum(), beyond.sum(), lost.sum()]).cpu()
        largest = torch.maximum(largest, (q - w).abs().max().cpu())
    error, size, beyond_count, lost_count = sums.tolist()
    rms = (size / weight.numel()) ** 0.5 or 1.0
    shares = (beyond_count / weight.numel(), lost_count / weight.numel())
    return Rounding(layer, PROJECTIONS[matrix], (error / weight.numel()) ** 0.5 / rms, float(largest) / rms, *shares)
