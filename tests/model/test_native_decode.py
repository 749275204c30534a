"""The whole stack in one native call against torch: every switch of the config, every weight type, ragged rows, paged
latents, and a row's independence of everything but its own sequence."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanok3.config import K3Config
from nanok3.kernels import native
from nanok3.kernels.decode_cpu import SequenceMemory
from nanok3.model.cache import KDAState, LatentCache, ModelState
from nanok3.model.decoder import K3
from nanok3.model.latent_moe import PackedExperts
from nanok3.model.mxfp4 import quantize_mxfp4
from nanok3.model.native_decode import STEPS_TO_COMPARE, NativeDecoder, refusal

pytestmark = [
    pytest.mark.skipif(not native.available("decode"), reason="no C++ compiler builds the kernel here"),
    pytest.mark.usefixtures("unchecked"),
]

FOLDERS = ["a_k3_13l", "b_k3_7l", "c1_k3_1l_kda", "c2_k3_1l_mla", "d_kimi_linear_6l", "e_k3_5l_realheads"]
FOLDERS += ["f_k3_4l_small"]
AMPLIFYING = ("a_k3_13l", "b_k3_7l", "f_k3_4l_small")
"""Where float32 rounding grows over many layers or tiny activations: the official code has up to 4e-5 there."""
BOUND = 1e-5
"""Relative L2 of logits in float32 against float64."""

SMALL: dict[str, Any] = {
    "hidden_size": 44,
    "intermediate_size": 52,
    "kda_num_heads": 3,
    "kda_head_dim": 12,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_experts": 7,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 36,
    "routed_expert_hidden_size": 28,
    "kda_layers": (1, 2, 4),
    "full_attn_layers": (3, 5),
    "attn_res_block_size": 2,
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "gate_lower_bound": None,
    "routed_expert_hidden_size": None,
    "use_full_rank_gate": False,
    "mla_use_output_gate": False,
    "q_lora_rank": None,
    "routed_scaling_factor": 2.446,
}
SWITCHES: dict[str, dict[str, Any]] = {
    "k3": {},
    "kimi_linear": KIMI_LINEAR,
    "no query bottleneck": {"q_lora_rank": None},
    "no attention gate": {"mla_use_output_gate": False},
    "low-rank gate": {"use_full_rank_gate": False},
    "unbounded decay": {"gate_lower_bound": None},
    "other bound": {"gate_lower_bound": -2.5},
    "full residuals": {"attn_res_full": True},
    "one block": {"attn_res_block_size": 12},
    "uncapped up": {"activation_situ_linear_beta": None},
    "beta left out": {"activation_situ_beta": None},
    "no latent": {"routed_expert_hidden_size": None},
    "no latent norm": {"latent_moe_use_norm": False},
    "no shared experts": {"num_shared_experts": 0},
    "neither latent nor shared": {"routed_expert_hidden_size": None, "num_shared_experts": 0},
    "dense": {"first_k_dense_replace": 9},
    "every second": {"first_k_dense_replace": 0, "moe_layer_freq": 2},
    "raw scores": {"moe_renormalize": False, "routed_scaling_factor": 1.7},
    "all experts": {"num_experts_per_token": 7},
    "one tap": {"short_conv_kernel_size": 1},
    "three taps": {"short_conv_kernel_size": 3},
    "no shared key part": {"qk_rope_head_dim": 0},
    "no MLA": {"kda_layers": (1, 2, 3, 4, 5), "full_attn_layers": ()},
    "no KDA": {"kda_layers": (), "full_attn_layers": (1, 2, 3, 4, 5)},
    "wide heads": {"kda_num_heads": 1, "kda_head_dim": 72, "v_head_dim": 40},
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def make(seed: int = 3, **changes: Any) -> K3:
    """Five small layers at odd widths, with weights large enough that everything matters."""
    torch.manual_seed(seed)
    cfg = replace(K3Config.tiny(initializer_range=0.2), **(SMALL | changes)).with_vocabulary(300)
    model = K3(cfg).eval()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", "_res_proj.weight", "correction_bias")):
            value.add_(0.3 * torch.randn_like(value))
    return model


def decoder_of(model: K3) -> NativeDecoder:
    decoder = NativeDecoder.of(model)
    assert isinstance(decoder, NativeDecoder), decoder
    return decoder


def one_by_one(decoder: NativeDecoder, ids: Tensor, state: ModelState | None = None) -> Tensor:
    """Logits (T, vocab) of one sequence, a token a call."""
    state = decoder.model.new_state(1) if state is None else state
    return torch.cat([decoder.step_state(token.view(1, 1), state).logits for token in ids])


def paged(decoder: NativeDecoder, page: int, pages: list[int], dtype: torch.dtype = torch.float32) -> SequenceMemory:
    """Empty memory whose latents lie in an arena (pages, layers, P, latent) full of NaN."""
    layout = decoder.layout
    arena = torch.full((max(pages) + 2, layout.mla_layers, page, layout.latent), torch.nan, dtype=dtype)
    return decoder.memory(
        [torch.zeros(layout.conv) for _ in range(layout.kda_layers)],
        [torch.zeros(layout.recurrent) for _ in range(layout.kda_layers)],
        [arena[:, i] for i in range(layout.mla_layers)],
        pages,
    )


# ------------------------------------------------------------------ equal to the official code, and to torch


@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_logits(golden, folder):
    """Token by token from nothing, float32 weights; the expected values are the official code's in float64."""
    g = golden(folder)
    decoder, bound = decoder_of(g.load(torch.float32)), 5e-4 if folder in AMPLIFYING else BOUND
    for case in ("len001", "len017", "len065"):
        got = one_by_one(decoder, g.ids(case)[0])
        assert relative(got, g.expected[f"{case}.logits"]) < bound


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch(switch):
    """Some rows at once, then one by one, against the same weights in float64; the states agree, too."""
    model = make(**SWITCHES[switch])
    ids = torch.randint(0, 300, (2, 19))
    decoder, state, exact = decoder_of(model), model.new_state(2), make(**SWITCHES[switch]).double()
    expected_state = exact.new_state(2)
    expected = exact(ids, state=expected_state).logits
    got = [decoder.step_state(ids[:, :7], state, every_row=True).logits.view(2, 7, -1)]
    got += [decoder.step_state(ids[:, t : t + 1], state).logits.view(2, 1, -1) for t in range(7, 19)]
    assert relative(torch.cat(got, dim=1), expected) < BOUND
    assert state.tokens == 19
    for (name, a), (_, b) in zip(state.tensors(), expected_state.tensors()):
        assert a.shape == b.shape and (a.numel() == 0 or relative(a, b) < BOUND), name


