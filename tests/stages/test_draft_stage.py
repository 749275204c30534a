"""`nanok3 draft`: the folder it makes, going on after Ctrl-C, what it refuses, and a server that uses it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nanok3
from nanok3.cli import main as command
from nanok3.data.files import only_one
from nanok3.data.plan import Source
from nanok3.data.prepared import prepare
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, attach, load_prediction, save_prediction
from nanok3.posttrain.draft_run import DraftRun
from nanok3.posttrain.draft_settings import DraftSettings
from nanok3.quant.mxfp import MXFP4, project
from nanok3.quant.qat import inputs_rule, mxfp8_inputs
from nanok3.serve.draft_folder import load_draft, read_facts
from nanok3.stages.draft import DraftArgs, main
from nanok3.stages.serve import ServeArgs, open_app

FLAGS = [
    "--train.steps",
    "6",
    "--train.rows",
    "1",
    "--train.seq-len",
    "24",
    "--train.unroll",
    "3",
    "--held-out",
    "2",
    "--train.eval-every",
    "3",
]
FLAGS += ["--train.save-every", "2", "--threads", "1", "--train.lr", "0.01"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its data beside it and one checkpoint."""
    folder = tmp_path_factory.mktemp("draft")
    (folder / "notes").mkdir()
    for i in range(12):
        (folder / "notes" / f"{i}.txt").write_text(f"Line {i} of a text that is long enough to say something.\n" * 4)
    tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)})
    prepare([Source("notes", path=folder / "notes")], tokenizer, folder / "data", validation=0.3)
    torch.manual_seed(0)
    cfg = nanok3.K3Config.tiny().at_depth(3, hidden_size=64).with_vocabulary(tokenizer.vocab_size)
    model = K3(replace(cfg, num_experts=4, num_experts_per_token=2))
    nanok3.save(model, folder / "run" / "model", dtype=torch.float32)
    (folder / "run" / "config.yaml").write_text(json.dumps({"settings": {"data": str(folder / "data")}}))
    (folder / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 10, "loss": 5.0}\n')
    (folder / "run" / "nanok3.json").write_text('{"stage": "pretrain"}')
    return folder / "run"


@pytest.fixture(scope="module")
def made(run: Path) -> Path:
    out = run.parent / "made"
    assert command(["draft", str(run), "--out", str(out), *FLAGS]) == 0
    return out


