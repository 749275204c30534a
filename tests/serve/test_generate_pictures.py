"""Pictures in `generate`, in the commands and in a conversation: the same as one forward pass over all of it."""

from __future__ import annotations

import sys
from io import StringIO

import pytest
import torch
from seeing import drawing, picture, seeing_model

import nanok3
import nanok3.serve.generate as generation
from nanok3.config import K3Config
from nanok3.data.pictures.document import question_text
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.serve.generate import generate, stream, unnamed_ids
from nanok3.serve.run_folder import OpenModel
from nanok3.serve.sampler import SamplingParams
from nanok3.stages import chat as chat_stage
from nanok3.stages.chat import Chat, ChatArgs, command
from nanok3.stages.generate import GenerateArgs, main

pytestmark = pytest.mark.usefixtures("unchecked")
TOKENIZER = Tokenizer({bytes([byte]): byte for byte in range(256)})
PAD = TOKENIZER.special["<|media_pad|>"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={257: -torch.inf, 258: -torch.inf})


@pytest.fixture(scope="module")
def model():
    return seeing_model(2).double()


@pytest.fixture
def files(tmp_path):
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(drawing(seed))
    return [str(tmp_path / f"{seed}.png") for seed in (1, 2)]


def nothing(piece):
    pass


@torch.no_grad()
def whole(model, ids, images):
    """The greedy continuation, each token by a pass over everything with a pad a picture."""
    media = {"pixel_values": torch.cat([p.pixel_values for p in images])}
    media["grid_thw"] = torch.cat([p.grid_thw for p in images])
    said = []
    for _ in range(GREEDY.max_tokens):
        logits = model(torch.tensor([ids + said]), **media).logits[0, -1]
        logits[[257, 258, PAD, *unnamed_ids(TOKENIZER, len(logits))]] = -torch.inf
        said.append(int(logits.argmax()))
    return said


@pytest.mark.parametrize("chunk", [5, 512])
def test_pictures_in_a_prompt(model, files, chunk):
    images = [picture(1), picture(2)]
    blocks = [TOKENIZER.encode(image.prompt, allow_special=True) for image in images]
    text = "a<|kimi_image_placeholder|>b<|kimi_image_placeholder|>c"
    ids = [*b"a", *blocks[0], *b"b", *blocks[1], *b"c"]
    expected = whole(model, ids, images)
    for prompt, given in ((text, files), (ids, images), (text, [drawing(1), images[1]])):
        done = generate(model, TOKENIZER, prompt, GREEDY, prefill_chunk=chunk, images=given)
        assert done.ids == expected and done.prompt_tokens == len(ids) + 22
    first = generate(model, TOKENIZER, "c", GREEDY, prefill_chunk=chunk, images=files)
    assert first.ids == whole(model, [*blocks[0], *blocks[1], *b"\nc"], images)


def test_float32_goes_on_natively(files):
    model = seeing_model(2)
    done = generate(model, TOKENIZER, "c", GREEDY, images=files[:1])
    block = TOKENIZER.encode(picture(1).prompt, allow_special=True)
    assert done.ids == whole(model, [*block, *b"\nc"], [picture(1)])


def test_pictures_and_placeholders_that_do_not_fit(model, files):
    for prompt, images, words in (
        ("<|kimi_image_placeholder|>", files, "1 placeholders"),
        ([PAD, 5], (), "1 placeholders"),
        ([5], files, "0 placeholders"),
        ("a", ["/no/such.png"], "cannot be read"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(model, TOKENIZER, prompt, GREEDY, images=images)
    blind = K3(K3Config.tiny().at_depth(1).with_vocabulary(512))
    with pytest.raises(ValueError, match="no vision tower"):
        generate(blind, TOKENIZER, "a", GREEDY, images=files)


def test_a_conversation_with_pictures(model, files, tmp_path, monkeypatch):
    """Turns, a chunk that ends inside a picture, Ctrl-C there, and going on."""
    chat = Chat(OpenModel(model, TOKENIZER, tmp_path, None), GREEDY)
    chat.say("hi", nothing)
    for file in files:
        assert "100 x 70, 12 tokens" in command(chat, f"/image {file}")
    first, read = chat.history[:], []
    plain = generation.Generation._read

    def broken(self, ids):
        read.append(len(ids))
        if len(read) == 2:
            raise KeyboardInterrupt
        return plain(self, ids)

    monkeypatch.setattr(generation.Generation, "_read", broken)
    monkeypatch.setattr(generation, "stream", lambda *given: stream(*given[:5], 50, *given[6:]))
    assert chat.say("what?", nothing).finish_reason == "interrupted"
    assert chat.pictures and PAD in chat.history[: chat.state.tokens] and PAD in chat.history[chat.state.tokens :]
    monkeypatch.setattr(generation.Generation, "_read", plain)
    done = chat.say("go on", nothing)
    blocks = [token for seed in (1, 2) for token in TOKENIZER.encode(picture(seed).prompt, allow_special=True)]
    ids = [*first, *b"\n", *blocks, *b"\nwhat?\ngo on"]
    assert done.ids == whole(model, ids, [picture(1), picture(2)])
    assert chat.text.count("<|media_pad|>") == 2
    command(chat, "/reset")
    assert not chat.pictures and not chat.attached


def test_commands(model, files, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    nanok3.save(seeing_model(2), folder)
    TOKENIZER.save(folder)
    flags = {"model": folder, "seed": 1, "max_tokens": 3}
    main(GenerateArgs(text="a", image=(files[0],), json=True, **flags))
    out = capsys.readouterr().out
    assert '"image": ["' in out and f'"prompt_tokens": {len("image 100x70") + 3 + 12 + len("|a")}' in out
    (tmp_path / "x").write_text("a\nb\n")
    with pytest.raises(ValueError, match="one prompt"):
        main(GenerateArgs(prompts_file=tmp_path / "x", image=(files[0],), **flags))
    (tmp_path / "bad.png").write_bytes(b"no")
    with pytest.raises(ValueError, match="not an image"):
        main(GenerateArgs(text="a", image=(tmp_path / "bad.png",), **flags))
    lines = f"/image\n/image {tmp_path / 'bad.png'}\n/image http://a/b.png\n/image '{files[0]}'\nwhat?\n/ask\n"
    monkeypatch.setattr(sys, "stdin", StringIO(lines))
    chat_stage.main(ChatArgs(**flags))
    out, err = capsys.readouterr()
    assert "needs the name" in out and "not an image" in out and "12 tokens, goes with" in out and "prompt: " in err
    assert "http://a/b.png: addresses are not fetched" in out and "(/ask needs a question)" in out


def test_a_question_in_the_form_of_the_documents(model, files, tmp_path):
    """Behind the picture, as in data/pictures/document.py; the answer ends with its line."""
    chat = Chat(OpenModel(model, TOKENIZER, tmp_path, None), GREEDY)
    command(chat, f"/image {files[0]}")
    done = chat.ask("Which colour?", nothing)
    shown = TOKENIZER.encode(picture(1).prompt, allow_special=True)
    ids = [*shown, *question_text("Which colour?").encode()]
    assert bytes(ids[len(shown) :]) == b"\nQuestion: Which colour?\nAnswer:"
    assert done.ids == whole(model, ids, [picture(1)])[: len(done.ids)] and "\n" not in done.text
    assert chat.params == GREEDY
    with pytest.raises(ValueError, match="needs a question"):
        chat.ask("", nothing)
