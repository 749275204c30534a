"""`nanok3 inspect`: the release's numbers on the screen and in the JSON, and the files beside the config."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import tyro
from safetensors.torch import load_file, save_file

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.stages.inspect import InspectArgs, draw_schedule, main


@pytest.fixture
def run(capsys, monkeypatch):
    """run(width=80, **arguments) -> what is printed."""

    def inspect(width: int = 80, **arguments) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        main(InspectArgs(**arguments))
        return capsys.readouterr().out

    return inspect


def facts(run, **arguments) -> dict:
    return json.loads(run(json=True, **arguments))


# ---------------------------------------------------------------------- the release


def test_release_on_the_screen(run):
    text = " ".join(run(config="k3").split())
    for number in (
        "93 layers, 7,168 wide, vocabulary 163,840: 69 KDA and 24 gated MLA",
        "1 dense and 92 with 896 experts (16 + 2 shared a token)",
        "2,779,931,834,976",
        "2,722,740,830,208",
        "Active: 104.2 B without the embedding table",
        "105.4 B with it",
        "An expert: 33,030,144; a layer's: 29.6 B, in 92 layers; one in 56 is chosen.",
        "1,560,860,324,864 bytes in 497,220 tensors",
        "KDA state S 1,572,864 3 MiB x 69 207 MiB 414 MiB",
        "MLA latents, a token 576 1.125 KiB x 24 27 KiB 54 KiB",
        "expanded, as released 30,720",
        "3,584 x 3,584 pixels: 65,536 patches, 16,384 tokens",
        "the last read has 9 sources",
        "27.43 GiB at 1M",
        "1.561 TB, shared by all",
        "443.1 MiB, fixed",
    ):
        assert number in text


def test_release_as_json(run):
    record = facts(run, config="k3", context="1M", batch=2)
    assert record["config"] == "k3"
    assert [layer["mixer"] for layer in record["layers"]].count("kda") == 69
    assert [l for l, layer in enumerate(record["layers"]) if layer["banks"]] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert [layer["channels"] for layer in record["layers"]] == ["dense"] + 92 * ["experts"]
    assert record["parameters"]["total"] == 2_779_931_834_976
    assert sum(row["parameters"] for row in record["parameters"]["ledger"]) == record["parameters"]["total"]
    assert sum(row["active"] for row in record["parameters"]["ledger"]) == record["parameters"]["active"]
    assert sum(row["bytes"] for row in record["parameters"]["ledger"]) == record["checkpoint"]["bytes"]
    assert record["checkpoint"]["tensors"] == 497_220
    assert record["experts"]["sparsity"] == 56
    assert record["cache"]["recurrent_values"] == 69 * 1_572_864
    assert record["cache"]["bytes"] == {"1048576": 2 * (69 * 4 * (1_572_864 + 110_592) + 2**20 * 27_648)}
    flops = record["flops_per_token"]["1048576"]
    assert flops["prefill"]["whole_prompt"] == flops["prefill"]["total"] * 2**20
    assert flops["training"] == 3 * flops["prefill"]["total"]
    assert record["on_disk"] is None


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("config", ["k3", "tiny", "base"])
def test_no_line_is_wider_than_the_terminal(run, config, width):
    assert max(map(len, run(width, config=config).splitlines())) <= width


def test_numbers_are_never_cut(run):
    assert "…" not in run(config="k3")


# ---------------------------------------------------------------------- the schedule


def drawn(cfg: K3Config) -> list[str]:
    """The rows of layers, without legend."""
    return [line for line in draw_schedule(cfg).plain.splitlines() if re.match(r"\s*\d+-\d+", line)]


def test_schedule_of_the_release():
    rows = drawn(K3Config.k3())
    assert rows[0] == "    0-11 >k K K M K K K M K K K M   > the embedding"
    assert rows[1] == "   12-23 >K K K M K K K M K K K M   > layers 0-11"
    assert rows[7] == "   84-92 >K K K M K K K M M         > layers 72-83"
    assert len(rows) == 8


@pytest.mark.parametrize("cfg", [K3Config.tiny(), K3Config.base(), K3Config.k3().at_depth(37)])
def test_schedule_shows_every_layer(cfg):
    letters = re.findall(r"[>\s]([KMkm])", " ".join(row[8:].split("   >")[0] for row in drawn(cfg)))
    assert [letter.upper() for letter in letters] == [kind[0].upper() for kind in cfg.kinds]
    assert [letter.isupper() for letter in letters] == [cfg.is_moe(l) for l in range(cfg.num_hidden_layers)]


def test_schedule_without_attention_residuals(golden):
    text = draw_schedule(golden("d_kimi_linear_6l").config).plain
    assert ">" not in text and "depth source" not in text


def test_schedule_with_full_attention_residuals():
    (row,) = drawn(K3Config.tiny(attn_res_full=True))
    assert row.count(">") == 5


# ---------------------------------------------------------------------- folders


@pytest.mark.parametrize("name", ["a_k3_13l", "b_k3_7l_sharded", "d_kimi_linear_6l"])
def test_official_checkpoints_hold_what_their_config_asks_for(golden, run, name):
    record = facts(run, config=str(golden(name).folder))
    assert record["on_disk"]["differences"] == []
    assert record["on_disk"]["bytes"] == record["checkpoint"]["bytes"]
    assert record["on_disk"]["tensors"] == record["checkpoint"]["tensors"]
    assert "name by name what the config asks for" in run(200, config=str(golden(name).folder))


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_our_own_checkpoints_do_too(tmp_path, run, experts, dtype):
    save(K3(K3Config.tiny()), tmp_path / "model", experts=experts, dtype=dtype)
    assert facts(run, config=str(tmp_path))["on_disk"]["differences"] == []


def changed(golden, tmp_path, change) -> str:
    """A copy of a checkpoint with its tensors changed."""
    shutil.copy(golden("b_k3_7l").folder / "config.json", tmp_path)
    tensors = load_file(golden("b_k3_7l").folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return str(tmp_path)


NORM = "language_model.model.norm.weight"


def test_a_missing_tensor_is_named(golden, tmp_path, run):
    folder = changed(golden, tmp_path, lambda tensors: tensors.pop(NORM))
    assert facts(run, config=folder)["on_disk"]["differences"] == [
        f"{NORM} BF16 [72]: the config asks for 1, the files hold 0"
    ]
    text = run(120, config=folder)
    assert "which is not what the config asks for" in text and NORM in text


def test_another_dtype_and_an_unknown_tensor_are_named(golden, tmp_path, run):
    def change(tensors):
        tensors[NORM] = tensors[NORM].float()
        tensors["extra"] = torch.zeros(2)

    differences = facts(run, config=changed(golden, tmp_path, change))["on_disk"]["differences"]
    assert [line.split(":")[0] for line in differences] == ["extra F32 [2]", f"{NORM} BF16 [72]", f"{NORM} F32 [72]"]


def test_contexts_beyond_the_config(golden, run):
    folder = str(golden("d_kimi_linear_6l").folder)
    assert "at most 4,096 tokens" in run(config=folder)
    assert "at most" not in run(config=folder, context="4K")


def test_a_config_without_weights(tmp_path, run):
    K3Config.small().to_json(tmp_path / "config.json")
    assert facts(run, config=str(tmp_path))["on_disk"] is None


def test_a_truncated_file_is_refused(golden, tmp_path):
    shutil.copy(golden("b_k3_7l").folder / "config.json", tmp_path)
    whole = (golden("b_k3_7l").folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        main(InspectArgs(config=str(tmp_path)))


def test_a_model_without_experts_vision_or_mla(tmp_path, run):
    changes = {"first_k_dense_replace": 5, "kda_layers": (1, 2, 3, 4, 5), "full_attn_layers": ()}
    K3Config.tiny(**changes).to_json(tmp_path / "config.json")
    text = run(config=str(tmp_path))
    assert "pixels" not in text and "An expert" not in text and "MLA cache" not in text
    assert facts(run, config=str(tmp_path))["picture"] is None


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"config": "huge"}, "config is 'huge'; allowed: a preset"),
        ({"context": "4K,,1M"}, "context is ''; allowed"),
        ({"context": "long"}, "context is 'long'; allowed"),
        ({"batch": 0}, "batch is 0; allowed"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        main(InspectArgs(**arguments))


def test_flags():
    arguments = tyro.cli(InspectArgs, args=["small@12", "--context", "8K", "--batch", "3", "--json"])
    assert arguments == InspectArgs(config="small@12", context="8K", batch=3, json=True)
