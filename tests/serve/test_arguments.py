"""Arguments piece by piece: what goes out when. What they become as a whole is in test_parser.py."""

from __future__ import annotations

import pytest

from nanok3.serve.arguments import Arguments, json_kind


@pytest.fixture
def pieces():
    return []


@pytest.fixture
def arguments(pieces):
    return Arguments(pieces.append, lambda kind, text: pieces.append((kind, text)))


def test_a_string_goes_out_as_it_grows(arguments, pieces):
    arguments.open_argument("a", "string")
    for letter in 'x"\n☃':
        arguments.text(letter)
    assert pieces == ['{"a": ', '"', "x", '\\"', "\\n", "☃"]
    arguments.close()
    arguments.end()
    assert pieces[6:] == ['"', "}"]


def test_other_values_wait_for_their_end(arguments, pieces):
    arguments.open_argument("a", "array")
    arguments.text("[1,")
    assert pieces == ['{"a": ']
    arguments.text(" 2]\n")
    arguments.close()
    arguments.open_argument("b", "number")
    arguments.text("1e2")
    arguments.close()
    assert pieces[1:] == ["[1, 2]", ', "b": ', "1e2"]


def test_a_type_nobody_knows_is_told_of_at_once_and_only_once(arguments, pieces):
    arguments.open_argument("a", "int")
    assert pieces[0] == ("argument_type", "int")
    arguments.text("1")
    arguments.close()
    assert pieces[1:] == ['{"a": ', "1"]


def test_what_is_held_goes_out_when_the_answer_breaks_off(arguments, pieces):
    arguments.open_argument("a", "array")
    arguments.text("[1,")
    arguments.cut()
    assert "".join(pieces) == '{"a": [1,'


@pytest.mark.parametrize(
    "text, kind",
    [("1", "number"), ("-1.5e3", "number"), ("true", "boolean"), ("null", "null"), ('"x"', "string"), ("{}", "object")]
    + [("[]", "array"), (" 1 ", "number"), ("1" * 5000, "number")]
    + [
        (text, None)
        for text in ("", "x", "NaN", "Infinity", "-Infinity", "01", "{'a': 1}", "[1,]", "[" * 9999, "\xa01")
    ],
)
def test_types_of_json(text, kind):
    assert json_kind(text) == kind
