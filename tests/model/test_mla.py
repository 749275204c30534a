"""Gated MLA without positions: two forms of one attention, the latents it keeps, and the gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.kernels import native
from nanok3.model import mla as mla_module
from nanok3.model.cache import LatentCache
from nanok3.model.mla import GatedMLA, causal_attention, causal_attention_reference, latent_attention

VARIANTS = {
    "k3": {},
    "kimi_linear": {"q_lora_rank": None, "mla_use_output_gate": False},
    "no shared key part": {"qk_rope_head_dim": 0},
}


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def draw(tokens, batch=2, heads=3, K=6, V=5, keys=None, dtype=torch.float64):
    q = torch.randn(batch, tokens, heads, K, dtype=dtype)
    k = torch.randn(batch, keys or tokens, heads, K, dtype=dtype)
    return q, k, torch.randn(batch, keys or tokens, heads, V, dtype=dtype)


def layer(dtype=torch.float64, **changes):
    cfg = replace(K3Config.tiny(), **changes)
    module = GatedMLA(cfg).to(dtype)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return cfg, module


def new_cache(cfg, batch=2, dtype=torch.float64):
    return LatentCache(batch, cfg.latent_cache_size, dtype, torch.device("cpu"))


def inputs(cfg, tokens, batch=2):
    return torch.randn(batch, tokens, cfg.hidden_size, dtype=torch.float64)


# ------------------------------------------------------------------ the attention itself


@pytest.mark.parametrize("tokens", [1, 2, 17, 65])
def test_fast_equals_the_reference(tokens):
    leaves = [x.requires_grad_() for x in draw(tokens)]
    fast, slow = causal_attention(*leaves, 0.3), causal_attention_reference(*leaves, 0.3)
    close(fast, slow)
    upstream = torch.randn_like(fast)
    for a, b in zip(torch.autograd.grad(fast, leaves, upstream), torch.autograd.grad(slow, leaves, upstream)):
        close(a, b)


def test_the_reference_is_softmax_over_the_past():
    q, k, v = draw(5, keys=9)
    out = causal_attention_reference(q, k, v, 0.7)
    for t in range(5):
        scores = 0.7 * torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : 5 + t])
        close(out[:, t], torch.einsum("bhs,bshv->bhv", scores.softmax(-1), v[:, : 5 + t]))


@pytest.mark.parametrize("bounds", [[0, 30], [0, 1, 30], [0, 0, 11, 11, 12, 30, 30], [0, 29, 30]])
def test_packed_documents_equal_each_alone(bounds):
    q, k, v = draw(30, batch=1)
    packed = causal_attention(q, k, v, 0.4, torch.tensor(bounds))
    alone = [
        causal_attention_reference(q[:, a:b], k[:, a:b], v[:, a:b], 0.4) for a, b in zip(bounds, bounds[1:]) if b > a
    ]
    close(packed, torch.cat(alone, dim=1))


def test_a_nan_stays_in_its_document():
    q, k, v = draw(20, batch=1)
    cu = torch.tensor([0, 6, 13, 20])
    clean = causal_attention(q, k, v, 0.4, cu)
    for x in (q, k, v):
        x[:, 6:13] = torch.nan
    poisoned = causal_attention(q, k, v, 0.4, cu)
    assert torch.equal(poisoned[:, :6], clean[:, :6]) and torch.equal(poisoned[:, 13:], clean[:, 13:])
    assert poisoned[:, 6:13].isnan().all()


def test_the_result_stays_float32_under_bfloat16():
    """Report 2.1: rounding the output before the gate has a bias that training picks up."""
    q, k, v = (x.bfloat16() for x in draw(9, dtype=torch.float32))
    assert causal_attention(q, k, v, 0.4).dtype == torch.float32
    exact = causal_attention_reference(q.double(), k.double(), v.double(), 0.4)
    close(causal_attention(q, k, v, 0.4).double(), exact, 1e-5)


@pytest.mark.parametrize("block", [1, 3, 4, 256])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 12), (5, 12), (12, 12), (4, 9)])
def test_item_21_absorbed_equals_expanded(tokens, keys, block, monkeypatch):
    """Item 21: reading the latents directly gives the same numbers, in any block of queries."""
    monkeypatch.setattr(mla_module, "SCORES_AT_ONCE", block * 2 * 3 * keys)  # B, H of the tensors below
    heads, nope, rope, V, rank = 3, 4, 2, 5, 7
    q_nope, q_rope = torch.randn(2, tokens, heads, nope).double(), torch.randn(2, tokens, heads, rope).double()
    rows = torch.randn(2, keys, rank + rope).double()
    kv_b = torch.randn(heads, nope + V, rank).double()
    both = torch.einsum("bsl,hnl->bshn", rows[..., :rank], kv_b)
    k = torch.cat((both[..., :nope], rows[:, :, None, rank:].expand(-1, -1, heads, -1)), dim=-1)
    expanded = causal_attention_reference(torch.cat((q_nope, q_rope), dim=-1), k, both[..., nope:], 0.3)
    close(latent_attention(q_nope, q_rope, rows, kv_b, 0.3), expanded)


# ------------------------------------------------------------------ the layer


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_item_22_the_layer_is_architecture_3_3(variant):
    """Items 20 and 22: init and forward of each variant, written out; the shared key part is taken as it comes, the
    scale is that of the whole key, the gate reads the layer's input and acts before o_proj."""
    cfg, module = layer(**variant)
    H, nope, rope, V = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    x = inputs(cfg, 13)
    w = dict(module.named_parameters())

    def norm(y, name):
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    if cfg.q_lora_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm.weight") @ w["q_b_proj.weight"].T
    q = q.view(2, 13, H, nope + rope)
    c, kr = (x @ w["kv_a_proj_with_mqa.weight"].T).split((cfg.kv_lora_rank, rope), dim=-1)
    both = (norm(c, "kv_a_layernorm.weight") @ w["kv_b_proj.weight"].T).view(2, 13, H, nope + V)
    k = torch.cat((both[..., :nope], kr[:, :, None].expand(2, 13, H, rope)), dim=-1)
    o = causal_attention_reference(q, k, both[..., nope:], (nope + rope) ** -0.5).flatten(2)
    if cfg.mla_use_output_gate:
        o = o * torch.sigmoid(x @ w["g_proj.weight"].T)
    close(module(x), o @ w["o_proj.weight"].T, 1e-11)


