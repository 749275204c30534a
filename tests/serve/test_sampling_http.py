"""Sampling fields over HTTP, as OpenAI's client sends them, with a small real model: each does what it is named for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
import uvicorn
from served import TOKENIZER

import nanok3
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.stages.serve import ServeArgs, listen, open_app

pytestmark = pytest.mark.usefixtures("unchecked")
A = {str(ord("A")): 100}
"""A bias under which nothing else is said."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("run") / "tiny"
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(TOKENIZER.vocab_size + 64)
    nanok3.save(K3(cfg), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module")
def client(folder):
    args = ServeArgs(model=folder, dtype="float32", device="cpu", memory=0.02, hash_block=16)
    app, engine, _ = open_app(args)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    engine.start(), thread.start()
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", api_key="-", max_retries=0
    ) as found:
        yield found
    engine.drain(0)
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def say(client):
    """The tokens of each choice, and the whole answer."""

    def said(**fields):
        fields = {"prompt": "Once upon a time", "max_tokens": 8, "logprobs": 0, "model": "tiny", **fields}
        answer = client.completions.create(**fields)
        return [choice.logprobs.tokens for choice in answer.choices], answer

    return said


@pytest.fixture(scope="module")
def greedy(say):
    return say(temperature=0)[0]


def test_greedy_is_deterministic(say, greedy):
    assert say(temperature=0)[0] == greedy and len(greedy[0]) == 8


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-9}, {"top_p": 1e-9}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}],
    ids=lambda fields: next(iter(fields.get("extra_body", fields))),
)
def test_what_leaves_one_token_is_greedy(say, greedy, fields):
    assert say(seed=3, **{"temperature": 1.0, **fields})[0] == greedy


def test_a_seed_gives_the_same_in_any_company(say):
    alone, _ = say(temperature=1, seed=7)
    with ThreadPoolExecutor(6) as pool:
        first, *others = pool.map(lambda k: say(temperature=1, seed=7 if k == 0 else 100 + k)[0], range(6))
    assert first == alone and alone not in others
    assert say(temperature=1, seed=-5)[0] == say(temperature=1, seed=-5)[0]


def test_choices_differ_and_share_their_prompt(say):
    tokens, answer = say(temperature=1, seed=7, n=3, prompt="Twice upon a time, " * 4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len({*map(tuple, tokens)}) == 3
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (76, 24)
    assert [entry["cached_tokens"] for entry in answer.model_extra["debug"]] == [0, 64, 64]


def test_bias_and_penalties(say, greedy):
    assert say(temperature=0, logit_bias=A)[0] == [["A"] * 8]
    assert "e" in greedy[0] and "e" not in say(temperature=0, logit_bias={str(ord("e")): -100})[0][0]
    scores = {}
    for penalty in (0, 2):
        for name in ("presence_penalty", "frequency_penalty"):
            _, answer = say(temperature=0, logit_bias={"65": 100, "66": 100}, **{name: penalty})
            scores[name, penalty] = answer.choices[0].logprobs.token_logprobs
            assert {*answer.choices[0].text} <= {"A", "B"}
    first = {values[0] for values in scores.values()}
    assert len(first) == 1, "nothing was said yet"
    assert len({tuple(values[:2]) for values in scores.values()}) == 2, "something was said once"
    assert len({tuple(values) for values in scores.values()}) == 3, "and more than once"
    assert say(temperature=0, extra_body={"repetition_penalty": 100.0})[0] != greedy


def test_logprobs_have_the_token_and_so_many_others(say):
    _, answer = say(temperature=0, logprobs=5)
    logprobs = answer.choices[0].logprobs
    for token, p, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 5 and top[token] == p == max(top.values()) <= 0
    _, answer = say(temperature=1, seed=1, logprobs=2)
    assert {len(top) for top in answer.choices[0].logprobs.top_logprobs} <= {2, 3}


def test_scores_of_a_prompt_name_what_could_have_been_said(say):
    """As evaluation harnesses compare: the best of each place is named, whatever rows the model has beside."""
    _, answer = say(prompt="Once upon", max_tokens=1, echo=True, logprobs=1, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs.top_logprobs[0] is None and all(logprobs.top_logprobs[1:])
    assert [
        top[token] for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:])
    ] == logprobs.token_logprobs[1:]


def test_stops_and_lengths(say):
    for fields in ({"stop": "AAA"}, {"stop": ["zz", "AA"]}, {"extra_body": {"stop_token_ids": [65]}}):
        choice = say(temperature=0, logit_bias=A, **fields)[1].choices[0]
        assert (choice.text, choice.finish_reason) == ("", "stop")
    choice = say(temperature=0, logit_bias=A, stop="B", max_tokens=3)[1].choices[0]
    assert (choice.text, choice.finish_reason) == ("AAA", "length")


def test_chat_thinks_within_its_tokens(client):
    hi = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="tiny", messages=hi, max_completion_tokens=6, max_tokens=50, seed=1)
    assert answer.usage.completion_tokens == answer.usage.completion_tokens_details.reasoning_tokens == 6
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content is None
    off = {"chat_template_kwargs": {"thinking": False}}
    fields = {"max_tokens": 6, "logprobs": True, "top_logprobs": 4, "extra_body": off, "logit_bias": A}
    answer = client.chat.completions.create(model="tiny", messages=hi, temperature=0, **fields)
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "AAAAAA" and [len(one.top_logprobs) for one in content] == [4] * 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 6}, "stop"),
        ({"stop": "x" * 33}, "stop"),
        ({"logit_bias": {"9999": 1}}, "logit_bias.9999"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_values_out_of_range_are_named(say, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        say(**fields)
    assert refused.value.param == param
