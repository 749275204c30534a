"""The command line: answers at once, and a mistake is one line, not a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanok3.cli import COMMANDS, main


def test_help_does_not_load_torch() -> None:
    code = "import sys; from nanok3.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_does_not_load_torch(command: str) -> None:
    code = (
        "import sys\nfrom nanok3.cli import main\n"
        f"try: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "unknown command 'serv'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["pretrain", "--data", "nowhere", "--train.steps", "1"], "nowhere"),
        (["pretrain", "--out", "nowhere", "--resume"], "nowhere/config.yaml does not exist"),
        (["generate", "nowhere", "hello"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["data", "--tokenizer", "nowhere"], "nowhere"),
        (["eval", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nanok3 {argv[0]}: ") and message in error
    assert "Traceback" not in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("nanok3 0.")


@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "0"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_spin_briefly_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path, chosen: dict[str, str]
) -> None:
    import os

    monkeypatch.chdir(tmp_path)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
        if name in chosen:
            monkeypatch.setenv(name, chosen[name])
    main(["inspect", "tiny"])
    expected = chosen if "OMP_WAIT_POLICY" in chosen else {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "1"} | chosen
    found = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    assert {name: value for name, value in found.items() if value is not None} == expected
    for name in expected:
        monkeypatch.delenv(name, raising=False)
