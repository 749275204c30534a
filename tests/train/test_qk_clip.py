from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.mla import GatedMLA
from nanok3.train.qk_clip import QKClip, clip_factors, clip_weights, max_logits, max_logits_reference

# ---------------------------------------------------------------------- the maximum


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("tile", [1, 5, 16, 256])
def test_equals_the_reference(tokens, tile):
    q, k = torch.randn(2, 3, tokens, 4, 6, dtype=torch.float64).transpose(0, 1).unbind(1)
    got = max_logits(q, k, 0.3, tile=tile)
    torch.testing.assert_close(got, max_logits_reference(q, k, 0.3), rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", [[17], [1, 16], [3, 0, 14], [5, 5, 5, 2], [1] * 17])
@pytest.mark.parametrize("tile", [1, 4, 256])
def test_documents_do_not_see_each_other(lengths, tile):
    q, k = torch.randn(2, 1, 17, 3, 5, dtype=torch.float64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    got = max_logits(q, k, 0.5, cu, tile=tile)
    alone = [max_logits(a, b, 0.5) for a, b in zip(q.split(lengths, 1), k.split(lengths, 1), strict=True)]
    torch.testing.assert_close(got, torch.stack(alone).amax(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(got, max_logits_reference(q, k, 0.5, cu), rtol=1e-12, atol=0)


def test_future_keys_and_other_documents_may_hold_anything():
    q, k = torch.ones(1, 6, 2, 3), torch.ones(1, 6, 2, 3)
    k[:, 2] = 1000.0
    q[:, 2:3] = 0.0  # token 2 sees itself
    cu = torch.tensor([0, 3, 6])
    assert max_logits(q, k, 1.0, cu).tolist() == [3.0, 3.0]
    assert max_logits(q, k, 1.0).tolist() == [3000.0, 3000.0]


def test_negative_and_bfloat16_logits():
    q, k = -torch.ones(1, 5, 1, 4).bfloat16(), torch.ones(1, 5, 1, 4).bfloat16()
    got = max_logits(q, k, 0.5)
    assert got.dtype == torch.float32 and got.item() == -2.0


def test_memory_is_tiles_only():
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if torch.is_tensor(out) else 0)
            return out

    q, k = torch.randn(2, 1, 300, 2, 4)
    with Sizes():
        max_logits(q, k, 1.0, tile=32)
    assert largest <= max(2 * 32 * 32, q.numel())


# ---------------------------------------------------------------------- the scaling


def test_factors():
    got = clip_factors(torch.tensor([50.0, 100.0, 200.0, -3.0, -torch.inf, torch.inf, torch.nan]), 100.0)
    assert got.tolist() == [1, 1, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_both_parts_of_every_logit_are_scaled_by_g(alpha):
    H, nope, rope, v, L, C = 3, 5, 2, 4, 7, 6
    wq, wkv = torch.randn(H * (nope + rope), C).double(), torch.randn(H * (nope + v), L).double()
    g = torch.tensor([1.0, 0.5, 0.01]).double()
    x, latent, shared = torch.randn(9, C).double(), torch.randn(9, L).double(), torch.randn(9, rope).double()

    def logits() -> tuple[Tensor, Tensor, Tensor]:
        q = (x @ wq.T).view(9, H, nope + rope)
        kv = (latent @ wkv.T).view(9, H, nope + v)
        own = torch.einsum("thk,shk->hts", q[..., :nope], kv[..., :nope])
        return own, torch.einsum("thk,sk->hts", q[..., nope:], shared), kv[..., nope:]

    own, common, values = logits()
    clip_weights(wq, wkv, g, nope, alpha)
    new_own, new_common, new_values = logits()
    torch.testing.assert_close(new_own, own * g[:, None, None])
    torch.testing.assert_close(new_common, common * g[:, None, None])
    torch.testing.assert_close(new_values, values, rtol=0, atol=0)


# ---------------------------------------------------------------------- in K3


def k3(hot: float = 30.0, **changes) -> K3:
    """Three layers, the last one MLA, with logits far above the threshold in heads 1 and 2."""
    torch.manual_seed(0)
    cfg = K3Config.tiny().at_depth(3, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
    cfg = replace(cfg, num_attention_heads=4, num_key_value_heads=4, **changes)
    model = K3(cfg)
    layer = mla(model)
    q_proj = layer.q_b_proj if hasattr(layer, "q_b_proj") else layer.q_proj
    with torch.no_grad():
        for p in (q_proj.weight, layer.kv_b_proj.weight):
            p.normal_(std=p.shape[1] ** -0.5)
            p.view(4, -1, p.shape[1])[1:3] *= hot
    return model


def mla(model: K3) -> GatedMLA:
    (layer,) = (m for m in model.modules() if isinstance(m, GatedMLA))
    return layer


IDS = torch.arange(62).view(2, 31) * 7 % 1000
KINDS = pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["q_lora", "no q_lora"])


def watched(model: K3, ids: Tensor = IDS, **options) -> tuple[QKClip, Tensor]:
    clip = QKClip(model, **options)
    with clip.observe():
        model.hidden_states(ids)
    (largest,) = clip.step().values()
    return clip, largest


@KINDS
def test_the_statistic_is_the_models_own_maximum(changes):
    model = k3(**changes)
    layer, inputs = mla(model), []
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    _, largest = watched(model, clip=False)
    q, k = layer.queries_keys(inputs[0])
    torch.testing.assert_close(largest, max_logits_reference(q, k, layer.scale), rtol=1e-5, atol=0)


@KINDS
def test_after_clipping_no_logit_is_above_the_threshold(changes):
    model = k3(**changes)
    _, before = watched(model)
    assert (before > 100).tolist() == [False, True, True, False]
    _, after = watched(model, clip=False)
    torch.testing.assert_close(after[1:3], torch.full((2,), 100.0), rtol=1e-5, atol=0)
    assert torch.equal(after[[0, 3]], before[[0, 3]])


def test_only_the_heads_above_it_and_only_their_query_and_key_rows_change():
    model = k3()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watched(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    prefix = "model.layers.2.self_attn."
    assert changed == {prefix + "q_b_proj.weight", prefix + "kv_b_proj.weight"}
    for name, own in (("q_b_proj", 20), ("kv_b_proj", 12)):
        new, old = (
            t.view(4, -1, t.shape[1]) for t in (getattr(mla(model), name).weight, before[f"{prefix}{name}.weight"])
        )
        assert torch.equal(new[[0, 3]], old[[0, 3]])
        assert (new[1:3, :own] != old[1:3, :own]).all()
        assert torch.equal(new[1:3, own:], old[1:3, own:])  # the value rows


def test_below_the_threshold_nothing_changes():
    model = k3(hot=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, largest = watched(model)
    assert largest.max() < 100
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_log_only_reports_and_forgets():
    model = k3()
    before = mla(model).kv_b_proj.weight.detach().clone()
    clip, largest = watched(model, clip=False)
    assert largest.max() > 100
    assert torch.equal(mla(model).kv_b_proj.weight, before)
    assert clip.step() == {}
    with clip.observe():
        model.hidden_states(IDS[:1, :1])
    (small,) = clip.step().values()
    assert (small < largest).any()


def test_microbatches_give_the_maximum_over_all():
    _, whole = watched(k3(), clip=False)
    model = k3()
    clip = QKClip(model, clip=False)
    for row in IDS:
        with clip.observe():
            model.hidden_states(row[None])
    torch.testing.assert_close(next(iter(clip.step().values())), whole, rtol=1e-5, atol=0)


def test_packed_documents_are_watched_one_by_one():
    _, want = watched(k3(), clip=False)
    model = k3()
    clip = QKClip(model, clip=False)
    with clip.observe():
        model.hidden_states(IDS.view(1, -1), cu_seqlens=torch.tensor([0, 31, 62]))
    torch.testing.assert_close(next(iter(clip.step().values())), want, rtol=1e-4, atol=0)


def test_evaluation_other_steps_and_forwards_outside_do_not_count():
    model = k3()
    clip = QKClip(model, every=3)
    seen = []
    for _ in range(7):
        model.hidden_states(IDS)
        with clip.observe():
            model.eval().hidden_states(IDS)
            model.train()
            assert not clip._largest
            model.hidden_states(IDS)
        seen.append(len(clip.step()))
    assert seen == [1, 0, 0, 1, 0, 0, 1]
    assert not mla(model)._forward_pre_hooks


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_not_watched_again(reentrant, monkeypatch):
    model, calls = k3(), []
    monkeypatch.setattr("nanok3.train.qk_clip.max_logits", lambda *a: calls.append(1) or max_logits(*a))
    clip = QKClip(model)
    x = torch.randn(1, 9, model.cfg.hidden_size, requires_grad=True)
    with clip.observe():
        checkpoint(mla(model), x, use_reentrant=reentrant).square().sum().backward()
    assert len(calls) == 1


def test_all_reduce_takes_the_maximum_over_ranks():
    models = [k3(), k3()]
    clips = [QKClip(model) for model in models]
    for model, clip, row in zip(models, clips, IDS, strict=True):
        with clip.observe():
            model.hidden_states(row[None])
    together = torch.maximum(*(next(iter(clip._largest.values())) for clip in clips))
    for clip in clips:
        (largest,) = clip.step(lambda t: t.copy_(together)).values()
        assert torch.equal(largest, together)
    assert torch.equal(mla(models[0]).q_b_proj.weight, mla(models[1]).q_b_proj.weight)


def test_bfloat16_forward_clips_the_float32_master():
    model = k3()
    model.compute_dtype = torch.bfloat16
    watched(model)
    assert mla(model).q_b_proj.weight.dtype == torch.float32
    _, after = watched(model, clip=False)
    assert after.max() < 103  # bfloat16 rounds the logits themselves by up to 0.4 %, and the inputs as well


def test_resumed_in_the_middle_of_a_step(tmp_path):
    model = k3()
    clip = QKClip(model, every=2)
    with clip.observe():
        model.hidden_states(IDS[:1])
    torch.save(clip.state_dict(), tmp_path / "state.pt")
    resumed = QKClip(model, every=2)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    (got,) = resumed.step().values()
    (want,) = clip.step().values()
    assert torch.equal(got, want)
    with resumed.observe():
        model.hidden_states(IDS)
    assert resumed.step() == {}  # the second step is not watched
    with pytest.raises(ValueError, match="other"):
        resumed.load_state_dict({"steps": 0, "largest": {"other": torch.zeros(4)}})


def test_models_without_mla_and_without_config():
    assert QKClip(nn.Linear(2, 2)).step() == {}
    with pytest.raises(ValueError, match=r"model\.cfg"):
        QKClip(nn.ModuleList([mla(k3())]))


@pytest.mark.parametrize(("option", "value"), [("threshold", 0.0), ("alpha", 1.5), ("every", 0)])
def test_wrong_options_are_named(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        QKClip(k3(), **{option: value})
