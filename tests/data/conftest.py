"""A small tokenizer, trained once for all data tests; no deadline for generated examples on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from nanok3.data.tokenizer import Tokenizer, train_tokenizer

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

PROSE = Path(__file__).parents[1] / "fixtures" / "data" / "prose.txt"


@pytest.fixture(scope="session")
def prose() -> str:
    return PROSE.read_text("utf-8")


@pytest.fixture(scope="session")
def tokenizer(prose: str) -> Tokenizer:
    return train_tokenizer([prose], 700)
