"""What stands between two markers of K3's markup: the name of an element and its attributes.

    tag = name { ' ' key '="' value '"' }        in a value `&quot;` is `"`, `&amp;` is `&`

A model may put blanks where none belong. What is no attribute is handed back as `rest`, so that it can be told of.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nanok3.data.chat import RESPONSE, THINK, TOOLS

ATTRIBUTES = {
    "message": {"role", "name"},
    THINK: set(),
    RESPONSE: set(),
    TOOLS: set(),
    "call": {"tool", "index"},
    "argument": {"key", "type"},
    "json": {"type"},
}
"""The elements, and the attributes of each."""


class Tag(NamedTuple):
    """What stands between two markers."""

    name: str
    attributes: dict[str, str]
    rest: str
    """What is no attribute, or one given before."""


_NAME = re.compile(r'\s*([^\s"=]*)')
_ATTRIBUTE = re.compile(r'\s*([^\s"=]+)\s*=\s*"([^"]*)"')


def read_tag(text: str) -> Tag:
    """A tag's name and attributes, whatever the blanks around them."""
    name = _NAME.match(text)
    assert name is not None  # it matches nothing, too
    attributes: dict[str, str] = {}
    again, at = "", name.end()
    while found := _ATTRIBUTE.match(text, at):
        at = found.end()
        if found[1] in attributes:
            again += found[0]
        attributes.setdefault(found[1], found[2].replace("&quot;", '"').replace("&amp;", "&"))
    return Tag(name[1], attributes, (again + text[at:]).strip())


def begins_tag(text: str) -> bool:
    """Whether the first word is an element's name or the beginning of one."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word in ATTRIBUTES or (word == text.strip() and any(name.startswith(word) for name in ATTRIBUTES))
