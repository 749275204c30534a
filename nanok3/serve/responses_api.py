"""`POST /v1/responses`: the same conversations and events in the shape of OpenAI's Responses API.

    input items                                          -> messages of a chat request, which is checked as ever
    reasoning + message + function_call, one behind the other  = one message of the assistant
    events of the answer                                 -> output items, and as a stream their growth

Nothing is stored: a conversation is sent whole each time, and `previous_response_id` is a mistake. Reasoning is an item
of its own with the text in `content`; send it back with the rest.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from nanok3.serve.answers import Answers, Ended, check_outcome
from nanok3.serve.chat_api import note
from nanok3.serve.events import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ContentDelta,
    Event,
    MessageEnd,
    ReasoningDelta,
    ReasoningWasAnswer,
)
from nanok3.serve.fields import Fields, RequestError, read_json, refuse
from nanok3.serve.places import Said
from nanok3.serve.protocol import MAX_TOKENS
from nanok3.serve.replies import KEEP_ALIVE, named_sse
from nanok3.serve.server import Asked, Call, Server, debug, in_thread, new_id, usage

SAME = ("model", "temperature", "top_p", "stream", "metadata", "user", "parallel_tool_calls", "prompt_cache_key")
"""Fields that mean what they mean in a chat request; so do those of the open servers."""
ALSO = ("top_k", "min_p", "seed", "stop", "cache_salt", "priority", "timeout", "chat_template_kwargs", "thinking")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


async def responses(server: Server, call: Call) -> dict[str, Any] | AsyncIterator[bytes]:
    """The endpoint."""
    body = await in_thread(read_json, call.body)
    asked = await server.read_chat(body, call, chat_body)
    reply = ResponseReply(body, asked.request.model or server.name)
    answers = server.start_chat(asked, call)
    if asked.request.stream:
        return _stream(server, call, asked, answers, reply)
    (whole,) = await answers.all()
    assert whole.ended is not None
    for _ in reply.events(whole.events):
        pass
    note(call, [whole.ended])
    return reply.end(asked, whole.ended)


async def _stream(
    server: Server, call: Call, asked: Asked, answers: Answers, reply: ResponseReply
) -> AsyncIterator[bytes]:
    ends: list[Ended] = []
    number = iter(range(1 << 62))

    def sse(kind: str, **fields: Any) -> bytes:
        return named_sse(kind, {"type": kind, "sequence_number": next(number), **fields})

    try:
        yield sse("response.created", response=reply.body("in_progress"))
        yield sse("response.in_progress", response=reply.body("in_progress"))
        async for items in answers.pieces(server.settings.keep_alive):
            if not items:
                yield KEEP_ALIVE
            for item in items:
                if isinstance(item, Ended):
                    check_outcome(item.outcome)
                for kind, fields in reply.events(item.events):
                    yield sse(kind, **fields)
                if isinstance(item, Ended):
                    ends.append(item)
                    body = reply.end(asked, item)
                    yield sse(f"response.{body['status']}", response=body)
    except RequestError as error:
        body = reply.body("failed")
        body["error"] = {"code": error.code or "server_error", "message": error.message}
        yield sse("response.failed", response=body)
    finally:
        answers.close()
        note(call, ends)


# ---------------------------------------------------------------------- the request


PLACES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What this API calls the fields of a chat request."""


def chat_body(body: Mapping[str, Any]) -> Said:
    """The chat request that asks for the same."""
    f = Fields(body)
    if f.has("previous_response_id") or f.has("conversation"):
        name = "previous_response_id" if f.has("previous_response_id") else "conversation"
        raise f.refuse(name, "no such field, since nothing is stored; send the whole conversation as input")
    if f.boolean("background"):
        raise f.refuse("background", "false")
    if f.has("top_logprobs") and f.get("top_logprobs") != 0:
        raise f.refuse("top_logprobs", "0, since only /v1/chat/completions and /v1/completions tell them")
    found = Said({name: body[name] for name in (*SAME, *ALSO) if f.has(name)}, **PLACES)
    instructions = f.string("instructions")
    system = Said({"role": "system", "content": instructions}, "instructions", content="instructions")
    found["messages"] = [system] if instructions else []
    found["messages"] += _messages(f)
    found["max_completion_tokens"] = f.integer("max_output_tokens", 1, MAX_TOKENS)
    found["tools"] = [_tool(tool, f"tools[{k}]") for k, tool in enumerate(f.list("tools"))]
    found["tool_choice"] = _choice(f)
    found["response_format"] = _format(f.object("text").object("format"))
    found["reasoning_effort"] = f.object("reasoning").string("effort")
    return found


