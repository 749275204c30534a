"""From the folder a user names to a model that can speak: where the weights, the tokenizer and the marker lie.

    runs/x/                        a run; its final model, else its newest checkpoint, is meant
    runs/x/model/                  config.json, weights, tiktoken.model, nanok3.json
    runs/x/checkpoints/step-N/     model/ without a tokenizer: that of the run or of its data is taken
    any folder with a config.json  a checkpoint in the official layout

`nanok3.json` beside the weights says how the model was trained: {"stage": "pretrain"} or {"stage": "sft"}. Without it
a model counts as a base model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from nanok3.data.tokenizer import MODEL_FILE, Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.streamed_experts import StreamStatistics, stream_of
from nanok3.model.weights import load

MARKER = "nanok3.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "stored": None}
_STEP = re.compile(r"step-(\d+)$")


@dataclass(frozen=True)
class OpenModel:
    """A loaded model, its tokenizer, the folder of its weights, and the training stage its marker names."""

    model: K3
    tokenizer: Tokenizer
    folder: Path
    stage: str | None

    @property
    def answers(self) -> bool:
        """Whether it was taught to answer; a base model was not."""
        return self.stage is not None and self.stage != "pretrain"


def open_model(
    path: Path, dtype: str = "auto", device: str = "auto", experts: str = "resident", expert_memory: int | None = None
) -> OpenModel:
    """Load what `path` means.

    dtype: 'float32', 'bfloat16', 'stored' (as on disk; packed experts stay packed) or 'auto': bfloat16 on a GPU,
    float32 on a CPU, where it decodes faster. device: 'cpu', 'cuda' or 'auto', a GPU where there is one. experts,
    expert_memory: as in `load`; streamed experts keep to a CPU.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype is {dtype!r}; allowed: 'auto', 'float32', 'bfloat16', 'stored'")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}; allowed: 'auto', 'cpu', 'cuda'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and experts == "resident" else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU here")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    folder = model_folder(path)
    tokenizer = Tokenizer.load(_tokenizer_folder(folder))
    model = load(folder, DTYPES[dtype], device, experts, expert_memory)
    _warm_up(model)
    if (stream := stream_of(model)) is not None:
        stream.statistics = StreamStatistics()
    return OpenModel(model, tokenizer, folder, stage_of(folder))


@torch.no_grad()
def _warm_up(model: K3) -> None:
    """Read one token and forget it: the first pass builds and loads kernels, which would count as reading a prompt."""
    model.hidden_states(torch.zeros(1, 1, dtype=torch.int64, device=model.lm_head.weight.device))


def model_folder(path: Path) -> Path:
    """The folder with config.json that `path` means. ValueError if there is none."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; expected a run or a model in the official layout")
    steps = [p for p in path.glob("checkpoints/step-*") if _STEP.match(p.name)]
    newest = sorted(steps, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)
    candidates = [path, path / "model", *(step / "model" for step in newest)]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"{path}: no config.json here, in model/ or in checkpoints/step-*/model/; is it a run?")


def run_root(folder: Path) -> Path:
    """The run that a model folder belongs to; a folder of its own is its own root."""
    folder = folder.resolve()
    root = folder.parent if folder.name == "model" else folder
    return root.parent.parent if _STEP.match(root.name) and root.parent.name == "checkpoints" else root


def stage_of(folder: Path) -> str | None:
    """What the marker beside the weights, or at the root of the run, names; None without one."""
    for place in (folder, run_root(folder)):
        if (place / MARKER).is_file():
            try:
                marker = json.loads((place / MARKER).read_text("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place / MARKER}: not valid JSON ({error})") from None
            stage = marker.get("stage") if isinstance(marker, dict) else None
            return None if stage is None else str(stage)
    return None


def _tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a model lies: beside it, in its run, or beside the data that the run's config names."""
    root = run_root(folder)
    places = [folder, root, root / "model", root / "tokenizer"]
    data = _data_folder(root / "config.yaml")
    if data is not None:
        places.append(data / "tokenizer")
    return next((place for place in places if (place / MODEL_FILE).is_file()), folder)


def _data_folder(config: Path) -> Path | None:
    """The data that a run's config names, if it has a config and that names one. ValueError names a wrong file."""
    if not config.is_file():
        return None
    try:
        document = yaml.safe_load(config.read_text("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{config}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{config}: expected a mapping, found {type(document).__name__}")
    settings = document.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"{config}: field 'settings' is {settings!r}; it must be a mapping")
    data = settings.get("data")
    if isinstance(data, list):  # files of conversations, which bring no tokenizer
        return None
    if data is not None and not isinstance(data, str):
        raise ValueError(f"{config}: field 'settings.data' is {data!r}; it must be a folder's path")
    return None if data is None else Path(data)