def test_a_draft_says_what_it_is(made: Path) -> None:
    facts = read_facts(made)
    assert facts["step"] == 6 and len(facts["acceptance"]) == 3 and facts["accepted_length"] > 1
    kinds = [json.loads(line)["kind"] for line in (made / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 6 and kinds.count("eval") == 3
    assert sorted(p.name for p in made.iterdir()) == [
        ".lock", "draft.json", "draft.safetensors", "metrics.jsonl", "training.pt"
    ]  # fmt: skip


def test_after_ctrl_c_it_goes_on_as_if_nothing_had_been(
    run: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, step = tmp_path / "new", DraftRun._train_step

    def interrupted(self: DraftRun) -> float:
        loss = step(self)
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(DraftRun, "_train_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell are started with it ignored
    assert command(["draft", str(run), "--out", str(out), *FLAGS]) == 130
    signal.signal(signal.SIGINT, before)
    assert "interrupted after step 3; saved" in capsys.readouterr().out
    monkeypatch.setattr(DraftRun, "_train_step", step)
    assert command(["draft", str(run), "--out", str(out), *FLAGS]) == 2
    assert "holds a draft; add --resume" in capsys.readouterr().err
    changed = [*FLAGS[:-1], "0.02"]
    assert command(["draft", str(run), "--out", str(out), *changed, "--resume"]) == 2
    assert "lr is 0.02" in capsys.readouterr().err
    assert command(["draft", str(run), "--out", str(out), *FLAGS, "--resume"]) == 0
    ours, theirs = (load_file(folder / "draft.safetensors") for folder in (out, made))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_draft_of_a_model_for_mxfp4_is_one_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is saved is rounded by the model's rule, what training goes on from is not."""
    four = tmp_path / "run"
    shutil.copytree(run, four)
    train = {"qat": "w4a8", "qat_scale_rule": "floor"}
    (four / "config.yaml").write_text(json.dumps({"settings": {"data": str(run.parent / "data"), "train": train}}))
    assert command(["draft", str(four), "--out", str(tmp_path / "d"), *FLAGS]) == 0
    assert "its experts trained for MXFP4 on inputs in MXFP8, scales by floor" in capsys.readouterr().out
    assert read_facts(tmp_path / "d")["qat"] == "w4a8"
    saved = load_file(tmp_path / "d" / "draft.safetensors")
    masters = torch.load(tmp_path / "d" / "training.pt", weights_only=True)["draft"]
    experts = [name for name in saved if re.search(r"experts\.w[123]$", name) and "shared" not in name]
    assert len(experts) == 3
    for name, value in saved.items():
        expected = project(masters[name], MXFP4, "floor") if name in experts else masters[name]
        assert torch.equal(value, expected) and (name not in experts or not torch.equal(value, masters[name]))
    plain = [*FLAGS, "--train.qat", "off"]
    assert command(["draft", str(four), "--out", str(tmp_path / "d"), *plain, "--resume"]) == 2
    assert "qat is off" in capsys.readouterr().err
    assert DraftSettings(qat="w4a16").of_model({}).qat_scale_rule == "ceil"
    assert DraftSettings(qat="off", qat_scale_rule="even").of_model(train).qat_scale_rule == "even"


def test_two_commands_do_not_write_to_one_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with only_one(tmp_path / "d"):
        assert command(["draft", str(run), "--out", str(tmp_path / "d"), *FLAGS]) == 2
    assert f"out: another process is writing in {tmp_path / 'd'}" in capsys.readouterr().err
    assert not (tmp_path / "d" / "draft.json").exists()


def test_a_draft_reads_its_inputs_as_the_model_does(run: Path, made: Path) -> None:
    """In MXFP8 exactly where the model does, by the model's rule: in training as in use."""
    model = nanok3.load(run / "model", dtype=torch.float32)
    assert inputs_rule(model) is None
    assert inputs_rule(load_draft(made, model)) is None
    mxfp8_inputs(model, "even")
    rounded = load_draft(made, model)
    assert inputs_rule(model) == inputs_rule(rounded) == "even"
    plain = load_draft(made, nanok3.load(run / "model", dtype=torch.float32))
    x = torch.randn(1, 5, model.cfg.hidden_size)
    one, other = (draft.layer.mtp_block.feed(x) for draft in (rounded, plain))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=0.2, atol=0.1 * float(other.abs().max()))


def test_a_server_guesses_with_it(run: Path, made: Path) -> None:
    """Through the same pages, whatever they are for; the answer is what it is without."""
    from nanok3.serve.engine import Job
    from nanok3.serve.sampler import SamplingParams

    class Kept:
        def __init__(self) -> None:
            self.ids: list[int] = []

        def push(self, token: object) -> bool:
            self.ids.append(token.id)  # type: ignore[attr-defined]
            return False

        def finish(self, outcome: object) -> None:
            pass

    answers = []
    for draft in (None, str(made)):
        _, engine, _ = open_app(ServeArgs(model=run, draft=draft, draft_tokens=3, memory=0.02, cache_memory="8MiB"))
        job = Job(list(b"Line 3 of a text"), SamplingParams(temperature=0.0, max_tokens=24), Kept(), ignore_ends=True)
        engine.submit(job)
        while not engine.idle:
            engine.step()
        answers.append(job.reader.ids)  # type: ignore[attr-defined]
        engine.drain(0)
    assert answers[0] == answers[1] and len(answers[0]) == 24
    assert engine.speculation is not None and engine.speculation.drafted.tokens > 0


def test_generate_guesses_with_it(run: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for flags in ([], ["--draft", str(made), "--draft-tokens", "3"]):
        flags += ["--prompt", "Line 3 of", "--temperature", "0", "--max-tokens", "60", "--threads", "1"]
        assert command(["generate", str(run), *flags]) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out and len(said[0].out) > 5
    assert "guesses were right" in said[1].err and "guesses" not in said[0].err


def test_a_draft_of_a_run_guesses_for_its_quantized_model(
    run: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In generate and in a server, packed as stored, too. The answers stay what they are."""
    out = tmp_path / "q"
    assert command(["quantize", str(run), "--out", str(out), "--no-evaluate", "--dtype", "float32"]) == 0
    capsys.readouterr()
    for dtype in ("float32", "stored"):
        said = []
        for flags in ([], ["--draft", str(made), "--draft-tokens", "3"]):
            flags += ["--prompt", "Line 3 of", "--temperature", "0", "--max-tokens", "24", "--dtype", dtype]
            assert command(["generate", str(out), *flags, "--threads", "1"]) == 0
            said.append(capsys.readouterr())
        assert said[0].out == said[1].out and "guesses were right" in said[1].err
    args = ServeArgs(model=out, draft=str(made), draft_tokens=3, memory=0.02, cache_memory="8MiB", dtype="stored")
    _, engine, _ = open_app(args)
    assert engine.speculation is not None
    engine.drain(0)


def test_it_starts_as_the_prediction_layer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After 1 step at a rate of next to nothing it is what was trained with the model, behind [0 0 I]."""
    model = nanok3.load(run / "model", dtype=torch.float32)
    torch.manual_seed(7)
    learned = attach(model)
    learned.eh_proj.weight.data *= 3
    folder = tmp_path / "with"
    nanok3.save(model, folder / "model", dtype=torch.float32)
    save_prediction(model, folder / "model", torch.float32)
    for name in ("config.yaml", "metrics.jsonl", "nanok3.json"):
        (folder / name).write_text((run / name).read_text())
    flags = ["--train.steps", "1", "--train.rows", "1", "--train.seq-len", "24", "--train.unroll", "2"]
    flags += ["--train.lr", "1e-30", "--held-out", "1", "--threads", "1"]
    assert command(["draft", str(folder), "--out", str(tmp_path / "made"), *flags]) == 0
    assert "from the model's prediction layer" in capsys.readouterr().out
    found = load_draft(tmp_path / "made", nanok3.load(folder / "model", dtype=torch.float32))
    for name, value in learned.state_dict().items():
        torch.testing.assert_close(found.layer.state_dict()[name], value, rtol=0, atol=1e-7)
    fresh = Draft(model.cfg)
    torch.testing.assert_close(found.fusion.weight, fresh.fusion.weight, rtol=0, atol=1e-7)
    assert load_prediction(model, run / "model") is None, "a model without"


def test_what_cannot_be_is_named(run: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held_out is 0"):
        main(DraftArgs(model=run, out=tmp_path / "x", held_out=0))
    with pytest.raises(ValueError, match="seq_len is 1; it must be at least 2"):
        DraftSettings(seq_len=1)
    for draft, what in ((str(tmp_path / "none"), "allowed: 'ngram', or a folder"), (str(tmp_path), "is no draft")):
        with pytest.raises(ValueError, match=what):
            open_app(ServeArgs(model=run, draft=draft))
    with pytest.raises(ValueError, match="leave it out with --scripted"):
        open_app(ServeArgs(scripted=tmp_path / "s", tokenizer=run, draft="ngram"))
    other = K3(nanok3.K3Config.tiny().at_depth(4))
    with pytest.raises(ValueError, match="was made for a model with hidden_size"):
        load_draft(made, other)
    facts, torn = read_facts(made), tmp_path / "torn"
    torn.mkdir()
    (torn / "draft.json").write_text(json.dumps(facts))
    (torn / "draft.safetensors").write_bytes((made / "draft.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be used"):
        load_draft(torn, nanok3.load(run / "model"))


@pytest.mark.parametrize("content", [b"", b"PK not a state", "half", "other"])
def test_a_damaged_state_is_named(
    run: Path, made: Path, tmp_path: Path, content: bytes | str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "torn"
    shutil.copytree(made, out)
    whole = (out / "training.pt").read_bytes()
    (out / "training.pt").write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    if content == "other":
        torch.save({"step": 1}, out / "training.pt")
    assert command(["draft", str(run), "--out", str(out), *FLAGS, "--resume"]) == 2
    assert "training.pt: " in capsys.readouterr().err


def test_weights_that_are_not_finite_make_no_draft(run: Path, tmp_path: Path) -> None:
    model = nanok3.load(run / "model", dtype=torch.float32)
    attach(model).eh_proj.weight.data.fill_(torch.nan)
    nanok3.save(model, tmp_path, dtype=torch.float32)
    save_prediction(model, tmp_path)
    with pytest.raises(ValueError, match=r"eh_proj\.weight holds inf or NaN"):
        load_prediction(model, tmp_path)


def test_a_folder_of_something_else_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    (tmp_path / "file").write_bytes(b"")
    for out, message in ((run, "choose another folder"), (tmp_path / "file", "file, which is no folder")):
        for flags in ([], ["--resume"]):
            assert command(["draft", str(run), "--out", str(out), *FLAGS, *flags]) == 2
            said = capsys.readouterr().err
            assert said.startswith("nanok3 draft: out") and message in said
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
