"""`nanok3 plan`: what is needed, whether it fits, what would; on the screen and as JSON."""

from __future__ import annotations

import json
import re

import pytest
import tyro

from nanok3 import capacity, ledger
from nanok3.config import K3Config
from nanok3.stages.plan import PlanArgs, collect, main, resolve

GIB = 2**30
EXAMPLE = {"config": "k3", "serve": True, "context": "1M", "devices": 16, "memory": "192GiB"}


@pytest.fixture
def run(capsys, monkeypatch):
    """run(width=80, **arguments) -> what is printed."""

    def plan(width: int = 80, **arguments) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        main(PlanArgs(**arguments))
        return capsys.readouterr().out

    return plan


def facts(run, **arguments) -> dict:
    return json.loads(run(json=True, **arguments))


def words(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------------- serving


def test_serving_the_release_at_a_million_tokens(run):
    record = facts(run, **EXAMPLE)
    rows = {row["name"]: row for row in record["bytes"]}
    assert record["for"] == "serving" and record["fits"] and record["context"] == 2**20
    assert rows["routed experts"]["total"] == 92 * 896 * 17_547_264
    assert rows["routed experts"]["device"] == 92 * 56 * 17_547_264
    assert rows["MLA latents"]["device"] == 2**20 * 27_648 == 27 * GIB
    assert rows["KDA states, float32"]["total"] == 69 * 4 * (1_572_864 + 110_592)
    assert record["bytes_per_device"] == sum(row["device"] for row in record["bytes"])
    assert record["total_bytes"] == sum(row["total"] for row in record["bytes"])
    assert record["limits"]["memory"] == -(-record["bytes_per_device"] // 0.9)
    assert record["instead"] == []


def test_serving_on_the_screen(run):
    text = words(run(**EXAMPLE))
    assert "Serving k3 on 16 devices of 192 GiB: 1 sequence of 1M tokens, MXFP4 experts, bfloat16" in text
    assert "MLA latents 432 GiB 27 GiB" in text
    assert "Layout: up to 56 of a layer's 896 experts on a device, everything else split over all 16." in text
    assert "Fits: " in text and "172.8 GiB planned with" in text
    assert "context up to 1,048,576 (the most the config allows)" in text


def test_what_would_fit_instead(run):
    arguments = {**EXAMPLE, "precision": "bf16"}
    text = words(run(**arguments))
    record = facts(run, **arguments)
    assert not record["fits"]
    assert "Does not fit: " in text and "What would fit, all else equal:" in text
    assert f"devices at least {record['limits']['devices']}" in text
    assert "settings --precision mxfp4: " in text
    assert f"model at_depth({record['instead'][-1]['depth']}): " in text


def test_settings_that_fit_only_together(run):
    text = words(
        run(config="k3", train=True, context="4K", devices=1024, batch=1024, memory="80GiB", optimizer="adamw")
    )
    assert "settings --optimizer muon --recompute: " in text and "and with these" in text


def test_without_a_memory_size_the_devices_are_counted(run):
    record = facts(run, config="k3", serve=True)
    counts = record["fewest_devices"]
    plan = resolve(PlanArgs(config="k3", serve=True))
    assert counts["80GiB"] == capacity.fewest_devices(plan, 0.9 * 80 * GIB)
    assert counts["24GiB"] > counts["80GiB"] > counts["288GiB"]
    assert "fits" not in record
    assert f"80 GiB at least {counts['80GiB']}" in words(run(config="k3", serve=True))


def test_more_than_any_number_of_devices(run):
    text = words(run(config="k3", serve=True, context="1M", batch=4, split=1))
    assert "24 GiB more than 4,096, if any number" in text


def test_a_rate(run):
    plain, rated = (facts(run, **EXAMPLE, batch=4, **extra)["work"] for extra in ({}, {"tokens_per_second": 100.0}))
    assert plain["flops_per_token"] == ledger.decode_flops(K3Config.k3(), 2**20).total
    assert rated["flops_per_second_and_device"] == 100 * plain["flops_per_token"] / 16
    assert rated["bytes_per_second_and_device"] == 100 / 4 * plain["bytes_per_step"] / 16
    assert "At 100 tokens a second, a device does" in words(run(**EXAMPLE, tokens_per_second=100.0))


def test_a_fixed_split(run):
    record = facts(run, **EXAMPLE, split=1)
    assert record["split"] == 1
    assert {row["name"]: row for row in record["bytes"]}["other weights"]["device"] > 100 * GIB
    assert "a copy of everything else on every device" in words(run(**EXAMPLE, split=1))
    assert "split over groups of 4" in words(run(**EXAMPLE, split=4))


def test_serving_a_checkpoint(golden, run):
    record = facts(run, config=str(golden("a_k3_13l").folder), serve=True, context="1K")
    weights = sum(row["total"] for row in record["bytes"] if "experts" in row["name"] or "weights" in row["name"])
    assert weights == sum(value.nbytes for value in golden("a_k3_13l").load(dtype=None).state_dict().values())


def test_a_context_beyond_the_config(golden, run):
    folder = str(golden("d_kimi_linear_6l").folder)
    assert "at most 4,096 tokens" in run(config=folder, serve=True, context="8K", memory="1GiB")
    assert facts(run, config=folder, serve=True, context="8K", memory="1GiB")["limits"]["context"] == 8192


# ---------------------------------------------------------------------- training


def test_training_on_one_device(run):
    arguments = {"config": "base", "train": True, "context": "4K", "batch": 8, "memory": "80GiB"}
    record = facts(run, **arguments)
    cfg = K3Config.base()
    rows = {row["name"]: row["total"] for row in record["bytes"]}
    assert record["for"] == "training" and record["precision"] == "bf16"
    assert sum(size for name, size in rows.items() if "masters" in name) == 4 * ledger.parameters(cfg)
    assert rows["activations"] == 8 * 4096 * ledger.activation_bytes(cfg, 2)
    assert record["work"] == {"flops_per_token": ledger.flops_per_token(cfg, 4096, training=True)}
    assert "Training base on 1 device of 80 GiB: 8 sequences of 4K tokens, bf16" in words(run(**arguments))


def test_recomputation_saves_activations(run):
    sizes = [
        facts(run, config="small", train=True, context="4K", recompute=recompute)["bytes_per_device"]
        for recompute in (False, True)
    ]
    assert sizes[1] < sizes[0] / 2


def test_a_rate_of_training(run):
    work = facts(run, config="small", train=True, devices=2, tokens_per_second=1e4)["work"]
    assert work["flops_per_second_and_device"] == 1e4 * work["flops_per_token"] / 2
    assert "bytes_per_second_and_device" not in work


# ---------------------------------------------------------------------- form and mistakes


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize(
    "arguments",
    [
        EXAMPLE,
        {**EXAMPLE, "precision": "bf16", "split": 1, "tokens_per_second": 1000.0},
        {"config": "k3", "train": True, "devices": 1024, "batch": 4096, "memory": "80GB", "optimizer": "adamw"},
    ],
)
def test_no_line_is_wider_than_the_terminal(run, arguments, width):
    text = run(width, **arguments)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "exactly one of --serve and --train"),
        ({"serve": True, "train": True}, "exactly one of --serve and --train"),
        ({"serve": True, "config": "huge"}, "config is 'huge'; allowed: a preset"),
        ({"serve": True, "memory": "192"}, "memory is '192'; allowed: a number with a unit"),
        ({"serve": True, "context": "0"}, "context is '0'; allowed: a whole number"),
        ({"serve": True, "batch": 0}, "batch is 0; allowed"),
        ({"serve": True, "devices": -1}, "devices is -1; allowed"),
        ({"serve": True, "prefill_chunk": 0}, "prefill_chunk is 0; allowed"),
        ({"serve": True, "usable": 1.5}, "usable is 1.5; allowed"),
        ({"serve": True, "usable": 0.0}, "usable is 0; allowed"),
        ({"serve": True, "tokens_per_second": 0.0}, "tokens_per_second is 0; allowed"),
        ({"serve": True, "devices": 16, "split": 5}, "split is 5; allowed: 1, 2, 4, 8, 16"),
        ({"train": True, "devices": 6, "split": 4}, "split is 4; allowed: 1, 2, 3, 6 (divisors of 6 devices)"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        main(PlanArgs(**arguments))


def test_flags():
    line = "k3 --serve --context 1M --devices 16 --memory 192GiB"
    assert tyro.cli(PlanArgs, args=line.split()) == PlanArgs(**EXAMPLE)


def test_the_record_is_plain():
    plan = resolve(PlanArgs(**EXAMPLE))
    record = collect(plan, 192 * GIB, 0.9, None)
    assert json.loads(json.dumps(record)) == record
