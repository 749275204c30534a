"""A small prepared corpus and a trainer on it: seconds for the whole test session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanok3.baselines.frame import Baseline
from nanok3.config import K3Config
from nanok3.data.loader import MixtureLoader
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, prepare
from nanok3.data.tokenizer import train_tokenizer
from nanok3.model.decoder import K3
from nanok3.train.loop import Trainer
from nanok3.train.settings import TrainSettings

WORDS = "the memory keeps what each token writes and a later query reads it back from there again".split()


def story(number: int) -> str:
    """A document that repeats a few words in an order of its own."""
    return " ".join(WORDS[(number * 7 + i * (1 + number % 3)) % len(WORDS)] for i in range(60 + number)) + ".\n"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with one source, 120 documents, a vocabulary of 560."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(120):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{number:03}.txt").write_text(story(number))
    tokenizer = train_tokenizer([story(number) for number in range(120)], 560)
    prepare([Source("stories", path=folder / "text")], tokenizer, folder / "data")
    return folder / "data"


@pytest.fixture
def make_trainer(corpus: Path, tmp_path: Path):
    """Trainer on the corpus: `make_trainer(steps=4)`; keyword arguments are settings, `model` may be given."""

    def make(run: Path | None = None, model: K3 | Baseline | None = None, **changes: object) -> Trainer:
        defaults = {"steps": 4, "batch_size": 2, "seq_len": 32, "precision": "float32", "lr": 2e-3}
        defaults |= {"eval_every": 0, "sample_every": 0, "save_every": 0, "qk_clip_every": 2, "log_seconds": 1e9}
        settings = replace(TrainSettings(), **(defaults | changes))
        data = Prepared(corpus)
        if model is None:
            torch.manual_seed(settings.seed)
            model = K3(tiny(data.manifest["vocab_size"]))
        sources, weights = data.sources(), data.weights()
        loader = MixtureLoader(sources, weights, settings.batch_size, settings.seq_len, settings.seed)
        tokenizer = data.tokenizer()
        sizes = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size - 256)] + [0] * 256)
        return Trainer(model, loader, settings, run or tmp_path / "run", sizes, report=lambda line: None)

    return make


def tiny(vocab_size: int) -> K3Config:
    """Four layers, 32 wide: every mechanism, milliseconds a step."""
    cfg = K3Config.tiny().at_depth(4, kda_num_heads=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=32)
    changes = {"kda_head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    changes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32}
    return replace(cfg, num_experts=4, num_experts_per_token=2, **changes).with_vocabulary(vocab_size)
