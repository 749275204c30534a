"""The loop: what a step does, that a resumed run is the same run, and how a run ends early."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from nanok3.baselines.frame import BaselineConfig
from nanok3.baselines.modern_gpt import ModernGPT
from nanok3.model.decoder import K3
from nanok3.train.checkpoint import checkpoints, latest, load_checkpoint
from nanok3.train.loop import Trainer, TrainingStopped
from nanok3.train.recompute import recompute_activations
from nanok3.train.track import read_metrics

pytestmark = pytest.mark.usefixtures("unchecked")  # many steps; shapes are checked where the pieces are tested


def weights(model: K3) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


def resumed(make_trainer, run: Path, **settings: object) -> Trainer:
    checkpoint, problems = latest(run)
    assert checkpoint is not None and not problems
    model, state = load_checkpoint(checkpoint)
    trainer = make_trainer(run, model, **settings)
    trainer.load_state_dict(state)
    return trainer


def test_loss_starts_at_the_vocabulary_and_falls(make_trainer) -> None:
    trainer = make_trainer(steps=30, lr=1e-2)
    first = trainer.train_step().loss
    assert abs(first - math.log(560)) < 0.2
    assert trainer.fit()
    assert trainer.progress.losses[-1] < first - 1.0


def test_resume_is_bit_for_bit(make_trainer, tmp_path: Path) -> None:
    """Weights, router bias, optimizer, balancing, data position: all as if there had been no break."""
    whole = make_trainer(tmp_path / "whole", steps=6)
    assert whole.fit()
    broken = make_trainer(tmp_path / "broken", steps=6, save_every=3)
    while broken.progress.step < 3:
        broken._advance(broken.train_step(), 1.0)
    broken.save()
    again = resumed(make_trainer, tmp_path / "broken", steps=6)
    assert again.progress.step == 3
    assert again.fit()
    assert_same(weights(whole.model), weights(again.model))
    assert whole.progress.losses == again.progress.losses
    for name, value in whole.optimizer.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(again.optimizer.state_dict()[name])), name
    assert whole.loader.state_dict() == again.loader.state_dict()


def test_microbatches_do_not_change_the_step(make_trainer, tmp_path: Path) -> None:
    """4 rows at once and 4 times one row: same loss, same gradients, same router bias."""
    together = make_trainer(tmp_path / "a", batch_size=4)
    apart = make_trainer(tmp_path / "b", batch_size=1, accumulate=4)
    for _ in range(3):
        a, b = together.train_step(), apart.train_step()
        assert a.tokens == b.tokens
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
    for name, value in together.model.state_dict().items():
        torch.testing.assert_close(value, apart.model.state_dict()[name], rtol=1e-2, atol=2e-3)


def test_recompute_changes_nothing(make_trainer, tmp_path: Path) -> None:
    plain, saving = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    recompute_activations(saving.model)
    for _ in range(2):
        a, b = plain.train_step(), saving.train_step()
        assert a.loads == b.loads  # the second pass in backward does not count as load
        assert a.loss == pytest.approx(b.loss, abs=1e-6)
    bias = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    torch.testing.assert_close(plain.model.state_dict()[bias], saving.model.state_dict()[bias])


def test_evaluation_leaves_the_router_alone(make_trainer, tmp_path: Path) -> None:
    plain, evaluated = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    evaluated.validation = {"stories": [next(make_trainer(tmp_path / "c").batches)]}
    for trainer in (plain, evaluated):
        trainer.train_step()
        trainer.evaluate()
        trainer.train_step()
    assert_same(weights(plain.model), weights(evaluated.model))


def test_evaluate_reports_bits_per_byte(make_trainer) -> None:
    trainer = make_trainer()
    batch = next(trainer.batches)
    trainer.validation = {"stories": [batch]}
    result = trainer.evaluate()["stories"]
    size = sum(int(trainer.bytes_of[t]) for t in batch.targets.flatten().tolist() if t >= 0)
    assert result["bytes"] == size
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * result["tokens"] / math.log(2) / size)


def test_nan_stops_before_the_weights_change(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(steps=5, save_every=1)
    trainer._advance(trainer.train_step(), 1.0)
    saved = trainer.save()
    trainer.model.lm_head.weight.data[0, 0] = torch.nan
    before = weights(trainer.model)
    with pytest.raises(
        TrainingStopped, match=r"not finite.*last good checkpoint: .*step-000001.*documents of the batch"
    ):
        trainer.train_step()
    after = weights(trainer.model)
    assert all(torch.equal(before[n], after[n]) for n in before if n != "lm_head.weight")
    assert saved in checkpoints(trainer.run)
    assert any(r["kind"] == "event" for r in read_metrics(trainer.run))


def test_a_spike_stops(make_trainer) -> None:
    trainer = make_trainer(spike_nats=1.0)
    trainer.progress.losses = [2.0] * 30
    with pytest.raises(TrainingStopped, match="spike"):
        trainer.train_step()
    trainer = make_trainer(spike_nats=0.0)
    trainer.progress.losses = [2.0] * 30
    trainer.train_step()


def test_losses_of_another_mixture_are_no_measure_of_a_spike(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(spike_nats=1.0)
    trainer.progress.losses = [2.0] * 30
    now = iter((0, 1))
    monkeypatch.setattr(type(trainer.loader), "stretch", property(lambda loader: next(now)))
    assert trainer.progress.losses == [2.0] * 30
    loss = trainer.train_step().loss
    assert loss > 3 and trainer.progress.losses == [loss]


def test_ctrl_c_saves_and_says_how_to_go_on(make_trainer, tmp_path: Path) -> None:
    lines: list[str] = []
    trainer = make_trainer(tmp_path / "run", steps=10_000)
    trainer.say = lines.append
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert not trainer.fit()
    assert f"nanok3 pretrain --out {tmp_path / 'run'} --resume" in lines[-1]
    again = resumed(make_trainer, tmp_path / "run", steps=10_000)
    assert again.progress.step == trainer.progress.step
    assert_same(weights(again.model), weights(trainer.model))


def test_a_schedule_in_minutes_ends_on_time(make_trainer) -> None:
    trainer = make_trainer(steps=None, minutes=1.5 / 60)
    assert trainer.fit()
    assert trainer.progress.fraction >= 1
    assert 1.4 < trainer.progress.seconds < 6
    rates = [r["lr"] for r in read_metrics(trainer.run) if r["kind"] == "train"]
    assert max(rates) <= trainer.settings.lr and rates[-1] < rates[len(rates) // 2]


def test_every_number_of_a_step_is_logged(make_trainer) -> None:
    trainer = make_trainer(steps=2, loads_every=1)
    trainer.fit()
    records = read_metrics(trainer.run)
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2]
    wanted = "tokens loss bits_per_byte lr grad_norm tokens_per_second flop_utilisation load_max_over_mean dead_experts"
    assert set(wanted.split()) <= set(train[0])
    loads = next(r for r in records if r["kind"] == "loads")
    assert loads["layers"] == [1, 2, 3]
    assert all(sum(layer) == pytest.approx(1) for layer in loads["loads"])


def test_overfits_one_batch(make_trainer) -> None:
    trainer = make_trainer(steps=150, lr=1e-2, spike_nats=0.0)
    batch = next(trainer.batches)
    trainer.batches = iter(lambda: batch, None)
    trainer.fit()
    assert trainer.progress.losses[-1] < 0.3


def test_bfloat16_learns_as_float32(make_trainer, tmp_path: Path) -> None:
    a = make_trainer(tmp_path / "a", steps=12, lr=5e-3)
    b = make_trainer(tmp_path / "b", steps=12, lr=5e-3, precision="bfloat16")
    a.fit(), b.fit()
    assert all(p.dtype == torch.float32 for p in b.model.parameters())
    assert a.progress.losses[-1] == pytest.approx(b.progress.losses[-1], abs=0.3)


# ---------------------------------------------------------------------- baselines, and another clock


def baseline() -> ModernGPT:
    return ModernGPT(BaselineConfig(vocab_size=560, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_baseline_trains_in_the_same_loop(make_trainer, optimizer: str) -> None:
    trainer = make_trainer(model=baseline(), steps=30, lr=1e-2, optimizer=optimizer)
    first = trainer.train_step()
    assert abs(first.loss - math.log(560)) < 0.3 and first.loads == [] and first.max_logit is None
    assert trainer.fit()
    assert trainer.progress.losses[-1] < first.loss - 1.0


def test_a_baseline_keeps_no_checkpoints(make_trainer) -> None:
    with pytest.raises(ValueError, match="save_every is 5; a baseline keeps no checkpoints"):
        make_trainer(model=baseline(), save_every=5)
    said: list[str] = []
    trainer = make_trainer(model=baseline())
    trainer.say, trainer.interrupted = said.append, True
    assert not trainer.fit()
    assert "nothing was saved" in said[-1] and not checkpoints(trainer.run)


def test_minutes_are_those_of_the_clock(make_trainer) -> None:
    """A clock that moves by 3 seconds whenever it is read: two readings a step, a third for the time of it all."""
    trainer = make_trainer(steps=None, minutes=0.5)
    readings = itertools.count(step=3.0)
    trainer.clock = lambda: next(readings)
    assert trainer.fit()
    assert trainer.progress.step == 5 and trainer.progress.seconds == 30.0
