"""Training a draft: the loss, the unrolled chain against decoding step by step, and what is learned."""

from __future__ import annotations

import math

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.packing import Batch
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, tapped_layers, taps
from nanok3.posttrain.draft import LOWEST, UNROLL, Acceptance, losses, mean_loss, measure, overlap_loss, read, unroll
from nanok3.train.loss import IGNORE

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    cfg = K3Config.tiny(initializer_range=0.2).at_depth(4).with_vocabulary(512)
    return K3(cfg).double().eval().requires_grad_(False)


@pytest.fixture
def draft(model):
    torch.manual_seed(3)
    made = Draft(model.cfg).double()
    with torch.no_grad():
        made.fusion.weight.add_(0.1 * torch.randn_like(made.fusion.weight))
    return made


def packed(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(0, 512, (1, sum(lengths)), generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    targets = ids.roll(-1, dims=1)
    targets[0, ends[1:] - 1] = IGNORE
    return Batch(ids, targets, ends.to(torch.int32), [])


# ------------------------------------------------------------------ the loss


def test_equal_distributions_cost_nothing_and_disjoint_ones_not_infinitely_much():
    p = torch.tensor([[0.0, 1.0, -2.0]])
    assert float(overlap_loss(p, p + 3)) == pytest.approx(0, abs=1e-6)
    inf = math.inf
    apart = torch.tensor([[0.0, -inf, -inf]]), torch.tensor([[-inf, 0.0, -inf]], requires_grad=True)
    loss = overlap_loss(*apart)
    loss.sum().backward()
    assert loss.item() == -LOWEST and apart[1].grad.isfinite().all()


def test_the_loss_is_the_chance_of_being_kept_and_pulls_where_q_is_too_small():
    p = torch.tensor([0.5, 0.3, 0.2]).log()
    q = torch.tensor([0.2, 0.6, 0.2]).log().requires_grad_()
    loss = overlap_loss(p[None], q[None])[0]
    assert (-loss).exp().item() == pytest.approx(0.2 + 0.3 + 0.2)
    loss.backward()
    assert q.grad[0] < 0 < q.grad[1], "up where q < p, down where it is above"


# ------------------------------------------------------------------ the chain


def test_taps_are_blocks_1_4_and_the_last_of_k3():
    assert tapped_layers(K3Config.k3()) == (12, 48, 93)
    low, middle, last = tapped_layers(K3Config.tiny().at_depth(4))
    assert 0 < low <= middle <= last == 4


def test_names_are_those_that_vllm_reads(model):
    names = {name.split(".")[0] for name in Draft(model.cfg).layer.state_dict()}
    assert names == {"enorm", "hnorm", "eh_proj", "mtp_block", "shared_head"}


def test_a_fresh_draft_reads_the_last_feature_alone(model):
    features = torch.randn(1, 5, 3, model.cfg.hidden_size, dtype=torch.float64)
    assert torch.equal(Draft(model.cfg).double().fuse(features), features[:, :, 2])


@torch.no_grad()
def test_the_unrolled_chain_is_what_decoding_does(model, draft):
    """From every base: the rows before it with the model's features, then guesses that go on with their own."""
    row = read(model, packed(9))
    chain = unroll(draft, row, 4)
    feature = draft.fuse(row.features)
    zero = torch.zeros_like(feature[:, :1])
    before = torch.cat((zero, feature[:, :-1]), dim=1)
    for base in range(6):
        cache = LatentCache(1, model.cfg.latent_cache_size, torch.float64, feature.device)
        own = draft.layer(row.embedded[:, : base + 1], before[:, : base + 1], cache=cache)[:, -1:]
        for j in range(4):
            if base + j < 9:
                assert torch.allclose(own, chain[j][:, base + j : base + j + 1], atol=1e-10), (base, j)
            if j < 3 and base + j + 1 < 9:
                own = draft.layer(row.embedded[:, base + j + 1 : base + j + 2], own, cache=cache)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model, draft):
    both, alone = packed(6, 8), packed(8)
    alone.input_ids[:] = both.input_ids[:, 6:]
    alone.targets[:] = both.targets[:, 6:]
    for a, b in zip(losses(model, draft, read(model, both)), losses(model, draft, read(model, alone))):
        assert torch.allclose(a[6:], b, atol=1e-9, equal_nan=True)


def test_labels_end_with_their_document(model, draft):
    found = losses(model, draft, read(model, packed(3, 4)), 3)
    counted = [(~one.isnan()).tolist() for one in found]
    T, F = True, False
    assert counted == [[T, T, F, T, T, T, F], [F, T, F, F, T, T, F], [F, F, F, F, F, T, F]]


# ------------------------------------------------------------------ what is learned


def test_acceptance_by_position_and_length():
    nan = torch.nan
    first, second = torch.tensor([0.5, 0.5, nan]), torch.tensor([nan, 1.0, nan])
    found = Acceptance.empty(2)
    found.add([-first.log(), -second.log()])
    assert found.by_position == pytest.approx([0.5, 1.0]) and found.chains == 1
    assert found.accepted_length == pytest.approx(1 + 0.5 + 0.5 * 1.0)


def test_a_copy_of_the_head_is_always_kept(model, draft, monkeypatch):
    row = read(model, packed(20))
    monkeypatch.setattr("nanok3.posttrain.draft.unroll", lambda draft, row, steps: [row.final] * steps)
    monkeypatch.setattr(type(draft.layer), "normed", lambda self, h: h)
    found = Acceptance.empty()
    found.add(losses(model, draft, row))
    assert found.accepted_length == pytest.approx(1 + UNROLL) and found.by_position == pytest.approx([1.0] * UNROLL)


def test_training_raises_what_is_accepted(model):
    torch.manual_seed(4)
    draft = Draft(model.cfg).double()
    batch = packed(24, 20)
    before = measure(model, draft, [batch], 3)
    optimizer = torch.optim.AdamW(draft.parameters(), 1e-2)
    for _ in range(12):
        loss = mean_loss(losses(model, draft, read(model, batch), 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = measure(model, draft, [batch], 3)
    assert after.accepted_length > before.accepted_length + 0.1
    assert all(p.grad is None for p in model.parameters()), "the model is frozen"


def test_taps_leave_no_hooks(model):
    with taps(model, (1, 4)) as found:
        model(torch.tensor([[3, 4, 5]]))
    assert set(found) == {1, 4} and not model.model.norm._forward_pre_hooks
