"""One stream of events in three shapes: what Responses and Messages say is what the chat answer says."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response as OpenAIResponse
from served import call, message, served, user

from nanok3.serve import messages_api, responses_api
from nanok3.serve.fields import RequestError

pytestmark = pytest.mark.usefixtures("unchecked")
CALLS = message("I call.", "Wait.", call("weather", city="Oslo"))
TOOL = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": TOOL}


@pytest.fixture(scope="module")
def stub():
    with served(CALLS) as server:
        yield server


def named(stub, path, body):
    """The events of a named stream, each under its name."""
    response = stub.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("event: "):
            found.append((lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))))
    assert all(name == body["type"] for name, body in found)
    return found


def without_ids(value):
    if isinstance(value, dict):
        return {
            k: without_ids(v) for k, v in value.items() if k not in ("id", "created_at", "debug", "usage", "item_id")
        }
    return [without_ids(v) for v in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------- responses

ASKED = {"input": "hi", "tools": [{"type": "function", **TOOL}]}


def test_a_response_is_the_answer_in_items(stub):
    body = stub.post("/v1/responses", ASKED).json()
    OpenAIResponse.model_validate(body)
    assert body["object"] == "response" and body["status"] == "completed"
    thought, said, called = body["output"]
    assert thought["type"] == "reasoning" and thought["content"][0]["text"] == "I call."
    assert said["content"][0]["text"] == "Wait." and said["role"] == "assistant"
    assert (called["call_id"], called["name"]) == ("weather_0", "weather")
    assert json.loads(called["arguments"]) == {"city": "Oslo"}
    chat = stub.chat(tools=[CHAT_TOOL]).json()["usage"]
    used = body["usage"]
    assert used["input_tokens"] == chat["prompt_tokens"] and used["output_tokens"] == chat["completion_tokens"]
    assert used["output_tokens_details"]["reasoning_tokens"] == len("I call.")


def test_a_streamed_response_grows_into_the_whole_one(stub):
    events = named(stub, "/v1/responses", ASKED)
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    names = [name for name, _ in events]
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    texts = {
        kind: "".join(b["delta"] for n, b in events if n == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert texts == {"reasoning_text": "I call.", "output_text": "Wait.", "function_call_arguments": '{"city": "Oslo"}'}
    done = [body["item"] for name, body in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    whole = stub.post("/v1/responses", ASKED).json()
    assert without_ids(events[-1][1]["response"]) == without_ids(whole)
    opened = [body["output_index"] for name, body in events if name == "response.output_item.added"]
    assert opened == [0, 1, 2]


def test_output_items_are_read_back_as_one_message(stub):
    output = stub.post("/v1/responses", ASKED).json()["output"]
    result = {"type": "function_call_output", "call_id": "weather_0", "output": "rain"}
    given = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *output, result]
    messages = responses_api.chat_body({"input": given, "instructions": "Be brief."})["messages"]
    arguments = '{"city": "Oslo"}'
    called = {"id": "weather_0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "I call.", "content": "Wait.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "weather_0", "content": "rain"},
    ]
    assert stub.post("/v1/responses", {**ASKED, "input": given}).status_code == 200


def test_a_response_that_was_cut_is_incomplete(stub):
    body = stub.post("/v1/responses", {"input": "hi", "max_output_tokens": 3}).json()
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert named(stub, "/v1/responses", {"input": "hi", "max_output_tokens": 3})[-1][0] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "x"}]}, "input[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ],
)
def test_mistakes_of_a_response(stub, fields, param):
    response = stub.post("/v1/responses", {"input": "hi", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_fields_of_a_response_become_those_of_a_chat():
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False}
    body = responses_api.chat_body(
        {
            "input": "x",
            "text": {"format": schema},
            "reasoning": {"effort": "low"},
            "tool_choice": {"type": "function", "name": "weather"},
        }
    )
    assert body["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": False}
    assert body["reasoning_effort"] == "low"
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


# ---------------------------------------------------------------------- messages

TALK = {
    "max_tokens": 200,
    "messages": [user("hi")],
    "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
}


def test_a_message_is_the_answer_in_blocks(stub):
    body = stub.post("/v1/messages", TALK).json()
    thought, said, called = body["content"]
    assert thought == {"type": "thinking", "thinking": "I call.", "signature": ""}
    assert said == {"type": "text", "text": "Wait."}
    assert called == {"type": "tool_use", "id": "weather_0", "name": "weather", "input": {"city": "Oslo"}}
    assert body["stop_reason"] == "tool_use" and body["role"] == "assistant"
    chat = stub.chat(tools=[CHAT_TOOL]).json()["usage"]
    used = body["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["prompt_tokens"]
    assert used["output_tokens"] == chat["completion_tokens"]
    assert stub.post("/v1/messages/count_tokens", TALK).json() == {"input_tokens": chat["prompt_tokens"]}


def test_a_streamed_message_grows_into_the_whole_one(stub):
    events = named(stub, "/v1/messages", TALK)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    blocks = []
    for name, body in events:
        if name == "content_block_start":
            assert body["index"] == len(blocks)
            blocks.append({**body["content_block"], "json": ""})
        elif name == "content_block_delta":
            for field, text in body["delta"].items():
                if field != "type":
                    blocks[body["index"]]["json" if field == "partial_json" else field] += text
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
    assert blocks == stub.post("/v1/messages", TALK).json()["content"]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_blocks_are_read_back(stub):
    answer = stub.post("/v1/messages", TALK).json()["content"]
    result = {"type": "tool_result", "tool_use_id": "weather_0", "content": [{"type": "text", "text": "rain"}]}
    talk = [user("hi"), {"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]
    messages = messages_api.chat_body({"system": [{"type": "text", "text": "s"}], "messages": talk})["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "I call." and messages[2]["content"] == "Wait."
    assert json.loads(messages[2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert stub.post("/v1/messages", {**TALK, "messages": talk}).status_code == 200


def test_why_a_message_ended(stub):
    ends = [({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": ["ai"]}, "stop_sequence", "ai")]
    for fields, reason, stop in ends:
        body = stub.post("/v1/messages", {**TALK, **fields}).json()
        assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    with served(message()) as plain:
        assert plain.post("/v1/messages", TALK).json()["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        {"tools": [{"name": "weather"}]},
        {"tool_choice": {"type": "some"}},
        {"tool_choice": {"type": "tool", "name": "other"}},
        {"stop_sequences": [""]},
    ],
)
def test_mistakes_of_a_message(stub, fields):
    response = stub.post("/v1/messages", {**TALK, **fields})
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]


def test_fields_of_a_message_become_those_of_a_chat():
    body = messages_api.chat_body(
        {
            "messages": [user("x")],
            "thinking": {"type": "enabled", "budget_tokens": 1000},
            "output_config": {"effort": "low"},
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
    )
    assert body["thinking"] == {"type": "enabled"} and body["reasoning_effort"] == "low"
    assert body["tool_choice"] == "required" and body["parallel_tool_calls"] is False
    with pytest.raises(RequestError, match=r"thinking\.type"):
        messages_api.chat_body({"thinking": {"type": "some"}})
    with pytest.raises(RequestError, match=r"thinking\.budget_tokens"):
        messages_api.chat_body({"thinking": {"type": "enabled", "budget_tokens": "many"}})


# ---------------------------------------------------------------------- both


def test_an_answer_said_as_a_thought_is_the_answer():
    segments = [{"text": "It is 42."}, {"text": "<|close|>response<|sep|>", "special": True}]
    with served({"segments": segments}) as stub:
        (block,) = stub.post("/v1/messages", TALK).json()["content"]
        assert block == {"type": "text", "text": "It is 42."}
        (item,) = stub.post("/v1/responses", {"input": "x"}).json()["output"]
        assert item["content"][0]["text"] == "It is 42."
        assert named(stub, "/v1/responses", {"input": "x"})[-1][0] == "response.completed"
        events = named(stub, "/v1/messages", TALK)
        assert events[-1][0] == "message_stop"
        assert [body["index"] for name, body in events if name == "content_block_start"] == [0, 1]


def test_an_error_in_a_stream_is_told_in_its_shape():
    with served(message(delay_ms=20)) as stub:
        events = named(stub, "/v1/responses", {"input": "x", "timeout": 0.1})
        assert events[-1][0] == "response.failed" and events[-1][1]["response"]["error"]["code"] == "timeout"
        name, body = named(stub, "/v1/messages", {**TALK, "timeout": 0.1})[-1]
        assert name == "error" and body["error"]["type"] == "timeout_error"
        assert stub.is_free()