def test_a_state_goes_from_torch_to_native_and_back():
    model = make()
    ids = torch.randint(0, 300, (3, 12))
    decoder, state, whole = decoder_of(model), model.new_state(3), model(ids).logits
    model(ids[:, :5], state=state)
    assert relative(decoder.step_state(ids[:, 5:6], state).logits, whole[:, 5]) < BOUND
    assert relative(model(ids[:, 6:9], state=state).logits, whole[:, 6:9]) < BOUND
    assert relative(decoder.step_state(ids[:, 9:], state).logits, whole[:, 11]) < BOUND


def test_hidden_is_what_the_head_reads():
    model = make()
    ids = torch.randint(0, 300, (1, 9))
    out = decoder_of(model).step_state(ids, model.new_state(1), hidden=True)
    assert out.hidden is not None
    assert relative(out.hidden, model.hidden_states(ids)[0]) < BOUND
    assert relative(out.logits, model(ids).logits[:, -1]) < BOUND


def test_clones_and_snapshots_stay_when_the_state_moves_in_place():
    model = make()
    decoder, state = decoder_of(model), model.new_state(1)
    decoder.step_state(torch.tensor([[1, 2, 3]]), state)
    clone, snapshot = state.clone(), state.snapshot()
    kept = [x.clone() for _, x in clone.tensors()]
    decoder.step_state(torch.tensor([[4]]), state)
    for other in (clone, snapshot.restore()):
        assert other.tokens == 3
        assert all(torch.equal(a, b) for (_, a), b in zip(other.tensors(), kept))
    assert torch.equal(
        one_by_one(decoder, torch.tensor([4, 5]), clone)[1:], one_by_one(decoder, torch.tensor([5]), state)
    )


# ------------------------------------------------------------------ storage types


