"""Requests that nobody meant: whatever the fields hold, there is an answer or a mistake with a name, never a fault."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import message, served

from nanok3.serve import openapi

pytestmark = pytest.mark.usefixtures("unchecked")
POSTS = {
    "/v1/chat/completions": openapi.CHAT,
    "/v1/completions": openapi.COMPLETION,
    "/v1/responses": openapi.RESPONSE,
    "/v1/messages": openapi.MESSAGES,
    "/tokenize": openapi.TOKENIZE,
    "/detokenize": openapi.DETOKENIZE,
    "/apply-template": openapi.CHAT,
}
NAMES = [
    "role",
    "input",
    "id",
    "call_id",
    "source",
    "text",
    "content",
    "type",
    "function",
    "name",
    "tools",
    "url",
    "effort",
    "schema",
    "json_schema",
    "arguments",
]

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308, 5e-324, 0.5, "", "\ud800", "\x00", "é", "<|open|>"]
    )
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        ["user", "system", "assistant", "tool", "text", "function", "json_schema", "auto", "required", "max"]
    )
    | st.sampled_from(["function_call", "reasoning", "function_call_output", "tool_use", "tool_result", "thinking"])
    | st.text(max_size=20)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4)
        | st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), inner)
    ),
    max_leaves=12,
)


@st.composite
def requests(draw):
    """A path, and a body with a few of its fields; mostly with what has to be there."""
    path = draw(st.sampled_from(sorted(POSTS)))
    body = draw(st.dictionaries(st.sampled_from(sorted(POSTS[path]["properties"])), values, max_size=4))
    sound = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "tokens": [1], "input": "hi"}
    if path == "/v1/messages" and draw(st.integers(0, 3)):
        body["max_tokens"] = 9
    for name in POSTS[path].get("required", ()):
        if draw(st.integers(0, 3)):
            body[name] = sound[name]
    return path, body


@pytest.fixture(scope="module")
def stub():
    with served(message(thought="", content="x"), context=512) as server:
        yield server


def check(stub, path, **content):
    response = stub.post(path, **content)
    assert response.status_code < 500, (path, content, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.status_code in (400, 404) and error["message"] and "Traceback" not in response.text
    return response


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_no_field_brings_a_fault(stub, request_):
    path, body = request_
    check(stub, path, content=json.dumps(body).encode())


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(POSTS)), st.binary(max_size=60) | st.text(alphabet='{}[]":,0eE-.nul', max_size=40))
def test_no_bytes_bring_a_fault(stub, path, content):
    check(stub, path, content=content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("depth", [50, 500, 900, 5000])
@pytest.mark.parametrize("field", ["messages", "tools", "logit_bias", "response_format", "metadata", "prompt"])
def test_no_depth_brings_a_fault(stub, field, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    tool = f'[{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}]'
    given = {"messages": '[{"role": "user", "content": "x"}]', field: tool if field == "tools" else nested}
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in given.items()) + "}"
    for path in ("/v1/chat/completions", "/apply-template"):
        check(stub, path, content=body.encode())


def test_afterwards_everything_is_free(stub):
    assert stub.chat().status_code == 200 and stub.is_free()