def test_item_20_the_scale_of_k3_is_192():
    """Item 20: 192^-1/2, not 128^-1/2 and not 576^-1/2."""
    with torch.device("meta"):
        module = GatedMLA(K3Config.k3())
    assert module.scale == 192**-0.5
    assert module.kv_a_proj_with_mqa.weight.shape == (576, 7168)


def test_item_20_the_row_a_token_leaves_is_latent_normed_and_key_part_raw():
    """Item 20: kr is neither normalised nor rotated, at any position."""
    cfg, module = layer()
    x = inputs(cfg, 1).expand(2, 7, cfg.hidden_size)  # the same token at seven positions
    rows = module.latents(x)
    raw = x @ module.kv_a_proj_with_mqa.weight.T
    close(rows, rows[:, :1].expand_as(rows))
    close(rows[..., cfg.kv_lora_rank :], raw[..., cfg.kv_lora_rank :])
    close(rows[..., : cfg.kv_lora_rank], module.kv_a_layernorm(raw[..., : cfg.kv_lora_rank]))
    assert (raw[..., : cfg.kv_lora_rank] - rows[..., : cfg.kv_lora_rank]).abs().max() > 0.1


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_item_23_the_order_of_the_past_does_not_matter(variant):
    """Item 23: nothing is rotated, so the last token's output is the same for any order of the tokens before it."""
    cfg, module = layer(**variant)
    x = inputs(cfg, 12)
    order = torch.tensor([4, 9, 0, 7, 2, 10, 1, 8, 3, 6, 5, 11])
    close(module(x)[:, -1], module(x[:, order])[:, -1], 1e-11)
    assert (module(x)[:, -2] - module(x[:, order])[:, -2]).abs().max() > 1e-3


