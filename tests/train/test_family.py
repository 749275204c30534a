"""Every change must hold over the whole family of sizes: `at_depth(n)` starts at ln(vocabulary), learns in two steps,
and every parameter is drawn as its initialiser says."""

from __future__ import annotations

import math

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.train.loss import cross_entropy
from nanok3.train.muon import K3Optimizer

DEPTHS = [1, 2, 3, 4, 5, 8, 13]
pytestmark = pytest.mark.usefixtures("unchecked")


def member(depth: int) -> K3Config:
    return K3Config.tiny().at_depth(depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_two_steps_lower_the_loss(depth: int) -> None:
    cfg = member(depth)
    model = K3(cfg)
    optimizer = K3Optimizer(model, lr=1e-2)
    ids = torch.randint(0, cfg.vocab_size - 256, (1, 96))
    bounds = torch.tensor([0, 40, 96])

    def loss() -> torch.Tensor:
        hidden = model.hidden_states(ids, cu_seqlens=bounds)
        total, count = cross_entropy(hidden, model.lm_head.weight, ids)
        return total / count

    losses = []
    for _ in range(3):
        value = loss()
        losses.append(float(value.detach()))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(cfg.vocab_size), abs=0.15)
    assert losses[2] < losses[1] < losses[0]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_parameter_is_drawn_as_its_initialiser_says(depth: int) -> None:
    cfg = member(depth)
    model = K3(cfg)
    for name, p in model.named_parameters():
        if name.endswith("_res_proj.weight"):
            assert not p.any(), name  # every depth source starts alike
        elif name.endswith("A_log"):
            assert not p.any(), name
        elif name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(p)
            assert float(step.min()) > 0.9e-3 and float(step.max()) < 0.11, name
        elif "conv1d" in name:
            bound = cfg.short_conv_kernel_size**-0.5
            assert float(p.detach().abs().max()) <= bound, name
            assert float(p.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.25), name
        elif p.dim() == 1:
            assert bool((p == 1).all()), name  # norms
        else:
            few = 5 / p.numel() ** 0.5
            assert float(p.detach().mean()) == pytest.approx(0, abs=cfg.initializer_range * few), name
            assert float(p.detach().std()) == pytest.approx(cfg.initializer_range, rel=few), name
