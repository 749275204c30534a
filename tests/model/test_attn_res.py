"""Attention residuals: the mix, its backward, and the protocol by which sources come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.attn_res import DepthSources, mix, mix_reference
from nanok3.model.decoder import K3


def draw(sources, tokens=5, width=7, dtype=torch.float64):
    values = [torch.randn(2, tokens, width, dtype=dtype) for _ in range(sources)]
    return values, torch.randn(width, dtype=dtype), torch.randn(1, width, dtype=dtype)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ the mix


@pytest.mark.parametrize("sources", [1, 2, 3, 9])
def test_it_is_the_formula(sources):
    values, norm, query = draw(sources)
    expected = torch.zeros_like(values[0])
    scores = torch.stack(
        [((v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt()) * norm * query[0]).sum(-1) for v in values]
    )
    for weight, value in zip(scores.softmax(0), values):
        expected += weight[..., None] * value
    close(mix(values, norm, query, 1e-5), expected)
    close(mix_reference(values, norm, query, 1e-5), expected)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("sources", [1, 2, 5])
def test_fast_equals_the_reference_with_gradients(sources, eps):
    values, norm, query = draw(sources)
    leaves = [x.requires_grad_() for x in (norm, query, *values)]
    upstream = torch.randn_like(values[0])
    grads = [torch.autograd.grad(form(values, norm, query, eps), leaves, upstream) for form in (mix, mix_reference)]
    for a, b in zip(*grads):
        close(a, b)


def test_gradcheck():
    values, norm, query = draw(3, tokens=2, width=4)
    leaves = [x.requires_grad_() for x in (norm, query, *values)]
    assert torch.autograd.gradcheck(lambda n, q, *v: mix(v, n, q, 1e-5), leaves)


def test_item_24_values_are_taken_as_they_are():
    """Item 24: un-normalised values in the weighted sum; a zero query gives their plain mean."""
    values, norm, query = draw(4)
    scaled = [v * 10.0**i for i, v in enumerate(values)]
    close(mix(scaled, norm, torch.zeros_like(query), 1e-5), torch.stack(scaled).mean(0))


def test_item_24_both_weights_multiply():
    """Item 24: the score meets norm weight times pseudo-query; neither alone will do."""
    values, norm, query = draw(3)
    right = mix(values, norm, query, 1e-5)
    close(right, mix(values, norm * query[0], torch.ones_like(query), 1e-5))
    for wrong in (mix(values, torch.ones_like(norm), query, 1e-5), mix(values, norm, torch.ones_like(query), 1e-5)):
        assert (right - wrong).abs().max() > 0.1


def test_scores_do_not_depend_on_a_sources_size_but_the_result_does():
    values, norm, query = draw(3)
    larger = [values[0] * 8, *values[1:]]
    difference = mix(larger, norm, query, 1e-12) - mix(values, norm, query, 1e-12)
    weight = torch.stack([v @ (norm * query[0]) / v.square().mean(-1).sqrt() for v in values]).softmax(0)[0]
    close(difference, 7 * weight[..., None] * values[0], 1e-9)


def test_the_order_of_the_sources_does_not_matter():
    values, norm, query = draw(5)
    close(mix(values, norm, query, 1e-5), mix([values[i] for i in (3, 0, 4, 1, 2)], norm, query, 1e-5))


def test_one_source_is_itself():
    values, norm, query = draw(1)
    close(mix(values, norm, query, 1e-5), values[0])


def test_item_24_the_scores_are_float32_and_the_result_is_rounded_once():
    """Item 24 and D6: float32 product of the weights, float32 scores, the mix rounded once to the model's dtype."""
    values, norm, query = draw(4, dtype=torch.float32)
    low = [v.bfloat16() for v in values]
    out = mix(low, norm.bfloat16(), query.bfloat16(), 1e-5)
    exact = mix_reference([v.double() for v in low], norm.bfloat16().double(), query.bfloat16().double(), 1e-5)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_a_nan_token_leaves_the_others_alone():
    values, norm, query = draw(3)
    clean = mix(values, norm, query, 1e-5)
    values[1][0, 2] = torch.nan
    poisoned = mix(values, norm, query, 1e-5)
    assert poisoned[0, 2].isnan().all()
    poisoned[0, 2] = clean[0, 2]
    assert torch.equal(poisoned, clean)


def test_very_large_and_very_small_sources_stay_finite():
    values, norm, query = draw(3, dtype=torch.float32)
    extreme = [(values[0] * 1e15).requires_grad_(), (values[1] * 1e-15).requires_grad_(), torch.zeros_like(values[2])]
    out = mix(extreme, norm, query, 1e-5)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), extreme[:2]))


@pytest.mark.slow
def test_item_26_offsets_past_32_bits():
    """Item 26: tokens * sources * width beyond 2^31; the last token comes out as it does alone."""
    value = torch.randn(1, 2**14, 2**12)  # 2^26 numbers, read as 33 sources
    norm, query = torch.randn(2**12), torch.randn(1, 2**12) * 0.01
    out = mix([value] * 32 + [value.flip(1)], norm, query, 1e-5)
    last = value[:, -1:]
    alone = mix([last] * 32 + [value[:, :1]], norm, query, 1e-5)
    close(out[:, -1:], alone, 1e-5)


# ------------------------------------------------------------------ the protocol


def test_sources_come_and_go():
    e, a, f = (torch.randn(1, 2, 3) for _ in range(3))
    depth = DepthSources(e)
    assert depth.sources() == [e] and depth.bank == []
    depth.close()
    assert depth.sources() == [e] and depth.bank == [e] and depth.running is None
    depth.add(a)
    assert depth.running is a, "the running sum restarts from the attention output alone"
    depth.add(f)
    assert torch.equal(depth.running, a + f) and depth.sources()[0] is e and len(depth.sources()) == 2
    depth.close()
    assert torch.equal(depth.bank[1], a + f) and len(depth.sources()) == 2


