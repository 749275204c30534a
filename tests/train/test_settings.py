"""Impossible settings are refused with field, value and rule."""

from __future__ import annotations

import pytest

from nanok3.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 1, "minutes": 1.0}, "steps or minutes, not both"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seq_len": 1}, "seq_len is 1"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be above 0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"warmup_fraction": 1.5}, r"warmup_fraction is 1.5; it must lie in \[0, 1\]"),
        ({"precision": "fp8"}, "precision is 'fp8'; allowed"),
        ({"vision_optimizer": "sgd"}, "vision_optimizer is 'sgd'; allowed: 'adamw', 'muon'"),
        ({"keep": -1}, "keep is -1"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**changes)


def test_the_rule_for_matrices_is_one_of_two() -> None:
    assert TrainSettings(steps=1, optimizer="adamw").optimizer == "adamw"
    with pytest.raises(ValueError, match="optimizer is 'sgd'; allowed: 'muon', 'adamw'"):
        TrainSettings(steps=1, optimizer="sgd")
