"""The API over the scripted stub, in process: every shape of answer, every rule for requests, nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import threading
import time

import pytest
from served import TOKENIZER, call, events_of, message, served, user

from nanok3.serve import chat_api, completions_api, messages_api, openapi, responses_api, status_api, tokens_api
from nanok3.serve.api import ROUTES
from nanok3.serve.engine import Job
from nanok3.serve.grammar import for_request
from nanok3.serve.http_gate import GateSettings
from nanok3.serve.protocol import Policy
from nanok3.serve.sampling_fields import Rules
from nanok3.serve.scheduler import Limits
from nanok3.serve.server import ServerSettings

pytestmark = pytest.mark.usefixtures("unchecked")
CHAT = "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def stub():
    with served(message()) as server:
        yield server


# ---------------------------------------------------------------------- chat completions


def test_an_answer_in_one_piece(stub):
    body = stub.chat("What?").json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "stub"
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert choice["message"] == {"role": "assistant", "content": "Hello, world.", "reasoning_content": "Hm."}
    (debug,) = body["debug"]
    assert debug["seconds"] >= debug["first_token_seconds"] >= debug["queue_seconds"] >= 0


def test_a_stream_says_the_same_piece_by_piece(stub):
    chunks, done = stub.stream()
    assert done and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world."
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_usage_stands_in_both_places(stub):
    whole = stub.chat().json()["usage"]
    chunks, _ = stub.stream(stream_options={"include_usage": True})
    *_, last, after = chunks
    assert after["choices"] == []
    for usage in (last["choices"][0]["usage"], after["usage"]):
        assert {**usage, "cached_tokens": 0, "prompt_tokens_details": 0} == {
            **whole,
            "cached_tokens": 0,
            "prompt_tokens_details": 0,
        }
        assert usage["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert "usage" not in stub.stream()[0][-1]


def test_prompt_tokens_are_those_of_the_prompt_without_its_opener(stub):
    body = {"messages": [user("hi")]}
    usage = stub.post(CHAT, body).json()["usage"]
    count = stub.post("/tokenize", body).json()["count"]
    opener = 2 + len(TOKENIZER.encode("think"))
    assert usage["prompt_tokens"] == count - opener
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Hm.")


def test_a_second_request_finds_the_first_ones_tokens():
    with served(message()) as stub:
        first, second = (stub.chat("x" * 1000, temperature=0).json() for _ in range(2))
        assert first["usage"]["cached_tokens"] == 0 and first["debug"][0]["cache_limit"] == "latents at 0"
        prompt = second["usage"]["prompt_tokens"]
        assert second["usage"]["cached_tokens"] == min(prompt, (prompt + 7 - 1) // 64 * 64)
        assert second["debug"][0]["cached_tokens"] == (prompt + 7 - 1) // 64 * 64
        assert second["debug"][0]["cache_limit"].startswith("prompt at")
        salted = stub.chat("x" * 1000, cache_salt="mine").json()
        assert salted["usage"]["cached_tokens"] == 0


def test_a_tool_call_whole_and_streamed():
    with served(message(content="", calls=call("weather", city="Oslo"))) as stub:
        fields = {"tools": [WEATHER]}
        choice = stub.chat(**fields).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (found,) = choice["message"]["tool_calls"]
        assert found["id"] == "weather_0" and json.loads(found["function"]["arguments"]) == {"city": "Oslo"}
        chunks, _ = stub.stream(**fields)
        entries = [e for chunk in chunks for e in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert entries[0]["id"] == "weather_0" and entries[0]["function"]["name"] == "weather"
        assert json.loads("".join(e["function"]["arguments"] for e in entries)) == {"city": "Oslo"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_choices_are_answers_of_their_own():
    with served(message(content="one"), message(content="two"), message(content="three")) as stub:
        choices = stub.chat(n=3).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in choices} == {"one", "two", "three"}
    with served(message(content="one"), message(content="two")) as stub:
        chunks, done = stub.stream(n=2)
        texts = {0: "", 1: ""}
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert done and set(texts.values()) == {"one", "two"}


def test_logprobs_are_those_of_the_content(stub):
    content = stub.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]) == b"Hello, world."
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == 0 for entry in content)
    chunks, _ = stub.stream(logprobs=True)
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]


def test_a_stop_string_ends_the_content_and_the_work(stub):
    body = stub.chat(stop=["wor"]).json()
    assert body["choices"][0]["message"]["content"] == "Hello, "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < stub.chat().json()["usage"]["completion_tokens"]
    ended = stub.chat(stop_token_ids=[ord(",")]).json()["choices"][0]
    assert ended["message"]["content"] == "Hello" and ended["finish_reason"] == "stop"


def test_max_tokens_end_with_length(stub):
    choice = stub.chat(max_completion_tokens=2, max_tokens=50).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": None, "reasoning_content": "Hm"}


def test_ignore_eos_goes_on(stub):
    body = stub.chat(ignore_eos=True, max_tokens=80).json()
    assert body["usage"]["completion_tokens"] == 80 and body["choices"][0]["finish_reason"] == "length"


def test_problems_of_an_answer_are_told(stub):
    segments = [{"text": "The answer is 42."}, {"text": "<|close|>response<|sep|>", "special": True}]
    with served({"segments": segments}) as odd:
        body = odd.chat().json()
        assert body["choices"][0]["message"]["content"] == "The answer is 42."
        assert [problem["kind"] for problem in body["problems"]] == ["missing_close"]
        chunks, _ = odd.stream()
        assert [problem["kind"] for problem in chunks[-1]["problems"]] == ["missing_close"]
    assert "problems" not in stub.chat().json()


def test_what_is_said_keeps_to_a_schema_and_a_forced_tool():
    constrain = functools.partial(for_request, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with served(message(content='Sure: {"a": 12} is it'), constrain=constrain) as stub:
        choice = stub.chat(response_format=form).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "Hm." and json.loads(choice["message"]["content"]) == {"a": 12}
        chunks, done = stub.stream(response_format=form)
        assert done and json.loads("".join(c["choices"][0]["delta"].get("content", "") for c in chunks)) == {"a": 12}
        wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 3}}}
        assert stub.chat(response_format=wrong).status_code == 400
        assert stub.chat(tools=[WEATHER], tool_choice="required", max_tokens=60).status_code == 200


# ---------------------------------------------------------------------- completions


def test_a_completion_echoes_and_scores_as_harnesses_ask(stub):
    ids = TOKENIZER.encode("once upon")
    for prompt in ("once upon", ids, [ids]):
        asked = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        (choice,) = stub.post("/v1/completions", asked).json()["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == "once uponH" and logprobs["tokens"] == list("once uponH")
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:-1] == pytest.approx([-math.log(TOKENIZER.vocab_size)] * 8)
        assert logprobs["text_offset"] == list(range(10))
    silent = stub.post("/v1/completions", {**asked, "max_tokens": 0}).json()
    assert silent["choices"][0]["text"] == "once upon" and len(silent["choices"][0]["logprobs"]["tokens"]) == 9
    assert silent["usage"]["completion_tokens"] == 0


def test_completions_of_several_prompts_come_in_order(stub):
    asked = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 3, "echo": True}
    body = stub.post("/v1/completions", asked).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["aHm.", "aHm.", "bcHm.", "bcHm."]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 0}])
def test_a_streamed_completion_adds_up(stub, fields):
    asked = {"prompt": "ab", "max_tokens": 3, **fields}
    whole = stub.post("/v1/completions", asked).json()["choices"][0]
    chunks, done = stub.stream("/v1/completions", **asked)
    assert done and "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
    tokens = [t for chunk in chunks for t in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert tokens == (whole["logprobs"] or {"tokens": []})["tokens"]


def test_an_empty_prompt_begins_a_text(stub):
    assert stub.post("/v1/completions", {"prompt": "", "max_tokens": 2}).json()["choices"][0]["text"] == "Hm"


# ---------------------------------------------------------------------- tokens, models, state


def test_tokens_and_templates(stub):
    assert stub.post("/tokenize", {"prompt": "<|open|>"}).json()["tokens"] == [*b"<|open|>"]
    shown = stub.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert shown["token_strs"] == ["a", "b"] and shown["max_model_len"] == 8192
    assert stub.post("/detokenize", {"tokens": [104, 105]}).json() == {"prompt": "hi"}
    found = stub.post("/apply-template", {"messages": [user("hi")]}).json()
    assert found["prompt"].endswith("<|open|>think<|sep|>") and "hi" in found["prompt"]
    assert "".join(part["text"] for part in found["segments"]) == found["prompt"]
    for path, body in [("/tokenize", {}), ("/detokenize", {"tokens": [512]}), ("/detokenize", {"tokens": 1})]:
        assert stub.post(path, body).status_code == 400


def test_models_have_all_their_names():
    with served(server=ServerSettings(names=("a", "b/c"))) as stub:
        assert [entry["id"] for entry in stub.get("/v1/models").json()["data"]] == ["a", "b/c"]
        assert stub.get("/v1/models/b/c").json()["max_model_len"] == 8192
        seen = stub.get("/v1/models/b/c").json()["supports_image_in"]
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        answered = stub.post(CHAT, {"messages": [user([picture])]})
        assert seen is False and answered.status_code == 400
        assert stub.chat(model="b/c").json()["model"] == "b/c"
        for response in (stub.get("/v1/models/d"), stub.chat(model="d")):
            assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_health_loads_and_metrics():
    with served() as stub:
        assert stub.get("/health").status_code == stub.get("/ready").status_code == 200
        stub.chat("x" * 300)
        stub.chat("x" * 300)
        loads = stub.get("/v1/loads").json()
        assert loads["num_running_reqs"] == loads["num_waiting_reqs"] == 0
        pages = loads["pages"]
        held = sum(pages[kind][state] for kind in ("latent", "snapshot") for state in ("used", "cached"))
        assert held + pages["any"]["free"] == pages["total"] and pages["snapshot"]["cached"] > 0
        text = stub.get("/metrics").text
        numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(numbers["nanok3_prompt_tokens_total"]) > float(numbers["nanok3_cached_tokens_total"]) > 0
        assert numbers['nanok3_requests_finished_total{reason="stop"}'] == "2.0"
        assert numbers["nanok3_time_to_first_token_seconds_count"] == "2.0"
        assert float(numbers["nanok3_inter_token_latency_seconds_count"]) > 10
        stub.engine.drain(0)
        assert stub.get("/ready").status_code == stub.get("/health").status_code == 503
        response = stub.chat()
        assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("module", [chat_api, completions_api, messages_api, responses_api, status_api, tokens_api])
def test_every_endpoint_has_its_path(module):
    found = [f for _, f in inspect.getmembers(module, inspect.iscoroutinefunction) if f.__module__ == module.__name__]
    public = [f for f in found if not f.__name__.startswith("_")]
    assert public and {f.__name__ for f in public} <= {route.answer.__name__ for route in ROUTES}


def test_the_openapi_document_names_every_path(stub):
    document = stub.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/metrics", "/v1/models/{model}"} <= set(document["paths"])
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == openapi.CHAT and body["properties"]["temperature"]["maximum"] == 2
    assert stub.get("/docs").status_code == 404


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a"] * 6}, "stop"),
        ({"stop": "x" * 33}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 10**7}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"thinking": {"type": "enabled", "effort": "medium"}}, "thinking.effort"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"512": 1}}, "logit_bias.512"),
    ],
)
def test_mistakes_are_400_and_name_the_field(stub, fields, param):
    response = stub.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == param


def test_kimis_own_rules_can_be_asked_for():
    with served(server=ServerSettings(names=("stub",), policy=Policy(rules=Rules.K3))) as strict:
        for fields in ({"top_p": 0.8}, {"n": 2}, {"presence_penalty": 0.5}, {"temperature": 1.1}):
            assert strict.chat(**fields).status_code == 400
        assert strict.chat(top_p=0.95, n=1, temperature=0.6).status_code == 200


def test_a_prompt_that_does_not_fit_is_told(stub):
    for fields in ({"messages": [user("x" * 9000)]}, {"max_tokens": 8192}):
        response = stub.chat(**fields)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


def test_what_cannot_be_kept_is_refused(stub):
    assert stub.chat(response_format={"type": "json_object"}).status_code == 400
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert stub.post(CHAT, {"messages": [{"role": "user", "content": [picture]}]}).status_code == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000])
def test_what_is_no_json_is_400(stub, body):
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/apply-template"):
        response = stub.post(path, content=body)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


def test_paths_and_methods_that_do_not_exist(stub):
    assert stub.get("/v1/nothing").json()["error"]["code"] == "not_found"
    response = stub.get(CHAT)
    assert response.status_code == 405 and "error" in response.json() and "POST" in response.headers["allow"]


def test_a_fault_of_ours_shows_no_traceback(stub, monkeypatch):
    monkeypatch.setattr(stub.engine, "submit", lambda job: 1 / 0)
    response = stub.chat()
    assert response.status_code == 500 and "ZeroDivision" not in response.text and "Traceback" not in response.text
    assert response.headers["x-request-id"]


def test_a_model_that_fails_fails_its_request_alone(monkeypatch):
    with served(message(delay_ms=1)) as stub:
        read = stub.engine.runner.read

        def broken(work, scored):
            results = read(work, scored)
            doomed = [piece.sequence.id for piece in work if len(piece.sequence.ids) % 7 == 0]
            return {**results, **{name: ValueError("secret") for name in doomed[:1]}}

        monkeypatch.setattr(stub.engine.runner, "read", broken)
        response = stub.chat()
        assert response.status_code == 500 and "secret" not in response.text
        chunks, done = stub.stream()
        assert not done and chunks[-1]["error"]["code"] == "server_error"
        monkeypatch.setattr(stub.engine.runner, "read", read)
        assert stub.chat().status_code == 200 and stub.is_free()


# ---------------------------------------------------------------------- who may ask, and how much


def test_keys():
    gate = GateSettings(keys=("first", "second"), admin_key="root")
    with served(server=ServerSettings(names=("stub",), gate=gate)) as stub:
        for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}, {"x-api-key": "é"}):
            response = stub.chat(headers={k: v.encode("latin-1") for k, v in headers.items()})
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
        assert stub.get("/metrics").status_code == 401
        assert stub.get("/health").status_code == 200
        page = stub.get("/")
        assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
        assert stub.get("/page/page.js").headers["content-type"].startswith("text/javascript")
        for headers in ({"authorization": "Bearer second"}, {"x-api-key": "first"}):
            assert stub.chat(headers=headers).status_code == 200
        assert stub.post("/admin/flush", headers={"authorization": "Bearer first"}).status_code == 401
        assert stub.engine.cache.spans > 0
        assert stub.post("/admin/flush", headers={"authorization": "Bearer root"}).status_code == 200
        deadline = time.monotonic() + 5
        while stub.engine.cache.spans and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stub.engine.cache.spans == 0
        assert stub.post("/v1/messages", headers={}).json()["type"] == "error"


def test_without_an_admin_key_nobody_is_one(stub):
    assert stub.post("/admin/flush", headers={"authorization": "Bearer "}).status_code == 403


def test_a_key_has_so_many_requests_at_a_time():
    gate = GateSettings(keys=("a", "b"), per_key=2)
    with served(message(delay_ms=5), server=ServerSettings(names=("stub",), gate=gate)) as stub:
        responses = stub.together(*[{"messages": [user("x")]}] * 4, headers={"x-api-key": "a"})
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
        assert stub.chat(headers={"x-api-key": "a"}).status_code == 200


def test_a_body_may_not_be_too_large():
    with served(server=ServerSettings(names=("stub",), gate=GateSettings(body_bytes=1000))) as stub:
        assert stub.chat("x" * 1000).status_code == 413

        async def pieces():
            for _ in range(100):
                yield b" " * 100

        assert stub.post(CHAT, content=pieces()).status_code == 413
        assert stub.chat("x").status_code == 200


def test_overload_is_429_and_says_when_to_come_back():
    limits = Limits(budget=512, max_sequences=1)
    with served(message(delay_ms=5), limits=limits, max_waiting=2) as stub:
        responses = stub.together(*[{"messages": [user("x")]}] * 8)
        refused = [response for response in responses if response.status_code == 429]
        assert refused and len(refused) < 8
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert stub.chat(n=3).status_code == 400 and stub.chat(n=2).status_code == 200


def test_a_deadline_is_kept():
    with served(message(delay_ms=20)) as stub:
        response = stub.chat(timeout=0.1)
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        chunks, done = stub.stream(timeout=0.1)
        assert not done and chunks[-1]["error"]["type"] == "timeout_error" and stub.is_free()
    with served(message(delay_ms=20), server=ServerSettings(names=("stub",), seconds=0.1)) as stub:
        assert stub.chat(timeout=100).status_code == 504


def test_a_stream_without_tokens_is_kept_alive():
    script = message(thought="x", content="y", delay_ms=60)
    with served(script, server=ServerSettings(names=("stub",), keep_alive=0.02)) as stub:
        response = stub.post(CHAT, {"messages": [user("x")], "stream": True})
        assert ": keep-alive\n\n" in response.text and events_of(response.text)[1]


def test_pages_of_other_origins_may_not_ask_unless_told(stub):
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in stub.request("OPTIONS", CHAT, headers=asked).headers
    gate = GateSettings(keys=("k",))
    with served(server=ServerSettings(names=("stub",), origins=("http://page",), gate=gate)) as open_:
        assert open_.request("OPTIONS", CHAT, headers=asked).headers["access-control-allow-origin"] == "http://page"
        other = open_.request("OPTIONS", CHAT, headers={**asked, "origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers


def test_requests_have_names_and_a_line_in_the_log(stub, caplog):
    caplog.set_level("INFO", "nanok3.access")
    response = stub.chat("secret words", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == response.headers["x-trace-id"] == "mine-1"
    assert stub.chat(headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")
    line = json.loads(caplog.messages[0])
    assert line["id"] == "mine-1" and line["status"] == 200 and line["finish"] == ["stop"]
    assert "secret" not in caplog.text and "Hello" not in caplog.text
    caplog.clear()
    gate = GateSettings(log_prompts=True)
    with served(server=ServerSettings(names=("stub",), gate=gate)) as loud:
        loud.chat("secret words")
    assert "secret words" in caplog.text


# ---------------------------------------------------------------------- clients that go away


async def leave(app, body, after):
    """Ask, and go away after so many pieces of the answer."""
    gone, pieces = asyncio.Event(), 0
    sent = False

    async def receive():
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal pieces
        pieces += message["type"] == "http.response.body"
        if pieces >= after:
            gone.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": ""}
    if after == 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    await asyncio.wait_for(app(scope, receive, send), 10)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything(stream):
    """Report 38 of the spec: at the next step, streaming or not."""
    with served(message(content="x" * 5000, delay_ms=2)) as stub:
        body = {"messages": [user("y" * 500)], "stream": stream, "n": 3}
        asyncio.run(leave(stub.app, body, after=5 if stream else 0))
        assert stub.is_free()
        assert stub.engine.counters.finished == {"cancelled": 3} and stub.engine.counters.said_tokens < 3000
        assert stub.chat("z", max_tokens=3).status_code == 200


def test_who_waits_in_the_queue_and_leaves_is_forgotten():
    with served(message(content="x" * 300, delay_ms=2), limits=Limits(max_sequences=1)) as stub:

        async def both():
            async with stub.client() as client:
                first = asyncio.create_task(client.post(CHAT, json={"messages": [user("a")]}))
                await asyncio.sleep(0.05)
                await leave(stub.app, {"messages": [user("b")], "stream": True}, after=0)
                while stub.engine.waiting:
                    await asyncio.sleep(0.01)
                assert not first.done()
                return await first

        assert asyncio.run(both()).status_code == 200 and stub.is_free()


def test_draining_lets_the_running_ones_finish():
    with served(message(delay_ms=5)) as stub:
        drained = []

        def drain():
            while not stub.engine.running:
                time.sleep(0.001)
            drained.append(stub.engine.drain(100))

        draining = threading.Thread(target=drain)
        draining.start()
        assert stub.chat().json()["choices"][0]["finish_reason"] == "stop"
        draining.join()
        assert drained == [True] and stub.chat().status_code == 503


def test_a_drain_that_takes_too_long_tells_who_waits():
    with served(message(content="x" * 500, delay_ms=10)) as stub:
        threading.Timer(0.1, lambda: stub.engine.drain(0.05)).start()
        response = stub.chat()
        assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"


def test_an_engine_that_breaks_leaves_nobody_waiting(monkeypatch):
    with served(message(delay_ms=1)) as stub:
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        monkeypatch.setattr(stub.engine.scheduler, "plan", lambda: 1 / 0)
        assert stub.chat().status_code == 500
        assert stub.get("/health").status_code == 503 and stub.chat().status_code == 503


def test_choices_have_seeds_of_their_own(stub):
    jobs = []
    keep = stub.engine.submit
    stub.engine.submit = lambda job: (jobs.append(job), keep(job))[1]
    try:
        stub.chat(n=3, seed=7)
    finally:
        stub.engine.submit = keep
    assert all(isinstance(job, Job) for job in jobs) and [job.params.seed for job in jobs] == [7, 8, 9]


def test_what_cannot_fit_is_refused_before_it_costs_anything(stub, monkeypatch):
    """One large body would hold up everybody: it is not rendered, encoded or written back first."""

    def encode(self, text, *more):
        raise AssertionError("it was encoded")

    monkeypatch.setattr(type(TOKENIZER), "encode", encode)
    many = [{"role": "user", "content": "a"}] * 2000
    for path, body, what in [
        (CHAT, {"messages": many}, "at least 12000 tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10**6}]}, "at least"),
        ("/v1/messages", {"messages": many, "max_tokens": 1}, "at least 12000 tokens"),
        ("/v1/responses", {"input": "a" * 10**6}, "at least"),
        ("/v1/responses", {"input": many * 5}, "at least 10000 tokens"),
        ("/v1/completions", {"prompt": "a" * 10**6}, "at least"),
        ("/v1/completions", {"prompt": ["a"] * 5000}, "5000 answers"),
        ("/tokenize", {"prompt": "a" * (2**22 + 1)}, "4194305 characters; allowed: 4194304"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "1048577 ids; allowed: 1048576"),
    ]:
        answer = stub.post(path, body)
        assert answer.status_code == 400 and what in answer.json()["error"]["message"]
    answer = stub.post("/detokenize", {"tokens": [1] * (2**21 + 2)})
    assert answer.status_code == 413 and "2097153 commas" in answer.json()["error"]["message"]


def test_a_number_that_would_be_infinite_is_no_json(stub):
    """It would stand in the answer as a word that no reader of JSON knows."""
    for path in (CHAT, "/v1/responses"):
        answer = stub.post(path, content=b'{"input": "hi", "messages": [], "metadata": {"a": -1e999}}')
        assert answer.status_code == 400 and "-1e999 is no JSON number" in answer.json()["error"]["message"]


def test_an_error_does_not_repeat_a_long_name(stub):
    assert len(stub.chat(model="x" * 10**5).content) < 300