def _messages(f: Fields) -> list[Said]:
    given = f.get("input")
    if isinstance(given, str):
        return [Said({"role": "user", "content": given}, "input", content="input")]
    if not isinstance(given, list) or not given:
        raise f.refuse("input", "a string, or a list of at least one item")
    messages: list[Said] = []
    for k, item in enumerate(given):
        if not isinstance(item, dict):
            raise refuse(f"input[{k}]", item, "an object")
        _add(messages, Fields(item, f"input[{k}]"))
    return messages


def _add(messages: list[Said], item: Fields) -> None:
    match item.get("type") or "message":
        case "message":
            role = item.string("role")
            if role != "assistant":
                messages.append(Said({"role": role, "content": _content(item, "content")}, item.where))
            else:
                _assistant(messages, item, "content").put("content", _content(item, "content"), item.path("content"))
        case "reasoning":
            text = _content(item, "content") or _content(item, "summary")
            said = _assistant(messages, item, "reasoning_content", "content", "tool_calls")
            said.put("reasoning_content", text, item.path("content"))
        case "function_call":
            function = Said({"name": item.get("name"), "arguments": item.get("arguments")}, item.where)
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            said = Said(call, item.where, id=item.path("call_id"))
            _assistant(messages, item).setdefault("tool_calls", []).append(said)
        case "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item, "output")}
            places = {"tool_call_id": item.path("call_id"), "content": item.path("output")}
            messages.append(Said(result, item.where, **places))
        case _:
            raise item.refuse("type", "message, reasoning, function_call, function_call_output")


def _assistant(messages: list[Said], item: Fields, *without: str) -> Said:
    """The assistant's message that an item belongs to: the last, if it has none of these fields yet."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in without):
        messages.append(Said({"role": "assistant"}, item.where))
    return messages[-1]


def _content(item: Fields, name: str) -> Any:
    """A text; parts of text joined; or parts as a chat message has them, where there are pictures."""
    given = item.get(name)
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise item.refuse(name, "a string, or a list of parts")
    parts: list[dict[str, Any]] = []
    for k, part in enumerate(given):
        where = f"{item.path(name)}[{k}]"
        if not isinstance(part, dict):
            raise refuse(where, part, "an object")
        if part.get("type") in TEXTS:
            text = part.get("text", part.get("refusal"))
            if not isinstance(text, str):
                raise refuse(f"{where}.text", text, "a string")
            parts.append(Said({"type": "text", "text": text}, where))
        elif part.get("type") == "input_image":
            parts.append(_picture(Fields(part, where)))
        else:
            raise refuse(f"{where}.type", part.get("type"), f"{', '.join(TEXTS)}, input_image")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _picture(part: Fields) -> Said:
    """By its address, or by the id of an uploaded file."""
    name = "image_url" if part.has("image_url") else "file_id" if part.has("file_id") else "image_url"
    url = part.string(name)
    if name == "file_id":
        url = f"ms://{url}"
    return Said({"type": "image_url", "image_url": url}, part.where, image_url=part.path(name))


def _tool(tool: Any, where: str) -> Any:
    """A function's fields stand beside its type here."""
    if not isinstance(tool, dict):
        raise refuse(where, tool, "an object of type function")
    if tool.get("type") != "function":
        raise refuse(f"{where}.type", tool.get("type"), "function")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return Said({"type": "function", "function": Said(function, where)}, where)


def _choice(f: Fields) -> Any:
    choice = f.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = Said({"name": choice.get("name")}, "tool_choice")
        return Said({"type": "function", "function": function}, "tool_choice")
    return choice


