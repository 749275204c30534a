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


def test_threads_do_not_spin_unless_asked_to(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    import os

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    main(["inspect", "tiny"])
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    main(["inspect", "tiny"])
    assert os.environ["OMP_WAIT_POLICY"] == "active"
