"""`nanok3 envs`: the list, an episode on screen, tasks in a file, mistakes."""

from __future__ import annotations

import json

import pytest

from nanok3.cli import main
from nanok3.stages.envs import EnvsArgs
from nanok3.stages.envs import main as envs


def test_the_list(capsys):
    assert main(["envs"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("lookup", "functions", "gym-chain_sum", "needs bubblewrap", "sandboxes:"))


def test_an_episode(capsys):
    envs(EnvsArgs(kind="lookup"))
    shown = capsys.readouterr().out
    assert "-> mail_send" in shown and "done, reward 1 (1 of 1 requests fulfilled)" in shown
    envs(EnvsArgs(kind="sums", count=2, policy="nothing"))
    assert capsys.readouterr().out.count("reward 0") == 2


def test_tasks_in_a_file(tmp_path):
    envs(EnvsArgs(kind="ask", count=3, json=tmp_path / "tasks.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 3 and lines[0]["tools"][0]["type"] == "function"


def test_mistakes(capsys):
    assert main(["envs", "nothing"]) == 2 and "kind is 'nothing'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="count is 0"):
        envs(EnvsArgs(kind="sums", count=0))
