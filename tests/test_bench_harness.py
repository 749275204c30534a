"""What the benchmarks share: turns, medians, tables, figures on disk."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("bench_harness", BENCH / "harness.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_harness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_contenders_take_turns_and_the_first_round_is_not_counted(harness):
    order, now = [], iter(range(1000))
    forms = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = harness.rounds(forms, 3, clock=lambda: next(now))
    assert "".join(order) == "abcbcacababc"
    assert seconds == {"a": [1] * 3, "b": [1] * 3, "c": [1] * 3}


def test_rows_give_median_spread_best_and_ratio(harness):
    seconds = {"ours": [0.001, 0.002, 0.003, 0.1], "theirs": [0.005] * 4}
    ours, theirs = harness.rows_of("x", seconds, "ours", lambda name, median: {"rate": 1 / median})
    assert (ours.median_ms, ours.best_ms, ours.ratio) == (2.5, 1.0, 1.0)
    assert ours.spread_ms == pytest.approx(0.5)
    assert theirs.ratio == 2.0 and theirs.record()["rate"] == 200


def test_different_results_are_not_timed(harness):
    harness.must_agree("x", 1e-6, 1e-5)
    for error in (1e-4, float("nan")):
        with pytest.raises(SystemExit, match="nothing to time"):
            harness.must_agree("x", error, 1e-5)


def test_cpu_time_of_many_threads_is_refused(harness):
    with pytest.raises(SystemExit, match="--threads 1"):
        harness.Options(threads=2, cpu_time=True).clock()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"threads": 10**9}, "threads is 1000000000; it must lie between 1 and 1024"),
        ({"rounds": -3}, "rounds is -3; it must be at least 1"),
        ({"tokens": [8, 0]}, "tokens is 0; it must be at least 1"),
        ({"depths": [0, -1]}, "depths is -1; it must be at least 0"),
    ],
)
def test_a_number_that_measures_nothing_is_refused(harness, flags, said):
    @dataclass
    class Options(harness.Options):
        tokens: list[int] = field(default_factory=lambda: [1])
        depths: list[int] = field(default_factory=lambda: [0])
        name: str | None = None

    Options(threads=1024, tokens=[1, 2], depths=[0])
    with pytest.raises(SystemExit, match=said):
        Options(**flags)


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_measured(harness, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"json is .*file/x\.json; .*file is no folder"):
        harness.Options(json=tmp_path / "file" / "x.json")
    with pytest.raises(SystemExit, match="which is a folder"):
        harness.Options(json=tmp_path)


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCH.glob("*.py")))
def test_every_benchmarks_own_flags_are_allowed(script, monkeypatch):
    """What it does without flags passes the check; -1 does not, whatever else it checks."""
    if "Options):" not in (BENCH / f"{script}.py").read_text():
        return
    monkeypatch.syspath_prepend(str(BENCH))
    options = importlib.import_module(script).Options
    options()
    with pytest.raises(SystemExit, match="threads is -1; it must be at least 1"):
        options(threads=-1)


def test_a_table_lines_up_and_keeps_its_records(harness, capsys):
    table = harness.Table()
    table.add([harness.Row("one", "ours", 1.0, 0.1, 0.9, 1.0, {"of_peak": 0.5})])
    table.add([{"case": "two", "contender": "theirs", "median_ms": 12345.0, "ratio": 12.3}])
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == "case contender median ms spread ms best ms ratio of peak".split()
    assert first.endswith("50%") and "1.00x" in first
    assert second.split() == ["two", "theirs", "12,345", "12x"]
    assert first.index("ours") == second.index("theirs") == heading.index("contender")
    assert len(table.records) == 2


def test_json_holds_the_machine_the_flags_and_the_rows(harness, tmp_path):
    path = tmp_path / "new" / "some.json"
    harness.write_json(path, [{"a": 1}], harness.Options(threads=2, json=path), peak=3.0)
    whole = json.loads(path.read_text())
    assert whole["name"] == "some" and whole["peak"] == 3.0 and whole["rows"] == [{"a": 1}]
    assert whole["options"]["threads"] == whole["machine"]["threads"] == 2
    assert {"date", "cpu", "load", "commit", "torch"} <= whole["machine"].keys()
    assert [p.name for p in path.parent.iterdir()] == ["some.json"]
