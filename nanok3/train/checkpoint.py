"""Checkpoints that are whole or absent: written aside, hashed, flushed, and renamed into place in one step.

    checkpoints/step-000200/
        model/            the weights in the official layout, in float32 (they are the masters), and beside
                      them those of a prediction layer that learns along
        trainer.pt        optimizer, balancing and clipping state, data position, random state, schedule
        manifest.json     sha256 of every file, written last

A folder under its final name is complete: whatever kills the writer leaves at most a `.writing-*` folder, which the
next save removes. Reading checks every hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from nanok3.model.decoder import K3
from nanok3.model.mtp import load_prediction, save_prediction
from nanok3.model.weights import load, save

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)$")


def save_checkpoint(run: Path, step: int, model: K3, trainer: dict[str, Any], keep: int = 2) -> Path:
    """Write `run/checkpoints/step-N` and drop the oldest beyond `keep` (0 keeps all)."""
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover)
    aside, final = folder / f".writing-{step:06}", folder / f"step-{step:06}"
    try:
        save(model, aside / "model", dtype=torch.float32)
        save_prediction(model, aside / "model", torch.float32)
        torch.save(trainer, aside / "trainer.pt")
    except (OSError, RuntimeError) as error:  # how the two writers report a full disk
        shutil.rmtree(aside)
        raise OSError(f"{aside}: cannot be written ({error})") from None
    files = sorted(p for p in aside.rglob("*") if p.is_file())
    hashes = {str(p.relative_to(aside)): _sha256(p) for p in files}
    (aside / MANIFEST).write_text(json.dumps({"step": step, "sha256": hashes}, indent=2))
    for path in [*files, aside / MANIFEST, aside / "model", aside]:
        _flush(path)
    if final.exists():  # the same step, reached again after going back
        shutil.rmtree(final)
    os.rename(aside, final)
    _flush(folder)
    for old in checkpoints(run)[:-keep] if keep else []:
        shutil.rmtree(old)
    return final


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [p for p in (run / "checkpoints").glob("step-*") if _NAME.match(p.name) and (p / MANIFEST).exists()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    match = _NAME.match(checkpoint.name)
    assert match is not None
    return int(match[1])


def verify(checkpoint: Path) -> None:
    """ValueError names every file that is missing or differs from the manifest."""
    try:
        hashes = json.loads((checkpoint / MANIFEST).read_text())["sha256"]
        complete = {"trainer.pt", "model/config.json"} <= hashes.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"{checkpoint}: no readable {MANIFEST}; this is not a complete checkpoint")
    bad = [n for n, sha in hashes.items() if not (checkpoint / n).exists() or _sha256(checkpoint / n) != sha]
    if bad:
        raise ValueError(f"{checkpoint}: damaged or missing: {', '.join(bad)}")


def latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose hashes hold, and what is wrong with the newer ones that were passed over."""
    passed_over: list[str] = []
    for checkpoint in reversed(checkpoints(run)):
        try:
            verify(checkpoint)
            return checkpoint, passed_over
        except ValueError as error:
            passed_over.append(str(error))
    return None, passed_over


def load_checkpoint(checkpoint: Path) -> tuple[K3, dict[str, Any]]:
    """The model (float32 masters) and the trainer's state. The hashes are checked by `latest` or `verify`."""
    model = load(checkpoint / "model", dtype=torch.float32)
    load_prediction(model, checkpoint / "model")
    # Whatever wrote it: the trainer moves each tensor to where its parameter is.
    trainer: dict[str, Any] = torch.load(checkpoint / "trainer.pt", weights_only=True, map_location="cpu")
    return model, trainer


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