def test_the_norms_have_an_epsilon_of_their_own():
    _, module = layer(rms_norm_eps=1e-2)
    assert (module.q_a_layernorm.eps, module.kv_a_layernorm.eps) == (1e-6, 1e-6)
    assert layer(qk_norm_eps=1e-5)[1].kv_a_layernorm.eps == 1e-5


@pytest.mark.parametrize("cuts", [[], [1], [9], [4, 5], [1, 2, 3], [*range(1, 20)]])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_reading_on_from_a_cache_equals_one_pass(variant, cuts):
    cfg, module = layer(**variant)
    x, cache = inputs(cfg, 20), new_cache(cfg)
    with torch.no_grad():
        parts = [module(x[:, a:b], None, cache) for a, b in zip([0, *cuts], [*cuts, 20])]
        close(torch.cat(parts, dim=1), module(x), 1e-11)
        close(cache.latents, module.latents(x))
    assert cache.latents.shape == (2, 20, cfg.kv_lora_rank + cfg.qk_rope_head_dim), "never expanded"


def test_gradients_reach_through_the_cache():
    cfg, module = layer()
    x = inputs(cfg, 12)
    upstream = torch.randn(2, 12, cfg.hidden_size, dtype=torch.float64)

    def gradients(cuts):
        leaf, cache = x.clone().requires_grad_(), new_cache(cfg)
        parts = [module(leaf[:, a:b], None, cache) for a, b in zip([0, *cuts], [*cuts, 12])]
        loss = (torch.cat(parts, dim=1) * upstream).sum()
        return torch.autograd.grad(loss, [leaf, *module.parameters()])

    for a, b in zip(gradients([5, 6]), gradients([])):
        close(a, b, 1e-10)


def test_packed_documents_in_the_layer():
    cfg, module = layer()
    x = inputs(cfg, 17, batch=1)
    bounds = [0, 3, 4, 4, 17]
    alone = [module(x[:, a:b]) for a, b in zip(bounds, bounds[1:]) if b > a]
    close(module(x, torch.tensor(bounds)), torch.cat(alone, dim=1), 1e-11)


def test_a_later_token_changes_nothing_before_it():
    cfg, module = layer()
    x = inputs(cfg, 16)
    before = module(x)
    x[:, 9:] = 100.0
    close(module(x)[:, :9], before[:, :9])


def test_observers_see_the_queries_and_keys_of_the_softmax():
    cfg, module = layer()
    x = inputs(cfg, 6)
    q, k = module.queries_keys(x)
    _, v = module.keys_values(module.latents(x))
    o = causal_attention_reference(q, k, v, module.scale).flatten(2) * torch.sigmoid(module.g_proj(x))
    close(module(x), module.o_proj(o), 1e-11)
    assert q.shape == k.shape == (2, 6, cfg.num_attention_heads, cfg.qk_head_dim)


def test_bfloat16_in_bfloat16_out():
    cfg, module = layer(torch.float32)
    x = torch.randn(2, 9, cfg.hidden_size)
    low, cache = module(x.bfloat16()), new_cache(cfg, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    with torch.no_grad():
        parts = [module(x[:, a:b].bfloat16(), None, cache) for a, b in ((0, 4), (4, 9))]
    exact = module(x)
    for got in (low, torch.cat(parts, dim=1)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 0.02
    assert cache.latents.dtype == torch.bfloat16


def test_many_new_tokens_expand_the_old_rows_once_more(monkeypatch):
    """The form that multiplies less is taken, and it changes rounding only."""
    cfg, module = layer(torch.float32, kv_lora_rank=160)
    module.eval()
    x = inputs(cfg, 360, batch=1).float()
    with torch.no_grad():
        whole = module(x)
        absorbed, forms = module._absorbed, []
        monkeypatch.setattr(module, "_absorbed", lambda q, rows: forms.append(q.shape[1]) or absorbed(q, rows))
        cache = new_cache(cfg, 1, torch.float32)
        parts = [module(some, cache=cache) for some in x.split([20, 300, 39, 1], dim=1)]
    assert forms == ([39, 1] if native.available("attention") else [300, 39, 1])
    close(torch.cat(parts, dim=1), whole, 2e-4)
