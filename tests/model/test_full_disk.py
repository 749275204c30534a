"""A disk without room is an OSError that names the folder, and leaves nothing half written."""

from __future__ import annotations

import pytest
from safetensors import SafetensorError

import nanok3
from nanok3.model import weights


def test_a_disk_without_room(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match=r"out cannot be written to: .*No space left on device"):
        nanok3.save(nanok3.K3(nanok3.K3Config.tiny().at_depth(1, hidden_size=64)), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
