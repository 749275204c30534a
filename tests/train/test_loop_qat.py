"""The loop with quantization-aware training: resumed bit for bit, masters kept, validated as it will be served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanok3.baselines.frame import BaselineConfig
from nanok3.baselines.modern_gpt import ModernGPT
from nanok3.data.packing import one_pass
from nanok3.data.prepared import Prepared
from nanok3.model.decoder import K3
from nanok3.quant.mxfp import MXFP4, project
from nanok3.train.checkpoint import latest, load_checkpoint
from nanok3.train.recompute import recompute_activations

pytestmark = pytest.mark.usefixtures("unchecked")  # many steps; shapes are checked where the pieces are tested


def weights(model: K3) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_resume_is_bit_for_bit(make_trainer, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", steps=4, qat="w4a8", qat_scale_rule="even")
    assert whole.fit()
    broken = make_trainer(tmp_path / "broken", steps=4, qat="w4a8", qat_scale_rule="even")
    while broken.progress.step < 2:
        broken._advance(broken.train_step(), 1.0)
    broken.save()
    model, state = load_checkpoint(latest(tmp_path / "broken")[0])
    again = make_trainer(tmp_path / "broken", model, steps=4, qat="w4a8", qat_scale_rule="even")
    again.load_state_dict(state)
    assert again.fit()
    assert whole.progress.losses == again.progress.losses
    for name, value in weights(whole.model).items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_the_masters_move_by_less_than_a_code(make_trainer) -> None:
    """One step: loss and gradients are those of the projection; the master is no projection, before or after."""
    plain, trained = make_trainer(), make_trainer(qat="w4a16")
    name = "model.layers.1.block_sparse_moe.experts.w1"
    before = weights(trained.model)[name]
    a, b = plain.train_step(), trained.train_step()
    after = weights(trained.model)[name]
    assert a.loss != b.loss and a.loss == pytest.approx(b.loss, abs=0.05)
    for value in (before, after):
        assert not torch.equal(value, project(value, MXFP4))
    assert not torch.equal(before, after)
    with trained.qat.projected():
        assert torch.equal(trained.model.get_parameter(name), project(after, MXFP4))


def test_validation_is_that_of_the_served_model(make_trainer, corpus: Path) -> None:
    trainer = make_trainer(qat="w4a16")
    [source] = Prepared(corpus).sources("validation")
    trainer.validation = {"stories": list(one_pass(source, 2, 32))[:2]}
    found = trainer.evaluate()
    for name, p in trainer.model.named_parameters():
        if ".experts." in name:
            p.data = project(p.data, MXFP4)
    trainer.qat.stepped()
    assert trainer.evaluate() == found
    plain = make_trainer()
    plain.validation = trainer.validation
    assert plain.evaluate() != found


def test_recompute_changes_nothing(make_trainer, tmp_path: Path) -> None:
    plain, saving = make_trainer(tmp_path / "a", qat="w4a8"), make_trainer(tmp_path / "b", qat="w4a8")
    recompute_activations(saving.model)
    for _ in range(2):
        assert plain.train_step().loss == pytest.approx(saving.train_step().loss, abs=1e-6)


def test_a_baseline_has_nothing_to_quantize(make_trainer) -> None:
    model = ModernGPT(BaselineConfig(vocab_size=560, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="ModernGPT has no routed experts"):
        make_trainer(model=model, qat="w4a16")
