"""A tool, a call of it, and the arguments of a call against the tool's schema.

A tool is shown to a model as the chat API has it; a call carries what was sampled. What does not fit is a ToolError
with the field, the value and what is allowed: the policy reads it as the result of its call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ToolError(Exception):
    """A tool's complaint about a call; the policy reads it as the call's result."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def schema(self) -> dict[str, Any]:
        """The tool as the chat API has it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool(name: str, description: str, **parameters: str | Mapping[str, Any]) -> Tool:
    """A tool by its parameters' types or schemas; a parameter whose name ends in `_` may be left out."""
    properties = {k.rstrip("_"): {"type": v} if isinstance(v, str) else dict(v) for k, v in parameters.items()}
    required = [k for k in parameters if not k.endswith("_")]
    shape = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name, description, shape)


@dataclass(frozen=True)
class Call:
    """One call. `arguments` is what was sampled: JSON text, or an object that a parser has made of it."""

    name: str
    arguments: str | Mapping[str, Any] = "{}"


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def read_arguments(tool: Tool, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as an object that fits the tool; ToolError with the field and what is allowed."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolError(f"arguments are not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ToolError(f"arguments are {type(arguments).__name__}; an object was expected")
    properties = tool.parameters["properties"]
    for name in tool.parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"{name} is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"{name!r:.80} is unknown; expected some of {', '.join(properties) or 'nothing'}")
        _check(name, value, properties[name])
    return dict(arguments)


def _check(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    wanted = schema.get("type")
    flag = isinstance(value, bool) and wanted in ("integer", "number")  # True is an int to Python
    if wanted and (flag or not isinstance(value, _TYPES[wanted])):
        raise ToolError(f"{name} is {value!r:.80}; a value of type {wanted} was expected")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} is {value!r:.80}; expected one of {', '.join(map(str, schema['enum']))}")


def shorten(text: str, most: int) -> str:
    """At most `most` characters, with a note of how many are missing from the middle."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n[{len(text) - most} characters left out]\n{text[len(text) - (most - most // 2) :]}"


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as the chat API's `tools`."""
    return [each.schema() for each in tools]