def _format(form: Fields) -> Said | None:
    if not form.given:
        return None
    if form.get("type") != "json_schema":
        return Said(form.given, form.where)
    schema = Said({name: form.get(name) for name in ("name", "schema", "strict")}, form.where)
    return Said({"type": "json_schema", "json_schema": schema}, form.where)


# ---------------------------------------------------------------------- the answer


class ResponseReply:
    """Adds an answer's events up to output items, and tells of each change."""

    def __init__(self, asked: Mapping[str, Any], model: str) -> None:
        self.asked, self.model, self.id, self.created = asked, model, new_id("resp"), int(time.time())
        self.output: list[dict[str, Any]] = []
        self._begun = 0
        """Items that a stream has seen, taken back or not."""
        self._open = False

    def events(self, events: Iterable[Event]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Type and fields of the events of a stream."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    yield from self._grow("reasoning", "reasoning_text", text)
                case ContentDelta(text):
                    yield from self._grow("message", "output_text", text)
                case ReasoningWasAnswer():
                    yield from self._close("completed")
                    self.output = [item for item in self.output if item["type"] != "reasoning"]
                case CallBegun(_, id, name):
                    yield from self._close("completed")
                    item = {"id": new_id("fc"), "type": "function_call", "call_id": id, "name": name, "arguments": ""}
                    yield from self._add(item)
                case ArgumentsDelta(_, text):
                    self.output[-1]["arguments"] += text
                    yield "response.function_call_arguments.delta", {**self._place(), "delta": text}
                case CallEnded(_, complete):
                    yield from self._close("completed" if complete else "incomplete")
                case MessageEnd(reason):
                    yield from self._close("incomplete" if reason == "length" else "completed")

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": self._begun - 1}

    def _add(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        self.output.append({**item, "status": "in_progress"})
        self._open, self._begun = True, self._begun + 1
        yield "response.output_item.added", {"output_index": self._begun - 1, "item": dict(self.output[-1])}

    def _grow(self, kind: str, part: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._open or self.output[-1]["type"] != kind:
            yield from self._close("completed")
            more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._add(
                {"id": new_id("rs" if kind == "reasoning" else "msg"), "type": kind, **more, "content": []}
            )
            empty = {"type": part, "text": "", **({"annotations": []} if part == "output_text" else {})}
            self.output[-1]["content"] = [empty]
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": dict(empty)}
        self.output[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        yield f"response.{part}.delta", {**self._place(), "content_index": 0, "delta": text, **logprobs}

    def _close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """End the item that is growing."""
        if not self._open:
            return
        item, self._open = self.output[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._place(), **done}
        else:
            (part,) = item["content"]
            logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield (
                f"response.{part['type']}.done",
                {**self._place(), "content_index": 0, "text": part["text"], **logprobs},
            )
            yield "response.content_part.done", {**self._place(), "content_index": 0, "part": dict(part)}
        yield "response.output_item.done", {"output_index": self._begun - 1, "item": dict(item)}

    def body(self, status: str) -> dict[str, Any]:
        """The response object."""
        asked = {name: self.asked.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [dict(item) for item in self.output],
            "parallel_tool_calls": self.asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": self.asked.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "text": self.asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": self.asked.get("tool_choice") or "auto",
            "tools": self.asked.get("tools") or [],
            "truncation": "disabled",
            "metadata": self.asked.get("metadata") or {},
            "usage": None,
            **asked,
        }

    def end(self, asked: Asked, ended: Ended) -> dict[str, Any]:
        """The finished one. RequestError if there is no answer."""
        check_outcome(ended.outcome)
        cut = ended.outcome.finish_reason == "length"
        used = usage(asked.prompt_tokens, [ended])
        body = self.body("incomplete" if cut else "completed")
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["usage"] = {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
            "output_tokens": used.completion,
            "output_tokens_details": {"reasoning_tokens": used.reasoning},
            "total_tokens": used.prompt + used.completion,
        }
        return {**body, **debug([ended])}