def test_bf16_weights_are_read_exactly():
    """The same numbers in bf16 and widened to float32 differ by the order of summation; latents are float32."""
    model = make().bfloat16()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "A_log" in name or "dt_bias" in name:
            value.data = value.data.float()
    model.compute_dtype = torch.float32
    wide = make()
    wide.load_state_dict(model.state_dict())
    ids = torch.randint(0, 300, (11,))
    assert relative(one_by_one(decoder_of(model), ids), one_by_one(decoder_of(wide), ids)) < BOUND


def test_bf16_latents_are_rounded_once():
    model = make().bfloat16()
    ids = torch.randint(0, 300, (1, 40))
    decoder, state = decoder_of(model), model.new_state(1)
    got = decoder.step_state(ids, state, every_row=True).logits
    latents = [layer for layer in state.layers if isinstance(layer, LatentCache)]
    assert all(layer.latents.dtype == torch.bfloat16 for layer in latents)
    wide = make()
    wide.load_state_dict(model.state_dict())
    expected = wide(ids).logits[0]
    assert 1e-5 < relative(got, expected) < 0.05


def pack(model: K3) -> K3:
    """Routed experts in MXFP4 where they were plain, and the plain ones set to the same values."""
    packed = make(**PACKABLE)
    for theirs, ours in zip(packed.model.layers, model.model.layers):
        if not hasattr(theirs, "block_sparse_moe"):
            continue
        experts = PackedExperts(model.cfg)
        for name in ("w1", "w2", "w3"):
            weight = ours.block_sparse_moe.experts.get_parameter(name)
            codes, scale = quantize_mxfp4(weight)
            experts.get_buffer(f"{name}_packed").copy_(codes)
            experts.get_buffer(f"{name}_scale").copy_(scale)
            for e in range(model.cfg.num_experts):
                weight[e] = experts.weight(name, e, weight)
        theirs.block_sparse_moe.experts = experts
    return packed


PACKABLE = {"moe_intermediate_size": 64, "routed_expert_hidden_size": 96}


def test_packed_experts_are_their_dequantised_weights():
    """But for the order of summation."""
    plain = make(**PACKABLE)
    packed = pack(plain)
    ids = torch.randint(0, 300, (1, 21))
    got = [decoder_of(m).step_state(ids, m.new_state(1), every_row=True).logits for m in (packed, plain)]
    assert relative(*got) < BOUND
    assert relative(got[0], plain(ids).logits[0]) < BOUND
    assert torch.equal(one_by_one(decoder_of(packed), ids[0]), got[0])


@pytest.mark.parametrize("packed", [False, True])
def test_experts_that_no_row_chose_are_not_read(packed):
    """NaN in all others, code 255 in their scales, changes no bit; in the chosen ones it is all there is."""
    plain = make(**PACKABLE, num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,), first_k_dense_replace=1)
    model = pack(plain) if packed else plain
    experts, router = model.model.layers[1].block_sparse_moe.experts, model.model.layers[1].block_sparse_moe.gate
    chosen: list[int] = []
    hook = router.register_forward_hook(lambda _m, _x, routing: chosen.extend(routing.chosen.flatten().tolist()))
    ids = torch.tensor([[5]])
    model(ids)
    hook.remove()
    assert 0 < len(set(chosen)) < model.cfg.num_experts
    before = decoder_of(model).step_state(ids, model.new_state(1)).logits
    for unread in (True, False):
        which = [e for e in range(model.cfg.num_experts) if (e in chosen) != unread]
        for name in ("w1", "w2", "w3"):
            if packed:
                experts.get_buffer(f"{name}_scale")[which] = 255
            else:
                experts.get_parameter(name)[which] = torch.nan
        after = decoder_of(model).step_state(ids, model.new_state(1)).logits
        assert torch.equal(after, before) if unread else after.isnan().all()


# ------------------------------------------------------------------ ragged rows, pages, batches, threads


