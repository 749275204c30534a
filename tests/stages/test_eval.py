"""`nanok3 eval` on a model folder, on files, and on a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.plan import Source
from nanok3.data.prepared import prepare
from nanok3.data.tokenizer import Tokenizer
from nanok3.eval.bits_per_byte import compressors
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.stages.eval import EvalArgs, diagnosis_batch, frequent_ids, held_out, main, shuffled

PROSE = [f"Line {i} of a text that is long enough to say something.\n" * 5 for i in range(12)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer({bytes([byte]): byte for byte in range(256)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A run folder with prepared data beside it, as pretraining leaves them, with an untrained model."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "notes").mkdir()
    for i, text in enumerate(PROSE):
        (folder / "notes" / f"{i}.txt").write_text(text)
    prepare([Source("notes", path=folder / "notes")], tokenizer, folder / "data", validation=0.3)
    torch.manual_seed(0)
    save(K3(K3Config.tiny().with_vocabulary(tokenizer.vocab_size)), folder / "run" / "model")
    tokenizer.save(folder / "run" / "model")
    settings = {"data": str(folder / "data"), "train": {"seq_len": 64}}
    (folder / "run" / "config.yaml").write_text(json.dumps({"command": "nanok3 pretrain", "settings": settings}))
    (folder / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 10, "loss": 5.0}\n')
    return folder / "run"


def test_a_run_is_measured_on_its_own_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "final.json").write_text('{"seconds": 12.5, "slices": {}}')
    main(EvalArgs(model=run, recall_distance=32, threads=1))
    shown = capsys.readouterr().out
    assert "notes" in shown and "copy, 32 back" in shown and "64 pairs" not in shown
    final = json.loads((run / "final.json").read_text())
    [(name, slice_)] = final["slices"].items()
    texts = held_out([run.parent / "data"])["notes"]
    joined = "".join(texts).encode()
    assert (
        name == "notes"
        and slice_["bytes"] == len(joined)
        and slice_["zlib"] == compressors("".join(shuffled(texts)).encode())["zlib"]
    )
    assert slice_["bits_per_byte"] == pytest.approx(9, abs=0.3)  # 512 tokens, untrained, one a byte
    assert (
        final["seconds"] == 12.5
        and final["context"] == 64
        and final["parameters"]["total"] > final["parameters"]["active"]
    )
    assert set(final["diagnostics"]) == {"depth_weights", "kda_half_lives", "expert_loads", "tokens"}
    page = (run / "report.html").read_text()
    assert "Weights over depth" in page and "finished run" in page and "notes" in page


def test_held_out_text_is_the_validation_split(run: Path) -> None:
    slices = held_out([run.parent / "data"])
    assert 1 <= len(slices["notes"]) < len(PROSE) and set(slices["notes"]) <= {text.strip() for text in PROSE} | set(
        PROSE
    )
    assert "".join(slices["notes"]).encode() == (run.parent / "data" / "validation" / "notes.txt").read_bytes()


def test_json_for_a_model_and_files_without_a_run(
    run: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model").rename(tmp_path / "alone")
    try:
        (tmp_path / "mine.txt").write_text("some text of mine " * 20)
        main(
            EvalArgs(model=tmp_path / "alone", data=(tmp_path / "mine.txt",), json=True, recall_distance=16, bytes=100)
        )
    finally:
        (tmp_path / "alone").rename(run / "model")
    found = json.loads(capsys.readouterr().out)
    assert list(found["slices"]) == ["mine"] and found["slices"]["mine"]["bytes"] == 100 and found["context"] == 4096
    assert [entry["distance"] for entry in found["recall"]["copy"]] == [16]
    assert not (tmp_path / "final.json").exists()


def test_mistakes_are_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes is 0"):
        main(EvalArgs(model=run, bytes=0))
    with pytest.raises(ValueError, match="does not exist"):
        main(EvalArgs(model=run, data=(tmp_path / "nothing.txt",)))
    with pytest.raises(ValueError, match="context is 1"):
        main(EvalArgs(model=run, context=1))


def test_what_is_not_asked_about_pictures_is_said(
    run: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of text beside pictures, and one that sees beside text."""
    flags = {"model": run / "model", "data": (run.parent / "data",), "recall_distance": 32, "threads": 1, "bytes": 400}
    main(EvalArgs(**flags))
    assert "pictures:" not in capsys.readouterr().err
    monkeypatch.setattr("nanok3.stages.eval.picture_folders", list)
    main(EvalArgs(**flags))
    assert "pictures: this model has no vision tower, so none is asked about" in capsys.readouterr().err
    main(EvalArgs(**flags, pictures=False))
    assert "pictures:" not in capsys.readouterr().err


def test_frequent_ids_and_the_diagnosis_batch() -> None:
    encoded = {"a": [[1, 1, 1, 2], [3, 3]], "b": [[2, 3, 5, 7, 9]]}
    assert frequent_ids(encoded, 3) == [1, 3, 2]
    assert diagnosis_batch(encoded, tokens=4).tolist() == [[1, 1, 1, 2], [2, 3, 5, 7]]
    assert diagnosis_batch({"a": [[i] * 9 for i in range(50)], "b": [[7, 7]]}, tokens=8).shape == (16, 8)
