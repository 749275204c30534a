"""Replies: whole and streamed are the same answer, in the shape that the OpenAI API has."""

from __future__ import annotations

import json
import math

import pytest

from nanok3.serve.events import (
    Answer,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ContentDelta,
    MessageEnd,
    Problem,
    ReasoningDelta,
    ReasoningWasAnswer,
)
from nanok3.serve.replies import (
    DONE,
    KEEP_ALIVE,
    ChatReply,
    TextReply,
    TokenLogprob,
    Usage,
    chat_logprobs,
    problems,
    sse,
    text_choice,
    text_logprobs,
)

REPLY = ChatReply("chatcmpl-1", "k3", 1700000000)
USAGE = Usage(prompt=10, completion=5, cached=8, reasoning=2)
EVENTS = [
    ReasoningDelta("hm"),
    ContentDelta("Let "),
    ContentDelta("me."),
    CallBegun(0, "f_0", "f"),
    ArgumentsDelta(0, '{"a": '),
    ArgumentsDelta(0, "1}"),
    CallEnded(0, True),
    Problem("stray_text", "x", 3),
    CallBegun(1, "g_1", "g"),
    ArgumentsDelta(1, "{}"),
    CallEnded(1, True),
    MessageEnd("tool_calls"),
]


def test_usage_has_both_names_of_the_cached_part():
    assert USAGE.body() == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "cached_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_the_whole_reply():
    assert REPLY.whole([Answer(EVENTS)], USAGE, extra={"nanok3": 1}) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "k3",
        "nanok3": 1,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Let me.",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "f_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                        {"id": "g_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": USAGE.body(),
    }


def read_stream(chunks):
    """What a client adds up: message, finish_reason, usage."""
    message, calls, reason, usage = {"role": None, "content": None}, {}, None, None
    for chunk in chunks:
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            usage = choice.get("usage", usage)
            reason = choice["finish_reason"] or reason
            message["role"] = delta.get("role", message["role"])
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                known = calls.setdefault(call["index"], {"arguments": ""})
                known |= {key: call[key] for key in ("id", "type") if key in call}
                known["name"] = call["function"].get("name", known.get("name"))
                known["arguments"] += call["function"]["arguments"]
    message["tool_calls"] = [
        {"id": c["id"], "type": c["type"], "function": {"name": c["name"], "arguments": c["arguments"]}}
        for c in calls.values()
    ]
    return message, reason, usage


def test_the_stream_adds_up_to_the_whole():
    chunks = [REPLY.begin(), *REPLY.chunks(EVENTS, usage=USAGE), REPLY.usage(USAGE)]
    message, reason, usage = read_stream(chunks)
    whole = REPLY.whole([Answer(EVENTS)], USAGE)["choices"][0]
    assert (message, reason, usage) == (whole["message"], whole["finish_reason"], USAGE.body())
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and {c["id"] for c in chunks} == {"chatcmpl-1"}


def test_the_stream_in_detail():
    first, *middle, last = [REPLY.begin(), *REPLY.chunks(EVENTS, usage=USAGE)]
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}]
    opened = middle[3]["choices"][0]["delta"]["tool_calls"]
    assert opened == [{"index": 0, "id": "f_0", "type": "function", "function": {"name": "f", "arguments": ""}}]
    extended = middle[4]["choices"][0]["delta"]["tool_calls"]
    assert extended == [{"index": 0, "function": {"arguments": '{"a": '}}]
    assert last["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls", "usage": USAGE.body()
    }  # fmt: skip
    assert not any("usage" in chunk or "usage" in chunk["choices"][0] for chunk in [first, *middle])
    assert REPLY.usage(USAGE)["choices"] == [] and REPLY.begin(3)["choices"][0]["index"] == 3


def test_report_03_content_is_complete_where_reasoning_was_the_answer():
    events = [ReasoningDelta("42."), ReasoningWasAnswer(), ContentDelta("42."), MessageEnd("stop")]
    message, reason, _ = read_stream([REPLY.begin(), *REPLY.chunks(events)])
    assert (message["content"], reason) == ("42.", "stop")
    assert REPLY.whole([Answer(events, reasons=True)], USAGE)["choices"][0]["message"] == {
        "role": "assistant", "content": "42.", "reasoning_content": ""
    }  # fmt: skip


def test_logprobs_and_more_go_into_the_first_chunk():
    logprobs = chat_logprobs([TokenLogprob(b"\xe2", -1.5, ((b"x", -0.5), (b"y", -math.inf)))])
    assert logprobs == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -1.5,
                "bytes": [226],
                "top_logprobs": [
                    {"token": "x", "logprob": -0.5, "bytes": [120]},
                    {"token": "y", "logprob": -9999.0, "bytes": [121]},
                ],
            }
        ],
        "refusal": None,
    }
    chunks = list(REPLY.chunks(EVENTS[:2], logprobs=logprobs, extra={"x": 1}))
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [logprobs, None]
    assert [chunk.get("x") for chunk in chunks] == [1, None]
    (alone,) = REPLY.chunks([], logprobs=logprobs)
    assert alone["choices"][0]["delta"] == {} and alone["choices"][0]["logprobs"] == logprobs
    (alone,) = REPLY.chunks([EVENTS[7]], extra={"problems": problems(EVENTS)})
    assert alone["problems"] == [{"kind": "stray_text", "text": "x", "at": 3}]
    assert REPLY.whole([Answer(EVENTS)], USAGE, [logprobs])["choices"][0]["logprobs"] == logprobs


def test_plain_completions():
    reply = TextReply("cmpl-1", "k3", 1)
    logprobs = text_logprobs([b"a", TokenLogprob(b" b", -1.0, ((b" c", -0.1),))], offset=4)
    assert logprobs == {
        "tokens": ["a", " b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {" c": -0.1, " b": -1.0}],
        "text_offset": [4, 5],
    }
    body = reply.body([text_choice("a b", 0, "length", logprobs)], USAGE)
    assert (body["object"], body["usage"]["total_tokens"]) == ("text_completion", 15)
    assert body["choices"] == [{"index": 0, "text": "a b", "logprobs": logprobs, "finish_reason": "length"}]
    assert "usage" not in reply.body([text_choice("a")])


def test_pieces_of_characters_are_told_apart():
    first, second = b"\xe2\x80", b"\xe2\x81"
    logprobs = text_logprobs([TokenLogprob(first, -1.0, ((second, -0.5), (first, -1.0))), b"a"])
    assert logprobs["tokens"] == [r"bytes:\xe2\x80", "a"] and logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"][0] == {r"bytes:\xe2\x81": -0.5, r"bytes:\xe2\x80": -1.0}


@pytest.mark.parametrize("text", ["é\u2028\n", "data: x\n\n", "\r"])
def test_an_event_is_one_line(text):
    line = sse({"text": text})
    assert line.startswith(b"data: {") and line.endswith(b"}\n\n") and line.count(b"\n") == 2 and line.isascii()
    assert json.loads(line[6:]) == {"text": text}
    assert DONE == b"data: [DONE]\n\n" and KEEP_ALIVE.startswith(b":") and KEEP_ALIVE.endswith(b"\n\n")
