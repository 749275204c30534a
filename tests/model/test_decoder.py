"""The whole model: what it returns, what it refuses, and that packed documents never meet."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanok3.config import K3Config
from nanok3.model.cache import KDAState, PackedState
from nanok3.model.decoder import K3, Output
from nanok3.model.kda import KDA
from nanok3.model.latent_moe import Routing
from nanok3.model.mla import GatedMLA
from nanok3.model.situ import GatedMLP

LINEAR = {
    "model_type": "kimi_linear",
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "use_full_rank_gate": False,
    "gate_lower_bound": None,
}
VARIANTS = {"k3": {}, "kimi_linear": LINEAR, "full residuals": {"attn_res_full": True}}


def config(**changes):
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "media_placeholder_token_id": 3}
    return replace(K3Config.tiny(), vocab_size=256, hidden_size=64, intermediate_size=96, **(ids | changes))


def build(dtype=torch.float64, **changes):
    """A small model in which nothing is zero, so that misplacement shows."""
    model = K3(config(**changes)).to(dtype)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    for name, b in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(b, std=0.1)
    return model


def draw_ids(*shape):
    return torch.randint(0, 256, shape)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ shape and meaning


def test_layers_are_what_the_config_says():
    model = build()
    kinds = [KDA, KDA, KDA, GatedMLA, GatedMLA]
    assert [type(layer.self_attn) for layer in model.model.layers] == kinds
    assert isinstance(model.model.layers[0].feed_forward, GatedMLP)
    assert all(layer.feed_forward is layer.block_sparse_moe for layer in model.model.layers[1:])


def test_item_02_the_two_g_projs_are_two_gates():
    """Item 2: one name and one shape, two meanings, resolved by the kind of layer."""
    cfg = config(kda_head_dim=16, kda_num_heads=4, v_head_dim=16, num_attention_heads=4, num_key_value_heads=4)
    model = K3(cfg)
    kda, mla = model.model.layers[0].self_attn, model.model.layers[3].self_attn
    assert kda.g_proj.weight.shape == mla.g_proj.weight.shape
    assert isinstance(kda, KDA) and isinstance(mla, GatedMLA)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_what_comes_back(variant):
    model = build(**variant)
    ids = draw_ids(2, 7)
    out = model(ids)
    assert isinstance(out, Output) and out.logits.shape == (2, 7, 256)
    assert out.state is None and out.hidden is None
    asked = model(ids, return_hidden=True)
    assert torch.equal(asked.logits, out.logits)
    assert len(asked.hidden.residual) == 5 and asked.hidden.residual[0].shape == (2, 7, 64)
    assert sorted(asked.hidden.router) == [1, 2, 3, 4]
    for routing in asked.hidden.router.values():
        assert isinstance(routing, Routing)
        assert routing.scores.shape == (14, 8) and routing.chosen.shape == routing.weights.shape == (14, 2)
    close(F.linear(asked.hidden.final, model.lm_head.weight), out.logits)
    assert torch.equal(model.hidden_states(ids), asked.hidden.final)
    normed = asked.hidden.final / model.model.norm.weight
    close(normed.square().mean(-1), torch.ones(2, 7).double(), 1e-3)


def test_asking_leaves_no_hook_behind():
    model = build()
    model(draw_ids(1, 3), return_hidden=True)
    assert not any(m._forward_hooks for m in model.modules())


def test_without_attention_residuals_it_is_a_plain_pre_norm_decoder():
    model = build(**LINEAR)
    ids = draw_ids(1, 9)
    p = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        p = p + layer.self_attn(layer.input_layernorm(p))
        p = p + layer.feed_forward(layer.post_attention_layernorm(p))
    out = model(ids, return_hidden=True)
    close(model.lm_head(model.model.norm(p)), out.logits)
    assert out.hidden.bank == []
    assert not any("_res_" in name for name, _ in model.named_parameters())


def test_the_embedding_is_neither_scaled_nor_tied():
    model = build()
    ids = draw_ids(1, 4)
    seen = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    before = model(ids).logits
    assert torch.equal(seen[0], model.model.embed_tokens.weight[ids])
    model.lm_head.weight.data.mul_(2)
    close(model(ids).logits, 2 * before)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_later_token_changes_nothing_before_it(variant, unchecked):
    model = build(**variant)
    ids = draw_ids(2, 20)
    before = model(ids).logits
    ids[:, 11:] = (ids[:, 11:] + 1) % 256
    after = model(ids).logits
    close(after[:, :11], before[:, :11])
    assert (after[:, 11:] - before[:, 11:]).abs().max() > 0.01


# ------------------------------------------------------------------ packed documents

BOUNDS = [[0, 30], [0, 1, 30], [0, 13, 13, 14, 30], [0, 5, 16, 17, 30, 30]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_item_18_packed_documents_equal_each_alone(variant, dtype, unchecked):
    """Item 18: there is no padding to leak from. Texts of different lengths share a row, and each comes out as alone,
    to its conv state, its S and its attention."""
    model = build(dtype, **variant)
    ids = draw_ids(1, 30)
    for bounds in BOUNDS:
        packed = model(ids, cu_seqlens=torch.tensor(bounds)).logits
        alone = [model(ids[:, a:b]).logits for a, b in itertools.pairwise(bounds) if b > a]
        close(packed, torch.cat(alone, dim=1), 1e-9 if dtype == torch.float64 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_item_28_a_nan_document_reaches_no_other(variant, dtype, unchecked):
    """Item 28: the embedding row of a token that one document alone uses is NaN."""
    model = build(dtype, **variant)
    ids = draw_ids(1, 30).clamp(max=250)
    ids[0, 10:17] = 255
    cu = torch.tensor([0, 10, 17, 30])
    clean = model(ids, cu_seqlens=cu).logits
    model.model.embed_tokens.weight.data[255] = torch.nan
    poisoned = model(ids, cu_seqlens=cu).logits
    assert poisoned[:, 10:17].isnan().all()
    for a, b in ((0, 10), (17, 30)):
        close(poisoned[:, a:b], clean[:, a:b], 1e-12 if dtype == torch.float64 else 2e-3)


def test_a_nan_row_of_a_batch_reaches_no_other():
    model = build()
    ids = draw_ids(3, 9).clamp(max=250)
    clean = model(ids).logits
    ids[1] = 255
    model.model.embed_tokens.weight.data[255] = torch.nan
    poisoned = model(ids).logits
    close(poisoned[[0, 2]], clean[[0, 2]])


def test_gradients_of_packed_documents_are_the_sum_of_each_alone(unchecked):
    model = build()
    ids, bounds = draw_ids(1, 24), [0, 7, 8, 24]
    names = [n for n, p in model.named_parameters()]

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    packed = gradients(model(ids, cu_seqlens=torch.tensor(bounds)).logits.square().sum())
    alone = gradients(sum(model(ids[:, a:b]).logits.square().sum() for a, b in itertools.pairwise(bounds)))
    for name, a, b in zip(names, packed, alone):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * b.abs().max().item(), msg=name)


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_learns(variant):
    """All but layer 0's unused mix; an expert that nobody chose has a gradient of zero."""
    model = build(**variant)
    model(draw_ids(2, 40)).logits.square().mean().backward()
    for name, p in model.named_parameters():
        if name.startswith("model.layers.0.self_attention_res"):
            assert p.grad is None
        else:
            assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, name


