"""The demo's road: what it runs, what it reuses, and that it stops where a step stops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tyro

from nanok3.stages import demo
from nanok3.stages.demo import DemoArgs, road
from nanok3.stages.serve import ServeArgs


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands instead of running them; each leaves behind what shows that it is finished."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        commands.append(command)
        marks = {"tokenizer": "tiktoken.model", "data": "manifest.json", "pretrain": "model/config.json"}
        if command[0] in marks:
            mark = Path(command[command.index("--out") + 1]) / marks[command[0]]
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text("{}")
        if command[0] == "eval":
            (Path(command[1]) / "final.json").write_text("{}")
        return 0

    monkeypatch.setattr(demo, "_run", run)
    return commands


def test_the_whole_road_once(ran: list[list[str]], tmp_path: Path) -> None:
    demo.main(DemoArgs(out=tmp_path / "demo"))
    assert [command[0] for command in ran] == ["tokenizer", "data", "pretrain", "eval", "generate"]


def test_a_second_run_reuses_everything_but_the_samples(ran: list[list[str]], tmp_path: Path) -> None:
    demo.main(DemoArgs(out=tmp_path / "demo"))
    ran.clear()
    demo.main(DemoArgs(out=tmp_path / "demo"))
    assert [command[0] for command in ran] == ["generate"]


def test_an_interrupted_training_is_resumed(ran: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("settings: {}")
    demo.main(DemoArgs(out=tmp_path))
    train = next(command for command in ran if command[0] == "pretrain")
    assert "--resume" in train


def test_a_failing_step_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_run", lambda command: 2)
    with pytest.raises(SystemExit) as stopped:
        demo.main(DemoArgs(out=tmp_path / "demo"))
    assert stopped.value.code == 2


@pytest.mark.parametrize("port", [8000, 8123])
def test_it_ends_by_offering_the_chat_page_and_can_start_it(
    ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    out = tmp_path / "demo"
    demo.main(DemoArgs(out=out, port=port))
    said = capsys.readouterr().out.replace("\n", "")
    assert f"serve {out}/run" in said and f"http://127.0.0.1:{port}/" in said and ran[-1][0] == "generate"
    demo.main(DemoArgs(out=out, port=port, serve=True))
    assert ran[-1] == ["serve", f"{out}/run", *(["--port", "8123"] if port == 8123 else [])]
    args = tyro.cli(ServeArgs, args=ran[-1][1:])
    assert (args.model, args.port) == (out / "run", port)


def test_every_command_parses(tmp_path: Path) -> None:
    """The flags the demo passes exist."""
    from nanok3.cli import COMMANDS
    from nanok3.stages import data, eval, generate, pretrain, tokenizer

    stages = {"data": data, "eval": eval, "generate": generate, "tokenizer": tokenizer}
    for args in (DemoArgs(), DemoArgs(quick=True, threads=1, minutes=2.0), DemoArgs(pictures=True)):
        for step in road(args):
            name, *flags = step.command
            if name == "pretrain":
                assert pretrain.parse(flags).train.minutes is not None
            else:
                tyro.cli(getattr(stages[name], COMMANDS[name].arguments), args=flags)


def test_a_held_out_picture_lies_there_to_be_shown(
    ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.example_picture(tmp_path) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final.json").write_text('{"pictures": {"examples": [{"png": "aGVsbG8="}]}}')
    demo.main(DemoArgs(out=tmp_path, chat=False))
    assert (tmp_path / "picture.png").read_bytes() == b"hello"
    assert f"/image {tmp_path}/picture.png" in capsys.readouterr().out.replace("\n", "")


def test_the_time_is_within_the_promise() -> None:
    for pictures in (False, True):
        assert sum(step.seconds for step in road(DemoArgs(pictures=pictures))) < 12 * 60
        assert sum(step.seconds for step in road(DemoArgs(quick=True, pictures=pictures))) < 2 * 60


def test_a_command_runs_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo._run(["--version"]) == 0
    assert "nanok3 0." in capfd.readouterr().out
    assert demo._run(["no-such-command"]) == 2
    assert sys.executable
