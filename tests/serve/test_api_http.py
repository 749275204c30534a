"""The command as a process of its own, asked over HTTP by OpenAI's client: streams, disconnects, the end in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pytest
from served import TOKENIZER, call, message

from nanok3.stages.serve import ServeArgs, listen, main, memory_bytes, open_app

ROOT = Path(__file__).parents[2]
HI = [{"role": "user", "content": "hi"}]


@contextmanager
def process(folder, *lines, flags=()):
    """A running server: its base address, and the process."""
    TOKENIZER.save(folder / "tokenizer")
    (folder / "replies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "nanok3", "serve", "--scripted", str(folder / "replies.jsonl")]
    command += ["--tokenizer", str(folder / "tokenizer"), "--port", "0", "--hash-block", "64", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        try:
            line = p.stdout.readline()
            assert " on http://" in line, line + p.stderr.read()
            yield line.split(" on ")[1].split("/v1")[0], p
        finally:
            p.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    lines = [message(content="", calls=call("weather", city="Oslo")), message(content="x" * 400, delay_ms=2)]
    with process(tmp_path_factory.mktemp("serve"), *lines, flags=["--api-key", "k", "--admin-key", "root"]) as found:
        yield found[0]


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running}/v1", api_key="k", max_retries=0, timeout=60)


def test_openais_client_calls_a_tool_and_streams(client):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    first = client.chat.completions.create(model="scripted", messages=HI, tools=tools)
    (found,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls" and json.loads(found.function.arguments) == {"city": "Oslo"}
    said = first.choices[0].message.model_dump(exclude_none=True)
    history = [*HI, said, {"role": "tool", "tool_call_id": found.id, "content": "rain"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="scripted", messages=history, tools=tools, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "x" * 400 and chunks[-1].usage.completion_tokens > 400
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.completions.create(model="scripted", prompt="a", max_tokens=2).choices[0].text == "Hm"


def test_errors_are_the_clients_own(client, running):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="scripted", messages=HI, temperature=3)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{running}/v1", api_key="no", max_retries=0).models.list()


def free_pages(base):
    pages = httpx2.get(f"{base}/v1/loads", headers={"x-api-key": "k"}).json()["pages"]
    return pages["any"]["free"], pages["latent"]["used"] + pages["snapshot"]["used"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_its_pages(client, running, stream):
    client.chat.completions.create(model="scripted", messages=HI, max_tokens=1)
    flush = httpx2.post(f"{running}/admin/flush", headers={"authorization": "Bearer root"})
    assert flush.status_code == 200
    if stream:
        answer = client.chat.completions.create(model="scripted", messages=HI, stream=True)
        for _ in range(5):
            next(answer)
        assert free_pages(running)[1] > 0
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(model="scripted", messages=HI)
    end = time.monotonic() + 20
    while free_pages(running)[1] and time.monotonic() < end:
        time.sleep(0.02)
    assert free_pages(running)[1] == 0
    assert 'reason="cancelled"' in httpx2.get(f"{running}/metrics", headers={"x-api-key": "k"}).text


def test_a_term_signal_lets_answers_finish(tmp_path):
    with process(tmp_path, message(content="x" * 50, delay_ms=5), flags=["--drain-timeout", "200"]) as (base, server):
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="-", max_retries=0, timeout=200)
        stream = client.chat.completions.create(model="scripted", messages=HI, stream=True)
        next(stream)
        server.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"
        assert server.wait(60) == 0
        log = server.stderr.read()
    assert "Traceback" not in log and '"finish": ["stop"]' in log


def test_a_term_signal_ends_what_takes_too_long(tmp_path):
    with process(tmp_path, message(content="x" * 5000, delay_ms=20), flags=["--drain-timeout", "0.2"]) as (
        base,
        server,
    ):
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="-", max_retries=0, timeout=200)
        stream = client.chat.completions.create(model="scripted", messages=HI, stream=True)
        next(stream)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert server.wait(60) == 0 and "Traceback" not in server.stderr.read()


def test_flags_that_are_mistakes(tmp_path):
    (tmp_path / "keys").write_text("\n")
    for flags, wrong in [
        ({"max_model_len": 1}, "max_model_len"),
        ({"hash_block": 1}, "hash_block"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"max_body_mib": 0}, "max_body_mib is 0"),
        ({}, "no model"),
        ({"scripted": tmp_path / "x"}, "scripted needs"),
        ({"model": tmp_path, "memory": -1.0}, "config.json"),
    ]:
        with pytest.raises(ValueError, match=wrong):
            open_app(ServeArgs(**flags))
    with pytest.raises(ValueError, match="api_key_file"):
        ServeArgs(api_key_file=tmp_path / "keys").server_settings(None)
    (tmp_path / "keys").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"api_key_file: .*keys is no UTF-8"):
        open_app(ServeArgs(model=tmp_path, api_key_file=tmp_path / "keys"))  # before a model is looked for
    for seconds in (-1.0, float("nan"), 1e30):
        with pytest.raises(ValueError, match=r"drain_timeout is .*; it must lie between 0 and 86400 seconds"):
            main(ServeArgs(model=tmp_path, drain_timeout=seconds))
    with pytest.raises(ValueError, match="memory is -1"):
        memory_bytes(-1.0, None)
    assert memory_bytes(0.5, None) == 1 << 29


def test_an_address_that_is_taken_is_told_before_a_model_is_read(tmp_path):
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(ValueError, match=r"cannot listen on .*: Address already in use$"),
    ):
        main(ServeArgs(model=tmp_path / "none", port=taken.getsockname()[1]))
