"""The messages of a conversation, as a chat API gets them: checked, and tool results in the order of their calls.

    {"role": "system" | "user", "content": content, "name": ...}
    {"role": "system", "content": "", "tools": [...]}                       more tools, from here on
    {"role": "assistant", "content": content, "reasoning_content": "...", "tool_calls": [call, ...]}
    {"role": "tool", "content": content, "tool_call_id": id, "name": ...}
    content = None | "..." | [{"type": "text", "text": "..."} | {"type": one of MEDIA_TYPES, ...}, ...]
    call    = {"id": id, "type": "function", "function": {"name": "...", "arguments": an object or its JSON text}}

They may come from a stranger, so a mistake is a ValueError that names the message, the field and what is allowed.

Order: neighbouring results that all answer calls of the last assistant's message are sorted as these are and take
their names. A run with any other result stays as it is; its results count as the answers to the first, second, ...
call unless they have names. Source: the released encoder's output. Ours: refusing what it drops or trips over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant", "tool")
IMAGE_TYPES = ("image", "image_url")
VIDEO_TYPE = "video_url"
MEDIA_TYPES = (*IMAGE_TYPES, VIDEO_TYPE)
"""Parts that are looked at: each stands in the prompt as its media blocks."""
Message = Mapping[str, Any]


class Call(NamedTuple):
    """A tool call of an assistant's message."""

    id: str | None
    tool: str
    arguments: dict[str, Any] | str
    """The object, or its text where that is no JSON."""
    where: str


class Turn(NamedTuple):
    """A message that has been checked."""

    message: Message
    where: str
    role: str
    name: str | None
    parts: list[Mapping[str, Any]]
    calls: list[Call]


def refuse(where: str, given: object, allowed: str) -> ValueError:
    """The error of every check here and in chat.py."""
    return ValueError(f"{where} is {given!r:.80}; allowed: {allowed}")


def read_message(message: Any, where: str) -> Turn:
    """One message, checked by itself; `where` is what errors call it."""
    if not isinstance(message, Mapping):
        raise refuse(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise refuse(f"{where}.role", role, ", ".join(ROLES))
    if message.get("tools") and (role != "system" or message.get("content")):
        raise ValueError(f"{where}.tools: allowed only in a system message whose content is empty")
    if message.get("partial") and (role != "assistant" or message.get("tool_calls")):
        raise ValueError(f"{where}.partial: allowed only in an assistant message without tool_calls")
    name = (role == "tool" and message.get("tool")) or message.get("name") or None
    if name is not None and not isinstance(name, str):
        raise refuse(f"{where}.name", name, "a string")
    parts = _read_content(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls") if role == "assistant" else None
    calls = [_read_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls or [])]
    return Turn(message, where, role, name, parts, calls)


def _read_content(content: object, where: str) -> list[Mapping[str, Any]]:
    """The parts of a message's content: a string is one part, None is none."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise refuse(where, content, "a string, a list of parts, None")
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", *MEDIA_TYPES):
            raise refuse(f"{where}[{k}]", part, f"an object of type text, {', '.join(MEDIA_TYPES)}")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise refuse(f"{where}[{k}].text", part.get("text"), "a string")
    return list(content)


def _read_call(call: Any, where: str) -> Call:
    """Name and arguments lie in `function`, as in the API, or in the call itself."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise refuse(where, call, "an object with a function that has name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refuse(f"{where}.function.name", name, "a string that is not empty")
    arguments = _read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return Call(_id(call.get("id")), name, arguments, where)


def _id(given: object) -> str | None:
    return None if given is None else str(given)


def _read_arguments(given: object, where: str) -> dict[str, Any] | str:
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            return given
    if not isinstance(value, dict):
        raise refuse(where, given, "an object, or the JSON text of one")
    return value


def read_messages(messages: Sequence[Any]) -> list[Turn]:
    """The messages checked, neighbouring results in the order of the calls they answer."""
    turns = [read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for turn in turns[:-1]:
        if turn.message.get("partial"):
            raise ValueError(f"{turn.where}.partial: allowed only in the last message")
    ordered: list[Turn] = []
    calls: list[Call] = []
    for is_result, group in groupby(turns, key=lambda turn: turn.role == "tool"):
        run = list(group)
        ordered += _in_call_order(run, calls) if is_result else run
        calls = next((turn.calls for turn in reversed(run) if turn.role == "assistant"), calls)
    return ordered


def _in_call_order(results: list[Turn], calls: list[Call]) -> list[Turn]:
    """Results sorted as their calls are, with the names of these. They stay as they are if one answers no call."""
    places: dict[str | None, int] = {}
    for place, call in enumerate(calls):
        if call.id is not None:
            places.setdefault(call.id, place)
    answered = [places.get(_id(turn.message.get("tool_call_id"))) for turn in results]
    known = [place for place in answered if place is not None]
    if len(known) < len(results):
        return results
    by_call = sorted(zip(known, results), key=lambda item: item[0])
    return [turn._replace(name=calls[place].tool) for place, turn in by_call]


def pictures(turns: Iterable[Turn]) -> list[Mapping[str, Any]]:
    """The parts with pictures or videos, in order."""
    return [part for turn in turns for part in turn.parts if part["type"] in MEDIA_TYPES]
