"""What was chosen is what the file says, and what the simulation says of it is what streaming does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.streamed_experts import stream_of
from nanok3.model.weights import load, save
from nanok3.serve.expert_budget import lru_hits
from nanok3.serve.routing_trace import Recorder, Trace

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    save(K3(K3Config.tiny()), path, experts="mxfp4")
    return path


@torch.no_grad()
def read(model):
    """A chunk of 7 tokens and 9 single ones."""
    ids, state = torch.randint(0, 300, (1, 16), generator=torch.Generator().manual_seed(1)), model.new_state(1)
    model(ids[:, :7], state=state)
    for i in range(7, 16):
        model(ids[:, i : i + 1], state=state)


@pytest.mark.parametrize("places", [2, 5, 9, 32])
def test_streaming_hits_what_the_simulation_says(folder, places, tmp_path):
    model = load(folder, experts="stream", expert_memory=places * 6_528)
    with Recorder(model) as recorder:
        read(model)
    recorder.trace(6_528).save(tmp_path / "trace.npz")
    read(model)  # no longer heard
    trace = Trace.load(tmp_path / "trace.npz")
    stream = stream_of(load(folder, experts="stream", expert_memory=places * 6_528))
    assert stream.form.nbytes == trace.expert_bytes == 6_528
    assert trace.read == 16 and trace.top_k == 2 and trace.all_bytes == 32 * 6_528
    assert trace.tokens.tolist() == [7] * 4 + [1] * 36 and trace.layers.tolist() == [1, 2, 3, 4] * 10

    again = load(folder, experts="stream", expert_memory=places * 6_528)
    read(again)
    found = stream_of(again).statistics
    assert found.hits == lru_hits(trace.visits(), places)
    assert found.hits + found.reads == sum(map(len, trace.visits()))


def test_what_is_no_trace_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", experts=8)
    (tmp_path / "text.npz").write_text("no archive")
    one, chosen = np.array([1], np.uint16), np.array([[1, 9]], np.uint16)
    np.savez(tmp_path / "beyond.npz", experts=8, expert_bytes=4, layers=one, tokens=one, chosen=chosen)
    for name in ("other.npz", "text.npz", "beyond.npz", "absent.npz"):
        with pytest.raises(ValueError, match=rf"routing_trace: .*{name} is no trace"):
            Trace.load(tmp_path / name)


def test_nothing_heard_and_nothing_to_hear(folder):
    with pytest.raises(ValueError, match="nothing was read"):
        Recorder(load(folder)).trace(1)