def ragged(decoder: NativeDecoder, parts: list[list[Tensor]], memories: list[SequenceMemory]) -> list[Tensor]:
    """parts[s] are the pieces of sequence s, one a call; the logits of all its rows."""
    logits: list[list[Tensor]] = [[] for _ in parts]
    for call in range(max(map(len, parts))):
        now = [s for s, pieces in enumerate(parts) if call < len(pieces)]
        pieces = [parts[s][call] for s in now]
        rows = [len(piece) for piece in pieces]
        out = decoder.step(torch.cat(pieces), [memories[s] for s in now], rows, range(sum(rows)))
        for s, part in zip(now, out.logits.split(rows)):
            logits[s].append(part)
    return [torch.cat(rows) for rows in logits]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_depends_on_its_own_sequence_alone(threads):
    """Sequences in one call, cut anyhow, in pages of any size: the bits of each are those it has alone, token by token,
    with one thread."""
    model = make()
    decoder = decoder_of(model)
    ids = [torch.randint(0, 300, (n,)) for n in (90, 70, 1, 8, 33)]
    alone = [one_by_one(decoder, x) for x in ids]
    cuts = [[1, 64, 25], [70], [1], [3, 5], [1, 1, 1, 30]]
    memories = [
        paged(decoder, 1, list(range(100, 10, -1))),
        paged(decoder, 16, [7, 0, 3, 1, 9]),
        paged(decoder, 64, [2]),
        paged(decoder, 5, [4, 0]),
        paged(decoder, 64, [0]),
    ]
    torch.set_num_threads(threads)
    try:
        got = ragged(decoder, [list(x.split(cut)) for x, cut in zip(ids, cuts)], memories)
    finally:
        torch.set_num_threads(1)
    for a, b in zip(got, alone):
        assert torch.equal(a, b)
    assert [m.tokens for m in memories] == [len(x) for x in ids]


def test_a_nan_harms_its_own_sequence_only():
    """And leaves nothing behind in the workspace for the next call."""
    model = make()
    decoder = decoder_of(model)
    ids = torch.randint(0, 300, (3, 6))
    clean = decoder.step_state(ids, model.new_state(3), every_row=True).logits.view(3, 6, -1)
    state = model.new_state(3)
    first = state.layers[0]
    assert isinstance(first, KDAState)
    first.recurrent[1] = torch.nan
    poisoned = decoder.step_state(ids, state, every_row=True).logits.view(3, 6, -1)
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[0::2], clean[0::2])
    assert torch.equal(decoder.step_state(ids, model.new_state(3), every_row=True).logits.view(3, 6, -1), clean)


def test_only_pages_of_the_sequence_are_written():
    decoder = decoder_of(make())
    memory = paged(decoder, 4, [2, 0])
    decoder.step(torch.randint(0, 300, (6,)), [memory], [6])
    for pool in memory.latents:
        written = ~pool.isnan().any(-1)
        assert written.tolist() == [[True, True, False, False], [False] * 4, [True] * 4, [False] * 4]


# ------------------------------------------------------------------ weights that move, and what is refused


def test_weights_changed_in_place_or_replaced_are_seen():
    model = make()
    decoder, ids = decoder_of(model), torch.randint(0, 300, (1, 5))

    def agrees() -> bool:
        return relative(decoder.step_state(ids, model.new_state(1)).logits, model(ids).logits[:, -1]) < BOUND

    assert agrees()
    model.lm_head.weight.mul_(-1)
    assert agrees()
    layer = model.model.layers[2]
    layer.input_layernorm.weight = torch.nn.Parameter(2 * layer.input_layernorm.weight)
    assert agrees()
    model.model.embed_tokens.weight.data = -model.model.embed_tokens.weight.data
    assert agrees()


def test_a_weight_replaced_amid_a_sequence_is_seen_within_some_steps():
    """And until then the old one is read: it is not given back to the system."""
    model = make()
    decoder, state = decoder_of(model), model.new_state(1)
    ids = torch.randint(0, 300, (1, 40))
    old, new = copy.deepcopy(model), model
    for token in ids[:, :4].split(1, 1):
        decoder.step_state(token, state)
    new.lm_head.weight = torch.nn.Parameter(-2 * new.lm_head.weight)
    seen, bound = (
        [],
        1e-3,
    )  # they differ by -2; rounding makes 1e-5 at 40 tokens, in torch too
    for t in range(4, 40):
        logits = decoder.step_state(ids[:, t : t + 1], state).logits
        expected = [m(ids[:, : t + 1]).logits[:, -1] for m in (old, new)]
        seen.append(relative(logits, expected[1]) < bound)
        assert seen[-1] or relative(logits, expected[0]) < bound
    assert all(seen[STEPS_TO_COMPARE:]) and seen == sorted(seen)


