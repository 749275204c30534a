"""The fields of a chat request, each with its rules: messages, tools, the form of the answer, thinking.

Every rule that makes a value a mistake is here or in sampling_fields.py; what holds for one message by itself, or for
its place among the others, is in data/messages.py. The records they fill are in protocol.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanok3.data.chat import EFFORTS, RESPONSE_FORMATS, TOOL_CHOICES
from nanok3.data.messages import MEDIA_TYPES, VIDEO_TYPE, read_messages
from nanok3.serve.fields import Fields, refuse, refused

TOOL_TYPES = ("function", "builtin_function")
TOOL_NAME = re.compile(r"[^\W\d][\w.:/-]{0,255}")
TOOL_NAME_RULE = "1 to 256 letters, digits and _ - . : /, a letter or _ first"
BUILTIN_NAME = re.compile(r"\$[\w.:/-]{1,255}")
GRAMMARS = ("json", "regex", "grammar", "choice")
"""Fields of `structured_outputs`, of which one may be set."""


@dataclass(frozen=True)
class Constraint:
    """What the content has to be: kind 'json' (any value), 'json_object', 'json_schema', 'regex', 'grammar' or
    'choice', and what the last four need."""

    kind: str
    value: Any = None


WEB = ("http://", "https://")


# ---------------------------------------------------------------------- messages


def read_conversation(f: Fields, from_web: bool = False) -> list[dict[str, Any]]:
    """from_web: whether pictures and videos may be named by web addresses."""
    given = f.get("messages")
    if not isinstance(given, list) or not given:
        raise f.refuse("messages", "a list of at least one message")
    messages = [dict(message) if isinstance(message, dict) else message for message in given]
    for k, message in enumerate(messages):
        if isinstance(message, dict):
            _adapt(message, f"messages[{k}]", from_web)
    if f.boolean("continue_final_message") and isinstance(messages[-1], dict):
        messages[-1]["partial"] = True
    try:
        read_messages(messages)
    except ValueError as error:
        raise refused(error) from None
    return messages


def _adapt(message: dict[str, Any], where: str, from_web: bool) -> None:
    """Other names for the same, and what the API asks of a message beyond its rendering."""
    m = Fields(message, where)
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.pop("prefix", None) is True:
        message["partial"] = True
    m.boolean("partial")
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        m.string(name)
    if message.get("role") == "tool" and not m.has("tool_call_id"):
        raise m.refuse("tool_call_id", "the id of the call that this is the result of")
    if message.get("tools"):
        m.list("tools")
    m.list("tool_calls")
    if isinstance(message.get("content"), list):
        for k, part in enumerate(message["content"]):
            if isinstance(part, dict) and part.get("type") in MEDIA_TYPES:
                media_source(part, f"{where}.content[{k}]", from_web)


def media_source(part: Mapping[str, Any], where: str = "content", from_web: bool = False) -> str:
    """Where a part's picture or video is: a data URL, `ms://` and the id of an uploaded file, or, where that is
    allowed, a web address."""
    given, kind = part.get(part["type"]), "video" if part["type"] == VIDEO_TYPE else "image"
    url = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(url, str) and re.match(rf"data:{kind}/[\w.+-]+;base64,|ms://.", url):
        return url
    if isinstance(url, str) and url.startswith(WEB):
        if from_web:
            return url
        allowed = f"data:{kind}/...;base64, or ms://, since this server fetches no web addresses"
        raise refuse(place_of(part, where), url, allowed)
    raise refuse(place_of(part, where), url, f"a URL that begins with data:{kind}/...;base64, or ms://")


def place_of(part: Mapping[str, Any], where: str) -> str:
    """What errors call the source of a picture or video."""
    return f"{where}.{part['type']}"


# ---------------------------------------------------------------------- tools


def read_tools(f: Fields) -> list[dict[str, Any]]:
    tools = f.list("tools")
    for k, tool in enumerate(tools):
        _check_tool(tool, f"tools[{k}]")
    return tools


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise refuse(where, tool, "an object with type and function")
    t = Fields(tool, where)
    if t.get("type") not in TOOL_TYPES:
        raise t.refuse("type", ", ".join(TOOL_TYPES))
    if not isinstance(tool.get("function"), dict):
        raise t.refuse("function", "an object with a name")
    function = t.object("function")
    builtin = tool["type"] == "builtin_function"
    name = function.get("name")
    if not isinstance(name, str) or not (BUILTIN_NAME if builtin else TOOL_NAME).fullmatch(name):
        raise function.refuse("name", "a $ and a name" if builtin else TOOL_NAME_RULE)
    function.string("description")
    function.object("parameters")
    function.boolean("strict")


def tool_names(tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> frozenset[str]:
    """Of the request's tools and those that messages declare, which are checked here. No name may come twice."""
    places = [(f"tools[{k}]", tool) for k, tool in enumerate(tools)]
    for number, message in enumerate(messages):
        for k, tool in enumerate(message.get("tools") or ()):
            _check_tool(tool, f"messages[{number}].tools[{k}]")
            places.append((f"messages[{number}].tools[{k}]", tool))
    seen: dict[str, str] = {}
    for where, tool in places:
        name = tool["function"]["name"]
        if name in seen:
            raise refuse(f"{where}.function.name", name, f"another name than that of {seen[name]}")
        seen[name] = where
    return frozenset(seen)


