"""A small tokenizer, trained once for all data tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanok3.data.tokenizer import Tokenizer, train_tokenizer

PROSE = Path(__file__).parents[1] / "fixtures" / "data" / "prose.txt"


@pytest.fixture(scope="session")
def prose() -> str:
    return PROSE.read_text("utf-8")


@pytest.fixture(scope="session")
def tokenizer(prose: str) -> Tokenizer:
    return train_tokenizer([prose], 700)
