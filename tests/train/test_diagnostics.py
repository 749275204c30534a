"""The three pictures of a model's inside, against numbers computed another way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.attn_res import depth_weights as softmax_over_sources
from nanok3.model.decoder import K3
from nanok3.train.diagnostics import (
    depth_weights,
    diagnose,
    expert_loads,
    half_life,
    kda_half_lives,
)

IDS = torch.arange(2 * 24).view(2, 24) % 200


@pytest.fixture(scope="module")
def model() -> K3:
    torch.manual_seed(1)
    made = K3(K3Config.tiny())
    for name, parameter in made.named_parameters():
        if name.endswith("res_proj.weight"):
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def test_depth_rows_grow_with_the_bank_and_sum_to_one(model: K3) -> None:
    found = depth_weights(model, IDS)
    depth = model.cfg.num_hidden_layers
    assert len(found["labels"]) == len(found["weights"]) == 2 * depth + 1
    assert found["labels"][:3] == ["0 KDA", "0 MLP", "1 KDA"] and found["labels"][-1] == "output"
    assert found["sources"] == ["embedding", *(f"layer {l}" for l in range(depth))]  # blocks of one layer
    assert [len(row) for row in found["weights"]] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert all(math.isclose(sum(row), 1, abs_tol=1e-5) for row in found["weights"])


def test_depth_weights_of_the_output_are_those_of_the_hidden_bank(model: K3) -> None:
    with torch.no_grad():
        hidden = model(IDS, return_hidden=True).hidden
    norm, query = model.model.output_attn_res_norm, model.model.output_attn_res_proj
    sources = [*hidden.bank, hidden.residual[-1]]
    expected = softmax_over_sources(sources, norm.weight, query.weight, norm.eps).mean((1, 2))
    torch.testing.assert_close(torch.tensor(depth_weights(model, IDS)["weights"][-1]), expected)


def test_depth_weights_are_uniform_with_zero_queries(model: K3) -> None:
    fresh = K3(model.cfg)  # pseudo-queries start at zero
    for row in depth_weights(fresh, IDS)["weights"]:
        assert row == pytest.approx([1 / len(row)] * len(row))


def test_depth_weights_of_a_feed_forward_read_the_attention_of_its_own_layer(model: K3) -> None:
    """With a query along the attention's output, the feed-forward of that layer reads almost nothing else."""
    changed = K3(model.cfg)
    layer = changed.model.layers[2]
    seen = []
    handle = layer.self_attn.register_forward_hook(lambda _m, _i, out: seen.append(out[0, -1]))
    changed.hidden_states(IDS[:1, -1:])
    handle.remove()
    with torch.no_grad():
        layer.mlp_res_proj.weight.copy_(100 * torch.nn.functional.normalize(seen[0], dim=0))
    found = depth_weights(changed, IDS[:1, -1:])
    assert found["weights"][found["labels"].index("2 MoE")][-1] > 0.99


def test_depth_weights_of_the_full_form_and_of_none(model: K3) -> None:
    full = depth_weights(K3(replace(model.cfg, attn_res_full=True)), IDS)
    assert [len(row) for row in full["weights"]] == list(range(1, 12))
    assert full["sources"][:4] == ["embedding", "0 KDA", "0 MLP", "1 KDA"] and len(full["sources"]) == 11
    without = replace(model.cfg, attn_res_block_size=None, model_type="kimi_linear", source={})
    assert depth_weights(K3(without), IDS) == {"labels": [], "sources": [], "weights": []}


def test_block_sources_are_named_by_their_layers() -> None:
    model = K3(K3Config.tiny(attn_res_block_size=2))
    found = depth_weights(model, IDS)
    assert found["sources"] == ["embedding", "layers 0–1", "layers 2–3", "layer 4"]
    assert [len(row) for row in found["weights"]] == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


def test_half_life_of_known_decays() -> None:
    assert half_life(torch.tensor([-math.log(2), -math.log(2) / 64])).tolist() == pytest.approx([1, 64])
    assert half_life(torch.tensor([0.0])).tolist() == pytest.approx([1e9])


def test_half_lives_of_constant_gates(model: K3) -> None:
    """With a dead input the gate is the bound times the sigmoid of the bias alone."""
    changed = K3(model.cfg)
    kda = changed.model.layers[1].self_attn
    with torch.no_grad():
        kda.f_b_proj.weight.zero_()
        kda.dt_bias.copy_(torch.linspace(-6, 2, kda.dt_bias.numel()))
    found = kda_half_lives(changed, IDS)
    expected = math.log(2) / (5 * torch.sigmoid(kda.dt_bias)).view(kda.heads, kda.dim)
    assert found["layers"] == [l for l, kind in enumerate(model.cfg.kinds) if kind == "kda"]
    torch.testing.assert_close(torch.tensor(found["half_lives"][found["layers"].index(1)]), expected.detach())


def test_expert_loads_count_the_chosen(model: K3) -> None:
    with torch.no_grad():
        router = model(IDS, return_hidden=True).hidden.router
    found = expert_loads(model, IDS)
    assert found["layers"] == sorted(router)
    for layer, loads in zip(found["layers"], found["loads"]):
        counts = [int((router[layer].chosen == e).sum()) for e in range(model.cfg.num_experts)]
        assert loads == pytest.approx([count / (IDS.numel() * 2) for count in counts])


def test_the_model_is_left_as_it_was(model: K3) -> None:
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = diagnose(model, IDS)
    assert model.training and found["tokens"] == IDS.numel()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    assert expert_loads(model, IDS)["layers"] and not model.training
    model.train()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_are_removed_after_an_error(model: K3) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        depth_weights(model, IDS[:, :0])
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
