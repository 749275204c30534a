"""Commands on a model whose experts stay on disk: they say what they say with resident ones, and what reading took."""

from __future__ import annotations

import pytest
import torch

import nanok3
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.streamed_experts import stream_of
from nanok3.serve.routing_trace import Trace
from nanok3.stages import generate
from nanok3.stages.chat import Chat, ChatArgs
from nanok3.stages.generate import GenerateArgs
from nanok3.stages.serve import ServeArgs

BYTES = {bytes([b]): b for b in range(256)}
EXPERT = 6_528
STREAM = {"experts": "stream", "expert_memory": f"{8 * EXPERT}B"}

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model that knows bytes only, its experts packed."""
    path = tmp_path_factory.mktemp("runs") / "model"
    torch.manual_seed(1)
    nanok3.save(nanok3.K3(nanok3.K3Config.tiny(initializer_range=0.2).with_vocabulary(512)), path, experts="mxfp4")
    Tokenizer(BYTES).save(path)
    return path


def test_generate_says_the_same_and_records_what_was_chosen(folder, capsys, tmp_path):
    common = {"model": folder, "text": "Once upon", "max_tokens": 6, "temperature": 0.0, "seed": 1}
    generate.main(GenerateArgs(**common))
    resident = capsys.readouterr()
    generate.main(GenerateArgs(**common, **STREAM, routing_trace=tmp_path / "streamed.npz"))
    streamed = capsys.readouterr()
    assert streamed.out == resident.out and "experts:" not in resident.err
    assert "experts: 8 of 32 fit into 51 KiB; " in streamed.err and "waited for" in streamed.err
    generate.main(GenerateArgs(**common, routing_trace=tmp_path / "resident.npz"))
    one, other = Trace.load(tmp_path / "streamed.npz"), Trace.load(tmp_path / "resident.npz")
    assert one.visits() == other.visits() and one.read == 14  # 9 of the prompt, 5 of 6 said ones
    assert one.expert_bytes == other.expert_bytes == EXPERT


def test_chat(folder):
    arguments = [ChatArgs(model=folder, seed=1, max_tokens=4, **flags) for flags in ({}, STREAM)]
    talks = [Chat(args.open(), args.sampling()) for args in arguments]
    for line in ("Once upon", "a time"):
        resident, streamed = (talk.say(line, lambda piece: None) for talk in talks)
        assert resident.ids == streamed.ids
    assert stream_of(talks[0].opened.model) is None and stream_of(talks[1].opened.model).statistics.reads > 0


def test_mistakes_are_told(folder):
    for flags, message in (
        ({"experts": "stream", "expert_memory": "1KiB"}, f"expert_memory is 1024; .* at least {2 * EXPERT} bytes"),
        ({"experts": "stream", "expert_memory": "much"}, "expert_memory is 'much'"),
        ({"expert_memory": "1MiB"}, "needs experts='stream'"),
    ):
        with pytest.raises(ValueError, match=message):
            GenerateArgs(model=folder, **flags).open()
    with pytest.raises(ValueError, match="which is a folder; name a file"):  # before anything is said, not after
        generate.main(GenerateArgs(model=folder, text="Once", routing_trace=folder))
    with pytest.raises(ValueError, match="allowed: no --experts stream"):
        ServeArgs(model=folder, experts="stream", cache_memory="1GiB").cache_bytes()
