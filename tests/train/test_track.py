"""The log of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nanok3.train.track import Tracker, read_metrics


def test_lines_come_back(tmp_path: Path) -> None:
    track = Tracker(tmp_path)
    track.write("train", 1, loss=2.5, ids=["a"])
    track.write("train", 2, loss=math.nan)
    track.close()
    assert read_metrics(tmp_path) == [
        {"kind": "train", "step": 1, "loss": 2.5, "ids": ["a"]},
        {"kind": "train", "step": 2, "loss": None},
    ]


def test_a_line_cut_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    Tracker(tmp_path).write("train", 1, loss=2.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    Tracker(tmp_path).write("train", 2, loss=1.0)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_missing_run(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("hook", ["tensorboard", "wandb"])
def test_a_missing_hook_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    import sys

    for module in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{hook} is not installed; pip install nanok3\[track\]"):
        Tracker(tmp_path, **{hook: True})


def test_wandb_receives_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    seen = []
    run = types.SimpleNamespace(log=lambda numbers, step: seen.append((step, numbers)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    track = Tracker(tmp_path, wandb=True)
    track.write("train", 7, loss=2.0, note="text")
    track.close()
    assert seen == [(7, {"train/loss": 2.0})]
