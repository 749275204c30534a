from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.train.quantile_balancing import (
    QuantileBalancer,
    count_required,
    next_bias,
    quantiles,
    solve,
)


def skewed(tokens=4096, experts=64, seed=0, dtype=torch.float32) -> Tensor:
    """Scores of a router that likes some experts far better than others."""
    generator = torch.Generator().manual_seed(seed)
    taste = 1.5 * torch.randn(experts, generator=generator)
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + taste).to(dtype)


def loads(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    return torch.bincount((scores + bias).topk(top_k, dim=1).indices.flatten(), minlength=scores.shape[1])


def worst(scores: Tensor, bias: Tensor, top_k: int) -> float:
    counts = loads(scores, bias, top_k).double()
    return float(counts.max() / counts.mean())


def histogram_bias(scores: Tensor, bias: Tensor, top_k: int, bins: int = 1000) -> Tensor:
    chosen = (scores + bias).topk(top_k, dim=1).indices
    new = quantiles(count_required(scores, chosen, bias, bins), bias, top_k)
    return (new - new.mean()).to(bias.dtype)


# ---------------------------------------------------------------------- the update


def test_next_bias_by_hand():
    """The definition, written out with sorted lists."""
    scores, bias, k = skewed(23, 5, dtype=torch.float64), torch.tensor([0.3, -0.1, 0.0, 0.2, -0.4]).double(), 2
    want = []
    for j in range(5):
        required = []
        for row in scores.tolist():
            biased = sorted((s + b for s, b in zip(row, bias.tolist(), strict=True)), reverse=True)
            required.append(biased[k] - row[j])
        want.append(sorted(required)[math.ceil(23 * k / 5) - 1])
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(next_bias(scores, bias, k), want - want.mean())


FIGURE_5 = [  # 8 tokens, 4 experts; each token takes its best expert
    [0.65, 0.45, 0.30, 0.15],
    [0.60, 0.75, 0.25, 0.15],
    [0.70, 0.50, 0.35, 0.20],
    [0.65, 0.40, 0.50, 0.15],
    [0.60, 0.50, 0.45, 0.40],
    [0.45, 0.45, 0.55, 0.30],
    [0.45, 0.65, 0.30, 0.40],
    [0.45, 0.75, 0.40, 0.15],
]


@pytest.mark.parametrize(
    "update", [next_bias, histogram_bias, lambda s, b, k: solve(s, k)], ids=["exact", "hist", "solve"]
)
def test_loads_4_3_1_0_become_2_2_2_2(update):
    """The numbers of the report's Figure 5."""
    scores, bias = torch.tensor(FIGURE_5), torch.zeros(4)
    assert loads(scores, bias, 1).tolist() == [4, 3, 1, 0]
    bias = update(scores, bias, 1)
    assert loads(scores, bias, 1).tolist() == [2, 2, 2, 2]
    assert abs(float(bias.mean())) < 1e-6


@pytest.mark.parametrize("update", [next_bias, histogram_bias], ids=["exact", "hist"])
def test_a_skewed_router_is_balanced_in_three_steps(update):
    """New tokens every step, so that the bias must generalise; the sign rule has hardly begun by then."""
    bias, sign = torch.zeros(64), torch.zeros(64)
    taste_seed = 0
    batches = [skewed(4 * 4096, seed=taste_seed)[i::4] for i in range(4)]
    seen = [worst(batches[0], bias, 4)]
    for now, then in zip(batches[:3], batches[1:], strict=True):
        bias = update(now, bias, 4)
        sign = sign - 0.001 * torch.sign(loads(now, sign, 4) - loads(now, sign, 4).double().mean()).float()
        seen.append(worst(then, bias, 4))
    assert seen[0] > 10 and seen[1] < 2 and seen[3] < 1.35
    assert worst(batches[3], sign, 4) > 9


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (64, 4), (7, 3)])
def test_solve_balances_a_fixed_set_almost_perfectly(experts, top_k):
    scores = skewed(64 * experts, experts, dtype=torch.float64)
    counts = loads(scores, solve(scores, top_k), top_k).double()
    assert counts.max() <= 1.05 * counts.mean() and counts.min() >= 0.9 * counts.mean()


