"""From a tool's parameters, a JSON schema, to the elements of a call in K3's markup, as rules of a Lark grammar.

    {"city": {"type": "string"}, "days": {"type": "integer"}}   ->
        open argument key="city" type="string"   any text        close argument
        open argument key="days" type="number"   %json integer   close argument

Arguments come in the order of `properties`, those not required may be missing. A value has one of the six JSON types,
named by the tag, so a schema of several types is an alternative of several elements: its string form is raw text (one
of an enum's strings, a pattern, a length, or any text), every other form is JSON under the schema cut down to that
type.

What one argument by itself cannot say (a condition over several, `allOf` of strings, a reference into the middle of the
schema) is said by the element `json`, which holds all arguments as one text. What that cannot say either is `Unfit`.
Further arguments are allowed only where `additionalProperties` says so, or where no property is named at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanok3.serve.rules import TEXT, Rules

Schema = Mapping[str, Any] | bool

TYPES = ("string", "number", "boolean", "null", "object", "array")
_PYTHON = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", dict: "object",
           list: "array"}  # fmt: skip
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "strict", "$schema",
          "$id", "$comment", "$defs", "definitions"}  # fmt: skip
"""Keywords that say nothing about what is valid."""
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_REFERENCES = 32
"""References that may lead to one another."""


class Unfit(Exception):
    """A schema that these rules cannot say."""


# ---------------------------------------------------------------------- one call's arguments


def elements(rules: Rules, schema: Schema) -> str:
    """An element for each argument. Unfit, with the reason."""
    if not isinstance(schema, Mapping):
        raise Unfit("it is no object")
    root, schema = schema, _resolved(schema, schema)
    others = set(schema) - _NOTES - {"type", "properties", "required", "additionalProperties"}
    if others or schema.get("type", "object") != "object" or _refers_inside(root):
        raise Unfit("it is more than separate arguments can say")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise Unfit("properties have to be an object, required a list")
    more = schema.get("additionalProperties", "properties" not in schema)
    every = {**properties, **{name: more for name in required if name not in properties}}
    parts = []
    for name, value in every.items():
        one = _element(rules, rules.value(str(name)), value, root)
        parts.append(one if name in required else f"{one}?")
    if more is not False:
        parts.append(f"{_element(rules, 'KEY', more, root)}*")
    return rules.rule(" ".join(parts) or '""')


def whole(rules: Rules, schema: Schema) -> str:
    """One element with all arguments in one text."""
    body = rules.json({**schema, "type": "object"} if isinstance(schema, Mapping) else {"type": "object"})
    return rules.rule(
        f"{rules.open('json', rules.attribute('type', rules.text('object')))} {body} {rules.close('json')}"
    )


def anything(rules: Rules, schema: Schema = True) -> str:
    """Any arguments, whatever the schema says."""
    return rules.rule(f"{_element(rules, 'KEY', True, {})}*")


def _element(rules: Rules, key: str, schema: Schema, root: Mapping[str, Any]) -> str:
    """One argument; its forms are alternatives."""
    forms = []
    for kind in _kinds(schema, root):
        named = rules.attribute("key", key), rules.attribute("type", rules.text(kind))
        texts = _texts(rules, schema, root) if kind == "string" else [rules.json(_cut_to(kind, schema, root))]
        forms += [f"{rules.open('argument', *named)} {text} {rules.close('argument')}" for text in texts]
    if not forms:
        raise Unfit("nothing satisfies one of its properties")
    return rules.rule(" | ".join(forms))


# ---------------------------------------------------------------------- one value's schema


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that is a reference and nothing more -> what it refers to."""
    for _ in range(_REFERENCES):
        if "$ref" not in schema or set(schema) - _NOTES != {"$ref"}:
            return schema
        found: Any = root
        for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise Unfit(f"no {schema['$ref']} in the schema")
        schema = found
    raise Unfit("references that lead in a circle")


