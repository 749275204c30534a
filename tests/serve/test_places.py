"""Mistakes bear the names that the client wrote: every field of the two other shapes, wrong one at a time."""

from __future__ import annotations

import copy
import re

import pytest
from served import message, served

from nanok3.serve import messages_api, openapi, responses_api
from nanok3.serve.fields import RequestError
from nanok3.serve.places import Said, named, place_in

pytestmark = pytest.mark.usefixtures("unchecked")
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
RESPONSE = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "look_0", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "look_0", "output": "a wall"},
    ],
    "max_output_tokens": 4,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "look"},
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "temperature": 1,
    "top_p": 1,
    "stream": False,
    "metadata": {},
    "user": "me",
    "parallel_tool_calls": True,
}
MESSAGES = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "tool_use", "id": "look_0", "name": "look", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "look_0", "content": "a wall"}]},
    ],
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "me"},
    "thinking": {"type": "enabled"},
    "output_config": {"effort": "low"},
    "temperature": 1,
    "top_p": 1,
    "top_k": 5,
    "stream": False,
}
SHAPES = {"/v1/responses": (RESPONSE, openapi.RESPONSE), "/v1/messages": (MESSAGES, openapi.MESSAGES)}


@pytest.fixture(scope="module")
def stub():
    with served(message(thought="", content="x")) as server:
        yield server


def leaves(value, path=""):
    """Places of all that is inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key
        yield place
        yield from leaves(one, place)


def steps(path):
    return [int(index) if index else name for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path)]


def with_wrong(body, path, wrong):
    body = copy.deepcopy(body)
    *before, last = steps(path)
    here = body
    for step in before:
        here = here[step]
    here[last] = wrong
    return body


def holds(body, path):
    """Whether there is such a place in a body, or could be in an object that is there."""
    here = body
    for k, step in enumerate(steps(path)):
        if isinstance(step, int):
            if not isinstance(here, list) or step >= len(here):
                return False
        elif not isinstance(here, dict):
            return False
        elif step not in here:
            return k == len(steps(path)) - 1
        here = here[step]
    return True


@pytest.mark.parametrize("path", SHAPES)
def test_every_field_that_is_wrong_is_named_as_the_client_wrote_it(stub, path):
    """Each place of a whole request gets a value of no allowed type. What is refused is refused under a name that leads
    somewhere in the client's own body, at that place or, where two places have to agree, at the other."""
    body, schema = SHAPES[path]
    translate = (responses_api if path == "/v1/responses" else messages_api).chat_body
    refused = {}
    for place in leaves(body):
        for wrong in (["?"], -1.5, "?", {"?": 1}):
            given = with_wrong(body, place, wrong)
            answer = stub.post(path, given)
            if answer.status_code == 501:
                continue  # a grammar where there is no library for it
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                error = answer.json()["error"]
                param = error.get("param") or error["message"].split()[0].rstrip(":")
                assert steps(param)[0] in schema["properties"] and holds(given, param), (place, wrong, error)
                refused.setdefault(place, set()).add(param)
    assert translate(body) and len(refused) > 20
    for place, params in refused.items():
        assert any(param.startswith(place) or place.startswith(param) for param in params), (place, params)


@pytest.mark.parametrize(
    ("path", "place", "wrong", "named_as"),
    [
        ("/v1/responses", "text.format.type", "xml", "text.format.type"),
        ("/v1/responses", "text.format", {"type": "json_schema", "name": "x", "schema": 5}, "text.format.schema"),
        ("/v1/responses", "text.format", {"type": "json_schema", "schema": {}}, "text.format.name"),
        ("/v1/responses", "tools[0].name", "a b", "tools[0].name"),
        ("/v1/responses", "tools[0].parameters", 5, "tools[0].parameters"),
        ("/v1/responses", "tool_choice.name", "other", "tool_choice.name"),
        ("/v1/responses", "max_output_tokens", 10**6, "input"),
        ("/v1/responses", "input[2].name", "", "input[2].name"),
        ("/v1/responses", "input[2].arguments", 5, "input[2].arguments"),
        ("/v1/responses", "input[3].call_id", None, "input[3].call_id"),
        ("/v1/messages", "stop_sequences[0]", "x" * 40, "stop_sequences[0]"),
        ("/v1/messages", "stop_sequences", ["x"] * 6, "stop_sequences"),
        ("/v1/messages", "tools[0].name", "a b", "tools[0].name"),
        ("/v1/messages", "tool_choice.name", "other", "tool_choice.name"),
        ("/v1/messages", "messages[1].content[1].name", "", "messages[1].content[1].name"),
        ("/v1/messages", "messages[2].content[0].tool_use_id", None, "messages[2].content[0].tool_use_id"),
    ],
)
def test_some_of_them(stub, path, place, wrong, named_as):
    error = stub.post(path, with_wrong(SHAPES[path][0], place, wrong)).json()["error"]
    assert error.get("param", named_as) == named_as
    assert error["message"].startswith(named_as) or "tokens" in error["message"]


def test_a_path_is_walked_through_what_was_said():
    part = Said({"type": "image_url", "image_url": "x"}, "input[4].content[1]", image_url="input[4].content[1].file_id")
    chat = Said({"messages": [{}, Said({"content": [{}, part]}, "input[4]")], "stop": []}, stop="stop_sequences")
    for path, place in {
        "messages[1].content[1].image_url": "input[4].content[1].file_id",
        "messages[1].content[0].text": "input[4].content[0].text",
        "messages[1].role": "input[4].role",
        "messages[0].role": "messages[0].role",
        "messages[9].role": "messages[9].role",
        "stop[2]": "stop_sequences[2]",
        "top_p": "top_p",
    }.items():
        assert place_in(chat, path) == place
    error = named(RequestError("stop[2] is 5; allowed: stop[2]", "stop[2]"), chat)
    assert (error.param, error.message) == ("stop_sequences[2]", "stop_sequences[2] is 5; allowed: stop[2]")
    untouched = RequestError("stop is 5", "stop")
    assert named(untouched, {"stop": 5}).param == "stop"