def test_repeated_updates_on_a_fixed_set_reach_the_solution():
    scores, bias = skewed(2048, 16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    for _ in range(60):
        bias = next_bias(scores, bias, 2)
    assert worst(scores, bias, 2) < 1.05
    torch.testing.assert_close(bias, solve(scores, 2), rtol=0, atol=0.03)


@pytest.mark.parametrize("experts", [1, 4])
def test_choosing_every_expert_needs_no_bias(experts):
    scores = skewed(9, experts)
    for bias in (next_bias(scores, torch.ones(experts), experts), solve(scores, experts)):
        assert torch.equal(bias, torch.zeros(experts))
    assert torch.isfinite(histogram_bias(scores, torch.randn(experts), experts)).all()


def test_without_tokens_the_bias_stays():
    bias = torch.tensor([0.5, 0.0, -0.5])
    assert torch.equal(next_bias(torch.empty(0, 3), bias, 1), bias)
    assert quantiles(torch.zeros(3, 1000, dtype=torch.int64), bias, 1).isnan().all()


def test_equal_scores_give_equal_biases():
    assert next_bias(torch.full((16, 8), 0.5), torch.zeros(8), 2).tolist() == [0.0] * 8


# ---------------------------------------------------------------------- the histogram


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(2, 9), st.data())
def test_histogram_is_the_exact_quantile_to_one_bin(tokens, experts, data):
    top_k = data.draw(st.integers(1, experts - 1))
    bins = data.draw(st.sampled_from([50, 1000, 4096]))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    scores = torch.rand(tokens, experts, dtype=torch.float64)
    bias = data.draw(st.sampled_from([0.0, 0.1, 3.0])) * torch.randn(experts, dtype=torch.float64)
    biased = scores + bias
    counts = count_required(scores, biased.topk(top_k, dim=1).indices, bias, bins)
    assert counts.sum(1).tolist() == [tokens] * experts
    cutoff = biased.topk(top_k + 1, dim=1).values[:, -1:]
    exact = (cutoff - scores).sort(dim=0).values[math.ceil(tokens * top_k / experts) - 1]
    width = (float(bias.max() - bias.min()) + 2) / bins
    assert (quantiles(counts, bias, top_k) - exact).abs().max() <= width * (1 + 1e-9)


def test_quantile_inside_a_bin_is_linear():
    """k/E = 1/2 of 8 tokens: rank 4. Bins of width 0.5 from -1 on."""
    counts = torch.tensor([[2, 4, 2, 0], [0, 0, 0, 8], [4, 0, 0, 4], [3, 5, 0, 0]])
    got = quantiles(counts, torch.zeros(4), 2)
    torch.testing.assert_close(got, torch.tensor([-0.5 + 0.25, 0.5 + 0.25, -0.5, -0.5 + 0.1]).double())


def test_fractional_rank_uses_the_bin_that_reaches_its_ceiling():
    """q = 3 * 1/2 = 1.5: the bin of the second token, of which nothing is taken while q - before is half a token."""
    counts = torch.tensor([[1, 0, 2, 0], [2, 0, 1, 0]])
    got = quantiles(counts, torch.zeros(2), 1)
    torch.testing.assert_close(got, torch.tensor([0.0 + 0.25 * 0.5, -1 + 0.75 * 0.5]).double())


