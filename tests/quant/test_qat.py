"""Quantization-aware training: what the forward sees, where gradients go, and that serving sees the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nanok3
from nanok3.baselines.frame import BaselineConfig
from nanok3.baselines.modern_gpt import ModernGPT
from nanok3.config import K3Config
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.latent_moe import PackedExperts, Routing, routed_reference, routed_sorted
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.model.native_decode import NativeDecoder
from nanok3.quant.mxfp import MXFP4, MXFP8, SCALE_RULES, project
from nanok3.quant.pack import pack_experts
from nanok3.quant.qat import MATRICES, MODES, QAT, moe_layers, mxfp8_inputs, to_mxfp8
from nanok3.stages.generate import ModelFlags
from nanok3.train.settings import TrainSettings

BASELINE = BaselineConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
CONFIG = K3Config.tiny(num_experts=5, num_experts_per_token=2).with_vocabulary(600)


@pytest.fixture
def model() -> K3:
    """Random weights that keep a signal's size; experts of very different magnitudes."""
    torch.manual_seed(0)
    made = K3(CONFIG)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if value.ndim > 1:
                value.normal_(std=1 if "embed_tokens" in name else value.shape[-1] ** -0.5)
            if ".experts." in name:
                value.mul_(torch.logspace(-0.5, 0.5, len(value))[:, None, None])
    return made


def masters(model: K3) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".experts." in n}


def ids(length: int = 40) -> Tensor:
    return torch.randint(0, 500, (2, length), generator=torch.Generator().manual_seed(1))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_the_forward_sees_projections_and_the_optimizer_masters(model: K3, rule: str) -> None:
    before, names, qat = masters(model), list(model.state_dict()), QAT(model, "w4a16", rule)
    with qat.projected():
        for name, p in model.named_parameters():
            if ".experts." in name:
                assert torch.equal(p, dequantize_mxfp4(*quantize_mxfp4(before[name], rule), torch.float32))
                assert not torch.equal(p, before[name])
    assert all(torch.equal(p, before[n]) for n, p in masters(model).items())
    assert list(model.state_dict()) == names and type(model.model.layers[2].feed_forward).__name__ == "LatentMoE"


def test_gradients_go_straight_through(model: K3) -> None:
    """Those of the masters are those of a model whose weights are the projections."""
    rounded = copy.deepcopy(model)
    for name, p in rounded.named_parameters():
        if ".experts." in name:
            p.data = project(p.data, MXFP4)
    qat = QAT(model, "w4a16")
    with qat.projected():
        model(ids()).logits.square().mean().backward()
    rounded(ids()).logits.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), rounded.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is q.grad and ".experts." not in name  # the first layer does not read over depth
        else:
            assert torch.equal(p.grad, q.grad), name


def test_masters_come_back_after_an_error(model: K3) -> None:
    before, qat = masters(model), QAT(model, "w4a16")
    with pytest.raises(RuntimeError, match="on the way"), qat.projected():
        raise RuntimeError("on the way")
    assert all(torch.equal(p, before[n]) for n, p in masters(model).items())


