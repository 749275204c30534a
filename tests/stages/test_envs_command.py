"""`nanok3 envs`: the list, an episode on screen, tasks in a file, mistakes."""

from __future__ import annotations

import json

import pytest

from nanok3.cli import main
from nanok3.envs.attacks import ATTACKS
from nanok3.envs.catalogue import kinds
from nanok3.envs.episode import solution
from nanok3.stages.envs import EnvsArgs, show_attacked
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


def test_what_attacks_earn(capsys):
    envs(EnvsArgs(kind="lookup", count=2, policy="attacks"))
    *attacks, solution = capsys.readouterr().out.splitlines()
    assert len(attacks) == len(ATTACKS) and all(line.split()[-2:] == ["0", "0"] for line in attacks)
    assert solution.split() == ["the", "solution", "1", "1"]


def test_an_attack_that_earns_something_is_named(capsys, monkeypatch):
    monkeypatch.setitem(ATTACKS, "the answer", lambda task: solution(task))
    show_attacked(kinds()["sums"], EnvsArgs(count=2))
    some = len(ATTACKS) - 1
    said = f"{some} of {some + 1} attacks earned nothing, 2 of 2 solved; earned something: the answer"
    assert said in capsys.readouterr().out


def test_tasks_in_a_file(tmp_path):
    envs(EnvsArgs(kind="ask", count=3, json=tmp_path / "tasks.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 3 and lines[0]["tools"][0]["type"] == "function"


def test_mistakes(capsys):
    assert main(["envs", "nothing"]) == 2 and "kind is 'nothing'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="count is 0"):
        envs(EnvsArgs(kind="sums", count=0))