def test_layers_are_independent():
    scores = [skewed(50, 6, seed=i) for i in range(3)]
    biases = torch.randn(3, 6)
    counts = [count_required(s, (s + b).topk(2, dim=1).indices, b) for s, b in zip(scores, biases, strict=True)]
    together = quantiles(torch.stack(counts), biases, 2)
    alone = [quantiles(c, b, 2) for c, b in zip(counts, biases, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=0)


# ---------------------------------------------------------------------- in a model


class Routing(NamedTuple):
    scores: Tensor
    chosen: Tensor


class FakeRouter(nn.Module):
    """Routes its input, which is already scores; what a test feeds is what the balancer sees, to the bit."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, scores: Tensor) -> Routing:
        return Routing(scores, (scores + self.e_score_correction_bias).topk(self.top_k, dim=1).indices)


class FakeModel(nn.Module):
    def __init__(self, experts=8, top_k=2, layers=2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FakeRouter(experts, top_k) for _ in range(layers))

    def forward(self, scores: Tensor) -> Tensor:
        return sum(layer(scores.roll(i, 1)).scores.square().sum() for i, layer in enumerate(self.layers))

    @property
    def biases(self) -> Tensor:
        return torch.stack([layer.e_score_correction_bias for layer in self.layers]).clone()


SCORES = skewed(96, 8)


def stepped(*batches: Tensor, model: FakeModel | None = None, masks: tuple = (), **options) -> tuple[Tensor, list]:
    """Biases and loads after one step over the batches."""
    model = model or FakeModel()
    balancer = QuantileBalancer(model, **options)
    for i, batch in enumerate(batches):
        with balancer.observe(masks[i] if masks else None):
            model(batch)
    result = balancer.step()
    return model.biases, result


def test_step_writes_the_histogram_update_of_every_layer_and_reports_loads():
    biases, result = stepped(SCORES)
    for i, (bias, load) in enumerate(zip(biases, result, strict=True)):
        scores = SCORES.roll(i, 1)
        torch.testing.assert_close(bias, histogram_bias(scores, torch.zeros(8), 2), rtol=0, atol=1e-6)
        torch.testing.assert_close(bias, next_bias(scores, torch.zeros(8), 2), rtol=0, atol=0.004)
        assert load.name == f"layers.{i}"
        assert torch.equal(load.loads, loads(scores, torch.zeros(8), 2))
        assert load.max_over_mean == pytest.approx(worst(scores, torch.zeros(8), 2))
        assert load.dead == int((load.loads == 0).sum())


def test_microbatches_do_not_matter():
    whole, result = stepped(SCORES)
    for parts in (SCORES.split(24), SCORES.split(37), SCORES.split(1)):
        biases, loads_ = stepped(*parts)
        assert torch.equal(biases, whole)
        assert all(torch.equal(a.loads, b.loads) for a, b in zip(result, loads_, strict=True))


def test_counts_are_tokens_times_experts_and_are_forgotten_after_the_step():
    model = FakeModel()
    balancer = QuantileBalancer(model)
    with balancer.observe():
        model(SCORES)
    assert balancer.counts[..., :-1].sum((1, 2)).tolist() == [96 * 8] * 2
    assert balancer.counts[..., -1].sum(1).tolist() == [96 * 2] * 2
    balancer.step()
    assert not balancer.counts.any()
    before = model.biases
    assert all(load.max_over_mean == 1.0 and load.dead == 8 for load in balancer.step())
    assert torch.equal(model.biases, before)  # a step without tokens


def test_evaluation_and_forwards_outside_the_context_do_not_count():
    want, _ = stepped(SCORES)
    model = FakeModel()
    balancer = QuantileBalancer(model)
    model(SCORES.flip(1))
    with balancer.observe():
        model(SCORES)
        model.eval()
        model(SCORES.flip(1))
        model.train()
    model.eval()(SCORES.flip(1))
    balancer.step()
    assert torch.equal(model.biases, want)


def test_padding_does_not_vote():
    want, _ = stepped(SCORES)
    padded = torch.stack((SCORES, SCORES.flip(1)), dim=1).flatten(0, 1)
    mask = torch.tensor([True, False]).repeat(96).view(4, 48)
    got, _ = stepped(padded, masks=(mask,))
    assert torch.equal(got, want)
    assert not torch.equal(stepped(padded)[0], want)
    got, _ = stepped(SCORES, padded, masks=(torch.ones(96, dtype=torch.bool), torch.zeros(192, dtype=torch.bool)))
    assert torch.equal(got, want)


def test_a_mask_of_the_wrong_length_is_refused_and_hooks_are_removed():
    model = FakeModel()
    balancer = QuantileBalancer(model)
    with pytest.raises(ValueError, match="95 tokens; router 0 saw 96"), balancer.observe(torch.ones(95) > 0):
        model(SCORES)
    assert not any(layer._forward_hooks for layer in model.layers)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_a_recomputed_forward_does_not_count(reentrant, backward_inside):
    model = FakeModel()
    balancer = QuantileBalancer(model)
    passes = []
    model.layers[0].register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    scores = SCORES.clone().requires_grad_()
    with balancer.observe():
        total = checkpoint(model, scores, use_reentrant=reentrant)
        if backward_inside:
            total.backward()
    if not backward_inside:
        total.backward()
    assert len(passes) == 2  # the forward did run twice
    assert balancer.counts[..., :-1].sum((1, 2)).tolist() == [96 * 8] * 2
    balancer.step()
    assert torch.equal(model.biases, stepped(SCORES)[0])


def test_all_reduce_sums_over_ranks_once():
    want, whole = stepped(SCORES)
    models = [FakeModel(), FakeModel()]
    balancers = [QuantileBalancer(model) for model in models]
    for model, balancer, scores in zip(models, balancers, SCORES.split(40)[:1] + (SCORES[40:],), strict=True):
        with balancer.observe():
            model(scores)
    total = balancers[0].counts + balancers[1].counts
    calls = []

    def all_reduce(counts: Tensor) -> None:
        calls.append(counts.shape)
        counts.copy_(total)

    results = [balancer.step(all_reduce) for balancer in balancers]
    assert len(calls) == 2
    for model, result in zip(models, results, strict=True):
        assert torch.equal(model.biases, want)
        assert torch.equal(result[1].loads, whole[1].loads)


def test_log_only_leaves_the_bias_alone_and_still_forgets():
    model = FakeModel()
    balancer = QuantileBalancer(model, update_bias=False)
    for _ in range(2):
        with balancer.observe():
            model(SCORES)
        result = balancer.step()
        assert int(result[0].loads.sum()) == 96 * 2
    assert not model.biases.any()


def test_ema_keeps_its_share_of_the_old_bias():
    once, _ = stepped(SCORES)
    model = FakeModel()
    biases, _ = stepped(SCORES, model=model, ema=0.75)
    torch.testing.assert_close(biases, 0.25 * once)


def test_choosing_every_expert_in_a_model():
    model = FakeModel(experts=4, top_k=4)
    model.layers[0].e_score_correction_bias += 0.3
    biases, result = stepped(SCORES[:, :4], model=model)
    assert not biases.any()
    assert result[0].max_over_mean == 1.0


def test_resumed_in_the_middle_of_a_step(tmp_path):
    want, _ = stepped(SCORES)
    model = FakeModel()
    balancer = QuantileBalancer(model)
    with balancer.observe():
        model(SCORES[:50])
    torch.save(balancer.state_dict(), tmp_path / "state.pt")
    resumed = QuantileBalancer(model)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with resumed.observe():
        model(SCORES[50:])
    resumed.step()
    assert torch.equal(model.biases, want)


def test_state_of_another_model_is_refused():
    state = QuantileBalancer(FakeModel(layers=3)).state_dict()
    with pytest.raises(ValueError, match=r"shape \[3, 8, 1001\]; expected \[2, 8, 1001\]"):
        QuantileBalancer(FakeModel()).load_state_dict(state)


def test_models_without_routers_and_with_unequal_ones():
    assert QuantileBalancer(nn.Linear(2, 2)).step() == []
    model = FakeModel()
    model.layers.append(FakeRouter(5, 2))
    with pytest.raises(ValueError, match=r"\[5, 8\]"):
        QuantileBalancer(model)


@pytest.mark.parametrize(("option", "value"), [("ema", 1.0), ("ema", -0.1), ("bins", 0)])
def test_wrong_options_are_named(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        QuantileBalancer(FakeModel(), **{option: value})


# ---------------------------------------------------------------------- in K3


def lopsided() -> K3:
    """A small K3 whose routers start with strong tastes."""
    torch.manual_seed(0)
    model = K3(K3Config.tiny().at_depth(3, num_experts=16, num_experts_per_token=2))
    for layer in model.model.layers[1:]:
        gate = layer.block_sparse_moe.gate
        nn.init.normal_(gate.weight, std=0.05)
        gate.weight.data += 0.15 * torch.randn(16, 1) * model.model.norm.weight.data
        layer.post_attention_layernorm.weight.data += 1.0
    return model


def test_routers_of_k3_are_found_and_balanced():
    model = lopsided()
    balancer = QuantileBalancer(model)
    assert balancer.layers == [f"model.layers.{l}.block_sparse_moe.gate" for l in (1, 2)]
    generator = torch.Generator().manual_seed(1)
    history = []
    for _ in range(5):
        for _ in range(2):
            ids = torch.randint(0, 1024, (4, 128), generator=generator)
            with balancer.observe(), torch.no_grad():
                model.hidden_states(ids)
        history.append([load.max_over_mean for load in balancer.step()])
    assert min(history[0]) > 1.8
    assert max(history[-1]) < 1.5
    assert sum(history[-1]) < 0.7 * sum(history[0])


def test_only_the_bias_changes_and_only_at_the_step():
    model = lopsided()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    balancer = QuantileBalancer(model)
    ids = torch.randint(0, 1024, (2, 33))
    with balancer.observe():
        model.hidden_states(ids)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    balancer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.e_score_correction_bias" for name in balancer.layers}
    assert all(module.e_score_correction_bias.dtype == torch.float32 for module in balancer.routers.values())
