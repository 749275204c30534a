"""What every test shares: one thread, a fixed seed, and the official numbers of tests/fixtures/text.

The fixtures there hold small checkpoints in the official layout with random weights, and what the official Python
computed from them in float64; tests/fixtures/text/README.md says how they were made and what each tensor means.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.weights import disk_tensors, load

FIXTURES = Path(__file__).parent / "fixtures"
torch.set_num_threads(1)


@dataclass(frozen=True)
class Golden:
    """One official checkpoint of tests/fixtures/text and its expected values."""

    name: str

    @property
    def folder(self) -> Path:
        return FIXTURES / "text" / self.name

    @property
    def config(self) -> K3Config:
        return K3Config.from_json(self.folder)

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        return load_file(self.folder / "expected.safetensors")

    @functools.cached_property
    def stored(self) -> dict[str, Tensor]:
        """The checkpoint's tensors as they lie on disk."""
        return load_file(self.folder / "model.safetensors")

    def load(self, dtype: torch.dtype | None = torch.float64) -> K3:
        """A model of its own, to be changed at will."""
        return load(self.folder, dtype=dtype)

    @functools.cached_property
    def model(self) -> K3:
        """The float64 model, shared by all tests: change it through monkeypatch only."""
        return self.load()

    def ids(self, case: str) -> Tensor:
        """(1, T) token ids of a case such as 'len017'."""
        return self.expected[f"{case}.input_ids"][None]


@pytest.fixture(scope="session")
def golden():
    """golden(name) -> Golden; each is read once."""
    return functools.cache(Golden)


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(20260721)


@contextmanager
def without_shape_checks():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def unchecked():
    """The package as a user runs it: without the shape checks that the test options switch on."""
    with without_shape_checks():
        yield


@pytest.fixture(scope="session")
def release_tensors():
    """Every tensor of the release on disk, from its config alone."""
    with without_shape_checks():
        return disk_tensors(K3Config.k3())
