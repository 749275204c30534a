"""`nanok3 bench`: finds the scripts, runs them, and makes a page of their figures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nanok3.stages import bench
from nanok3.stages.bench import BenchArgs, about, benchmarks, checkout, chosen, main, report

GOOD = '''"""Measures nothing.

More.
"""
import json, os, sys
from pathlib import Path
if __name__ == "__main__":
    path = Path(sys.argv[sys.argv.index("--json") + 1] if "--json" in sys.argv else "runs/bench/good.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"argv": " ".join(sys.argv[1:]), "policy": os.environ["OMP_WAIT_POLICY"]}
    path.write_text(json.dumps({"machine": {"load": 0.5}, "options": {"json": "x", "rounds": 3}, "rows": [said]}))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout with a good benchmark, a failing one and a file that is none."""
    place = tmp_path / "bench"
    place.mkdir()
    (place / "good.py").write_text(GOOD)
    (place / "bad.py").write_text(
        '"""Fails."""\nif __name__ == "__main__":\n    raise SystemExit(3)  # runs/bench/bad\n'
    )
    (place / "helper.py").write_text('"""Not a benchmark."""\n')
    (place / "harness.py").write_text((checkout() / "harness.py").read_text())
    monkeypatch.setattr(bench, "checkout", lambda: place)
    monkeypatch.chdir(tmp_path)
    return place


def test_the_scripts_of_the_checkout_are_found():
    found = benchmarks(checkout())
    assert {"kda", "fused"} <= found.keys() and "harness" not in found
    assert all(about(script) for script in found.values())


def test_without_a_name_they_are_listed(folder, capsys):
    main(BenchArgs())
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["bad", "Fails."],
        ["good", "Measures nothing."],
    ]


def test_the_list_fits_into_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    scripts = benchmarks(checkout())
    lines = list(bench.listed(scripts))
    assert max(map(len, lines)) <= 80 < sum(map(len, lines)) / len(scripts)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(scripts)
    assert {len(line) - len(line.lstrip()) for line in lines} == {0, 23}


def test_names_are_spelt_out_once(folder):
    scripts = benchmarks(folder)
    assert chosen(["good", "all"], scripts) == ["good", "bad"]
    assert chosen(["go", "b"], scripts) == ["good", "bad"]
    with pytest.raises(ValueError, match="names holds 'b'"):
        chosen(["b"], {**scripts, "both": folder})
    assert chosen(["quick"], {**scripts, "startup": folder, "kda": folder}) == ["kda", "startup"]
    with pytest.raises(ValueError, match="names holds ''"):
        chosen([""], scripts)
    with pytest.raises(ValueError, match="names holds 'nothing'; allowed: quick, all, bad, good"):
        chosen(["nothing"], scripts)


def test_all_leaves_out_what_takes_hours_or_cannot_run_and_says_so(folder, capsys, monkeypatch):
    """By its own name each runs."""
    scripts = dict.fromkeys(("good", "quality", "gpu_check"), folder / "good.py")
    monkeypatch.setattr(bench, "benchmarks", lambda _: scripts)
    ran = []
    monkeypatch.setattr(bench, "run", lambda name, *_: ran.append(name) or True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    main(BenchArgs(names=("all",)))
    said = capsys.readouterr().out.splitlines()
    assert ran == ["good"]
    assert said == [
        "skipped quality: it takes 2.5 h; `nanok3 bench quality` runs it",
        "skipped gpu_check: torch finds no GPU here",
    ]
    main(BenchArgs(names=("all", "quality")))
    assert ran == ["good", "good", "quality"] and "quality" not in capsys.readouterr().out


def test_every_script_is_told_of_with_its_time():
    """In the list, and as a row of docs/benchmarks.md."""
    scripts = benchmarks(checkout())
    assert bench.TIMES.keys() == scripts.keys() and set(bench.QUICK) < scripts.keys()
    page = (checkout().parent / "docs" / "benchmarks.md").read_text()
    missing = [name for name in scripts if f"| `{name}` | {bench.TIMES[name]} |" not in page]
    assert not missing


def test_flags_reach_the_script_and_threads_do_not_spin(folder):
    main(BenchArgs(names=("good",), threads=2, rounds=7, json=folder / "figures"))
    (row,) = json.loads((folder / "figures" / "good.json").read_text())["rows"]
    assert row == {"argv": f"--threads 2 --rounds 7 --json {folder / 'figures' / 'good.json'}", "policy": "passive"}


def test_a_failure_does_not_stop_the_others_but_is_told(folder, capfd):
    with pytest.raises(SystemExit) as ended:
        main(BenchArgs(names=("bad", "good")))
    assert ended.value.code == 1 and "failed: bad" in capfd.readouterr().err
    assert (folder.parent / "runs/bench/good.json").exists()


@pytest.mark.parametrize(
    ("error", "said"), [("KeyboardInterrupt", b""), ("BrokenPipeError", b""), ("OSError", b"Trace")]
)
def test_the_readers_end_and_the_users_are_no_tracebacks(folder, error, said):
    (folder / "ends.py").write_text(f"import harness\nraise {error}\n")
    done = subprocess.run([sys.executable, folder / "ends.py"], capture_output=True, check=False)
    assert done.stderr[:5] == said and done.returncode != 0
    assert (done.returncode == bench.CLOSED_PIPE) == (error == "BrokenPipeError")


def test_a_closed_pipe_ends_all_of_them(folder):
    (folder / "good.py").write_text("import harness\nraise BrokenPipeError\n")
    with pytest.raises(BrokenPipeError):
        bench.run("good", folder / "good.py", BenchArgs())


def test_the_report_is_one_table_a_file(folder):
    main(BenchArgs(names=("good",)))
    page = report(folder.parent / "runs/bench", folder).splitlines()
    assert page[0] == "### good" and page[2] == "load 0.5. Flags: rounds=3."
    assert page[4:] == ["| argv | policy |", "|---|---|", "|  | passive |"]


def test_a_report_of_nothing_or_of_something_else_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="holds no figures; run"):
        report(tmp_path / "none", folder)
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"x.json holds no figures of a benchmark"):
        report(tmp_path, folder)


def test_without_a_checkout_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "nanok3" / "stages" / "bench.py"))
    with pytest.raises(ValueError, match="benchmarks live in the checkout"):
        checkout()


@pytest.mark.parametrize(("name", "value"), [("threads", 0), ("rounds", -1), ("threads", 5000)])
def test_numbers_out_of_range_are_named(name, value, folder):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must lie between 1 and 1024"):
        main(BenchArgs(names=("good",), **{name: value}))
