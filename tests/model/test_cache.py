"""What a sequence leaves behind: sizes, independence of copies, and that reading on is the same as reading at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.cache import KDAState, LatentCache, ModelState, Snapshot
from nanok3.model.decoder import K3

pytestmark = pytest.mark.usefixtures("without_gradients", "unchecked")


@pytest.fixture
def without_gradients():
    """No gradients: this is about decoding."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = K3(replace(K3Config.tiny(), hidden_size=64, intermediate_size=96)).double()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 1024, (2, 24))


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def contents(state):
    return {name: tensor.clone() for name, tensor in state.tensors()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------ sizes


def test_the_memory_of_k3():
    """69 fixed matrices of 414 MiB in float32, and 576 numbers a token for each of 24 layers."""
    cfg = K3Config.k3()
    state = ModelState.empty(cfg, 1, torch.bfloat16, torch.device("meta"))
    fixed = [layer for layer in state.layers if isinstance(layer, KDAState)]
    growing = [layer for layer in state.layers if isinstance(layer, LatentCache)]
    assert (len(fixed), len(growing)) == (69, 24)
    assert {layer.recurrent.shape for layer in fixed} == {(1, 96, 128, 128)}
    assert {layer.recurrent.dtype for layer in fixed} == {torch.float32}
    assert sum(layer.recurrent.nbytes for layer in fixed) == 434_110_464 == 414 * 2**20
    assert {layer.conv.shape for layer in fixed} == {(1, 3, 3, 12288)}
    assert {layer.latents.shape for layer in growing} == {(1, 0, 576)}
    for layer in growing:
        layer.append(torch.zeros(1, 1000, 576, dtype=torch.bfloat16, device="meta"))
    assert sum(layer.nbytes for layer in growing) == 1000 * 27_648


def test_kda_memory_is_constant_and_latents_grow_by_the_token(model, ids):
    state = model.new_state(2)
    sizes = []
    for t in range(24):
        model(ids[:, t : t + 1], state=state)
        fixed = sum(l.nbytes for l in state.layers if isinstance(l, KDAState))
        sizes.append((fixed, state.nbytes - fixed))
    assert len({fixed for fixed, _ in sizes}) == 1
    width = model.cfg.latent_cache_size * 8 * 2 * 2  # float64, two sequences, two MLA layers
    assert [latents for _, latents in sizes] == [width * (t + 1) for t in range(24)]


def test_appending_costs_a_copy_now_and_then_only():
    cache = LatentCache(1, 3, torch.float32, torch.device("cpu"))
    buffers = set()
    for t in range(1000):
        rows = cache.append(torch.full((1, 1, 3), float(t)))
        buffers.add(cache._buffer.data_ptr())
        assert rows.shape == (1, t + 1, 3)
    assert torch.equal(cache.latents[0, :, 0], torch.arange(1000.0))
    assert len(buffers) <= 6


def test_new_states_are_empty_and_of_the_models_kind(model):
    state = model.new_state(3)
    assert (state.tokens, state.batch_size) == (0, 3)
    assert all(tensor.abs().sum() == 0 and tensor.dtype == torch.float64 for _, tensor in state.tensors())
    low = ModelState.empty(model.cfg, 1, torch.bfloat16, torch.device("cpu"))
    kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in low.tensors()}
    assert kinds == {"conv": torch.float32, "recurrent": torch.float32, "latents": torch.bfloat16}
    with pytest.raises(ValueError, match="batch_size is -1; it must be at least 1"):
        model.new_state(-1)


def test_the_batch_is_known_when_the_first_layer_is_mla(golden):
    state = golden("c2_k3_1l_mla").model.new_state(5)
    assert state.batch_size == 5


# ------------------------------------------------------------------ reading on


def test_forward_advances_the_state_it_was_given(model, ids):
    state = model.new_state(2)
    out = model(ids[:, :7], state=state)
    assert out.state is state and state.tokens == 7
    model(ids[:, 7:9], state=state)
    assert state.tokens == 9


@pytest.mark.parametrize("cuts", [[1], [23], [5, 6], [16], [1, 2, 3, 4], [*range(1, 24)]])
def test_reading_on_equals_reading_at_once(model, ids, cuts):
    state = model.new_state(2)
    parts = [model(ids[:, a:b], state=state).logits for a, b in zip([0, *cuts], [*cuts, 24])]
    close(torch.cat(parts, dim=1), model(ids).logits)


def test_two_sequences_are_two_singles(model, ids):
    both = model.new_state(2)
    singles = [model.new_state(1), model.new_state(1)]
    for a, b in ((0, 9), (9, 10), (10, 24)):
        together = model(ids[:, a:b], state=both).logits
        for row, single in enumerate(singles):
            close(model(ids[row : row + 1, a:b], state=single).logits[0], together[row])
    for (name, tensor), (_, first), (_, second) in zip(both.tensors(), singles[0].tensors(), singles[1].tensors()):
        close(torch.cat((first, second)), tensor), name


# ------------------------------------------------------------------ copies


def test_a_clone_is_independent_both_ways(model, ids):
    state = model.new_state(2)
    model(ids[:, :10], state=state)
    clone = state.clone()
    before = contents(state)
    assert same(contents(clone), before) and clone.tokens == 10
    model(ids[:, 10:13], state=clone)
    assert same(contents(state), before) and (state.tokens, clone.tokens) == (10, 13)
    advanced = contents(clone)
    model(ids[:, 13:], state=state)
    assert same(contents(clone), advanced)


