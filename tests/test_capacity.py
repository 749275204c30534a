"""What a plan says is needed, against bytes that really exist; and the searches for what fits, against their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from storages import Storages

from nanok3 import capacity, ledger
from nanok3.capacity import Plan
from nanok3.config import K3Config, with_expert_format
from nanok3.model.decoder import K3
from nanok3.model.weights import load, save
from nanok3.train.loss import cross_entropy
from nanok3.train.muon import K3Optimizer

GIB = 2**30
K3_CONFIG = K3Config.k3()


def serving(cfg: K3Config, precision: str = "stored", **changes) -> Plan:
    plan = Plan(cfg, False, batch=1, context=4096, precision=capacity.precision_of(cfg, precision))
    return replace(plan, **changes)


def training(cfg: K3Config, precision: str = "bf16", **changes) -> Plan:
    plan = Plan(cfg, True, batch=1, context=512, precision=capacity.precision_of(cfg, precision, train=True))
    return replace(plan, **changes)


def line(plan: Plan, *words: str) -> capacity.Line:
    (found,) = (line for line in capacity.need(plan).lines if all(word in line.name for word in words))
    return found


def held(model: torch.nn.Module) -> int:
    return sum(value.nbytes for value in model.state_dict().values())


# ---------------------------------------------------------------------- bytes that exist


@pytest.mark.parametrize("name", ["a_k3_13l", "d_kimi_linear_6l"])
def test_weights_of_a_loaded_model(golden, name):
    plan = serving(golden(name).config)
    assert sum(capacity.model_bytes(plan)) == held(golden(name).load(dtype=None))


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_of_a_converted_model(golden, precision, dtype):
    plan = serving(golden("a_k3_13l").config, precision)
    assert sum(capacity.model_bytes(plan)) == held(golden("a_k3_13l").load(dtype=dtype))


def test_weights_of_a_packed_model(tmp_path):
    model = K3(K3Config.tiny())
    save(model, tmp_path, experts="mxfp4")
    assert sum(capacity.model_bytes(serving(model.cfg, "mxfp4"))) == held(load(tmp_path))


def test_states_of_a_served_batch():
    cfg, context, batch = K3Config.tiny(), 9, 3
    model = K3(cfg)
    model.compute_dtype = torch.bfloat16
    state = model.new_state(batch)
    with torch.no_grad():
        model(torch.randint(cfg.vocab_size, (batch, context)), state=state)
    plan = serving(cfg, "bf16", batch=batch, context=context)
    assert line(plan, "KDA states").total + line(plan, "MLA latents").total == state.nbytes


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_workspace_holds_the_first_piece_of_a_prompt(unchecked, precision, dtype):
    cfg = K3Config.tiny()
    model = K3(cfg)
    model.compute_dtype = dtype

    def most(tokens: int) -> int:
        """Bytes alive at once while a prompt is read, what its tokens leave behind not counted."""
        state = model.new_state(1)
        with torch.no_grad(), Storages() as made:
            model.hidden_states(torch.randint(cfg.vocab_size, (1, tokens)), state=state)
        return made.most - tokens * ledger.latent_bytes(cfg, dtype.itemsize)

    short, long = (line(serving(cfg, precision, context=n), "workspace").device for n in (320, 640))
    assert 0.5 * (long - short) < most(640) - most(320) <= long - short


def test_masters_gradients_and_moments():
    cfg = K3Config.tiny()
    model = K3(cfg)
    optimizer = K3Optimizer(model, lr=1e-3)
    ids = torch.randint(cfg.vocab_size, (1, 256))
    loss, _ = cross_entropy(model.hidden_states(ids), model.lm_head.weight, ids)
    loss.backward()
    optimizer.step()
    plan = training(cfg, optimizer="muon")
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    unread = (
        sum(4 * w.parameters for w in ledger.weights(cfg) if "self_attention_res" in w.name) // cfg.num_hidden_layers
    )
    assert line(plan, "routed", "masters").total + line(plan, "other", "masters").total == held(model)
    # Layer 0 reads no mix, so its two vectors get no gradient and no moments.
    assert line(plan, "routed", "gradients").total + line(plan, "other", "gradients").total == gradients + unread
    moments = sum(v.nbytes for v in _tensors(optimizer.state_dict()) if v.numel() > 1)
    assert line(plan, "routed", "moments").total + line(plan, "other", "moments").total == pytest.approx(
        moments, rel=0.01
    )


def _tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for branch in branches for tensor in _tensors(branch)]


def test_adamw_keeps_two_moments():
    plan = training(K3Config.tiny(), optimizer="adamw")
    for part in ("routed", "other"):
        assert line(plan, part, "moments").total == 2 * line(plan, part, "gradients").total


def test_float32_training_makes_no_copies():
    names = [line.name for line in capacity.need(training(K3Config.tiny(), "fp32")).lines]
    assert not any("copies" in name for name in names)


# ---------------------------------------------------------------------- many devices


def test_split_weights_add_up():
    one = serving(K3_CONFIG)
    sixteen = replace(one, devices=16, split=16)
    for name in ("routed experts", "other weights"):
        assert line(sixteen, name).total == line(one, name).total
        assert line(sixteen, name).device == -(-line(one, name).total // 16)


def test_replicated_weights_are_on_every_device():
    one = serving(K3_CONFIG)
    plan = replace(one, devices=16, split=1)
    assert line(plan, "other weights").device == line(one, "other weights").total
    assert line(plan, "other weights").total == 16 * line(one, "other weights").total
    assert line(plan, "routed experts").total == line(one, "routed experts").total


def test_experts_are_dealt_out_whole():
    cfg = K3Config.tiny()  # 8 experts
    whole = line(serving(cfg), "routed experts").total
    for devices, most in ((3, 3), (5, 2), (8, 1), (12, 1)):
        assert line(serving(cfg, devices=devices), "routed experts").device == whole * most // 8


def test_sequences_are_dealt_to_groups():
    cfg = K3_CONFIG
    kda, latents = ledger.kda_state_bytes(cfg), 4096 * ledger.latent_bytes(cfg)
    plan = serving(cfg, devices=8, split=2, batch=9)  # 4 groups of 2, three sequences in the fullest
    assert line(plan, "KDA states").device == -(-3 * kda // 2)
    assert line(plan, "KDA states").total == 9 * kda
    assert line(plan, "MLA latents").device == 3 * latents
    assert line(plan, "MLA latents").total == 9 * 2 * latents


def test_training_rows_are_dealt_to_devices():
    one = training(K3Config.tiny())
    assert line(replace(one, devices=4, batch=9), "activations").device == 3 * line(one, "activations").device
    assert line(replace(one, devices=4, batch=2), "activations").device == line(one, "activations").device
    assert line(replace(one, devices=4, batch=2), "activations").total == 2 * line(one, "activations").device


def test_the_chosen_split_leaves_most_room():
    plan = serving(K3_CONFIG, devices=16, batch=16, context=2**20)
    answers = [capacity.need(replace(plan, split=split)) for split in capacity.allowed_splits(plan)]
    assert capacity.need(plan) in answers
    assert capacity.need(plan).device == min(answer.device for answer in answers)
    assert 1 < capacity.need(plan).split < 16  # copies of the weights against copies of the latents


def test_splits_divide_devices_and_heads():
    assert capacity.allowed_splits(serving(K3_CONFIG, devices=10)) == [1, 2]
    assert capacity.allowed_splits(training(K3_CONFIG, devices=10)) == [1, 2, 5, 10]


# ---------------------------------------------------------------------- what fits


def near(works, n: int) -> bool:
    return works(n) and not works(n + 1)


def test_limits_are_tight():
    plan, room = serving(K3_CONFIG, devices=16, context=2**19, batch=4), 140.0 * GIB
    limits = capacity.limits(plan, room)
    assert near(lambda n: capacity.fits(replace(plan, context=n), room), limits["context"])
    assert near(lambda n: capacity.fits(replace(plan, batch=n), room), limits["batch"])
    fewer = [n for n in capacity.DEVICE_COUNTS if n < limits["devices"]]
    assert capacity.fits(replace(plan, devices=limits["devices"]), room)
    assert not any(capacity.fits(replace(plan, devices=n), room) for n in fewer)


def test_no_context_above_the_config():
    plan = serving(K3Config.tiny(), context=16)
    assert capacity.largest_context(plan, 10.0 * GIB) == plan.cfg.max_position_embeddings


def test_limits_where_nothing_helps():
    assert capacity.limits(serving(K3_CONFIG), 1.0 * GIB) == {"context": 0, "batch": 0, "devices": None}


def test_a_given_split_limits_the_device_counts():
    plan = serving(K3_CONFIG, devices=12, split=12)
    count = capacity.fewest_devices(plan, 172.8 * GIB)
    assert count is not None and count % 12 == 0


def test_alternatives_fit():
    plan, room = serving(K3_CONFIG, "bf16", devices=16), 172.8 * GIB
    assert not capacity.fits(plan, room)
    found = capacity.alternatives(plan, room)
    packed = replace(plan, precision=capacity.precision_of(K3_CONFIG, "mxfp4"))
    assert found[0] == {"settings": "--precision mxfp4", "device": capacity.need(packed).device}
    smaller = found[-1]
    assert near(lambda n: capacity.fits(replace(plan, cfg=K3_CONFIG.at_depth(n)), room), smaller["depth"])
    assert smaller["parameters"] == ledger.parameters(K3_CONFIG.at_depth(smaller["depth"]))


def test_alternatives_together_where_none_is_enough():
    plan = training(K3Config.base(), "fp32", batch=64, context=4096, optimizer="adamw")
    lean = capacity.need(capacity.leanest(plan)).device
    alone = [
        capacity.need(other).device
        for other in (
            replace(plan, precision=capacity.precision_of(plan.cfg, "bf16", train=True)),
            replace(plan, optimizer="muon"),
            replace(plan, recompute=True),
        )
    ]
    assert lean < min(alone)
    together = capacity.alternatives(plan, (lean + min(alone)) / 2)[0]
    assert together["settings"] == "--precision bf16 --optimizer muon --recompute"
    assert together["device"] == lean
    assert together["limits"]["batch"] >= plan.batch


def test_the_leanest_plan_has_nothing_cheaper():
    plan = capacity.leanest(training(K3Config.tiny(), "fp32", optimizer="adamw"))
    assert [set(found) for found in capacity.alternatives(plan, 1.0)] == []


def test_mxfp4_is_offered_only_where_rows_divide():
    cfg = K3Config.tiny(moe_intermediate_size=40)
    with pytest.raises(ValueError, match="widths 64 and 40 are not both multiples of 32; allowed: stored, bf16, fp32"):
        capacity.precision_of(cfg, "mxfp4")
    assert capacity.leanest(serving(cfg, "fp32")).precision.name == "bf16"


def test_stored_precision_follows_the_config():
    packed = with_expert_format(K3Config.tiny(), "mxfp4")
    assert capacity.precision_of(packed, "stored").packed
    assert not capacity.precision_of(packed, "stored", train=True).packed
    assert not capacity.precision_of(packed, "mxfp4", train=True).packed
    assert capacity.precision_of(replace(packed, dtype="float32"), "stored", train=True).plain == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 2**20), st.sampled_from([1, 2, 3, 8, 16, 96]), st.booleans())
def test_more_work_never_needs_less(batch, context, devices, train):
    plan = (training if train else serving)(K3_CONFIG, batch=batch, context=context, devices=devices)
    now = capacity.need(plan).device
    assert capacity.need(replace(plan, batch=batch + 1)).device >= now
    assert capacity.need(replace(plan, context=context + 1)).device >= now


def test_a_decode_step_reads_what_it_uses():
    cfg = K3_CONFIG
    one = serving(cfg, devices=1, context=1)
    routed, others = capacity.model_bytes(one)
    rest = 2 * ledger.kda_state_bytes(cfg) + ledger.latent_bytes(cfg)
    assert capacity.read_bytes(one, 1) == pytest.approx(routed * 16 / 896 + others + rest)
    many = capacity.read_bytes(replace(one, batch=10_000), 1) - 10_000 * rest
    assert many == pytest.approx(routed + others)  # a large batch meets every expert