def test_the_gradient_is_the_slope(golden, unchecked):
    """Along a random direction through all parameters of the official model with the tiny activations."""
    g = golden("f_k3_4l_small")
    model, ids = g.load(), g.ids("len065")
    direction = {n: torch.randn_like(p) * p.abs().mean() for n, p in model.named_parameters()}

    def loss():
        return F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])

    loss().backward()
    slope = sum((p.grad * direction[n]).sum() for n, p in model.named_parameters() if p.grad is not None)
    values, start = [], {n: p.detach().clone() for n, p in model.named_parameters()}
    h = 1e-7
    with torch.no_grad():
        for sign in (1, -1):
            for n, p in model.named_parameters():
                p.copy_(start[n] + sign * h * direction[n])
            values.append(loss())
    assert ((values[0] - values[1]) / (2 * h)).item() == pytest.approx(slope.item(), rel=1e-4)


# ------------------------------------------------------------------ precision


def test_masters_in_float32_compute_in_bfloat16():
    model = build(torch.float32)
    ids = draw_ids(2, 20)
    exact = model(ids).logits
    model.compute_dtype = torch.bfloat16
    out = model(ids, return_hidden=True)
    assert out.logits.dtype == out.hidden.residual[0].dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(r.scores.dtype == torch.float32 for r in out.hidden.router.values())
    assert ((out.logits.float() - exact).norm() / exact.norm()).item() < 0.5
    out.logits.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    state = model.new_state(2)
    assert model(ids, state=state).logits.dtype == torch.bfloat16


