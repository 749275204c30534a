"""bench/gpu_check.py as far as a CPU can tell: its sections exist, it runs to its end, and it survives broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_check

    return gpu_check


def test_every_section_is_a_described_function(gpu_check):
    assert sum(section.share for section in gpu_check.SECTIONS) < 1.5
    for section in gpu_check.SECTIONS:
        assert section.function().__doc__, section.name
    assert len({section.name for section in gpu_check.SECTIONS}) == len(gpu_check.SECTIONS)


def fake_worker(tmp_path: Path, body: str) -> Path:
    """A second process that says what `body` tells it to, in place of the real one."""
    script = tmp_path / "worker.py"
    script.write_text(f"import json, sys, time, os\nnames = json.loads(sys.argv[2])[2]\n{body}")
    return script


SAY = "say = lambda event, **f: print('\\x1e' + json.dumps({'event': event, **f}), flush=True)\n"


def supervised(gpu_check, monkeypatch, script: Path, names: list[str], minutes=1.0):
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setattr(gpu_check, "GRACE", 1.0)
    monkeypatch.setattr(gpu_check, "LEAST", 0.1)
    findings = gpu_check.Findings()
    gpu_check.supervise(gpu_check.Options(minutes=minutes), names, findings)
    return findings


def test_a_section_that_ends_its_process_is_named_and_the_next_ones_run(gpu_check, monkeypatch, tmp_path, capsys):
    body = SAY + (
        "for name in names:\n"
        "    say('begin', section=name)\n"
        "    if name == 'depth': os._exit(11)\n"
        "    print('a library talks')\n"
        "    say('row', section=name, columns={'check': name, 'error': 0.5, 'bound': 0.1, 'ok': False})\n"
        "    say('end', section=name)\n"
    )
    findings = supervised(gpu_check, monkeypatch, fake_worker(tmp_path, body), ["kda_values", "depth", "resume"])
    assert [row["section"] for row in findings.rows] == ["kda_values", "resume"]
    assert findings.broken == {"depth": "the process ended with status 11"}
    assert findings.failed == ["kda_values: kda_values", "resume: resume", "depth broke"]
    assert "FAILED" in capsys.readouterr().out


def test_a_section_that_hangs_is_ended(gpu_check, monkeypatch, tmp_path):
    body = SAY + (
        "for name in names:\n"
        "    say('begin', section=name)\n"
        "    if name == 'kda_speed': time.sleep(60)\n"
        "    say('end', section=name)\n"
    )
    findings = supervised(gpu_check, monkeypatch, fake_worker(tmp_path, body), ["kda_speed", "decode_speed"], 0.1)
    assert list(findings.broken) == ["kda_speed"] and "still running" in findings.broken["kda_speed"]
    assert "decode_speed" in findings.seconds
    assert findings.failed == []  # a table that is missing is no wrong number


def test_not_a_number_is_no_agreement(gpu_check, capsys):
    bench = gpu_check.Bench("cpu", True, 1.0, "depth")
    bench.check("nothing", float("nan"), 1.0)
    assert json.loads(capsys.readouterr().out[1:])["columns"]["ok"] is False


def test_unknown_names_are_refused(gpu_check):
    with pytest.raises(SystemExit, match="--only names 'speed'; allowed: environment, kda_values"):
        gpu_check.check(gpu_check.Options(only=("speed",)))
    with pytest.raises(SystemExit, match="--device is 'tpu'; allowed: cuda, cpu"):
        gpu_check.main(gpu_check.Options(device="tpu"))


def test_without_a_gpu_it_says_so_at_once(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "_finds_cuda", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no CUDA device here"):
        gpu_check.main(gpu_check.Options())


@pytest.mark.slow
def test_it_runs_to_its_end_on_a_cpu(tmp_path):
    figures = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--device", "cpu", "--quick", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped: no CUDA device" in done.stdout
    facts = json.loads(figures.read_text())
    checks = [row for row in facts["rows"] if "ok" in row]
    assert len(checks) > 100 and all(row["ok"] for row in checks) and facts["broken"] == {}
