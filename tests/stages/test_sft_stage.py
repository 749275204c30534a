"""`nanok3 sft`: from a file of conversations to a model that answers, and going on with nothing but the folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from nanok3.config import K3Config
from nanok3.data.files import write_file
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain.domains import small_tokenizer
from nanok3.posttrain.sft_settings import DEFAULTS, WORLD
from nanok3.serve.run_folder import stage_of
from nanok3.stages.sft import SftArgs, check, main, parse, plain, saved
from nanok3.train.checkpoint import checkpoints
from nanok3.train.run_record import read_run

FAST = replace(DEFAULTS, steps=3, batch_size=1, seq_len=128, precision="float32", eval_every=0, save_every=2)


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    save(K3(K3Config.tiny().at_depth(1).with_vocabulary(tokenizer.vocab_size)), tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    return tmp_path / "base"


def write(path, count=20):
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "x"}]} for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_from_a_file_to_a_model_and_on_from_its_folder(model, tmp_path, capsys):
    out = tmp_path / "run"
    data = write(tmp_path / "a.jsonl")
    main(SftArgs(model=model, data=(data,), out=out, train=FAST, held_out_share=0.3))
    assert stage_of(out / "model") == "sft" and [c.name for c in checkpoints(out)] == ["step-000002", "step-000003"]
    evals = read_run(out).kind("eval")
    assert set(evals[-1]["slices"]) == {"all", "think", "response", "end"}
    assert "20 conversations" not in capsys.readouterr().out, "some are held out"
    with pytest.raises(ValueError, match="holds a run; add --resume"):
        main(SftArgs(model=model, data=(data,), out=out, train=FAST))
    again = parse(["--out", str(out), "--resume", "--train.steps", "4"])
    assert again.model == model and again.data == (data,) and again.held_out_share == 0.3 and again.train.seq_len == 128
    main(again)
    assert read_run(out).kind("train")[-1]["step"] == 4


def test_a_small_model_from_demonstrations(tmp_path):
    args = parse(["--domains", "general", "--demonstrations", "6", "--preset", "quick", "--out", str(tmp_path / "w")])
    assert args.train == WORLD and args.domains == ("general",)
    main(replace(args, train=replace(WORLD, steps=1, batch_size=1, precision="float32", save_every=0)))
    assert (tmp_path / "w/model/chat_sentences.json").exists() and saved(tmp_path / "w").domains == ("general",)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "give either --data FILE, --source NAME or both, or --domains NAME"),
        ({"data": (Path("a"),), "domains": ("general",)}, "give either"),
        ({"data": (Path("a"),)}, "--data and --source need a model to teach"),
        ({"domains": ("general",), "model": Path("x")}, "--domains teaches a new model"),
        ({"domains": ("general",), "held_out_share": 1.0}, r"held_out_share is 1.0; it must lie in \[0, 1\)"),
        ({"domains": ("general",), "demonstrations": 0}, "demonstrations is 0; it must be at least 1"),
    ],
)
def test_flags_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        check(replace(SftArgs(), **changes))


def test_the_run_is_found_however_out_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, threads in (("runs/sft", 1), ("mine", 7)):  # the first is the default
        write_file(Path(name) / "config.yaml", yaml.safe_dump({"settings": plain(SftArgs(threads=threads))}).encode())
    for flags in (["--out", "mine"], ["--out=mine"]):
        assert parse([*flags, "--resume"]).threads == 7
    with pytest.raises(ValueError, match="--out needs a value"):
        parse(["--resume", "--out"])


def test_going_on_without_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"--resume: .*config.yaml does not exist"):
        parse(["--out", str(tmp_path), "--resume"])
    (tmp_path / "config.yaml").write_text("settings: 3")
    with pytest.raises(ValueError, match="holds no settings of nanok3 sft"):
        parse(["--out", str(tmp_path), "--resume"])


def test_from_a_named_source_and_on(model, tmp_path, monkeypatch):
    out = tmp_path / "run"
    main(SftArgs(model=model, source=("exercises:2",), conversations=30, out=out, train=FAST, skip_long=True))
    evals = read_run(out).kind("eval")
    assert {"think", "response"} <= set(evals[-1]["slices"])
    again = saved(out)
    assert again.source == ("exercises:2",) and again.conversations == 30
    with pytest.raises(ValueError, match="allowed: chat, passages, exercises, math, mbpp, docstrings, bfcl"):
        main(SftArgs(model=model, source=("wikipedia",), out=tmp_path / "no", train=FAST))
