"""Tags: names and attributes, and what is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanok3.data.chat import _Writer
from nanok3.serve.tags import ATTRIBUTES, Tag, begins_tag, read_tag


@pytest.mark.parametrize(
    "text, tag",
    [
        ("think", Tag("think", {}, "")),
        (" think\n", Tag("think", {}, "")),
        ('call tool="f" index="1"', Tag("call", {"tool": "f", "index": "1"}, "")),
        ('call\n tool = "f"index="1" ', Tag("call", {"tool": "f", "index": "1"}, "")),
        ('call tool="a b=&quot;&amp;quot;"', Tag("call", {"tool": 'a b="&quot;'}, "")),
        ('call tool="f" tool="g"', Tag("call", {"tool": "f"}, 'tool="g"')),
        ("call tool=f", Tag("call", {}, "tool=f")),
        ('call tool="f', Tag("call", {}, 'tool="f')),
        ("The answer is 42.", Tag("The", {}, "answer is 42.")),
        ('="x"', Tag("", {}, '="x"')),
        ("", Tag("", {}, "")),
    ],
)
def test_reading(text, tag):
    assert read_tag(text) == tag


@given(st.dictionaries(st.sampled_from(["key", "type", "tool"]), st.text(st.characters(exclude_categories=["Cs"]))))
def test_what_was_written_is_read(attributes):
    writer = _Writer()
    writer.open("argument", **attributes)
    text = "".join(segment.text for segment in writer.segments[1:-1])
    assert read_tag(text) == Tag("argument", attributes, "")


def test_beginnings_of_tags():
    assert all(begins_tag(text) for text in ("", "thi", " think", 'call tool="f', *ATTRIBUTES))
    assert not any(begins_tag(text) for text in ("thinking", "The answer", "thi x"))