def test_a_whole_model_in_one_dtype():
    ids = draw_ids(1, 5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert build(dtype)(ids).logits.dtype == dtype


# ------------------------------------------------------------------ building


def test_fresh_weights_are_drawn_as_described():
    model = K3(K3Config.tiny())
    for name, p in model.named_parameters():
        if name.endswith("_res_proj.weight"):
            assert p.abs().max() == 0, "every source starts with the same weight"
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        elif "conv1d" in name:
            assert p.abs().max() <= 0.5
        elif not name.endswith(("A_log", "dt_bias")):
            assert abs(p.std().item() / 0.02 - 1) < 0.1 and abs(p.mean().item()) < 0.004, name
    assert all(b.abs().max() == 0 for b in model.buffers())
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_the_same_seed_gives_the_same_model():
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(K3(K3Config.tiny()))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))


def test_shapes_without_memory():
    with torch.device("meta"):
        model = K3(K3Config.base())
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model.lm_head.weight.shape == (32768, 1024)


@pytest.mark.parametrize("depth", [1, 2, 13])
def test_item_25_small_depths_run(depth):
    """Item 25, at the model: depth 1 is a single MLA layer with a dense MLP."""
    cfg = K3Config.tiny().at_depth(depth)
    assert torch.isfinite(K3(cfg)(torch.tensor([[1, 2, 3]])).logits).all()


# ------------------------------------------------------------------ what is refused


def test_wrong_inputs_are_named():
    model = build()
    ids = draw_ids(2, 6)
    with pytest.raises(ValueError, match=r"input_ids has shape \(1, 0\); there must be at least one token"):
        model(ids[:1, :0])
    with pytest.raises(ValueError, match="the state holds 3 sequences, input_ids 2"):
        model(ids, state=model.new_state(3))
    with pytest.raises(ValueError, match="cu_seqlens and state exclude each other"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 6]), state=model.new_state(1))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the row's 6 tokens, got"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="the batch holds 2; flatten it to 1 first"):
        model(ids, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        model.new_state(0)


def test_pictures_need_eyes_and_grids(golden):
    pixels, grid = torch.zeros(4, 3, 14, 14), torch.tensor([[1, 2, 2]])
    with pytest.raises(ValueError, match="this model has no vision tower"):
        build()(draw_ids(1, 3), pixel_values=pixels, grid_thw=grid)
    with pytest.raises(ValueError, match="this model has no vision tower"):
        build().vision(pixels, grid)
    seeing = golden("c2_k3_1l_mla").model
    size = seeing.cfg.patch_size
    with pytest.raises(ValueError, match="pixel_values were given without grid_thw"):
        seeing(torch.tensor([[1, 2]]), pixel_values=torch.zeros(4, 3, size, size))


def test_an_id_beyond_the_vocabulary_is_an_error_and_leaves_the_state_alone():
    model = build()
    state = model.new_state(1)
    for wrong in (256, -1, 2**40):
        with pytest.raises(ValueError, match=f"input_ids holds {wrong}; ids must be from 0 to 255"):
            model(torch.tensor([[3, wrong]]), state=state)
    assert state.tokens == 0 and all(t.abs().sum() == 0 for _, t in state.tensors())


@pytest.mark.parametrize(
    "ids", [torch.tensor([1, 2]), torch.tensor(1), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)], ids=str
)
def test_ids_that_are_no_ids_are_named(ids, unchecked):
    with pytest.raises(ValueError, match=r"input_ids is torch\..* of shape \(.*it must be int64 or int32"):
        build()(ids)