def test_a_step_is_projected_once(model: K3, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("nanok3.quant.qat.project", lambda *args: calls.append(1) or project(*args))
    qat = QAT(model, "w4a16")
    experts = moe_layers(model)["model.layers.1.block_sparse_moe"].experts
    for _ in range(3):
        with qat.projected():
            pass
    assert len(calls) == 3 * len(moe_layers(model))
    experts.w1.data.mul_(2)
    qat.stepped()
    with qat.projected():
        assert torch.equal(experts.w1, project(experts.w1, MXFP4))
    assert len(calls) == 6 * len(moe_layers(model))


def test_off_does_nothing(model: K3) -> None:
    weight = model.model.layers[1].feed_forward.experts.w1
    with QAT(model).projected():
        assert model.model.layers[1].feed_forward.experts.w1 is weight
    with QAT(ModernGPT(BASELINE), "off").projected():
        pass


def test_what_cannot_be_trained_so_is_refused(model: K3) -> None:
    with pytest.raises(ValueError, match="qat is 'w8'; allowed: 'off', 'w4a16', 'w4a8'"):
        QAT(model, "w8")
    with pytest.raises(ValueError, match="qat_scale_rule is 'up'; allowed"):
        QAT(model, "w4a16", "up")
    with pytest.raises(ValueError, match="has no routed experts"):
        QAT(ModernGPT(BASELINE), "w4a16")
    with pytest.raises(ValueError, match=r"moe_intermediate_size is 48; .* a multiple of 32"):
        QAT(K3(K3Config.tiny(moe_intermediate_size=48)), "w4a16")
    model.model.layers[1].feed_forward.experts.w2.data[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="inf or NaN"), QAT(model, "w4a16").projected():
        pass
    for mode in MODES:
        assert TrainSettings(qat=mode).qat == mode
    with pytest.raises(ValueError, match="qat is 'w8'; allowed: 'off', 'w4a16', 'w4a8'"):
        TrainSettings(qat="w8")
    for rule in SCALE_RULES:
        assert TrainSettings(qat_scale_rule=rule).qat_scale_rule == rule
    with pytest.raises(ValueError, match="qat_scale_rule is 'up'; allowed"):
        TrainSettings(qat_scale_rule="up")


# ---------------------------------------------------------------------- activations


def test_rounded_inputs_and_their_gradient() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    y = to_mxfp8(x, "floor")
    assert torch.equal(y, project(x.detach(), MXFP8, "floor"))
    weight = torch.randn(3, 64)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("packed", [False, True])
def test_experts_on_mxfp8_equal_their_reference(model: K3, packed: bool) -> None:
    """Grouped and token by token, on plain and on packed weights, and not what experts on full inputs say."""
    if packed:
        pack_experts(model)
    model.eval().double()
    moe = moe_layers(model)["model.layers.1.block_sparse_moe"]
    z, logits = torch.randn(23, CONFIG.latent_size).double(), torch.randn(23, 5)
    chosen = logits[:, :4].topk(2).indices  # expert 4 has no tokens
    routing = Routing(logits.double(), chosen, torch.rand(23, 2).double())
    with torch.no_grad():
        plain = routed_sorted(moe.experts, z, routing)
        mxfp8_inputs(model)
        assert isinstance(moe.experts, PackedExperts) == packed
        got = routed_sorted(moe.experts, z, routing)
        torch.testing.assert_close(got, routed_reference(moe.experts, z, routing))
    assert 1e-3 < relative(got, plain) < 0.1


def test_a_model_on_mxfp8_inputs_is_not_decoded_natively(model: K3) -> None:
    mxfp8_inputs(model.eval())
    assert "OnMXFP8" in str(NativeDecoder.of(model))


def test_w4a8_trains(model: K3) -> None:
    qat = QAT(model, "w4a8")
    with qat.projected():
        model(ids()).logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.model.layers[1].feed_forward.experts.w2.grad.abs().sum() > 0


# ---------------------------------------------------------------------- the same in training, export and serving


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_exported_loaded_and_unpacked_it_is_the_projection_of_the_master(model: K3, rule: str, tmp_path: Path) -> None:
    before = masters(model)
    pack_experts(model, rule)
    nanok3.save(model, tmp_path, experts="mxfp4", dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = nanok3.load(tmp_path, dtype=dtype).state_dict()
        for name, master in before.items():
            assert torch.equal(loaded[name], project(master, MXFP4, rule).to(dtype)), name
    packed = nanok3.load(tmp_path).state_dict()
    for name, master in before.items():
        values = dequantize_mxfp4(packed[f"{name}_packed"], packed[f"{name}_scale"], torch.float32)
        assert torch.equal(values, project(master, MXFP4, rule))


@pytest.mark.parametrize("mode", ["w4a16", "w4a8"])
def test_the_exported_model_answers_as_the_trained_one(model: K3, mode: str, tmp_path: Path) -> None:
    """Logits of training's forward in evaluation, and of the packed model, to the rounding of products; W4A8 rounds
    activations on the way, where a last bit may tip a value to its neighbour."""
    exported = copy.deepcopy(model)
    pack_experts(exported)
    nanok3.save(exported, tmp_path, experts="mxfp4", dtype=torch.float32)
    qat = QAT(model.eval(), mode)
    served = nanok3.load(tmp_path)
    if mode == "w4a8":
        mxfp8_inputs(served)
    with torch.no_grad(), qat.projected():
        trained = model(ids()).logits
    with torch.no_grad():
        answers = served(ids()).logits
        assert isinstance(served.model.layers[1].feed_forward.experts, PackedExperts)
        without = model(ids()).logits
    assert relative(answers, trained) < (1e-5 if mode == "w4a16" else 2e-3)
    assert relative(without, trained) > 1e-2


# ---------------------------------------------------------------------- what packing costs


def test_the_error_report(model: K3) -> None:
    before = masters(model)
    errors = {(e.layer, e.projection): e for e in pack_experts(model, "floor")}
    assert len(errors) == 3 * len(moe_layers(model)) and {p for _, p in errors} == {"gate", "up", "down"}
    for (layer, projection), error in errors.items():
        matrix = {"gate": "w1", "down": "w2", "up": "w3"}[projection]
        w = before[f"model.layers.{layer}.block_sparse_moe.experts.{matrix}"].double()
        q, rms = project(w, MXFP4, "floor"), w.square().mean().sqrt()
        assert error.rms_error == pytest.approx(relative(q, w)) and 0.08 < error.rms_error < 0.15
        assert error.max_error == pytest.approx(float((q - w).abs().max() / rms))
        top = 1.5 * 2.0 ** torch.floor(torch.log2(w.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)))
        assert error.saturated == pytest.approx(float((w.unflatten(-1, (-1, 32)).abs() > top).double().mean()))
        assert 0 < error.saturated < 0.05 and error.zeros == pytest.approx(float(((q == 0) & (w != 0)).double().mean()))


def test_nothing_is_beyond_the_scale_with_ceil_and_nothing_new_is_rounded(model: K3) -> None:
    with QAT(model, "w4a16").projected():
        trained = copy.deepcopy(model)
    assert all(error.saturated == 0 and error.rms_error > 0.08 for error in pack_experts(model))
    assert all(error.max_error == 0 for error in pack_experts(trained))
    with pytest.raises(ValueError, match="packed already"):
        pack_experts(model)
    assert set(MATRICES) == {"w1", "w2", "w3"}


# ------------------------------------------------------------------ serving


def test_serving_on_mxfp8_inputs_is_what_training_saw(tmp_path):
    """--expert-inputs mxfp8 on a packed checkpoint: bit for bit the logits of a forward pass of --train.qat w4a8, under
    the rule that the folder names."""
    torch.manual_seed(0)
    tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)})
    model = K3(K3Config.tiny(initializer_range=0.1).at_depth(3).with_vocabulary(tokenizer.vocab_size)).eval()
    ids = torch.randint(0, 256, (1, 24))
    for rule in ("ceil", "even"):
        folder = tmp_path / rule
        trained = K3(model.cfg).eval()
        trained.load_state_dict(model.state_dict())
        with torch.no_grad(), QAT(trained, "w4a8", rule).projected():
            seen = trained(ids).logits
            nanok3.save(trained, folder, experts="mxfp4", dtype=torch.float32)
        tokenizer.save(folder)
        (folder / "quantization.json").write_text(f'{{"scale_rule": "{rule}"}}')
        with torch.no_grad():
            plain = ModelFlags(model=folder, dtype="float32").open().model(ids).logits
            served = ModelFlags(model=folder, dtype="float32", expert_inputs="mxfp8").open().model(ids).logits
        assert torch.equal(served, seen) and not torch.equal(plain, seen)
