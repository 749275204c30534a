"""The JSON schemas of requests for /openapi.json: names, types and ranges. What protocol.py checks beyond them, as that
a tool's name is declared once, no schema says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanok3.data.chat import RESPONSE_FORMATS, TOOL_CHOICES
from nanok3.serve.file_store import MOST_FILES, PURPOSES
from nanok3.serve.protocol import MAX_TOKENS
from nanok3.serve.sampling_fields import CHOICES, STOPS, TOP_LOGPROBS

Schema = Mapping[str, Any]


def _whole(lowest: int, highest: int | None = None) -> Schema:
    return {"type": "integer", "minimum": lowest, **({} if highest is None else {"maximum": highest})}


def _number(lowest: float, highest: float) -> Schema:
    return {"type": "number", "minimum": lowest, "maximum": highest}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": _whole(0), "minItems": 1}

_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "temperature": _number(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "seed": {"type": "integer"},
    "n": _whole(1, CHOICES),
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": STOPS}]},
    "stop_token_ids": {"type": "array", "items": _whole(0)},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    "ignore_eos": _FLAG,
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
    "priority": {"type": "integer"},
    "timeout": _number(0, 10**6),
    "cache_salt": _TEXT,
    "prompt_cache_key": _TEXT,
    "structured_outputs": _OBJECT,
    "metadata": _OBJECT,
    "user": _TEXT,
}

_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}]},
        "reasoning_content": _TEXT,
        "tool_calls": {"type": "array", "items": _OBJECT},
        "tool_call_id": _TEXT,
        "name": _TEXT,
        "partial": _FLAG,
    },
}

CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **_SAMPLING,
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "max_completion_tokens": _whole(1, MAX_TOKENS),
        "max_tokens": _whole(1, MAX_TOKENS),
        "tools": {"type": "array", "items": _OBJECT},
        "tool_choice": {"anyOf": [{"enum": list(TOOL_CHOICES)}, _OBJECT]},
        "parallel_tool_calls": _FLAG,
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": list(RESPONSE_FORMATS)}, "json_schema": _OBJECT},
        },
        "thinking": _OBJECT,
        "reasoning_effort": _TEXT,
        "chat_template_kwargs": _OBJECT,
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, TOP_LOGPROBS),
    },
}

COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        **_SAMPLING,
        "prompt": {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]},
        "max_tokens": _whole(0, MAX_TOKENS),
        "echo": _FLAG,
        "logprobs": _whole(0, TOP_LOGPROBS),
        "return_token_ids": _FLAG,
    },
}

RELOAD: Schema = {
    "type": "object",
    "required": ["folder", "version"],
    "properties": {"folder": _TEXT, "version": _whole(0, 2**31 - 1)},
}

_ITEMS: Schema = {"type": "array", "items": _OBJECT, "minItems": 1}

RESPONSE: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        **{name: _SAMPLING[name] for name in ("model", "temperature", "top_p", "stream", "metadata", "user")},
        "input": {"anyOf": [_TEXT, _ITEMS]},
        "instructions": _TEXT,
        "max_output_tokens": _whole(1, MAX_TOKENS),
        "tools": {"type": "array", "items": _OBJECT},
        "tool_choice": {"anyOf": [{"enum": list(TOOL_CHOICES)}, _OBJECT]},
        "parallel_tool_calls": _FLAG,
        "text": _OBJECT,
        "reasoning": _OBJECT,
    },
}

MESSAGES: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **{name: _SAMPLING[name] for name in ("model", "temperature", "top_p", "top_k", "stream", "metadata")},
        "messages": _ITEMS,
        "max_tokens": _whole(1, MAX_TOKENS),
        "system": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
        "stop_sequences": {"type": "array", "items": _TEXT, "maxItems": STOPS},
        "tools": {"type": "array", "items": _OBJECT},
        "tool_choice": _OBJECT,
        "thinking": _OBJECT,
        "output_config": _OBJECT,
    },
}

TOKENIZE: Schema = {
    "type": "object",
    "properties": {"prompt": _TEXT, "messages": CHAT["properties"]["messages"], "return_token_strs": _FLAG},
}

SAVED: Schema = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": _TEXT, "cache_salt": _TEXT, "messages": CHAT["properties"]["messages"], "prompt": {}},
}

DETOKENIZE: Schema = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"tokens": {"type": "array", "items": _whole(0)}},
}


FILE: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": list(PURPOSES)}},
}
FILES_QUERY: dict[str, Schema] = {
    "purpose": {"enum": list(PURPOSES)},
    "limit": _whole(1, MOST_FILES),
    "after": _TEXT,
    "order": {"enum": ["asc", "desc"]},
}


ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    400: "A field is wrong, or the body is no JSON",
    401: "No key, or an unknown one",
    403: "The server has no admin key",
    404: "No such model or file",
    408: "The body did not come",
    413: "The body is too large",
    429: "More than the server takes now",
    500: "The model or the server failed",
    501: "This server cannot do that",
    503: "The server is shutting down",
    504: "The request took more than its time",
}


def operation(
    path: str, body: Schema | None, kind: str = "application/json", query: Mapping[str, Schema] | None = None
) -> dict[str, Any]:
    """What FastAPI adds to an operation: the body of that content type, the places of the path and of the query."""
    names = re.findall(r"{(\w+)", path)
    places = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    places += [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()]
    content = None if body is None else {"required": True, "content": {kind: {"schema": body}}}
    return ({"parameters": places} if places else {}) | ({"requestBody": content} if content else {})


def responses(kinds: Iterable[str]) -> dict[int | str, dict[str, Any]]:
    """What an operation answers: a success of one of these content types, or an error."""
    error = {"application/json": {"schema": ERROR}}
    success = {"description": "The answer", "content": {kind: {"schema": {}} for kind in kinds}}
    return {200: success, **{status: {"description": text, "content": error} for status, text in STATUSES.items()}}