class Watch:
    """Notes how many sources every read of a forward pass sees."""

    def __init__(self, monkeypatch):
        self.counts = []
        monkeypatch.setattr("nanok3.model.decoder.mix", self.mix)

    def mix(self, sources, norm, query, eps):
        self.counts.append(len(sources))
        return mix(sources, norm, query, eps)


def small_model(depth, block, **changes):
    cfg = replace(K3Config.tiny().at_depth(depth, num_experts=4, num_experts_per_token=2), attn_res_block_size=block)
    model = K3(replace(cfg, **changes)).double()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


@pytest.mark.parametrize("depth", [1, 12, 13, 24, 25])
def test_item_25_depths_that_are_no_multiple_of_the_block(depth, monkeypatch, unchecked):
    """Item 25: layer l sees ceil(l / 12) banked sources before its attention and floor(l / 12) + 1 before its feed-
    forward, the last read all of them and the running sum; layer 0 has no mix before its attention."""
    cfg = K3Config.tiny(vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=2, media_placeholder_token_id=3)
    full = tuple(l for l in range(1, depth + 1) if l % 4 == 0 or l == depth)
    kda = tuple(l for l in range(1, depth + 1) if l not in full)
    cfg = replace(
        cfg,
        num_hidden_layers=depth,
        attn_res_block_size=12,
        full_attn_layers=full,
        kda_layers=kda,
        hidden_size=32,
        intermediate_size=32,
        num_experts=2,
        num_experts_per_token=1,
        kda_num_heads=1,
        kda_head_dim=8,
    )
    model = K3(cfg).double()
    watch = Watch(monkeypatch)
    out = model(torch.tensor([[5, 6, 7]]), return_hidden=True)
    expected = []
    for l in range(depth):
        if l:
            expected.append(-(-l // 12) + 1)
        expected.append(l // 12 + 2)
    blocks = -(-depth // 12)
    assert watch.counts == [*expected, blocks + 1]
    assert len(out.hidden.bank) == blocks and torch.isfinite(out.logits).all()


@pytest.mark.parametrize(("depth", "block"), [(5, 2), (6, 3), (7, 3)])
def test_item_24_what_the_bank_holds(depth, block):
    """Item 24: bank[0] is the embedding alone, bank[k] the sum of the outputs of block k-1 without the embedding (so it
    holds no mix, and the running sum restarts from the attention output)."""
    model = small_model(depth, block)
    outputs, ids = [], torch.tensor([[3, 1, 4, 1, 5]])
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.feed_forward):
            part.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    hidden = model(ids, return_hidden=True).hidden
    assert torch.equal(hidden.bank[0], model.model.embed_tokens(ids))
    for k in range(1, len(hidden.bank)):
        own = outputs[2 * block * (k - 1) : 2 * block * k]
        close(hidden.bank[k], torch.stack(own).sum(0))
    start = (depth - 1) // block * block
    close(hidden.residual[-1], torch.stack(outputs[2 * start :]).sum(0))
    assert len(hidden.bank) == -(-depth // block) and len(hidden.residual) == depth


def test_the_first_attention_reads_the_embedding_as_it_is():
    model = small_model(5, 2)
    seen = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    ids = torch.tensor([[3, 1, 4]])
    before = model(ids).logits
    assert torch.equal(seen[0], model.model.embed_tokens(ids))
    torch.nn.init.normal_(model.model.layers[0].self_attention_res_proj.weight)
    assert torch.equal(model(ids).logits, before), "layer 0 has the tensors and never reads them"


def test_the_release_mixes_nine_sources_at_the_end(monkeypatch, unchecked):
    """93 = 7 * 12 + 9: eight banked sources and the running sum."""
    cfg = replace(
        K3Config.tiny(), num_hidden_layers=93, attn_res_block_size=12, hidden_size=16, intermediate_size=8,
        kda_layers=K3Config.k3().kda_layers, full_attn_layers=K3Config.k3().full_attn_layers, kda_num_heads=1,
        kda_head_dim=4, first_k_dense_replace=93, q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=4,
        qk_rope_head_dim=2, v_head_dim=4, num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    watch = Watch(monkeypatch)
    hidden = K3(cfg)(torch.tensor([[1, 2]]), return_hidden=True).hidden
    assert len(hidden.bank) == 8 and watch.counts[-1] == 9
    # reads of layer l (before attention, before feed-forward) are number 2l - 1 and 2l
    assert [watch.counts[2 * 84 - 1], watch.counts[2 * 84]] == [8, 9]


def test_full_attention_residuals_make_every_output_a_source(monkeypatch):
    model = small_model(3, 1, attn_res_full=True)
    watch = Watch(monkeypatch)
    outputs, ids = [], torch.tensor([[3, 1, 4]])
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.feed_forward):
            part.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    hidden = model(ids, return_hidden=True).hidden
    assert watch.counts == [2, 3, 4, 5, 6, 7]
    for banked, source in zip(hidden.bank, [model.model.embed_tokens(ids), *outputs]):
        assert torch.equal(banked, source)


def test_item_27_nothing_of_it_survives_a_call():
    """Item 27: memory over depth lives for one forward call; reading token by token equals one pass."""
    model = small_model(6, 2)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        whole, state = model(ids).logits, model.new_state(1)
        parts = [model(ids[:, t : t + 1], state=state).logits for t in range(8)]
    close(torch.cat(parts, dim=1), whole, 1e-10)
    assert not any("bank" in name or "residual" in name for name, _ in state.tensors())