def test_a_state_is_looked_up_anew_when_it_consists_of_other_tensors():
    """Read on by torch, grown, cloned, set back: the step goes by what the state is now."""
    model = make()
    decoder, state = decoder_of(model), model.new_state(2)
    ids = torch.randint(0, 300, (2, 75))
    whole = model(ids).logits
    for t in range(70):  # the latents' buffer grows at 65
        if t % 30 == 10:
            assert relative(model(ids[:, t : t + 1], state=state).logits[:, 0], whole[:, t]) < 10 * BOUND
            continue
        assert relative(decoder.step_state(ids[:, t : t + 1], state).logits, whole[:, t]) < 10 * BOUND
    branch = state.clone()
    for t in range(70, 75):
        for current in (state, branch):
            assert relative(decoder.step_state(ids[:, t : t + 1], current).logits, whole[:, t]) < 10 * BOUND


def test_what_the_kernel_cannot_read_is_refused_with_the_reason():
    assert "torch.float64" in str(NativeDecoder.of(make().double()))
    assert "torch.float16" in str(NativeDecoder.of(make().half()))
    model = make()
    model.compute_dtype = torch.bfloat16
    assert "computes in torch.bfloat16" in str(refusal(model))
    model = make()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(44, 300).T)
    assert "lm_head.weight: it is not contiguous" in str(refusal(model))
    with torch.device("meta"):
        assert "it is on meta" in str(refusal(K3(model.cfg)))

    class Other(type(make().model.layers[0].self_attn)):  # type: ignore[misc]
        pass

    model = make()
    model.model.layers[0].self_attn.__class__ = Other
    assert "layers.0 has a Other as its self_attn" in str(refusal(model))
    model.model.layers[0].self_attn = torch.nn.Identity()
    assert "layers.0 has a Identity as its self_attn" in str(refusal(model))
    with pytest.raises(ValueError, match="no native decoding"):
        NativeDecoder(model)


def test_what_a_native_call_would_pass_by_is_refused():
    """Adapters, parametrizations, hooks, and an attention of another kind than its layer's."""
    model = make()
    attention = model.model.layers[0].self_attn
    other = next(layer.self_attn for layer in model.model.layers if layer.kind == "mla")
    model.model.layers[0].self_attn = other
    assert "layers.0 has a GatedMLA as its self_attn" in str(refusal(model))
    model.model.layers[0].self_attn = attention
    handle = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert "layers.1 has forward hooks" in str(refusal(model))
    handle.remove()
    torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", torch.nn.Identity())
    assert "lm_head is a ParametrizedLinear" in str(refusal(model))
    torch.nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
    assert refusal(model) is None


def test_a_model_that_becomes_unreadable_is_refused_at_the_next_step():
    model = make()
    decoder = decoder_of(model)
    model.double()
    with pytest.raises(ValueError, match=r"no native decoding: .*float64"):
        decoder.step(torch.tensor([1]), [paged(decoder, 4, [0])])


def test_bad_input_moves_nothing():
    model = make()
    decoder, state = decoder_of(model), model.new_state(2)
    decoder.step_state(torch.tensor([[1, 2], [3, 4]]), state)
    before = [x.clone() for _, x in state.tensors()]
    for ids, message in (
        (torch.tensor([[1]]), r"ids has shape \(1, 1\); it must be \(2, tokens\)"),
        (torch.zeros(2, 0, dtype=torch.int64), r"at least one token"),
        (torch.tensor([[1], [300]]), "ids holds 300; ids must be from 0 to 299"),
        (torch.tensor([[-1], [0]]), "ids holds -1"),
        (torch.tensor([[1.0], [0.0]]), r"ids is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.step_state(ids, state)
    with pytest.raises(ValueError, match="the state has"):
        decoder.step_state(torch.tensor([[1]]), K3(replace(model.cfg, num_hidden_layers=4)).new_state(1))
    assert state.tokens == 2
    assert all(torch.equal(a, b) for (_, a), b in zip(state.tensors(), before))
    assert (
        relative(
            decoder.step_state(torch.tensor([[5], [6]]), state).logits,
            model(torch.tensor([[1, 2, 5], [3, 4, 6]])).logits[:, -1],
        )
        < BOUND
    )
