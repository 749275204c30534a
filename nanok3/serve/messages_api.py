"""`POST /v1/messages` and `/v1/messages/count_tokens`: the same in the shape of Anthropic's Messages API.

    content blocks     text, image, thinking, tool_use, tool_result     -> messages of a chat request
    events             -> blocks of an answer, which grow in a stream between their start and stop

A thought is a block `thinking`. Its signature is empty, since nothing has to be proved here; it is read back all the
same. `input_tokens` are those that were not in the cache, as there.
"""

from __future__ import annotations

import json
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

SAME = ("model", "temperature", "top_p", "top_k", "stream", "cache_salt", "seed", "min_p", "priority", "timeout")
"""Fields that mean what they mean in a chat request."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def messages(server: Server, call: Call) -> dict[str, Any] | AsyncIterator[bytes]:
    """The endpoint."""
    body = await in_thread(read_json, call.body)
    if Fields(body).integer("max_tokens", 1, MAX_TOKENS) is None:
        raise Fields(body).refuse("max_tokens", f"a whole number from 1 to {MAX_TOKENS}")
    asked = await server.read_chat(body, call, chat_body)
    reply = MessageReply(asked.request.model or server.name)
    answers = server.start_chat(asked, call)
    if asked.request.stream:
        return _stream(server, call, asked, answers, reply)
    (whole,) = await answers.all()
    assert whole.ended is not None
    for _ in reply.events(whole.events):
        pass
    note(call, [whole.ended])
    return reply.end(asked, whole.ended)


async def count_tokens(server: Server, call: Call) -> dict[str, Any]:
    """What a request's prompt would count."""
    asked = await server.read_chat(call.body, call, chat_body)
    return {"input_tokens": asked.prompt_tokens}


async def _stream(
    server: Server, call: Call, asked: Asked, answers: Answers, reply: MessageReply
) -> AsyncIterator[bytes]:
    ends: list[Ended] = []

    def sse(kind: str, **fields: Any) -> bytes:
        return named_sse(kind, {"type": kind, **fields})

    try:
        begun = {"input_tokens": asked.prompt_tokens, "output_tokens": 0}
        yield sse("message_start", message=reply.body(None, begun))
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
                    delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
                    yield sse("message_delta", delta=delta, usage=body["usage"], debug=body["debug"])
        yield sse("message_stop")
    except RequestError as error:
        yield sse("error", error={"type": error.type, "message": error.message})
    finally:
        answers.close()
        note(call, ends)


# ---------------------------------------------------------------------- the request


PLACES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""What this API calls the fields of a chat request."""


def chat_body(body: Mapping[str, Any]) -> Said:
    """The chat request that asks for the same."""
    f = Fields(body)
    found = Said({name: body[name] for name in SAME if f.has(name)}, **PLACES)
    system = _text(f, "system")
    found["messages"] = [Said({"role": "system", "content": system}, "system", content="system")] if system else []
    for k, message in enumerate(f.list("messages")):
        if not isinstance(message, dict):
            raise refuse(f"messages[{k}]", message, "an object")
        found["messages"] += _messages(Fields(message, f"messages[{k}]"))
    found["max_completion_tokens"] = f.get("max_tokens")
    found["stop"] = f.get("stop_sequences")
    found["tools"] = [_tool(tool, f"tools[{k}]") for k, tool in enumerate(f.list("tools"))]
    found["tool_choice"], found["parallel_tool_calls"] = _choice(f.object("tool_choice"))
    found["user"] = f.object("metadata").string("user_id")
    f.object("thinking").integer("budget_tokens", 1, MAX_TOKENS)  # no model here counts what it thinks
    thinking = f.object("thinking").choice("type", ("enabled", "adaptive", "disabled"))
    if thinking is not None:
        found["thinking"] = {"type": "disabled" if thinking == "disabled" else "enabled"}
    found["reasoning_effort"] = f.object("output_config").string("effort")
    return found


def _text(f: Fields, name: str) -> str:
    """A string, or blocks of text."""
    given = f.get(name)
    if given is None or isinstance(given, str):
        return given or ""
    return "".join(_block_text(Fields(block, where)) for block, where in _blocks(f, name))


def _blocks(f: Fields, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    for k, block in enumerate(f.list(name)):
        where = f"{f.path(name)}[{k}]"
        if not isinstance(block, dict):
            raise refuse(where, block, "an object")
        yield block, where


def _block_text(block: Fields) -> str:
    text = block.string("text")
    if block.get("type") != "text" or text is None:
        raise block.refuse("type", "text, with its text")
    return text


def _messages(message: Fields) -> list[Said]:
    """One message, and those that carry the results in it before it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise message.refuse("role", "user, assistant")
    if isinstance(content, str):
        return [Said({"role": role, "content": content}, message.where)]
    found = Said({"role": role}, message.where)
    results: list[Said] = []
    parts: list[Said] = []
    for given, where in _blocks(message, "content"):
        _read_block(Fields(given, where), found, parts, results)
    found["content"] = _joined(parts)
    empty = role == "user" and not parts and results
    return results if empty else [*results, found]


def _joined(parts: list[Said]) -> Any:
    """Parts of text as one string."""
    only_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if only_text else parts


