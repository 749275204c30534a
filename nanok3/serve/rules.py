"""A grammar while it is written: rules in Lark's notation over ids and bytes, and the grammars that they refer to.

    start: <[258]> <[116]> <[104]> ... @g0 ...          g0: {"json_schema": {...}}

Markup is written as ids, each piece encoded by itself as in rendering (data/chat.py): what a grammar lets a model say
is, id by id, what a rendered message has. Values are written as bytes: any ids whose bytes fit.

Schemas pass through `prepared`: it opens `nullable`, refuses what would take the compiler seconds, and bounds the
blanks between JSON's signs, in which a weak model can lose itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanok3.data.chat import CLOSE, OPEN, SEP

if TYPE_CHECKING:
    from nanok3.data.tokenizer import Tokenizer

TEXT = "TEXT?"
"""Any text, also none."""
DEPTH = 64
"""Schemas inside one another."""
LARGEST_FACTOR = 10_000
"""Of `multipleOf`, without its decimal point: an automaton needs as many states."""
_STYLE = {"whitespace_pattern": r"[ ]{1,2}|\r?\n[ \t]{0,64}"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_ONES = {"items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else"}
"""Keywords whose values are schemas by name, in a list, and alone."""


@dataclass
class Rules:
    """A Lark grammar while it is written: rules, and the grammars that they refer to by `@name`."""

    tokenizer: Tokenizer
    lark: list[str] = field(default_factory=lambda: ["TEXT: /(?s:.+)/", r'KEY: /[^"&\x00-\x1f]{1,256}/'])
    parts: dict[str, str] = field(default_factory=dict)
    """Rule or grammar as written -> its name, so that equal ones are written once."""
    grammars: list[dict[str, Any]] = field(default_factory=list)

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self.parts:
            self.parts[body] = f"r{len(self.parts)}"
            self.lark.append(f"{self.parts[body]}: {body}")
        return self.parts[body]

    def terminal(self, body: str) -> str:
        if body not in self.parts:
            self.parts[body] = f"T{len(self.parts)}"
            self.lark.append(f"{self.parts[body]}: {body}")
        return self.parts[body]

    def grammar(self, kind: str, content: Any) -> str:
        """A reference to a grammar of its own: kind 'json_schema' or 'lark_grammar'."""
        written = kind + json.dumps(content, sort_keys=False)
        if written not in self.parts:
            self.parts[written] = f"g{len(self.parts)}"
            self.grammars.append({"name": self.parts[written], kind: content})
        return f"@{self.parts[written]}"

    def json(self, schema: Any) -> str:
        """A reference to the values of a prepared schema."""
        styled = {**schema, "x-guidance": _STYLE} if isinstance(schema, Mapping) else schema
        return self.grammar("json_schema", {"x-guidance": _STYLE} if schema is True else styled)

    def document(self, start: str) -> str:
        """The whole, as the library reads it."""
        main = "\n".join([f"start: {start}", *self.lark])
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self.grammars]})

    # Markup is written as ids, each piece by itself, so it is the very ids that rendering writes.

    def text(self, piece: str) -> str:
        return " ".join(f"<[{token}]>" for token in self.tokenizer.encode(piece))

    def marker(self, name: str) -> str:
        return f"<[{self.tokenizer.special[name]}]>"

    def open(self, tag: str, *attributes: str) -> str:
        """attributes: each as `attribute` writes it."""
        return " ".join([self.marker(OPEN), self.text(tag), *attributes, self.marker(SEP)])

    def close(self, tag: str) -> str:
        return f"{self.marker(CLOSE)} {self.text(tag)} {self.marker(SEP)}"

    def attribute(self, key: str, value: str) -> str:
        """value: an expression."""
        quote = '"'
        quote = '"'
        return f"{self.text(f' {key}')} {self.text('=' + quote)} {value} {self.text(quote)}"

    def value(self, text: str) -> str:
        """An attribute's value that is known."""
        return self.text(text.replace("&", "&amp;").replace('"', "&quot;"))


# ---------------------------------------------------------------------- schemas


def prepared(schema: Any, deeper: int = DEPTH) -> Any:
    """A schema without `nullable`. ValueError for what is too deep or too dear."""
    if isinstance(schema, list):  # `items` of older drafts
        return [prepared(one, deeper - 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if not deeper:
        raise ValueError(f"schemas inside one another deeper than {DEPTH}")
    _check_factor(schema.get("multipleOf"))
    found = {key: _prepared_value(key, value, deeper) for key, value in schema.items() if key != "x-guidance"}
    return _or_null(found) if found.pop("nullable", None) is True else found


def _prepared_value(key: str, value: Any, deeper: int) -> Any:
    if key in _MAPS and isinstance(value, Mapping):
        return {name: prepared(one, deeper - 1) for name, one in value.items()}
    if key in _LISTS or key in _ONES:
        return prepared(value, deeper - 1)
    return value


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "type" not in schema:
        definitions: dict[str, Any] = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
        return {"anyOf": [schema, {"type": "null"}], **definitions}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    values = {"enum": [*schema["enum"], None]} if isinstance(schema.get("enum"), list) else {}
    return {**schema, "type": [*kinds, "null"], **values}


def _check_factor(factor: Any) -> None:
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        digits = f"{factor:.15g}".split("e")[0].replace(".", "").strip("0-") or "0"
        if int(digits) > LARGEST_FACTOR:
            raise ValueError(f"multipleOf {factor}; allowed: at most {LARGEST_FACTOR} without its decimal point")
