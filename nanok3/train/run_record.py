"""A run folder as one record: what config.yaml, metrics.jsonl and final.json say. Each of them may be missing.

    config.yaml      the resolved settings, with `command`
    metrics.jsonl    one JSON object a line, with `kind` (train, eval, loads, sample, event) and `step`; see track.py
    final.json       written by `nanok3 eval`: slices, recall, diagnostics, parameters, hardware, versions, seconds

A run that went back to a checkpoint repeats steps: a train line that does not advance discards what was logged from its
step on, and of several lines of one kind for one step the last counts. Lines that are not JSON (a killed writer) are
skipped and counted, but for an unfinished last one.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from nanok3.train.svg import Point

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What the folder says. records: by kind, in order of steps; ended: whether a final model lies there; unreadable,
    repeated: lines left out."""

    name: str
    config_text: str = ""
    config: Record = field(default_factory=dict)
    records: dict[str, list[Record]] = field(default_factory=dict)
    final: Record = field(default_factory=dict)
    ended: bool = False
    unreadable: int = 0
    repeated: int = 0

    def kind(self, name: str) -> list[Record]:
        return self.records.get(name, [])

    @cached_property
    def x_name(self) -> str:
        """What the curves run over: 'tokens', or 'step' where no train line counts tokens."""
        return "tokens" if len(self._tokens_by_step) > 1 else "step"

    def x(self, record: Record) -> float:
        """Tokens read at the record's step (interpolated between train lines), or the step itself."""
        if self.x_name == "step":
            return float(record["step"])
        own = number(record.get("tokens"))
        return own if own is not None else interpolate(self._tokens_by_step, record["step"])

    def curve(self, kind: str, name: str) -> list[Point]:
        """(x, value) of a field; NaN where it is missing or not finite."""
        pairs = ((self.x(r), number(r.get(name))) for r in self.kind(kind))
        return [(x, math.nan if value is None else value) for x, value in pairs]

    @cached_property
    def _tokens_by_step(self) -> list[Point]:
        pairs = ((float(r["step"]), number(r.get("tokens"))) for r in self.kind("train"))
        return [(0.0, 0.0), *((step, tokens) for step, tokens in pairs if tokens is not None)]


def read_run(folder: Path) -> Run:
    """Read a run folder; each of its files may be missing."""
    config_text = _text(folder / "config.yaml")
    records, unreadable = _parse_lines(_text(folder / "metrics.jsonl"))
    kept = _last_of_each_step(_without_rewound(records))
    by_kind = {kind: [r for r in kept if r["kind"] == kind] for kind in {r["kind"] for r in kept}}
    return Run(
        folder.resolve().name,
        config_text,
        _mapping(config_text),
        by_kind,
        _mapping(_text(folder / "final.json")),
        (folder / "model" / "config.json").is_file(),
        unreadable,
        len(records) - len(kept),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _mapping(text: str) -> Record:
    """A YAML (or JSON) mapping; empty if it is none: its text is shown all the same."""
    try:
        loaded = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _parse_lines(text: str) -> tuple[list[Record], int]:
    """Records and the number of unreadable lines; an unfinished last line is neither."""
    *lines, last = text.split("\n")  # not splitlines: samples may hold other line separators
    records, unreadable = [], 0
    for line in [*lines, last]:
        record = _record(line)
        if record is not None:
            records.append(record)
        elif line.strip() and line is not last:
            unreadable += 1
    return records, unreadable


def _record(line: str) -> Record | None:
    try:
        loaded = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    whole = isinstance(loaded, dict) and isinstance(loaded.get("kind"), str) and number(loaded.get("step")) is not None
    return loaded if whole else None


def _without_rewound(records: Iterable[Record]) -> list[Record]:
    kept: list[Record] = []
    reached = -math.inf
    for record in records:
        if record["kind"] == "train":
            if record["step"] <= reached:
                kept = [r for r in kept if r["step"] < record["step"] or r["kind"] == "event"]
            reached = record["step"]
        kept.append(record)
    return kept


def _last_of_each_step(records: Iterable[Record]) -> list[Record]:
    """Of each kind and step the last record, except events and samples of different prompts, which all stay."""
    last = {(r["kind"], r["step"], str(r.get("prompt") or r.get("message"))): r for r in records}
    return sorted(last.values(), key=lambda r: r["step"])


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def interpolate(points: Sequence[Point], x: float) -> float:
    """Between neighbours of points sorted by x; beyond the ends the end's value."""
    after = bisect_right(points, x, key=lambda p: p[0])
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def find_number(config: object, name: str) -> float | None:
    """The first number called `name` in nested mappings."""
    if not isinstance(config, dict):
        return None
    own = number(config.get(name))
    return own if own is not None else next((v for v in (find_number(c, name) for c in config.values()) if v), None)


def mapping_of(holder: Record, name: str) -> Record:
    """The mapping called `name`, or an empty one."""
    value = holder.get(name)
    return value if isinstance(value, dict) else {}
