"""Checkpoints: whole or absent, checked by hash, kept by policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.train.checkpoint import checkpoints, latest, load_checkpoint, save_checkpoint, verify

TRAINER = {"progress": {"step": 3, "losses": [1.5, 1.25]}, "random": torch.arange(4, dtype=torch.uint8)}


@pytest.fixture(scope="module")
def model() -> K3:
    torch.manual_seed(0)
    return K3(K3Config.tiny())


def test_round_trip(model: K3, tmp_path: Path) -> None:
    model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    path = save_checkpoint(tmp_path, 3, model, TRAINER)
    assert path.name == "step-000003"
    loaded, trainer = load_checkpoint(path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert trainer["progress"] == TRAINER["progress"]
    assert torch.equal(trainer["random"], TRAINER["random"])


def test_old_ones_go(model: K3, tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, model, TRAINER, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000002", "step-000010"]
    save_checkpoint(tmp_path, 11, model, TRAINER, keep=0)
    assert len(checkpoints(tmp_path)) == 3


def test_damage_is_named_and_passed_over(model: K3, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, model, TRAINER)
    newer = save_checkpoint(tmp_path, 2, model, TRAINER)
    with open(newer / "trainer.pt", "r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    with pytest.raises(ValueError, match=r"step-000002: damaged or missing: trainer\.pt"):
        verify(newer)
    (newer / "model" / "model.safetensors").unlink()
    good, problems = latest(tmp_path)
    assert good is not None and good.name == "step-000001"
    assert len(problems) == 1 and "model/model.safetensors" in problems[0]


def test_unreadable_manifest(model: K3, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, model, TRAINER)
    for broken in ('{"sha256": ', "[]", "5", '{"sha256": []}', '{"sha256": {}}', '{"sha256": 5}'):
        (path / "manifest.json").write_text(broken)
        assert latest(tmp_path)[0] is None


def test_a_full_disk_is_an_os_error_and_leaves_nothing(model: K3, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"writing-000001: cannot be written"):
        save_checkpoint(tmp_path, 1, model, TRAINER)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path) == (None, [])


def test_the_same_step_twice(model: K3, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, model, TRAINER)
    path = save_checkpoint(tmp_path, 1, model, {"progress": {"step": 99}})
    assert load_checkpoint(path)[1]["progress"]["step"] == 99


KILLED = """
import sys, torch
from pathlib import Path
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.train.checkpoint import save_checkpoint
torch.manual_seed(0)
model = K3(K3Config.tiny())
run = Path(sys.argv[1])
save_checkpoint(run, 1, model, {"step": 1})
print("ready", flush=True)
for step in range(2, 10_000):
    save_checkpoint(run, step, model, {"step": step})
"""


@pytest.mark.parametrize("delay", [0.02, 0.11, 0.23])
def test_kill_in_the_middle_of_writing(tmp_path: Path, delay: float) -> None:
    """kill -9 at any moment: the newest complete checkpoint is whole, and the next save cleans up."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    good, problems = latest(tmp_path)
    assert good is not None and not problems
    model, trainer = load_checkpoint(good)
    assert trainer["step"] == json.loads((good / "manifest.json").read_text())["step"]
    save_checkpoint(tmp_path, 20_000, model, {"step": 20_000})
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))