def test_no_tensor_is_shared_with_a_clone_or_a_snapshot(model, ids):
    state = model.new_state(2)
    model(ids[:, :10], state=state)
    for other in (state.clone(), state.snapshot().restore()):
        for (_, a), (_, b) in zip(state.tensors(), other.tensors()):
            assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_a_snapshot_is_restored_any_number_of_times(model, ids):
    state = model.new_state(2)
    model(ids[:, :10], state=state)
    snapshot = state.snapshot()
    assert isinstance(snapshot, Snapshot) and snapshot.tokens == 10 and snapshot.nbytes == state.nbytes
    model(ids[:, 10:], state=state)
    runs = []
    for _ in range(3):
        restored = snapshot.restore()
        runs.append(model(ids[:, 10:], state=restored).logits)
        assert restored.tokens == 24 and snapshot.tokens == 10
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    close(runs[0], model(ids).logits[:, 10:])


def test_a_snapshot_cannot_be_advanced(model, ids):
    snapshot = model.new_state(2).snapshot()
    assert not hasattr(snapshot, "layers") and not hasattr(snapshot, "tensors")


def test_item_16_a_prefix_is_reused_at_a_boundary_where_both_memories_agree(model, ids):
    """Item 16: the snapshot holds the matrices and the latents of the same number of tokens, so a reused prefix gives
    what a cold run gives; matrices of another boundary do not."""
    state, snapshots = model.new_state(2), {}
    for a, b in ((0, 8), (8, 16), (16, 20)):
        model(ids[:, a:b], state=state)
        snapshots[b] = state.snapshot()
        latents = [layer.latents.shape[1] for layer in state.layers if isinstance(layer, LatentCache)]
        assert set(latents) == {state.tokens} == {b}
    cold = model(ids).logits
    for boundary, snapshot in snapshots.items():
        close(model(ids[:, boundary:], state=snapshot.restore()).logits, cold[:, boundary:])
    mixed = snapshots[16].restore()
    mixed.layers[0] = snapshots[8].restore().layers[0]
    assert (model(ids[:, 16:], state=mixed).logits - cold[:, 16:]).abs().max() > 0.01


@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_item_17_rolling_back_a_rejected_suffix(model, ids, accepted):
    """Item 17: after rejecting a suffix the convolution window and S equal those of the accepted prefix."""
    state = model.new_state(2)
    model(ids[:, :10], state=state)
    before = state.snapshot()
    draft = (ids[:, 10:15] + 1) % 1024
    model(draft, state=state)
    state = before.restore()
    if accepted:
        model(draft[:, :accepted], state=state)
    direct = model.new_state(2)
    model(ids[:, :10], state=direct)
    if accepted:
        model(draft[:, :accepted], state=direct)
    assert same(contents(state), contents(direct)) and state.tokens == direct.tokens == 10 + accepted
    close(model(ids[:, 20:], state=state).logits, model(ids[:, 20:], state=direct).logits)


def test_gradients_may_flow_through_a_state(model, ids):
    with torch.enable_grad():
        state = model.new_state(2)
        parts = [model(ids[:, a:b], state=state).logits for a, b in ((0, 9), (9, 12), (12, 24))]
        weight = model.model.embed_tokens.weight
        (grad,) = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), weight)
        (expected,) = torch.autograd.grad(model(ids).logits.square().sum(), weight)
    torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())


def test_decoding_after_a_step_with_gradients(model, ids):
    """The buffer that autograd saw is left alone by the writes that follow."""
    with torch.enable_grad():
        state = model.new_state(2)
        first = model(ids[:, :9], state=state).logits
    clone = state.clone()
    rest = model(ids[:, 9:], state=clone).logits
    close(rest, model(ids).logits[:, 9:])
    with torch.enable_grad():
        first.sum().backward()
    model.zero_grad()


def test_names_of_what_a_state_holds(model):
    names = [name for name, _ in model.new_state(1).tensors()]
    assert names[:2] == ["layers.0.conv", "layers.0.recurrent"] and names[-1] == "layers.4.latents"
    assert len(names) == 2 * 3 + 2


# ------------------------------------------------------------------ failing


@pytest.mark.parametrize("failing", ["first layer", "last layer", "head"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("read", [0, 5, 64])
def test_a_forward_that_fails_leaves_the_state_as_it_was(model, failing, error, read):
    """Whatever was read before, and wherever it fails: the state reads on as if nothing had happened."""
    ids = torch.randint(0, 1024, (2, 80))
    state = model.new_state(2)
    if read:
        model(ids[:, :read], state=state)
    untouched = model.new_state(2)
    if read:
        model(ids[:, :read], state=untouched)
    before = contents(state)

    def fail(*_):
        raise error("broken")

    layers = model.model.layers
    place = {"first layer": layers[0].post_attention_layernorm, "last layer": layers[-1], "head": model.lm_head}
    handle = place[failing].register_forward_hook(fail)
    try:
        with pytest.raises(error):
            model(ids[:, read : read + 9].flip(1), state=state)
    finally:
        handle.remove()
    assert state.tokens == read and same(contents(state), before)
    rest = ids[:, read : read + 7]
    assert torch.equal(model(rest, state=state).logits, model(rest, state=untouched).logits)
    assert same(contents(state), contents(untouched))
