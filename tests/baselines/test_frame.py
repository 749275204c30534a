"""What every rung of the ladder owes to training: shapes, causality, packed documents, a falling loss, its size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanok3.baselines import deltanet, gpt2, linear_attention, modern_gpt
from nanok3.baselines.frame import Baseline, BaselineConfig, row_of, softmax_attention
from nanok3.eval.bits_per_byte import bits_per_byte
from nanok3.model.mla import causal_attention_reference
from nanok3.train.loss import cross_entropy
from nanok3.train.muon import K3Optimizer, OptimizerSettings

SIZE = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 3}
RUNGS = {
    "gpt2": (gpt2, gpt2.GPT2, gpt2.GPT2Config(**SIZE, max_position_embeddings=150)),
    "gpt2 untied": (gpt2, gpt2.GPT2, gpt2.GPT2Config(**SIZE, tie_word_embeddings=False)),
    "modern_gpt": (modern_gpt, modern_gpt.ModernGPT, BaselineConfig(**SIZE)),
    "linear_attention": (linear_attention, linear_attention.LinearAttentionLM, BaselineConfig(**SIZE)),
    "deltanet": (deltanet, deltanet.DeltaNet, deltanet.DeltaNetConfig(**SIZE)),
    "gated deltanet": (deltanet, deltanet.DeltaNet, deltanet.DeltaNetConfig(**SIZE, gated=True)),
}
every_rung = pytest.mark.parametrize("rung", RUNGS)


def make(rung: str, dtype: torch.dtype = torch.float64) -> Baseline:
    """A model none of whose weights is zero: a layer that adds nothing would pass every test."""
    torch.manual_seed(0)
    _, model, cfg = RUNGS[rung]
    made = model(cfg).to(dtype)
    for p in made.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return made


@every_rung
def test_number_of_parameters(rung: str) -> None:
    module, model, cfg = RUNGS[rung]
    assert sum(p.numel() for p in model(cfg).parameters()) == module.parameters(cfg)


@every_rung
def test_shapes_and_starting_loss(rung: str) -> None:
    _, model, cfg = RUNGS[rung]
    torch.manual_seed(0)
    made = model(cfg)
    ids = torch.randint(0, 300, (2, 65))
    hidden, out = made.hidden_states(ids), made(ids)
    assert hidden.shape == (2, 65, 24) and out.logits.shape == (2, 65, 300) and out.state is None
    torch.testing.assert_close(out.logits, made.lm_head(hidden))
    loss, count = cross_entropy(hidden, made.lm_head.weight, torch.randint(0, 300, (2, 65)))
    assert float(loss.detach()) / count == pytest.approx(math.log(300), abs=0.2)


@every_rung
@pytest.mark.parametrize("changed", [0, 15, 16, 63, 64, 99])
def test_no_token_sees_a_later_one(rung: str, changed: int) -> None:
    model = make(rung)
    ids = torch.randint(0, 300, (1, 100))
    before = model.hidden_states(ids)
    ids[0, changed] = (ids[0, changed] + 1) % 300
    after = model.hidden_states(ids)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-12)
    assert (after - before)[:, changed:].abs().amax(2).min() > 1e-9


@every_rung
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_documents_are_as_if_alone(rung: str, dtype: torch.dtype) -> None:
    model = make(rung, dtype)
    lengths = [1, 2, 17, 0, 64, 65]
    documents = [torch.randint(0, 300, (1, n)) for n in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = model.hidden_states(torch.cat(documents, dim=1), cu_seqlens=bounds)
    alone = torch.cat([model.hidden_states(d) for d in documents if d.numel()], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-11 if dtype == torch.float64 else 1e-5)


@every_rung
@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_it_learns(rung: str, matrices: str) -> None:
    """A row of a short period is predicted after a few steps."""
    _, model, cfg = RUNGS[rung]
    torch.manual_seed(0)
    made = model(cfg)
    optimizer = K3Optimizer(made, OptimizerSettings(lr=2e-2, matrices=matrices))
    assert {r.kind for r in optimizer.rules} == {"adamw", matrices}
    ids = torch.arange(7).repeat(15)[None]
    losses = []
    for _ in range(15):
        loss = cross_entropy(made.hidden_states(ids[:, :-1]), made.lm_head.weight, ids[:, 1:])[0] / 104
        losses.append(float(loss.detach()))
        loss.backward()
        assert all(p.grad is not None for p in made.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 1.5 < losses[0]


@every_rung
def test_operations_are_mostly_those_of_the_matrices(rung: str) -> None:
    model = make(rung)
    body = 2 * (4 * 24 * 24 + 2 * 3 * 24 * 24) + 300 * 24
    assert 2 * body <= model.flops_per_token(10) <= 3.5 * body
    assert model.flops_per_token(10, training=True) == 3 * model.flops_per_token(10)


def test_bfloat16_runs_in_bfloat16() -> None:
    for rung in RUNGS:
        model = make(rung, torch.float32)
        model.compute_dtype = torch.bfloat16
        ids = torch.randint(0, 300, (1, 20))
        hidden = model.hidden_states(ids)
        assert hidden.dtype == torch.bfloat16
        model.compute_dtype = None
        torch.testing.assert_close(hidden.float(), model.hidden_states(ids), rtol=0, atol=0.3)


def test_attention_is_causal_attention() -> None:
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    bounds = torch.tensor([0, 13, 40])
    row = row_of(torch.zeros(1, 40, dtype=torch.int64), bounds)
    o = softmax_attention(q, k, v, row)
    for a, b in ((0, 13), (13, 40)):
        part = causal_attention_reference(q[:, a:b], k[:, a:b], v[:, a:b], 8**-0.5)
        torch.testing.assert_close(o[:, a:b], part)


def test_a_baseline_is_measured_like_a_model() -> None:
    model = make("modern_gpt", torch.float32)
    score = bits_per_byte(model, [[1, 2, 3, 4], [5] * 70], 100, 300, context=64, row=64)
    assert score.tokens == 74 and 0 < score.bits_per_byte < 100
    with pytest.raises(ValueError, match="carries nothing over"):
        model.new_state(1)


@pytest.mark.parametrize("field, value", [("hidden_size", 25), ("num_hidden_layers", 0), ("vocab_size", -1)])
def test_sizes_that_cannot_be_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        BaselineConfig(**(SIZE | {field: value}))
    with pytest.raises(ValueError, match="cu_seqlens"):
        make("modern_gpt").hidden_states(torch.zeros(1, 8, dtype=torch.int64), cu_seqlens=torch.tensor([0, 5]))
