"""`nanok3 pretrain` as a user runs it: settings from three places, a run, a kill, and going on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from nanok3.cli import main
from nanok3.data.files import only_one
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, prepare
from nanok3.data.tokenizer import train_tokenizer
from nanok3.model.weights import load
from nanok3.stages.pretrain import PretrainArgs, model_config, parse

MODEL = ["--preset", "tiny", "--depth", "4", "--set", "num_experts=4", "hidden_size=64"]
TRAIN = ["--train.batch-size", "2", "--train.seq-len", "32", "--train.precision", "float32", "--train.eval-every", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "text").mkdir()
    texts = [f"{n} times {n + i} is {n * (n + i)}, said the clerk.\n" * 4 for n in range(12) for i in range(5)]
    for number, text in enumerate(texts):
        (folder / "text" / f"{number:03}.txt").write_text(text)
    prepare([Source("sums", path=folder / "text")], train_tokenizer(texts, 540), folder / "data")
    return folder / "data"


def run(data: Path, out: Path, *flags: str) -> int:
    return main(["pretrain", "--data", str(data), "--out", str(out), *MODEL, *TRAIN, *flags])


# ---------------------------------------------------------------------- settings


def test_flags_over_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: tiny\nout: from-yaml\ntrain: {minutes: 3, lr: 5e-1, seed: 7}\n")
    args = parse(["--config", str(file), "--train.lr", "0.25", "--depth", "6"])
    assert (args.preset, args.out, args.depth) == ("tiny", Path("from-yaml"), 6)
    assert (args.train.lr, args.train.seed, args.train.minutes) == (0.25, 7, 3)
    assert args.train.grad_clip == PretrainArgs().train.grad_clip


def test_a_preset_brings_its_recipe_and_flags_go_before(tmp_path: Path) -> None:
    args = parse(["--preset", "vision-small", "--train.lr", "0.25"])
    assert (args.train.minutes, args.train.vision_optimizer, args.train.lr) == (30, "muon", 0.25)
    assert parse(["--preset=vision-small", "--train.steps", "5"]).train.minutes is None
    assert parse(["--preset", "small"]).train == PretrainArgs().train
    file = tmp_path / "run.yaml"
    file.write_text("preset: vision-small\ntrain: {lr: 5e-1}\n")
    train = parse(["--config", str(file)]).train
    assert (train.lr, train.vision_optimizer) == (0.5, "muon")
    file.write_text("preset: small\n")
    assert parse(["--config", str(file), "--preset", "vision-small"]).train.vision_optimizer == "muon"


def test_steps_on_the_command_line_replace_minutes_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {minutes: 3}\n")
    args = parse([f"--config={file}", "--train.steps=5"])
    assert (args.train.steps, args.train.minutes) == (5, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preste: tiny\n", "unknown settings .*preste"),
        ("train: {learning_rate: 1}\n", r"unknown settings .*train\.learning_rate"),
        ("- a list\n", "must hold a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("train: 3\n", "must hold a mapping"),
        ("train: {lr: fast}\n", r"train\.lr is 'fast'; it must be float"),
        ("train: {batch_size: 2.5}\n", r"train\.batch_size is 2\.5; it must be int"),
        ("set: num_experts=4\n", r"set is 'num_experts=4'; it must be a list"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"run\.yaml.*{message}|{message}"):
        parse(["--config", str(file)])


def test_model_config() -> None:
    cfg = model_config(PretrainArgs(preset="small", depth=6, set=("num_experts=8", "latent_moe_use_norm=false")), 700)
    assert (cfg.num_hidden_layers, cfg.num_experts, cfg.vocab_size) == (6, 8, 700)
    assert cfg.latent_moe_use_norm is False and cfg.bos_token_id == 700 - 256
    with pytest.raises(ValueError, match=r"'experts' is no field of the config; allowed: .*num_experts"):
        model_config(PretrainArgs(set=("experts=8",)), 700)
    with pytest.raises(ValueError, match="preset is 'huge'; allowed: tiny, small, base, k3"):
        model_config(PretrainArgs(preset="huge"), 700)
    with pytest.raises(ValueError, match="num_experts_per_token"):
        model_config(PretrainArgs(set=("num_experts=1",)), 700)


# ---------------------------------------------------------------------- runs


def test_a_run_from_start_to_model(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unchecked) -> None:
    out = tmp_path / "run"
    assert run(data, out, "--train.steps", "6", "--train.save-every", "3") == 0
    printed = capsys.readouterr().out
    assert "parameters, each with one rule" in printed and "bits/byte" in printed
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["settings"]["train"]["steps"] == 6 and config["command"].startswith("nanok3")
    assert json.loads((out / "model" / "nanok3.json").read_text())["stage"] == "pretrain"
    assert (out / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    model = load(out / "model", dtype=torch.float32)
    assert model.cfg.num_hidden_layers == 4
    assert main(["generate", str(out), "3 times", "--max-tokens", "4", "--seed", "0"]) == 0


def test_an_old_run_is_not_overwritten(data: Path, tmp_path: Path, capsys, unchecked) -> None:
    out = tmp_path / "run"
    assert run(data, out, "--train.steps", "2") == 0
    assert run(data, out, "--train.steps", "2") == 2
    assert "add --resume, or choose another folder" in capsys.readouterr().err


def test_length_is_asked_for(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data, tmp_path / "run") == 2
    assert "--train.steps N or --train.minutes M" in capsys.readouterr().err


def test_unknown_source_in_the_mixture(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data, tmp_path / "run", "--train.steps", "2", "--mixture", "prose:1") == 2
    assert "'prose' is no source of" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["5", "9-3", "-4", "0-1e3"])
def test_rows_of_a_mixture_that_are_none(data: Path, tmp_path: Path, capsys, rows: str) -> None:
    name = Prepared(data).sources()[0].name
    assert run(data, tmp_path / "run", "--train.steps", "2", "--mixture", f"{name}:1@{rows}") == 2
    assert f"mixture: '{name}:1@{rows}'; expected rows as in" in capsys.readouterr().err


def test_a_finished_run_without_checkpoints_is_kept(data: Path, tmp_path: Path, capsys, unchecked) -> None:
    out = tmp_path / "run"
    common = ["--train.steps", "2", "--train.save-every", "0", "--no-evaluate"]
    assert run(data, out, *common) == 0
    before = (out / "model" / "model.safetensors").read_bytes()
    assert run(data, out, *common) == 2 and run(data, out, "--resume", *common) == 2
    assert "kept no checkpoint" in capsys.readouterr().err
    assert (out / "model" / "model.safetensors").read_bytes() == before


def test_damaged_checkpoints_are_not_started_over(data: Path, tmp_path: Path, capsys, unchecked) -> None:
    out = tmp_path / "run"
    assert run(data, out, "--train.steps", "2", "--no-evaluate") == 0
    for file in (out / "checkpoints").glob("*/trainer.pt"):
        file.write_bytes(file.read_bytes() + b"x")
    assert run(data, out, "--resume", "--train.steps", "4", "--no-evaluate") == 2
    assert "no checkpoint of" in capsys.readouterr().err


def test_damaged_data_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(data, tmp_path / "data")
    shard = next((tmp_path / "data" / "train").glob("*.bin"))
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert run(tmp_path / "data", tmp_path / "run", "--train.steps", "2") == 2
    assert shard.name in capsys.readouterr().err


def test_one_process_a_run(tmp_path: Path) -> None:
    with only_one(tmp_path), pytest.raises(ValueError, match="another process is writing"), only_one(tmp_path):
        pass
    with pytest.raises(ValueError, match="wrong"), only_one(tmp_path / "new"):
        raise ValueError("wrong")
    assert not (tmp_path / "new").exists(), "nothing was written"


def start(data: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "nanok3",
        "pretrain",
        "--data",
        str(data),
        "--out",
        str(out),
        *MODEL,
        *TRAIN,
        *flags,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed_and_resumed(data: Path, folder: Path, steps: int, save_every: int, kill_at: int) -> None:
    """A run that is killed with kill -9 after `kill_at` steps and resumed ends with the weights of one that was not."""
    common = ["--no-evaluate", "--train.steps", str(steps), "--train.save-every", str(save_every), "--threads", "1"]
    assert start(data, folder / "whole", *common).wait() == 0
    process = start(data, folder / "killed", *common)
    metrics = folder / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count('"train"') < kill_at:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = start(data, folder / "killed", "--resume", *common)
    assert resumed.wait() == 0, resumed.stdout.read()
    whole = load(folder / "whole" / "model")
    again = load(folder / "killed" / "model")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    a, b = (sorted((folder / r / "checkpoints").iterdir())[-1] / "model" for r in ("whole", "killed"))
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def test_kill_and_resume_is_the_same_run(data: Path, tmp_path: Path) -> None:
    killed_and_resumed(data, tmp_path, steps=12, save_every=4, kill_at=6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_and_resume_is_the_same_run_over_200_steps(data: Path, tmp_path: Path) -> None:
    killed_and_resumed(data, tmp_path, steps=200, save_every=50, kill_at=110)


# ---------------------------------------------------------------------- pictures

EYES = ["--preset", "vision-tiny", "--depth", "2", "--set", "num_experts=4", "hidden_size=64", "text_hidden_size=64"]
EYES += ["vt_hidden_size=32", "mm_hidden_size=32", "qkv_hidden_size=32", "vt_num_attention_heads=2"]


@pytest.fixture(scope="module")
def seen(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nanok3.data.pictures.kinds import PictureMix

    folder = tmp_path_factory.mktemp("seen") / "data"
    tokenizer = train_tokenizer(["Question: What colour is it? Answer: red", *"abc"] * 9, 540)
    prepare([Source("sums", path=data.parent / "text")], tokenizer, folder, pictures=PictureMix(0.5, 80, ("shapes",)))
    return folder


def see(data: Path, out: Path, *flags: str) -> int:
    flags = ("--data", str(data), "--out", str(out), *EYES, *TRAIN, "--train.seq-len", "256", *flags)
    return main(["pretrain", *flags])


def test_a_run_with_pictures_samples_measures_and_reports_them(seen: Path, tmp_path: Path) -> None:
    assert see(seen, tmp_path / "run", "--train.steps", "4", "--train.sample-every", "4", "--no-evaluate") == 0
    asked = ["--pictures", "--picture-questions", "3", "--recall-distance", "32", "--bytes", "2000"]
    assert main(["eval", str(tmp_path / "run"), *asked]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [r for r in records if r["kind"] == "sample"]
    assert len(samples) == 2 and samples[1]["prompt"].startswith("[shapes: ")
    assert {"sums", "shapes"} == next(r for r in records if r["kind"] == "eval")["slices"].keys()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert set(final["slices"]) == {"sums"}  # compressors are measured on texts
    assert {f["field"] for f in final["pictures"]["fields"]} - {"pixel", "position"} == {"colour", "count", "shape"}
    report = (tmp_path / "run" / "report.html").read_text()
    assert "data:image/png;base64," in report and "without the picture" in report


def test_a_run_with_pictures_killed_and_resumed_is_the_same_run(seen: Path, tmp_path: Path) -> None:
    """Interrupted at a checkpoint and gone on with in a new process's place: the same weights, the tower's too."""
    flags = ("--train.steps", "4", "--train.save-every", "2", "--train.sample-every", "0", "--no-evaluate")
    flags += ("--train.picture-lead", "0.6")
    assert see(seen, tmp_path / "whole", *flags) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000004")
    assert main(["pretrain", "--out", str(tmp_path / "cut"), "--resume", "--no-evaluate"]) == 0
    whole, cut = load(tmp_path / "whole" / "model").state_dict(), load(tmp_path / "cut" / "model").state_dict()
    assert "vision_tower.patch_embed.proj.weight" in whole
    assert not [name for name, value in whole.items() if not torch.equal(value, cut[name])]


def test_a_text_model_is_refused_pictures(seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(seen, tmp_path / "run", "--train.steps", "2", "--train.seq-len", "256") != 0
    assert "no vision tower" in capsys.readouterr().err


def test_a_model_with_eyes_trains_on_text_alone(data: Path, tmp_path: Path) -> None:
    assert see(data, tmp_path / "run", "--train.steps", "2", "--no-evaluate", "--train.sample-every", "0") == 0