def read_tool_choice(f: Fields, names: frozenset[str]) -> tuple[str, str | None]:
    """auto, none or required, and the tool that is to be called if one is named."""
    choice, forced = f.get("tool_choice"), None
    if isinstance(choice, dict) and choice.get("type") == "function":
        forced = f.object("tool_choice").object("function").string("name")
        if forced not in names:
            raise refuse("tool_choice.function.name", forced, "the name of one of the tools")
        choice = "required"
    if choice is None:
        return "auto", None
    if choice not in TOOL_CHOICES:
        raise f.refuse("tool_choice", f"{', '.join(TOOL_CHOICES)}, or a function with its name")
    if choice == "required" and not names:
        raise f.refuse("tool_choice", "auto, none, since there are no tools")
    return choice, forced


# ---------------------------------------------------------------------- the form of the answer


def read_response_format(f: Fields) -> tuple[dict[str, Any] | None, Constraint | None]:
    if f.has("modalities") and f.get("modalities") != ["text"]:
        raise f.refuse("modalities", '["text"], since answers are text only')
    if f.has("audio"):
        raise f.refuse("audio", "no such field; answers are text only")
    form = f.object("response_format")
    if not f.has("response_format"):
        return None, None
    if not form.has("type"):
        raise form.refuse("type", ", ".join(RESPONSE_FORMATS))
    kind = form.choice("type", RESPONSE_FORMATS)
    if kind == "text":
        return dict(form.given), None
    if kind == "json_object":
        return dict(form.given), Constraint("json_object")
    wrapper = form.object("json_schema")
    if not wrapper.string("name"):
        raise wrapper.refuse("name", "a string that is not empty")
    if not isinstance(wrapper.get("schema"), dict):
        raise wrapper.refuse("schema", "a JSON schema, an object")
    strict = wrapper.boolean("strict", True)
    return dict(form.given), Constraint("json_schema", wrapper.get("schema")) if strict else Constraint("json")


def read_structured(f: Fields) -> Constraint | None:
    """The open servers' field for what `response_format` cannot say."""
    given = f.object("structured_outputs")
    set_ = [name for name in GRAMMARS if given.has(name)]
    if f.has("structured_outputs") and (len(set_) != 1 or f.has("response_format")):
        raise f.refuse("structured_outputs", f"one of {', '.join(GRAMMARS)}, and no response_format beside it")
    if not set_:
        return None
    name, value = set_[0], given.get(set_[0])
    if name == "json":
        return Constraint("json_schema", given.object(name).given)
    if name == "choice":
        if not value or not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise given.refuse(name, "a list of strings that are not empty")
        return Constraint(name, tuple(value))
    if not given.string(name):
        raise given.refuse(name, "a string that is not empty")
    return Constraint(name, value)


def read_thinking(f: Fields, default: bool, default_effort: str | None) -> tuple[bool, str | None]:
    """Whether to think, and the effort to tell the model; the order is that of the docstring above."""
    thinking, kwargs = f.object("thinking"), f.object("chat_template_kwargs")
    kind = thinking.choice("type", ("enabled", "disabled"))
    level = f.string("reasoning_effort")
    efforts = [thinking.choice("effort", EFFORTS), kwargs.choice("thinking_effort", EFFORTS)]
    if kind is not None:
        on = kind == "enabled"
    else:
        on = kwargs.boolean("enable_thinking", default if level != "none" else False)
        on = kwargs.boolean("thinking", on)
    if on:
        thinking.choice("keep", ("all",))
    named = next((effort for effort in efforts if effort), None)
    if named is None and level is not None:
        named = level if level in EFFORTS else None
    elif named is None:
        named = default_effort
    return on, named if on else None
