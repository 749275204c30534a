"""Reading a run folder: killed writers, resumed runs, missing files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from nanok3.train.run_record import find_number, interpolate, number, read_run


def write_lines(folder: Path, *records: dict[str, Any] | str) -> None:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def train(step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "tokens": 100 * step, "loss": 1.0 / step, **fields}


def test_an_empty_folder_is_an_empty_run(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert run.name == tmp_path.name and run.records == {} and run.config == {} and run.final == {}
    assert run.curve("train", "loss") == [] and run.x_name == "step"


def test_curves_run_over_tokens(tmp_path: Path) -> None:
    write_lines(tmp_path, train(1), train(2), {"kind": "eval", "step": 2, "slices": {}})
    run = read_run(tmp_path)
    assert run.curve("train", "loss") == [(100, 1.0), (200, 0.5)]
    assert run.x(run.kind("eval")[0]) == 200


def test_without_token_counts_curves_run_over_steps(tmp_path: Path) -> None:
    write_lines(tmp_path, {"kind": "train", "step": 7, "loss": 1.5})
    run = read_run(tmp_path)
    assert run.x_name == "step" and run.curve("train", "loss") == [(7, 1.5)]


def test_a_half_written_last_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train(1)) + '\n{"kind": "train", "st')
    run = read_run(tmp_path)
    assert len(run.kind("train")) == 1 and run.unreadable == 0


def test_unreadable_lines_in_the_middle_are_counted(tmp_path: Path) -> None:
    write_lines(tmp_path, train(1), '{"kind": "tra', "[1, 2]", '{"step": 3}', '{"kind": "train"}', "", train(2))
    run = read_run(tmp_path)
    assert [r["step"] for r in run.kind("train")] == [1, 2] and run.unreadable == 4


def test_a_resumed_run_discards_what_it_repeats(tmp_path: Path) -> None:
    """Killed after step 4, resumed from a checkpoint of step 2, and so far at step 3."""
    lines = [
        train(1),
        train(2),
        {"kind": "eval", "step": 2, "slices": {"a": {"loss": 1}}},
        train(3),
        train(4),
        {"kind": "sample", "step": 4, "prompt": "p", "text": "old"},
        {"kind": "event", "step": 4, "message": "killed"},
        train(3, loss=0.123),
    ]
    write_lines(tmp_path, *lines)
    run = read_run(tmp_path)
    assert [(r["step"], r["loss"]) for r in run.kind("train")] == [(1, 1.0), (2, 0.5), (3, 0.123)]
    assert run.kind("sample") == [] and len(run.kind("eval")) == 1 and len(run.kind("event")) == 1
    assert run.repeated == 3


def test_the_last_of_two_lines_for_a_step_counts(tmp_path: Path) -> None:
    slices = [{"kind": "eval", "step": 5, "slices": {"a": {"loss": loss}}} for loss in (3, 2)]
    samples = [{"kind": "sample", "step": 5, "prompt": prompt, "text": "x"} for prompt in "pq"]
    write_lines(tmp_path, train(5), *slices, *samples)
    run = read_run(tmp_path)
    assert [r["slices"]["a"]["loss"] for r in run.kind("eval")] == [2] and len(run.kind("sample")) == 2


def test_values_that_are_not_finite_become_nan(tmp_path: Path) -> None:
    write_lines(tmp_path, train(1), '{"kind": "train", "step": 2, "tokens": 200, "loss": NaN}', train(3, loss=None))
    curve = read_run(tmp_path).curve("train", "loss")
    assert curve[0] == (100, 1.0) and all(math.isnan(y) for _, y in curve[1:])


def test_other_line_separators_inside_a_sample_end_no_line(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    write_lines(tmp_path, {"kind": "sample", "step": 1, "prompt": "", "text": text})
    run = read_run(tmp_path)
    assert [r["text"] for r in run.kind("sample")] == [text] and run.unreadable == 0


def test_broken_config_and_final_are_shown_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1, 2")
    (tmp_path / "final.json").write_text('{"slices": ')
    run = read_run(tmp_path)
    assert run.config == {} and run.config_text == "a: [1, 2" and run.final == {}


def test_settings_are_found_wherever_they_are_nested() -> None:
    config = {"command": "x", "settings": {"out": "r", "train": {"seq_len": 512}}}
    assert find_number(config, "seq_len") == 512 and find_number(config, "other") is None


def test_numbers_and_interpolation() -> None:
    assert [number(v) for v in (1, 2.5, True, None, "3", math.inf, math.nan)] == [1, 2.5, *[None] * 5]
    points = [(0.0, 0.0), (10.0, 100.0), (20.0, 400.0)]
    assert [interpolate(points, x) for x in (-1, 0, 5, 10, 15, 99)] == [0, 0, 50, 100, 250, 400]