def test_int32_ids_read_the_same():
    model, ids = build(), draw_ids(1, 5)
    assert torch.equal(model(ids).logits, model(ids.int()).logits)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: K3(config().at_depth(9)), "the state has 9 layers, the model"),
        (lambda: build(kda_head_dim=16), r"layer 0 of the state holds \('kda'"),
        (lambda: build(short_conv_kernel_size=3), r"layer 0 of the state holds \('kda'"),
        (lambda: build(kv_lora_rank=24), r"layer \d of the state holds \('mla', "),
        (lambda: build(torch.float32), r"layer 0 of the state holds .*torch\.float32.*needs .*torch\.float64"),
    ],
)
def test_a_state_of_another_model_is_refused(other, words):
    with pytest.raises(ValueError, match=words):
        build()(draw_ids(1, 3), state=other().new_state(1))


# ------------------------------------------------------------------ several sequences in one row, each going on


def packed_and_alone(model, befores, lengths, poisoned=None):
    """Read `befores` tokens of each sequence alone, then `lengths` more: alone again, and all in one packed row."""
    states = []
    for count in befores:
        states.append(model.new_state(1))
        if count:
            model.hidden_states(draw_ids(1, count), state=states[-1])
    if poisoned is not None:
        for layer in states[poisoned].layers:
            if isinstance(layer, KDAState):
                layer.recurrent = torch.full_like(layer.recurrent, torch.nan)
    rows, alone = [draw_ids(1, count) for count in lengths], [state.clone() for state in states]
    wanted = [model.hidden_states(row, state=state) for row, state in zip(rows, alone)]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    packed = PackedState(states)
    found = model.hidden_states(torch.cat(rows, dim=1), cu_seqlens=bounds, state=packed).split(lengths, dim=1)
    packed.unpack()
    return list(zip(found, wanted, states, alone))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@torch.no_grad()
def test_sequences_that_go_on_in_one_row_are_those_alone(variant, dtype, tolerance):
    """Fresh ones beside ones that have read, one token beside a long chunk; and once more with none that has read."""
    model = build(dtype, **VARIANTS[variant])
    for befores in [(0, 1, 2, 40, 17, 0), (0, 0, 0)]:
        lengths = [70, 1, 2, 33, 16, 3][: len(befores)]
        for found, wanted, state, alone in packed_and_alone(model, befores, lengths):
            close(found, wanted, tolerance)
            for (name, a), (_, b) in zip(state.tensors(), alone.tensors()):
                assert a.shape == b.shape, name
                close(a, b, tolerance)


@torch.no_grad()
def test_a_packed_sequence_of_nan_harms_no_other():
    for dtype in (torch.float64, torch.float32):
        rows = packed_and_alone(build(dtype), (5, 20, 0), [40, 40, 40], poisoned=1)
        assert rows[1][0].isnan().any()
        for found, wanted, state, _ in (rows[0], rows[2]):
            close(found, wanted, 2e-4)
            assert all(torch.isfinite(tensor).all() for _, tensor in state.tensors())


def test_a_packed_state_wants_a_document_for_each_and_moves_wholly():
    model = build()
    states = [model.new_state(1) for _ in range(2)]
    for bounds in ([0, 6], [0, 2, 4, 6]):
        with pytest.raises(ValueError, match="the state holds 2 sequences, cu_seqlens"):
            model.hidden_states(draw_ids(1, 6), cu_seqlens=torch.tensor(bounds), state=PackedState(states))
    with pytest.raises(ValueError, match="the state holds 2 sequences, cu_seqlens 0"):
        model.hidden_states(draw_ids(1, 6), state=PackedState(states))
    with pytest.raises(ValueError, match="at least one, each of 1, can be packed"):
        PackedState([model.new_state(2)])
    model.model.norm.forward = lambda x: 1 / 0
    packed = PackedState(states)
    with pytest.raises(ZeroDivisionError):
        model.hidden_states(draw_ids(1, 6), cu_seqlens=torch.tensor([0, 2, 6]), state=packed)
    packed.unpack()
    for state in states:
        assert all(not tensor.any() for _, tensor in state.tensors())
