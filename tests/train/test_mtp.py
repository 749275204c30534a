"""The prediction layer in training: what it guesses, what it may see, and that a run with it is a run like any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanok3 import ledger
from nanok3.baselines.frame import BaselineConfig
from nanok3.baselines.modern_gpt import ModernGPT
from nanok3.config import K3Config
from nanok3.data.packing import Batch, Segment
from nanok3.model.decoder import K3
from nanok3.model.mtp import FILE, attach, load_prediction, prediction_of, save_prediction, taps
from nanok3.model.weights import load, save
from nanok3.quant.mxfp import MXFP4, project
from nanok3.train.checkpoint import latest, load_checkpoint, verify
from nanok3.train.loop import Trainer
from nanok3.train.loss import IGNORE
from nanok3.train.mtp import Prediction, labels
from nanok3.train.recompute import recompute_activations
from nanok3.train.report_pictures import learning
from nanok3.train.run_record import read_run
from nanok3.train.track import read_metrics

pytestmark = pytest.mark.usefixtures("unchecked")


def config() -> K3Config:
    changes = {"kda_num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "kda_head_dim": 16}
    cfg = K3Config.tiny(initializer_range=0.1).at_depth(4, hidden_size=32, **changes)
    changes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 64}
    changes |= {"moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "num_experts": 4}
    return replace(cfg, num_experts_per_token=2, num_nextn_predict_layers=1, **changes).with_vocabulary(560)


@pytest.fixture
def make(make_trainer):
    """`make_trainer` with a layer on the model."""

    def made(run: Path | None = None, model: K3 | None = None, **changes: object) -> Trainer:
        if model is None:
            torch.manual_seed(0)
            model = K3(config())
            attach(model)
        return make_trainer(run, model, **({"mtp_weight": 0.3} | changes))

    return made


def packed(*lengths: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (1, sum(lengths)), generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    targets = ids.roll(-1, dims=1)
    targets[0, ends[1:] - 1] = IGNORE
    return Batch(ids, targets, ends, [Segment("x", i, 0) for i in range(len(lengths))])


@pytest.fixture
def double() -> K3:
    torch.manual_seed(1)
    model = K3(config()).double()
    attach(model).double()
    return model


def second_loss(model: K3, batch: Batch) -> torch.Tensor:
    prediction = Prediction(model, 1.0)
    prediction.begin([batch])
    with prediction.watch():
        model.hidden_states(batch.input_ids, cu_seqlens=batch.cu_seqlens)
    loss = prediction.loss(prediction.hidden(batch), batch)
    assert loss is not None
    return loss


# ------------------------------------------------------------------ what is guessed from what


def test_labels_by_hand() -> None:
    """[A0 A1 A2 | B0 B1 B2 B3]: the thought at A0 with token A1 guesses A2, and so on; nothing is guessed across."""
    batch = packed(3, 4)
    a, b = batch.input_ids[0, :3].tolist(), batch.input_ids[0, 3:].tolist()
    assert labels(batch)[0].tolist() == [IGNORE, a[2], IGNORE, IGNORE, b[2], b[3], IGNORE]


def test_a_piece_cut_out_of_a_document_keeps_its_last_label() -> None:
    batch = packed(3, 4)
    batch.targets[0, 2] = 77  # the document goes on in another row
    assert labels(batch)[0].tolist()[:3] == [IGNORE, int(batch.input_ids[0, 2]), 77]


def test_the_loss_is_that_of_a_loop_over_thoughts(double: K3) -> None:
    """Each document alone, position s at a time: token s + 2 from the feature at s and the embedding of s + 1."""
    batch, layer = packed(3, 5), prediction_of(double)
    expected = []
    for ids in batch.input_ids[0].split([3, 5]):
        last = len(double.model.layers)
        with taps(double, (last,)) as found:
            double.hidden_states(ids[None])
        feature, embedded = found[last], double.model.embed_tokens(ids[None])
        x = layer.combine(embedded, torch.cat((torch.zeros_like(feature[:, :1]), feature[:, :-1]), dim=1))
        h = layer.mtp_block.attend(x) + x
        logits = double.lm_head(layer.normed(h + layer.mtp_block.feed(h)))[0]
        expected += [F.cross_entropy(logits[s + 1], ids[s + 2]) for s in range(len(ids) - 2)]
    torch.testing.assert_close(second_loss(double, batch), torch.stack(expected).mean(), rtol=1e-9, atol=0)


def test_gradients_are_those_of_differences(double: K3) -> None:
    batch = packed(4, 6)
    loss = second_loss(double, batch)
    names = ["prediction.eh_proj.weight", "model.layers.2.self_attn.o_proj.weight", "lm_head.weight"]
    names += ["model.embed_tokens.weight", "prediction.mtp_block.self_attn.kv_b_proj.weight"]
    parameters = [double.get_parameter(name) for name in names]
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        direction, step = torch.randn_like(p), 1e-5
        with torch.no_grad():
            p += step * direction
            up = second_loss(double, batch)
            p -= 2 * step * direction
            down = second_loss(double, batch)
            p += step * direction
        assert float((grad * direction).sum()) == pytest.approx(float(up - down) / (2 * step), rel=1e-4, abs=1e-8)


@torch.no_grad()
def test_the_next_document_changes_nothing(double: K3) -> None:
    """Loss of the first document alone: whatever stands in the second, before or after it."""
    first = packed(5, 6)
    first.targets[0, 5:] = IGNORE
    for changed in range(5, 11):
        other = replace(first, input_ids=first.input_ids.clone())
        other.input_ids[0, changed] = 301
        torch.testing.assert_close(second_loss(double, other), second_loss(double, first), rtol=1e-12, atol=0)
    second = packed(5, 6)
    second.targets[0, :5] = IGNORE
    for changed in range(5):
        other = replace(second, input_ids=second.input_ids.clone())
        other.input_ids[0, changed] = 301
        torch.testing.assert_close(second_loss(double, other), second_loss(double, second), rtol=1e-12, atol=0)


@torch.no_grad()
def test_no_thought_sees_what_it_is_to_guess(double: K3) -> None:
    """A token changes no guess of its own or of an earlier row."""
    batch = packed(8)
    prediction = Prediction(double, 1.0)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        with prediction.watch():
            double.hidden_states(ids, cu_seqlens=batch.cu_seqlens)
        return prediction.hidden(batch)[0]

    other = batch.input_ids.clone()
    other[0, 5] = 301
    a, b = rows(batch.input_ids), rows(other)
    apart = (a - b).abs().amax(-1)
    assert (apart[:5] < 1e-12).all() and (apart[5:] > 1e-6).all()


# ------------------------------------------------------------------ the run


def test_weight_0_is_plain_training_bit_for_bit(make, make_trainer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = K3(config())
    attach(model)
    model.add_module("prediction", None)
    plain, without = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b", model, mtp_weight=0.0)
    plain.model.load_state_dict(without.model.state_dict())
    for _ in range(3):
        a, b = plain.train_step(), without.train_step()
        assert a == b and b.mtp_loss is None
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, without.model.state_dict()[name]), name


def test_both_losses_fall_and_are_written_down(make) -> None:
    trainer = make(steps=15, lr=2e-2, loads_every=1)
    trainer.validation = {"stories": [next(trainer.batches)]}
    said: list[str] = []
    trainer.say = said.append
    assert trainer.fit()
    records = read_metrics(trainer.run)
    ahead = [r["mtp_loss"] for r in records if r["kind"] == "train"]
    assert abs(ahead[0] - 6.3) < 0.4 and ahead[-1] < ahead[0] - 1
    assert trainer.progress.losses[-1] < trainer.progress.losses[0] - 1
    assert f"ahead {ahead[-1]:.3f}" in said[-2]
    assert 0 < trainer.evaluate()["stories"]["mtp_loss"] < ahead[0]
    loads = next(r for r in records if r["kind"] == "loads")
    assert loads["layers"] == [1, 2, 3, 4] and len(loads["loads"]) == 4
    assert "of the token after the next" in learning(read_run(trainer.run))
    assert trainer.flops_per_token > 1.1 * ledger.flops_per_token(trainer.model.cfg, 32, training=True)


@pytest.mark.parametrize("qat", ["off", "w4a8"])
def test_resume_is_bit_for_bit(make, tmp_path: Path, qat: str) -> None:
    whole = make(tmp_path / "whole", steps=4, qat=qat)
    assert whole.fit()
    broken = make(tmp_path / "broken", steps=4, qat=qat)
    while broken.progress.step < 2:
        broken._advance(broken.train_step(), 1.0)
    broken.save()
    checkpoint = latest(tmp_path / "broken")[0]
    verify(checkpoint)
    model, state = load_checkpoint(checkpoint)
    again = make(tmp_path / "broken", model, steps=4, qat=qat)
    again.load_state_dict(state)
    assert again.fit()
    assert whole.progress.losses == again.progress.losses and whole.mtp.mean == again.mtp.mean
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    for name, value in whole.optimizer.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(again.optimizer.state_dict()[name])), name


def test_microbatches_do_not_change_the_step(make, tmp_path: Path) -> None:
    together, apart = make(tmp_path / "a", batch_size=4), make(tmp_path / "b", batch_size=1, accumulate=4)
    a, b = together.train_step(), apart.train_step()
    assert a.mtp_loss == pytest.approx(b.mtp_loss, rel=1e-5)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


def test_recompute_changes_nothing(make, tmp_path: Path) -> None:
    plain, saving = make(tmp_path / "a"), make(tmp_path / "b")
    recompute_activations(saving.model)
    for _ in range(2):
        a, b = plain.train_step(), saving.train_step()
        assert a.loads == b.loads and a.mtp_loss == pytest.approx(b.mtp_loss, abs=1e-6)


def test_the_layer_is_balanced_clipped_and_rounded_like_the_others(make) -> None:
    trainer = make(qat="w4a16")
    experts = trainer.model.get_parameter("prediction.mtp_block.block_sparse_moe.experts.w2")
    with trainer.qat.projected():
        assert torch.equal(experts, project(experts, MXFP4))
    assert not torch.equal(experts, project(experts, MXFP4))
    assert "prediction.mtp_block.self_attn" in trainer.clip.layers
    trainer.train_step()
    bias = trainer.model.get_buffer("prediction.mtp_block.block_sparse_moe.gate.e_score_correction_bias")
    assert bias.abs().max() > 0
    kinds = {rule.name: rule.kind for rule in trainer.optimizer.rules}
    assert kinds["prediction.eh_proj.weight"] == "muon" and kinds["prediction.enorm.weight"] == "adamw"


def test_a_layer_and_a_weight_go_together(make_trainer, make, tmp_path: Path) -> None:
    gpt = ModernGPT(BaselineConfig(vocab_size=560, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"mtp_weight is 0.5; a baseline has no prediction layer"):
        make_trainer(model=gpt, mtp_weight=0.5)
    with pytest.raises(ValueError, match="the checkpoint it came from, has no prediction layer"):
        make_trainer(mtp_weight=0.5)
    with pytest.raises(ValueError, match="must go on learning: above 0"):
        make(mtp_weight=0.0)
    with pytest.raises(ValueError, match=r"mtp_weight is -1.0; it must be at least 0"):
        make(mtp_weight=-1.0)


# ------------------------------------------------------------------ files and numbers


def test_saved_under_the_names_of_a_layer_more(tmp_path: Path) -> None:
    model = K3(config())
    layer = attach(model)
    save(model, tmp_path, dtype=torch.float32)
    assert K3Config.from_json(tmp_path).num_nextn_predict_layers == 0
    save_prediction(model, tmp_path, torch.float32)
    assert K3Config.from_json(tmp_path).num_nextn_predict_layers == 1
    again = load(tmp_path)
    assert prediction_of(again) is None, "the model alone is what others load"
    found = load_prediction(again, tmp_path)
    assert found is not None
    for name, value in layer.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name
    from safetensors.torch import load_file

    names = load_file(tmp_path / FILE)
    stem = "language_model.model.layers.4"
    assert {f"{stem}.enorm.weight", f"{stem}.block_sparse_moe.experts.3.w1.weight"} <= set(names)
    counted = [w for w in ledger.weights(model.cfg) if w.component == ledger.PREDICTION]
    assert sum(w.copies for w in counted) == len(names)
    assert sum(w.parameters for w in counted) == sum(value.numel() for value in names.values())
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match=r"mtp.safetensors: cannot be read"):
        load_prediction(load(tmp_path), tmp_path)


def test_an_interrupted_saving_leaves_the_file_that_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on the disk before the name is theirs."""
    model = K3(config())
    attach(model)
    save(model, tmp_path)
    save_prediction(model, tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    attach(model)
    with pytest.raises(OSError, match="no space left"):
        save_prediction(model, tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_the_ledger_counts_the_layer() -> None:
    cfg = config()
    with torch.device("meta"):
        model = K3(cfg)
        attach(model)
    everything = sum(p.numel() for p in model.parameters())
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("correction_bias"))
    assert ledger.parameters(cfg) == everything + biases
    without = replace(cfg, num_nextn_predict_layers=0)
    assert ledger.active_parameters(cfg) == ledger.active_parameters(without), "a token is said without it"
    assert ledger.parameters(replace(K3Config.k3(), num_nextn_predict_layers=1)) > ledger.parameters(K3Config.k3())
