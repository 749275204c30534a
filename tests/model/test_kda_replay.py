"""Rolling back a draft: whatever part of a trial is kept, memory is what reading that part alone would have left."""

from __future__ import annotations

import pytest
import torch

from nanok3.config import K3Config
from nanok3.kernels import native
from nanok3.model.cache import KDAState, ModelState
from nanok3.model.decoder import K3
from nanok3.model.kda_replay import Trial, record_bytes, replay_reference
from nanok3.model.native_decode import NativeDecoder

pytestmark = pytest.mark.usefixtures("unchecked")
DRAFTED = 8
needs_native = pytest.mark.skipif(not native.available("decode"), reason="no C++ compiler builds the kernel here")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model_of(**changes) -> K3:
    torch.manual_seed(7)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4, **changes).with_vocabulary(512)
    return K3(cfg).eval()


def same(a: ModelState, b: ModelState, within: float = 0.0) -> bool:
    assert a.tokens == b.tokens
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(x.shape == y.shape and bool(((x - y).abs() <= within).all()) for (_, x), (_, y) in pairs)


def ids_of(count: int) -> torch.Tensor:
    return torch.randint(0, 512, (1, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("read", [0, 1, 2, 21])
def test_what_was_projected_is_enough(read):
    """In torch: every accepted count, after prompts shorter than the convolutions' window and longer."""
    model = model_of().double()
    prompt, trial_ids = ids_of(read + 1)[:, :read], ids_of(DRAFTED)
    for kept in range(DRAFTED + 1):
        state, wanted = model.new_state(), model.new_state()
        for one in (state, wanted) if read else ():
            model(prompt, state=one)
        trial = Trial(model.model.layers, state)
        model(trial_ids, state=state)
        trial.keep(kept)
        for t in range(kept):
            model(trial_ids[:, t : t + 1], state=wanted)
        assert same(state, wanted, 1e-12)
        assert all(layer.tape is None for layer in state.layers if isinstance(layer, KDAState))


def native_state(model: K3, prompt: torch.Tensor) -> tuple[NativeDecoder, ModelState]:
    decoder = NativeDecoder.of(model)
    assert isinstance(decoder, NativeDecoder)
    state = model.new_state()
    decoder.step_state(prompt, state)
    return decoder, state


@needs_native
@pytest.mark.parametrize("head_dim", [12, 16, 32])
def test_native_replay_is_reading_one_by_one_bit_for_bit(head_dim):
    """Every accepted count, and every split of it, as where a span of the prefix cache ends in it."""
    model = model_of(kda_head_dim=head_dim)
    prompt, trial_ids = ids_of(21), ids_of(DRAFTED)
    decoder, wanted = native_state(model, prompt)
    tape = decoder.tape(DRAFTED)
    for kept in range(1, DRAFTED + 1):
        one = decoder.step_state(trial_ids[:, kept - 1 : kept], wanted).logits
        for split in range(kept):
            _, state = native_state(model, prompt)
            before = state.clone()
            (memory,) = decoder._memories(state, DRAFTED)
            memory.record_on(tape)
            rows = decoder.step_state(trial_ids, state, every_row=True).logits
            assert torch.equal(rows[kept - 1], one[0]), "a row is what it is alone"
            for layer, old in zip(state.layers, before.layers):
                if isinstance(layer, KDAState):
                    assert torch.equal(layer.recurrent, old.recurrent) and torch.equal(layer.conv, old.conv)
            memory.tokens = before.tokens
            for start, end in ((0, split), (split, kept)):
                if end > start:
                    memory.record_on(tape[:, start:])
                    decoder.replay([memory], [end - start])
            memory.record_on(None)
            for layer in state.layers:
                if not isinstance(layer, KDAState):
                    layer.tokens = before.tokens + kept
            state.tokens = before.tokens + kept
            assert same(state, wanted), (kept, split)


@needs_native
def test_the_tape_holds_what_the_reference_replays():
    model = model_of()
    decoder, state = native_state(model, ids_of(21))
    before, tape = state.clone(), decoder.tape(DRAFTED)
    (memory,) = decoder._memories(state, DRAFTED)
    memory.record_on(tape)
    decoder.step_state(ids_of(DRAFTED), state)
    memory.tokens = before.tokens
    decoder.replay([memory], [5])
    layers = [
        (a, b) for a, b in zip(state.layers, before.layers) if isinstance(a, KDAState) and isinstance(b, KDAState)
    ]
    for (after, old), rows in zip(layers, tape, strict=True):
        heads, dim = old.recurrent.shape[1:3]
        k, decay, u = rows[:5, 3 * heads * dim :].view(5, 3, heads, dim).unbind(1)
        S = replay_reference(old.recurrent[0], k, decay, u)
        assert torch.allclose(after.recurrent[0], S, atol=1e-5)


@needs_native
def test_taps_are_what_the_layers_read():
    model = model_of()
    decoder, state = native_state(model, ids_of(5))
    other, depth = state.clone(), model.cfg.num_hidden_layers
    read = {}
    handles = [
        norm.register_forward_pre_hook(lambda _, x, place=place: read.update({place: x[0][0]}))
        for place, norm in ((2, model.model.layers[2].input_layernorm), (depth, model.model.norm))
    ]
    model(ids_of(3), state=other)
    for handle in handles:
        handle.remove()
    sequences = decoder._memories(state, 3)
    taps = decoder.step(ids_of(3).flatten(), sequences, [3], tapped=[2, depth]).taps
    assert torch.allclose(taps[:, 0], read[2], atol=1e-4) and torch.allclose(taps[:, 1], read[depth], atol=1e-4)


@needs_native
def test_a_tape_that_does_not_fit_is_named():
    decoder, state = native_state(model_of(), ids_of(5))
    (memory,) = decoder._memories(state, 4)
    with pytest.raises(ValueError, match="the tape is"):
        memory.record_on(decoder.tape(4).double())
    memory.record_on(decoder.tape(2))
    with pytest.raises(ValueError, match="room for 2"):
        decoder.step_state(ids_of(3), state)
    memory.record_on(None)
    with pytest.raises(ValueError, match="no tape"):
        decoder.replay([memory], [1])


def test_a_record_is_a_fraction_of_a_state():
    cfg = K3Config.k3()
    assert [round(state / record) for record, state in (record_bytes(cfg), record_bytes(cfg, projected=True))] == [
        23,
        45,
    ]
