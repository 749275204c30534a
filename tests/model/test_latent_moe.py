"""Stable LatentMoE: who is chosen, with what weight, and that sorting by expert changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanok3.config import K3Config, with_expert_format
from nanok3.model.latent_moe import (
    Experts,
    LatentMoE,
    PackedExperts,
    Router,
    Routing,
    grouped_linear,
    routed,
    routed_reference,
    tally,
)
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.situ import activation


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def config(**changes):
    return replace(K3Config.tiny(), **changes)


def router(cfg, dtype=torch.float64):
    gate = Router(cfg)
    torch.nn.init.normal_(gate.weight, std=0.3)
    torch.nn.init.normal_(gate.e_score_correction_bias, std=0.3)
    return gate.to(dtype)


def experts(cfg, dtype=torch.float64):
    module = Experts(cfg)
    module.reset_parameters(0.2)
    return module.to(dtype)


def choose(rows, cfg):
    """A Routing with these experts per token and random weights."""
    chosen = torch.tensor(rows)
    weights = torch.rand(chosen.shape, dtype=torch.float64)
    return Routing(torch.rand(len(rows), cfg.num_experts), chosen, weights)


def inputs(cfg, tokens, dtype=torch.float64):
    return torch.randn(tokens, cfg.latent_size, dtype=dtype)


# ------------------------------------------------------------------ the router


def test_the_router_is_architecture_3_6():
    cfg = config(num_experts_per_token=3)
    gate = router(cfg)
    x = torch.randn(20, cfg.hidden_size, dtype=torch.float64)
    scores, chosen, weights = gate(x)
    s = torch.sigmoid(x @ gate.weight.T)
    close(scores, s)
    for t in range(20):
        best = set((s[t] + gate.e_score_correction_bias).argsort(descending=True)[:3].tolist())
        assert set(chosen[t].tolist()) == best
        total = s[t, chosen[t]].sum() + 1e-20
        close(weights[t], s[t, chosen[t]] / total)


def test_item_29_the_bias_chooses_and_touches_nothing_else():
    """Item 29: bias only for selection; weights from un-biased scores; they sum to 1."""
    cfg = config()
    gate = router(cfg)
    x = torch.randn(50, cfg.hidden_size, dtype=torch.float64)
    gate.e_score_correction_bias.zero_()
    plain = gate(x)
    gate.e_score_correction_bias[5] = 100.0
    biased = gate(x)
    assert (biased.chosen == 5).any(1).all() and not (plain.chosen == 5).any(1).all()
    assert torch.equal(biased.scores, plain.scores)
    close(biased.weights.sum(-1), torch.ones(50).double())
    raw = plain.scores.gather(1, biased.chosen)
    close(biased.weights, raw / raw.sum(-1, keepdim=True))
    assert (biased.weights - (raw + 100.0 * (biased.chosen == 5)) / 100.0).abs().max() > 0.1


def test_item_29_all_scores_zero_divide_by_the_epsilon_not_by_zero():
    """Item 29: + 1e-20."""
    cfg = config()
    gate = router(cfg, torch.float32)
    gate.weight.data.fill_(-1.0)
    weights = gate(torch.full((3, cfg.hidden_size), 100.0)).weights
    assert torch.equal(weights, torch.zeros_like(weights))


def test_the_scaling_factor_and_the_renormalisation_follow_the_config():
    x = torch.randn(9, 128, dtype=torch.float64)
    gate = router(config())
    usual = gate(x)
    gate.cfg = config(routed_scaling_factor=2.446)
    close(gate(x).weights, 2.446 * usual.weights)
    gate.cfg = config(moe_renormalize=False)
    close(gate(x).weights, usual.scores.gather(1, usual.chosen))


def test_item_30_scores_are_float32():
    """Item 30: a near tie that bfloat16 scores would decide otherwise."""
    cfg = config(num_experts=2, num_experts_per_token=1)
    gate = Router(cfg)
    gate.weight.data.zero_()
    gate.weight.data[0, 0], gate.weight.data[1, 0] = 1.0, 1.0
    gate.weight.data[1, 1] = 2.0**-12
    x = torch.zeros(1, cfg.hidden_size).bfloat16()
    x[0, :2] = 1.0
    routing = gate(x)
    assert routing.scores.dtype == routing.weights.dtype == torch.float32
    assert routing.chosen.item() == 1 and routing.scores[0, 0] < routing.scores[0, 1]
    low = torch.sigmoid(F.linear(x, gate.weight.bfloat16()))
    assert low[0, 0] == low[0, 1], "bfloat16 cannot tell them apart"


def test_item_06_the_correction_bias_is_float32_and_no_parameter():
    """Item 6: it never passes through bfloat16; it is set from outside, never by a gradient."""
    cfg = config(num_experts=2, num_experts_per_token=1)
    gate = Router(cfg)
    torch.nn.init.zeros_(gate.weight)
    gate.e_score_correction_bias.copy_(torch.tensor([1.0, 1.0 + 2.0**-20]))
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert gate(torch.ones(4, cfg.hidden_size).bfloat16()).chosen.flatten().tolist() == [1] * 4
    assert [n for n, _ in gate.named_parameters()] == ["weight"]
    assert "e_score_correction_bias" in gate.state_dict()
    gate(torch.randn(3, cfg.hidden_size)).weights.sum().backward()
    assert gate.e_score_correction_bias.grad is None


def test_the_routers_gradient_flows_through_the_chosen_scores():
    gate = router(config())
    x = torch.randn(7, 128, dtype=torch.float64)
    upstream = torch.randn(7, 2, dtype=torch.float64)
    routing = gate(x)
    (grad,) = torch.autograd.grad((routing.weights * upstream).sum(), gate.weight)
    leaf = gate.weight.detach().clone().requires_grad_()
    s = torch.sigmoid(x @ leaf.T).gather(1, routing.chosen)
    (expected,) = torch.autograd.grad((s / s.sum(-1, keepdim=True) * upstream).sum(), leaf)
    close(grad, expected)


# ------------------------------------------------------------------ the experts


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_sorted_equals_token_by_token_with_gradients(tokens):
    cfg = config(num_experts_per_token=3)
    gate, module = router(cfg), experts(cfg)
    z = inputs(cfg, tokens).requires_grad_()
    x = torch.randn(tokens, cfg.hidden_size, dtype=torch.float64)
    leaves = [z, gate.weight, *module.parameters()]
    upstream = torch.randn_like(z)
    results = []
    for form in (routed, routed_reference):
        y = form(module, z, gate(x))
        results.append([y, *torch.autograd.grad(y, leaves, upstream)])
    for a, b in zip(*results):
        close(a, b)


SPREADS = {
    "one token": [[3, 5]],
    "all to the same": [[2, 7]] * 9,
    "one expert gets all": [[2, 0], [2, 1], [2, 3], [2, 4]],
    "most get none": [[0, 7], [7, 0], [0, 7]],
    "every expert once": [[0, 1], [2, 3], [4, 5], [6, 7]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_item_33_every_spread(spread, dtype):
    """Item 33: zero tokens for an expert; one token; all tokens to the same expert. Also through grouped products."""
    cfg = config()
    module, routing = experts(cfg, dtype), choose(spread, cfg)
    z = inputs(cfg, len(spread), dtype)
    exact = torch.zeros(len(spread), cfg.latent_size, dtype=torch.float64)
    for t, (chosen, weights) in enumerate(zip(routing.chosen, routing.weights)):
        for e, p in zip(chosen.tolist(), weights):
            w1, w2, w3 = (w[e].double() for w in (module.w1, module.w2, module.w3))
            exact[t] += p * (w2 @ activation(cfg, w1 @ z[t].double(), w3 @ z[t].double()))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for form in (routed, routed_reference):
        y = form(module, z, routing)
        assert y.dtype == dtype
        assert ((y.double() - exact).norm() / exact.norm()).item() < tolerance


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_item_33_gradients_of_every_spread(spread):
    """Item 33: an expert without tokens has a gradient of exactly zero, in the grouped product too."""
    cfg = config()
    routing = choose(spread, cfg)
    for dtype in (torch.float32, torch.float64):
        module = experts(cfg, dtype)
        z = inputs(cfg, len(spread), dtype).requires_grad_()
        routed(module, z, routing).sum().backward()
        used = set(routing.chosen.flatten().tolist())
        for weight in module.parameters():
            for e in range(cfg.num_experts):
                assert (weight.grad[e].abs().max() > 0) == (e in used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [(32, 48), (33, 48), (32, 47), (12, 20)])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_grouped_products_with_any_width(counts, columns, dtype):
    rows, (width, out) = sum(counts), columns
    x = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(4, out, width).to(dtype).requires_grad_()
    got = grouped_linear(x, weight, torch.tensor(counts))
    wanted = torch.cat([part.double() @ w.double().T for part, w in zip(x.split(counts), weight)])
    assert got.shape == (rows, out) and got.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=10 * tolerance)
    for upstream in (torch.randn_like(got), torch.ones(1, dtype=dtype).expand(got.shape)):
        grads = torch.autograd.grad(got, (x, weight), upstream, retain_graph=True)
        exact = torch.autograd.grad(wanted, (x, weight), upstream.double(), retain_graph=True)
        for a, b in zip(grads, exact):
            torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=20 * tolerance)


def test_item_31_outputs_are_summed_in_float32_and_rounded_once():
    """Item 31 and architecture 3.6: expert outputs upcast, weighted and summed in float32."""
    cfg = config(num_experts_per_token=8)
    module = experts(cfg, torch.bfloat16)
    z = inputs(cfg, 6, torch.bfloat16)
    routing = choose([list(range(8))] * 6, cfg)
    parts = torch.stack([module.expert(e, z).float() for e in range(8)], dim=1)
    once = torch.einsum("nk,nkl->nl", routing.weights.float(), parts).bfloat16()
    close(routed_reference(module, z, routing).float(), once.float(), 2**-7)
    close(routed(module, z, routing).float(), once.float(), 2**-6)


def test_item_28_a_nan_token_reaches_no_other():
    """Item 28: a poisoned row changes neither the routing nor the output of the others."""
    cfg = config()
    for dtype in (torch.float32, torch.float64):
        moe = LatentMoE(cfg)
        for p in moe.parameters():
            torch.nn.init.normal_(p, std=0.2)
        moe = moe.to(dtype)
        x = torch.randn(1, 12, cfg.hidden_size, dtype=dtype)
        clean, routing = moe(x), moe.gate(x[0])
        x[0, 4] = torch.nan
        poisoned, after = moe(x), moe.gate(x[0])
        keep = torch.arange(12) != 4
        assert torch.equal(after.chosen[keep].sort(-1).values, routing.chosen[keep].sort(-1).values)
        close(poisoned[0, keep], clean[0, keep], 1e-12 if dtype == torch.float64 else 1e-5)
        assert poisoned[0, 4].isnan().all()


# ------------------------------------------------------------------ stored bytes


def packed_pair():
    cfg = with_expert_format(config(), "mxfp4")
    plain, packed = experts(cfg, torch.float64), PackedExperts(cfg).eval()
    for name in ("w1", "w2", "w3"):
        bytes_, scale = quantize_mxfp4(getattr(plain, name).detach())
        setattr(packed, f"{name}_packed", bytes_)
        setattr(packed, f"{name}_scale", scale)
        getattr(plain, name).data.copy_(dequantize_mxfp4(bytes_, scale, torch.float64))
    return cfg, plain, packed


def test_packed_experts_do_not_train():
    cfg, _, packed = packed_pair()
    z, counts = torch.randn(1, cfg.latent_size), torch.tensor([1] + [0] * (cfg.num_experts - 1))
    packed.train()
    with pytest.raises(ValueError, match="packed experts are for inference; load with a dtype to train"):
        packed(z, counts)
    with torch.no_grad():
        read = packed(z, counts)
    assert torch.equal(packed.eval()(z, counts), read)


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_packed_experts_are_the_decoded_ones(spread):
    cfg, plain, packed = packed_pair()
    routing, z = choose(spread, cfg), inputs(cfg, len(spread))
    close(routed(packed, z, routing), routed(plain, z, routing))
    close(routed_reference(packed, z, routing), routed(plain, z, routing))
    low = z.bfloat16()
    exact = routed(plain, low.double(), routing).detach()
    ours, layers = (routed(e, low, routing).double().detach() for e in (packed, plain.bfloat16()))
    wrong, by_layers = (float((y - exact).norm() / exact.norm()) for y in (ours, layers))
    assert wrong < 4e-3 and wrong < 1.1 * by_layers  # three products that round once each


def test_packed_experts_have_bytes_only():
    _, _, packed = packed_pair()
    assert list(packed.parameters()) == []
    assert {b.dtype for b in packed.buffers()} == {torch.uint8}
    weights = sum(2 * b.numel() for n, b in packed.named_buffers() if n.endswith("packed"))
    assert sum(b.nbytes for b in packed.buffers()) / weights == 0.53125
    with pytest.raises(ValueError, match="packed experts hold stored bytes and cannot be initialised"):
        packed.reset_parameters(0.02)


def test_packed_experts_of_nobody():
    cfg, _, packed = packed_pair()
    empty = torch.zeros(0, cfg.latent_size)
    assert packed(empty, torch.zeros(cfg.num_experts, dtype=torch.int64)).shape == (0, cfg.latent_size)


# ------------------------------------------------------------------ the layer

VARIANTS = {
    "k3": {},
    "no norm": {"latent_moe_use_norm": False},
    "no latent": {"routed_expert_hidden_size": None},
    "no shared experts": {"num_shared_experts": 0},
    "kimi_linear": {"routed_expert_hidden_size": None, "hidden_act": "silu", "routed_scaling_factor": 2.446},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_layer_is_architecture_3_6(variant):
    """Items 31 and 32: the norm after the weighted sum, the shared experts on the full-width input, unscaled."""
    cfg = config(**variant)
    moe = LatentMoE(cfg).double()
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(moe.gate.e_score_correction_bias, std=0.3)
    x = torch.randn(2, 5, cfg.hidden_size, dtype=torch.float64)
    w = dict(moe.named_parameters())
    flat = x.flatten(0, 1)
    routing = moe.gate(flat)
    latent = cfg.routed_expert_hidden_size is not None
    z = flat @ w["routed_expert_down_proj.weight"].T if latent else flat
    y = routed_reference(moe.experts, z, routing)
    if latent and cfg.latent_moe_use_norm:
        y = y / (y.square().mean(-1, keepdim=True) + cfg.rms_norm_eps).sqrt() * w["routed_expert_norm.weight"]
    y = (y @ w["routed_expert_up_proj.weight"].T if latent else y).view_as(x)
    if cfg.num_shared_experts:
        hidden = activation(cfg, x @ w["shared_experts.gate_proj.weight"].T, x @ w["shared_experts.up_proj.weight"].T)
        assert hidden.shape[-1] == 2 * cfg.moe_intermediate_size
        y = y + hidden @ w["shared_experts.down_proj.weight"].T
    close(moe(x), y, 1e-11)


def test_item_31_a_sum_of_norms_is_not_the_norm_of_the_sum():
    """Item 31: norm after the weighted sum; per expert or per half it is another model."""
    cfg = config(num_shared_experts=0)
    moe = LatentMoE(cfg).double()
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(1, 6, cfg.hidden_size, dtype=torch.float64)
    routing, z = moe.gate(x[0]), moe.routed_expert_down_proj(x[0])
    halves = [
        routed_reference(
            moe.experts, z, Routing(routing.scores, routing.chosen[:, i : i + 1], routing.weights[:, i : i + 1])
        )
        for i in range(2)
    ]
    right = moe.routed_expert_up_proj(moe.routed_expert_norm(halves[0] + halves[1]))
    wrong = moe.routed_expert_up_proj(moe.routed_expert_norm(halves[0]) + moe.routed_expert_norm(halves[1]))
    close(moe(x)[0], right, 1e-11)
    assert (right - wrong).abs().max() > 1


def test_item_32_shared_experts_are_not_scaled():
    """Item 32: the scaling factor multiplies the routed experts alone."""
    cfg = config(routed_expert_hidden_size=None)
    moe = LatentMoE(cfg).double()
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(1, 6, cfg.hidden_size, dtype=torch.float64)
    shared = moe.shared_experts(x)
    once = moe(x) - shared
    moe.gate.cfg = replace(cfg, routed_scaling_factor=3.0)
    close(moe(x), 3 * once + shared, 1e-11)


def test_the_router_reads_the_full_width():
    """Not the latent that the experts read."""
    cfg = config()
    moe = LatentMoE(cfg)
    assert moe.gate.weight.shape == (cfg.num_experts, cfg.hidden_size)
    assert moe.experts.w1.shape == (cfg.num_experts, cfg.moe_intermediate_size, cfg.latent_size)


def test_item_05_w1_is_the_gate_and_w3_the_up_branch():
    """Item 5: w1 = gate, w2 = down, w3 = up."""
    cfg = config()
    module = experts(cfg)
    z = inputs(cfg, 4)
    right = activation(cfg, z @ module.w1[3].T, z @ module.w3[3].T) @ module.w2[3].T
    close(module.expert(3, z), right)
    swapped = activation(cfg, z @ module.w3[3].T, z @ module.w1[3].T) @ module.w2[3].T
    assert (right - swapped).abs().max() > 0.1


def test_a_tally_by_scattering_is_a_bincount():
    """The form for other devices, whose shape the meta device shows, gives the same numbers."""
    index = torch.randint(0, 7, (50,), dtype=torch.int32)
    scattered = torch.zeros(9, dtype=torch.int64).scatter_add_(0, index.long(), torch.ones(50, dtype=torch.int64))
    assert torch.equal(tally(index, 9), scattered)
    assert tally(index.to("meta"), 9).shape == (9,)
