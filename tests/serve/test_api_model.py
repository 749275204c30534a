"""The command's own way from a folder with a real model to answers: those of the model, cold and warm, one or many."""

from __future__ import annotations

import pytest
import torch
from served import TOKENIZER, Served, user

import nanok3
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.serve.generate import generate
from nanok3.serve.sampler import SamplingParams
from nanok3.stages.serve import ServeArgs, open_app

pytestmark = pytest.mark.usefixtures("unchecked")
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("run") / "tiny-model"
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(TOKENIZER.vocab_size + 64)
    nanok3.save(K3(cfg), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module")
def server(folder):
    args = ServeArgs(model=folder, dtype="float32", device="cpu", memory=0.02, hash_block=16, check_cache=1.0)
    app, engine, name = open_app(args)
    assert name == "tiny-model" and engine.settings.hash_block == 16
    engine.start()
    yield Served(app, engine)
    engine.drain(0)


def alone(folder, text, most):
    model = nanok3.load(folder, dtype=torch.float32)
    return generate(model, TOKENIZER, text, SamplingParams(temperature=0.0, max_tokens=most)).text


def test_completions_are_the_models_own_cold_warm_and_together(folder, server):
    text = "Once upon a time there was a small language model. "
    expected = alone(folder, text, 8)
    assert expected
    for _ in range(2):
        body = server.post("/v1/completions", {"prompt": text, **GREEDY}).json()
        assert body["choices"][0]["text"].startswith(expected)
    assert body["usage"]["cached_tokens"] == len(text) // 16 * 16 - (len(text) % 16 == 0) * 16
    bodies = [{"prompt": text[k:], **GREEDY} for k in range(6)]
    answers = [response.json()["choices"][0]["text"] for response in server.together(*bodies, path="/v1/completions")]
    assert [answer.startswith(alone(folder, text[k:], 8)) for k, answer in enumerate(answers)] == [True] * 6


def test_a_conversation_goes_on_from_the_cache(server):
    first = server.post("/v1/chat/completions", {"messages": [user("Who are you?")], **GREEDY}).json()
    answer = first["choices"][0]["message"]
    second = server.post("/v1/chat/completions", {"messages": [user("Who are you?"), answer, user("?")], **GREEDY})
    usage = second.json()["usage"]
    assert usage["cached_tokens"] >= first["usage"]["prompt_tokens"] // 16 * 16 - 16 > 0
    assert server.post("/v1/chat/completions", {"messages": [user("x")], "n": 2, "seed": 1}).status_code == 200


def test_every_hit_was_checked(server):
    while not server.engine.idle:
        pass
    assert server.engine.checks.done >= 2 and server.engine.checks.failed == 0
    text = server.get("/metrics").text
    assert f"nanok3_cache_checks_total {float(server.engine.checks.done)}" in text and server.is_free()