def _result(block: Fields) -> Any:
    """The content of a tool's result: a string, or blocks of text and pictures."""
    if not isinstance(block.get("content"), list):
        return _text(block, "content")
    inner = [Fields(given, where) for given, where in _blocks(block, "content")]
    return _joined([_picture(one) if one.get("type") == "image" else _text_part(one) for one in inner])


def _text_part(block: Fields) -> Said:
    return Said({"type": "text", "text": _block_text(block)}, block.where)


def _picture(block: Fields) -> Said:
    """A block of type image: its data, a web address, or an uploaded file."""
    source = block.object("source")
    match source.choice("type", ("base64", "url", "file")):
        case "base64":
            url = f"data:{source.string('media_type')};base64,{source.string('data')}"
        case "url":
            url = source.string("url") or ""
        case "file":
            url = f"ms://{source.string('file_id') or ''}"
        case _:
            raise source.refuse("type", "base64, url, file")
    return Said({"type": "image_url", "image_url": {"url": url}}, block.where, image_url=block.path("source"))


def _read_block(block: Fields, found: Said, parts: list[Said], results: list[Said]) -> None:
    match (found["role"], block.get("type")):
        case (_, "text"):
            parts.append(_text_part(block))
        case ("user", "image"):
            parts.append(_picture(block))
        case ("user", "tool_result"):
            result = {"role": "tool", "tool_call_id": block.string("tool_use_id"), "content": _result(block)}
            results.append(Said(result, block.where, tool_call_id=block.path("tool_use_id")))
        case ("assistant", "thinking"):
            thought = found.get("reasoning_content", "") + (block.string("thinking") or "")
            found.put("reasoning_content", thought, block.path("thinking"))
        case ("assistant", "redacted_thinking"):
            pass
        case ("assistant", "tool_use"):
            function = {"name": block.string("name"), "arguments": dict(block.object("input").given)}
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            said = Said(function, block.where, arguments=block.path("input"))
            call = {"id": block.string("id"), "type": "function", "function": said}
            found.setdefault("tool_calls", []).append(Said(call, block.where))
        case ("user", _):
            raise block.refuse("type", "text, image, tool_result")
        case _:
            raise block.refuse("type", "text, thinking, tool_use")


def _tool(tool: Any, where: str) -> Said:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise refuse(where, tool, "an object with a name and an input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    said = Said(function, where, parameters=f"{where}.input_schema")
    return Said({"type": "function", "function": said}, where)


def _choice(choice: Fields) -> tuple[Any, bool]:
    """The tool that is to be called, and whether several may be."""
    kind = choice.choice("type", (*CHOICES, "tool"))
    several = not choice.boolean("disable_parallel_tool_use")
    if kind == "tool":
        function = Said({"name": choice.string("name")}, choice.where)
        return Said({"type": "function", "function": function}, choice.where), several
    return (None if kind is None else CHOICES[kind]), several


# ---------------------------------------------------------------------- the answer


class MessageReply:
    """Adds an answer's events up to content blocks, and tells of each change."""

    def __init__(self, model: str) -> None:
        self.model, self.id = model, new_id("msg")
        self.content: list[dict[str, Any]] = []
        self._arguments: list[str] = []
        self._begun = 0
        """Blocks that a stream has seen, taken back or not."""
        self._open = False

    def events(self, events: Iterable[Event]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Type and fields of the events of a stream."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    yield from self._grow("thinking", text)
                case ContentDelta(text):
                    yield from self._grow("text", text)
                case ReasoningWasAnswer():
                    yield from self._close()
                    self.content = [block for block in self.content if block["type"] != "thinking"]
                case CallBegun(_, id, name):
                    yield from self._close()
                    yield from self._add({"type": "tool_use", "id": id, "name": name, "input": {}})
                case ArgumentsDelta(_, text):
                    self._arguments.append(text)
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnded() | MessageEnd():
                    yield from self._close()

    def _add(self, block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        self.content.append(block)
        self._open, self._begun = True, self._begun + 1
        yield "content_block_start", {"index": self._begun - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": self._begun - 1, "delta": delta}

    def _grow(self, kind: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._open or self.content[-1]["type"] != kind:
            yield from self._close()
            yield from self._add({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self.content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """End the block that is growing."""
        if self._open:
            self._open = False
            if self.content[-1]["type"] == "tool_use":
                self.content[-1]["input"] = _object("".join(self._arguments))
                self._arguments = []
            yield "content_block_stop", {"index": self._begun - 1}

    def body(self, reason: str | None, used: Mapping[str, int], stop: str | None = None) -> dict[str, Any]:
        """The message object."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [dict(block) for block in self.content],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": dict(used),
        }

    def end(self, asked: Asked, ended: Ended) -> dict[str, Any]:
        """The finished one. RequestError if there is no answer."""
        check_outcome(ended.outcome)
        used = usage(asked.prompt_tokens, [ended])
        numbers = {
            "input_tokens": used.prompt - used.cached,
            "output_tokens": used.completion,
            "cache_read_input_tokens": used.cached,
            "cache_creation_input_tokens": 0,
        }
        return {**self.body(self._reason(ended), numbers, ended.stop), **debug([ended])}

    def _reason(self, ended: Ended) -> str:
        if ended.stop is not None:
            return "stop_sequence"
        if ended.outcome.finish_reason == "length":
            return "max_tokens"
        return "tool_use" if any(block["type"] == "tool_use" for block in self.content) else "end_turn"


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call. This shape has no place for a text that is no object: such a call has none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
