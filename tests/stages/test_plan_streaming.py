"""`nanok3 plan --experts stream` and `--routing-trace`: the release from a disk, and a run that was recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nanok3.serve.routing_trace import Trace
from nanok3.stages.plan import PlanArgs, main

GIB = 2**30
EXPERT = 17_547_264
"""3 x 3,584 x 3,072 weights of 4.25 bits: the release's."""


@pytest.fixture
def run(capsys, monkeypatch):
    def plan(**arguments):
        monkeypatch.setenv("COLUMNS", "100")
        main(PlanArgs(**arguments))
        return capsys.readouterr().out

    return plan


def test_the_release_from_a_disk(run):
    facts = json.loads(run(experts="stream", memory="192GiB", disk_bandwidth="3GB/s", json=True))
    assert facts["expert_bytes"] == EXPERT and facts["experts"] == 92 * 896
    assert facts["bytes_per_token_cold"] == 92 * 16 * EXPERT == 25_829_572_608
    assert facts["tokens_per_second_cold"] == pytest.approx(3e9 / 25_829_572_608)
    # without padding and headers, trunk and experts are the release
    assert facts["trunk_bytes"] + facts["experts"] * EXPERT == pytest.approx(1_560_860_324_864, rel=1e-5)
    held = int(0.9 * 192 * GIB - facts["trunk_bytes"] - facts["other_bytes"]) // EXPERT
    assert facts["experts_in_memory"] == held and facts["hit_rate_even"] == held / (92 * 896)
    assert facts["tokens_per_second"] == pytest.approx(3e9 / (25_829_572_608 * (1 - held / 82_432)))


def test_on_the_screen(run):
    text = " ".join(run(experts="stream", memory="192GiB", disk_bandwidth="7GB/s").split())
    assert "read for a token, none in memory: 1,472 24.06 GiB" in text
    assert "a disk of 7 GB/s gives at most 0.271 tokens/s" in text
    assert "Does not fit into 64 GiB" in run(experts="stream", memory="64GiB")
    assert "With --memory" in run(experts="stream")
    assert "All of them" in run(config="tiny", experts="stream", memory="64GiB")


def test_a_recorded_run(run, tmp_path):
    chosen = np.array([[0, 1], [0, 2], [0, 1], [0, 3]], np.uint16)
    layers, tokens = np.array([1, 1, 1, 1], np.uint16), np.ones(4, np.uint32)
    Trace(8, 1 << 20, layers, tokens, chosen).save(tmp_path / "t.npz")
    facts = json.loads(run(routing_trace=tmp_path / "t.npz", memory="3MiB", json=True))["trace"]
    assert (facts["tokens"], facts["asked"], facts["used"], facts["experts"]) == (4, 8, 4, 8)
    by_places = {budget["places"]: budget["hit_rates"] for budget in facts["budgets"]}
    assert by_places[2] == {"LRU": 3 / 8, "pinned": 4 / 8, "optimal": 4 / 8}
    assert by_places[3] == by_places[4] == {"LRU": 4 / 8, "pinned": 4 / 8, "optimal": 4 / 8}
    text = run(routing_trace=tmp_path / "t.npz")
    assert "4 of 8 experts" in text and "Recommended: --expert-memory 2MiB" in text


def test_what_makes_no_sense_is_refused(run, tmp_path):
    for arguments, message in (
        ({"experts": "stream", "train": True}, "with --train"),
        ({"experts": "stream", "devices": 2}, "devices is 2; with experts 'stream' it must be 1"),
        ({"experts": "stream", "disk_bandwidth": "fast"}, "disk_bandwidth is 'fast'"),
        ({"routing_trace": tmp_path / "none"}, "is no trace"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**arguments)
    Trace(8, 1 << 20, np.ones(1, np.uint16), np.ones(1, np.uint32), np.ones((1, 4), np.uint16)).save(tmp_path / "t")
    with pytest.raises(ValueError, match="memory is 1048576; it must be at least 4194304 bytes"):
        run(routing_trace=tmp_path / "t", memory="1MiB")
