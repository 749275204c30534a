"""The grammar of an answer in K3's markup, from the body and the calls that are asked for.

    start in think       leave? ( open response, body, close response, end
                                | (open response, words, close response)?  calls, end )
    start in response             body, close response, end  |  words, (close response)?  calls, end

    body    JSON (any, an object, a schema), a regular expression, a Lark grammar, one of some texts; or any text
    words   any text, where the body is any text; else nothing
    calls   one or more where they are required, exactly one of a named tool; else the first way is open too

A model may leave `think` by its closing tag or by the opening of the next channel, as K3 does at times. After the body
or the calls the channel and the message are closed, and nothing may follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanok3.data.chat import END_OF_MSG, RESPONSE, THINK, TOOLS
from nanok3.serve import tool_schema
from nanok3.serve.chat_fields import Constraint
from nanok3.serve.protocol import ChatRequest
from nanok3.serve.rules import TEXT, Rules, prepared

MAX_CALLS = 64
"""Of one answer."""

Form = Callable[[Rules, Any], str]
"""Writes the rules of a call's arguments, by the tool's parameters."""


@dataclass(frozen=True)
class Tool:
    """A tool that may be called."""

    where: str
    """Of its parameters, in the request."""
    name: str
    parameters: Any
    strict: bool

    @property
    def forms(self) -> list[Form]:
        """Ways to say its arguments, the best first."""
        by_schema: list[Form] = [tool_schema.elements, tool_schema.whole]
        return by_schema if self.strict else [*by_schema, tool_schema.anything]


def callable_tools(request: ChatRequest) -> list[Tool]:
    """Those of the request and its messages that this answer may call."""
    if request.tool_choice == "none":
        return []
    places = [(f"tools[{k}]", tool) for k, tool in enumerate(request.tools)]
    for number, message in enumerate(request.messages):
        declared = message.get("tools") or ()
        places += [(f"messages[{number}].tools[{k}]", tool) for k, tool in enumerate(declared)]
    tools = [_tool(where, tool) for where, tool in places]
    return [tool for tool in tools if request.forced_tool in (None, tool.name)]


def _tool(where: str, tool: dict[str, Any]) -> Tool:
    function = tool["function"]
    # A function without parameters takes none; what a built-in one takes only the model knows.
    unsaid: dict[str, Any] = {"properties": {}} if tool["type"] == "function" else {}
    strict = function.get("strict") is True
    return Tool(f"{where}.function.parameters", function["name"], function.get("parameters") or unsaid, strict)


# ---------------------------------------------------------------------- the body


def body(rules: Rules, constraint: Constraint | None) -> str:
    """The content that is asked for. ValueError for what cannot be said."""
    if constraint is None:
        return TEXT
    match constraint.kind:
        case "json":
            return rules.json({})
        case "json_object":
            return rules.json({"type": "object"})
        case "json_schema":
            return rules.json(prepared(constraint.value))
        case "choice":
            return rules.rule(" | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.value))
        case "regex":
            return rules.grammar("lark_grammar", f"start: /{tool_schema.between_slashes(constraint.value)}/")
        case kind:
            assert kind == "grammar", kind
            return rules.grammar("lark_grammar", _clients(constraint.value))


_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')


def _clients(lark: str) -> str:
    """A client's grammar. ValueError where it names control tokens, which are the program's."""
    if "<" in _LITERAL.sub("", lark):
        raise ValueError("it names a control token by <...>; allowed: text alone")
    return lark


# ---------------------------------------------------------------------- the whole


def answer(rules: Rules, start: str, body: str, calls: str | None, required: bool) -> str:
    """The start rule of an answer that begins in the channel `start`. calls: None if nothing may be called."""
    end = f"{rules.close('message')} {rules.marker(END_OF_MSG)}"
    opened, closed = rules.open(RESPONSE), rules.close(RESPONSE)
    words = TEXT if body == TEXT else ""
    if start == THINK:
        said, before = f"{opened} {body} {closed} {end}", f"({opened} {words} {closed})?"
    else:
        said, before = f"{body} {closed} {end}", f"{words} ({closed})?"
    ways = [] if required else [said]
    if calls is not None:
        ways.append(f"{before} {calls} {end}")
    leave = f"({rules.close(THINK)})?" if start == THINK else ""
    return f"{leave} ({' | '.join(ways)})"


def calls(rules: Rules, tools: list[Tool], forms: list[Form], once: bool) -> str:
    """The channel `tools`. A call's number is the parameter of its rule."""
    ways = []
    for tool, form in zip(tools, forms, strict=True):
        named = rules.attribute("tool", rules.value(tool.name)), rules.attribute("index", "number::_")
        inside = form(rules, prepared(tool.parameters))
        ways.append(f"{rules.open('call', *named)} {inside} {rules.close('call')}")
    most = 1 if once else MAX_CALLS
    numbers = [f"{rules.text(str(k))} %if eq(_, {k})" for k in range(1, most + 1)]
    rules.lark += [
        f"number::_: {' | '.join(numbers)}",
        f"call::_: {' | '.join(ways)}",
        f'more::_: "" | call::_ more::incr(_) %if le(_, {most})',
    ]
    return f"{rules.open(TOOLS)} call::1 more::2 {rules.close(TOOLS)}"
