"""What a path on the command line means: model, tokenizer, stage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import nanok3
from nanok3.data.tokenizer import Tokenizer
from nanok3.serve.run_folder import model_folder, open_model, stage_of

BYTES = {bytes([byte]): byte for byte in range(256)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a random model that knows bytes only."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    nanok3.save(nanok3.K3(nanok3.K3Config.tiny().at_depth(1).with_vocabulary(512)), folder / "model")
    Tokenizer(BYTES).save(folder / "model")
    (folder / "model" / "nanok3.json").write_text('{"stage": "pretrain"}')
    return folder


def test_what_a_path_means(run: Path, tmp_path: Path) -> None:
    assert model_folder(run) == model_folder(run / "model") == run / "model"
    for step in ("step-000009", "step-000010"):
        (tmp_path / "checkpoints" / step / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no config\.json"):
        model_folder(tmp_path)
    for step in ("step-000009", "step-000010"):
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(run / "model" / name, tmp_path / "checkpoints" / step / "model" / name)
    newest = tmp_path / "checkpoints" / "step-000010"
    assert model_folder(tmp_path) == model_folder(newest) == newest / "model"
    with pytest.raises(ValueError, match=r"tiktoken\.model"):
        open_model(tmp_path)
    (tmp_path / "config.yaml").write_text(f"settings:\n  data: {tmp_path / 'data'}\n")
    Tokenizer(BYTES).save(tmp_path / "data" / "tokenizer")
    assert open_model(tmp_path).folder == newest / "model"
    with pytest.raises(ValueError, match="no such folder"):
        model_folder(tmp_path / "nothing")


def test_the_marker_tells_the_stage(run: Path, tmp_path: Path) -> None:
    assert stage_of(run / "model") == "pretrain" and not open_model(run).answers
    folder = tmp_path / "model"
    shutil.copytree(run / "model", folder)
    (folder / "nanok3.json").write_text('{"stage": "sft"}')
    assert open_model(tmp_path).answers
    (folder / "nanok3.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        stage_of(folder)
    (folder / "nanok3.json").unlink()
    assert stage_of(folder) is None and not open_model(tmp_path).answers


def test_a_run_that_was_taught_from_files_is_opened(run: Path, tmp_path: Path) -> None:
    """Its data are conversations, which have no tokenizer; that lies beside the model."""
    shutil.copytree(run / "model", tmp_path / "model")
    for data in ("[]", "[chats.jsonl]"):
        (tmp_path / "config.yaml").write_text(f"settings: {{data: {data}}}")
        assert open_model(tmp_path).folder == tmp_path / "model"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected a mapping, found NoneType"),
        (b"- 1", "expected a mapping, found list"),
        (b"settings: [", "not valid YAML"),
        (b"\xff\xfe\xfd", "not valid YAML"),
        (b"[" * 20_000, "not valid YAML"),
        (b"settings:", "field 'settings' is None; it must be a mapping"),
        (b"settings: [data]", "field 'settings' is ['data']; it must be a mapping"),
        (b"settings: {data: 3}", "field 'settings.data' is 3; it must be a folder's path"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_config_of_a_run_is_named(run: Path, tmp_path: Path, content: bytes, words: str) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError) as error:
        open_model(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.yaml'}: {words}")
    assert "\n" not in str(error.value)


def test_folders_that_only_look_like_checkpoints_are_passed_over(run: Path, tmp_path: Path) -> None:
    for name in ("step-000002", "step-old-step-3"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        shutil.copytree(run / "model", tmp_path / "checkpoints" / name / "model")
    assert model_folder(tmp_path) == tmp_path / "checkpoints" / "step-000002" / "model"


def test_dtypes(run: Path) -> None:
    assert open_model(run, "stored").model.lm_head.weight.dtype == torch.bfloat16
    assert open_model(run, "auto", "cpu").model.lm_head.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        open_model(run, "float16")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        open_model(run, device="tpu")