def _refers_inside(root: Mapping[str, Any]) -> bool:
    """Whether something refers to another place than the definitions, which go along with every part."""
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(root))
    return any(not re.match(r"#/(\$defs|definitions)/[^/]+$", reference) for reference in references)


def _branches(schema: Mapping[str, Any]) -> list[Schema] | None:
    """The alternatives of a schema that is nothing but alternatives."""
    keys = set(schema) - _NOTES
    if keys in ({"anyOf"}, {"oneOf"}):
        branches: list[Schema] = schema[keys.pop()]
        return branches
    return None


def _kinds(schema: Schema, root: Mapping[str, Any]) -> list[str]:
    """The JSON types a value may have, in the order of TYPES."""
    found = _possible(schema, root, _REFERENCES)
    return [kind for kind in TYPES if kind in found]


def _possible(schema: Schema, root: Mapping[str, Any], deeper: int) -> set[str]:
    if isinstance(schema, bool):
        return set(TYPES) if schema else set()
    if not isinstance(schema, Mapping) or not deeper:
        raise Unfit("not a schema")
    schema = _resolved(schema, root)
    branches = _branches(schema)
    if branches is not None:
        return set().union(*(_possible(branch, root, deeper - 1) for branch in branches))
    named = schema.get("type", list(TYPES))
    kinds = {"number" if kind == "integer" else kind for kind in ([named] if isinstance(named, str) else named)}
    values = _values(schema)
    return kinds if values is None else kinds & {_PYTHON[type(value)] for value in values}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Those of `enum` or `const`, if there is one."""
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _cut_to(kind: str, schema: Schema, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for values of one type, with the definitions it may refer to."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    if isinstance(schema, Mapping) and schema.get("type") in (kind, "integer" if kind == "number" else kind):
        return {**schema, **definitions}
    return {"allOf": [schema, {"type": kind}], **definitions}


def _texts(rules: Rules, schema: Schema, root: Mapping[str, Any]) -> list[str]:
    """Expressions for the raw text of a string."""
    if isinstance(schema, bool):
        return [TEXT]
    schema = _resolved(schema, root)
    branches = _branches(schema)
    if branches is not None:
        of_strings = [branch for branch in branches if "string" in _possible(branch, root, _REFERENCES)]
        return [text for branch in of_strings for text in _texts(rules, branch, root)]
    if _values(schema) is not None:
        return [rules.text(value) for value in _values(schema) or () if isinstance(value, str)]
    if "string" not in (schema.get("type", "string")):
        return []
    keys = set(schema) - _NOTES - {"type", "minLength", "maxLength", "pattern", "format"}
    others = {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const"}
    if keys & others:
        raise Unfit(f"{', '.join(sorted(keys & others))} of strings")
    return [_text(rules, schema)]


def _text(rules: Rules, schema: Mapping[str, Any]) -> str:
    """Raw text of a length, a pattern and a format."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    wanted = list(_patterns(schema))
    if least or most is not None:
        wanted.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if not wanted:
        return TEXT
    return rules.terminal(" & ".join(f"/{between_slashes(one)}/" for one in wanted))


def _patterns(schema: Mapping[str, Any]) -> Iterable[str]:
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise Unfit(f"the format {schema['format']} of raw text")
        yield _FORMATS[schema["format"]]
    if "pattern" in schema:
        yield _unanchored(schema["pattern"])


def _unanchored(pattern: str) -> str:
    """A pattern of JSON schemas, found anywhere, as one of the whole text."""
    if "|" in re.sub(r"\\.|\[[^\]]*\]|\([^()]*\)", "", pattern):
        pattern = f"(?:{pattern})"  # an anchor inside is refused by the library
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def between_slashes(pattern: str) -> str:
    r"""A regular expression between slashes; `\d` and `\w` are those of JSON schemas, of ASCII alone."""
    pattern = pattern.replace("\n", r"\n")
    return re.sub(r"\\(.)|(/)", lambda found: _ASCII.get(found[1], found[0]) if found[1] else r"\/", pattern)


_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9a-zA-Z_]", "W": "[^0-9a-zA-Z_]"}
