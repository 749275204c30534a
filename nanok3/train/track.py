"""Where the numbers of a run go: `metrics.jsonl` always, TensorBoard and Weights & Biases where asked for.

One JSON object a line, with a field `kind`: train, eval, loads, sample or event. A line is flushed when written, so a
killed run loses at most the line it was writing; readers take the last line of a step, since a resumed run repeats
those after its checkpoint.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class Tracker:
    """Appends to `folder/metrics.jsonl`; tensorboard and wandb need the extra `nanok3[track]`."""

    def __init__(self, folder: Path, tensorboard: bool = False, wandb: bool = False, config: Any = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _end_last_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = _summary_writer(folder) if tensorboard else None
        self._wandb = _wandb_run(folder, config) if wandb else None

    def write(self, kind: str, step: int, **fields: Any) -> None:
        record = {"kind": kind, "step": step, **{k: _finite(v) for k, v in fields.items()}}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()
        numbers = {f"{kind}/{k}": v for k, v in fields.items() if isinstance(v, int | float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line cut off by a kill is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    # Not splitlines: a text may hold other line separators, which JSON leaves as they are.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _end_last_line(path: Path) -> None:
    """A half-written line stays readable as one broken line, not as part of the next."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard is not installed; pip install nanok3[track]") from None
    return SummaryWriter(str(folder / "tensorboard"))


def _wandb_run(folder: Path, config: Any) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb is not installed; pip install nanok3[track]") from None
    return wandb.init(project="nanok3", name=folder.name, dir=str(folder), config=config, resume="allow")
