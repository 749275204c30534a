"""Messages as a stranger may send them: mistakes are named, results find their calls."""

from __future__ import annotations

import json
import re

import pytest

from nanok3.data.messages import pictures, read_message, read_messages

ASK = {"role": "user", "content": "Weigh the parcels."}


def calls(*pairs):
    """An assistant's message with calls (id, tool); an id of None is left out."""
    made = [{**({"id": i} if i else {}), "function": {"name": tool, "arguments": {}}} for i, tool in pairs]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(call=None, content="r", **fields):
    return {"role": "tool", "content": content, **({"tool_call_id": call} if call else {}), **fields}


def order(*messages):
    """Name and first text of each result, as read."""
    return [(t.name, t.parts[0]["text"]) for t in read_messages(messages) if t.role == "tool"]


# ------------------------------------------------------------------ results


def test_results_are_sorted_as_their_calls_are_and_take_their_names():
    asked = calls(("a", "scale"), ("b", "ruler"), ("c", "scale"))
    given = [result("c", "3 kg"), result("a", "1 kg", name="stale"), result("b", "2 m")]
    assert order(ASK, asked, *given) == [("scale", "1 kg"), ("ruler", "2 m"), ("scale", "3 kg")]
    assert order(ASK, asked, given[0], given[2]) == [("ruler", "2 m"), ("scale", "3 kg")]


def test_a_run_with_a_result_of_no_call_stays_as_it_is():
    asked = calls(("a", "scale"), ("b", "ruler"))
    for stranger in (result("z", "?"), result(None, "?"), result("None", "?")):
        assert order(ASK, asked, result("b", "2 m"), stranger) == [(None, "2 m"), (None, "?")]
    assert order(ASK, calls((None, "scale")), result(None, "?")) == [(None, "?")]


def test_only_neighbours_are_sorted_and_only_by_the_last_answer():
    first, second = calls(("a", "scale"), ("b", "ruler")), calls(("a", "clock"), ("b", "map"))
    assert order(first, result("b", "2"), ASK, result("a", "1")) == [("ruler", "2"), ("scale", "1")]
    assert order(first, result("a", "1"), second, result("b", "4"), result("a", "3")) == [
        ("scale", "1"),
        ("clock", "3"),
        ("map", "4"),
    ]
    assert order(first, {"role": "assistant", "content": "no"}, result("a", "1")) == [(None, "1")]


def test_calls_that_share_an_id_and_results_that_share_a_call():
    assert order(calls(("a", "scale"), ("a", "ruler")), result("a", "1"), result("a", "2")) == [
        ("scale", "1"),
        ("scale", "2"),
    ]
    asked = calls(("a", "scale"), ("b", "ruler"))
    assert order(asked, result("b", "x"), result("a", "y"), result("b", "z")) == [
        ("scale", "y"),
        ("ruler", "x"),
        ("ruler", "z"),
    ]


def test_a_result_names_its_tool_in_either_field():
    assert order(result("z", "1", tool="scale", name="ruler"), result("z", "2", name="ruler")) == [
        ("scale", "1"),
        ("ruler", "2"),
    ]


def test_pictures_come_in_the_order_of_the_results():
    asked = calls(("a", "camera"), ("b", "camera"))
    left, right = ({"type": "image_url", "image_url": {"url": side}} for side in ("left", "right"))
    messages = [{"role": "user", "content": [left]}, asked, result("b", [right]), result("a", [left])]
    assert pictures(read_messages(messages)) == [left, left, right]


def test_reading_changes_no_message():
    messages = [ASK, calls(("a", "scale"), ("b", "ruler")), result("b", "2"), result("a", "1", name="stale")]
    before = json.dumps(messages)
    read_messages(messages)
    assert json.dumps(messages) == before


# ------------------------------------------------------------------ calls and content


@pytest.mark.parametrize("given", [{"kg": 2}, '{"kg": 2}', ' {"kg" :2}\n', '{"kg": 1, "kg": 2}'])
def test_arguments_may_be_an_object_or_its_text(given):
    call = {"function": {"name": "scale", "arguments": given}}
    assert read_message({"role": "assistant", "tool_calls": [call]}, "m").calls[0].arguments == {"kg": 2}


@pytest.mark.parametrize("given", [None, "", " \n", {}, "{}"])
def test_no_arguments(given):
    call = {"function": {"name": "scale", "arguments": given}}
    assert read_message({"role": "assistant", "tool_calls": [call]}, "m").calls[0].arguments == {}


@pytest.mark.parametrize("given", ['{"kg": ', "two kilos", '{"a":' * 100_000, '{"n": ' + "9" * 5000 + "}"])
def test_text_that_is_no_json_is_kept(given):
    """Nesting beyond the parser's depth, and numbers beyond its digits, are a model's mistakes too."""
    call = {"function": {"name": "scale", "arguments": given}}
    assert read_message({"role": "assistant", "tool_calls": [call]}, "m").calls[0].arguments == given


def test_name_and_arguments_may_lie_in_the_call():
    turn = read_message({"role": "assistant", "tool_calls": [{"id": 7, "name": "scale", "arguments": {"kg": 2}}]}, "m")
    assert turn.calls[0][:3] == ("7", "scale", {"kg": 2})


def test_content_is_a_string_parts_or_nothing():
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]
    assert read_message({"role": "user", "content": "a"}, "m").parts == parts[:1]
    assert read_message({"role": "user", "content": parts}, "m").parts == parts
    assert read_message({"role": "user"}, "m").parts == read_message({"role": "user", "content": []}, "m").parts == []


# ------------------------------------------------------------------ mistakes

TOOL = {"type": "function", "function": {"name": "scale"}}
MISTAKES = {
    "a string": ("hello", "messages[1] is 'hello'; allowed: an object with role and content"),
    "no role": ({"content": "x"}, "messages[1].role is None; allowed: system, user, assistant, tool"),
    "another role": ({"role": "developer"}, "messages[1].role is 'developer'; allowed: system, user, assistant, tool"),
    "a list as role": ({"role": []}, "messages[1].role is []; allowed: system, user, assistant, tool"),
    "name": ({"role": "user", "name": 3}, "messages[1].name is 3; allowed: a string"),
    "content": (
        {"role": "user", "content": {"text": "x"}},
        "messages[1].content is {'text': 'x'}; allowed: a string, a list of parts, None",
    ),
    "a part that is a string": (
        {"role": "user", "content": ["x"]},
        "messages[1].content[0] is 'x'; allowed: an object of type text, image, image_url, video_url",
    ),
    "a part of another type": (
        {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "audio"}]},
        "messages[1].content[1] is {'type': 'audio'}; allowed: an object of type text, image, image_url, video_url",
    ),
    "a part without its text": (
        {"role": "tool", "content": [{"type": "text"}]},
        "messages[1].content[0].text is None; allowed: a string",
    ),
    "tools of a user": (
        {"role": "user", "content": "", "tools": [TOOL]},
        "messages[1].tools: allowed only in a system message whose content is empty",
    ),
    "tools beside content": (
        {"role": "system", "content": "x", "tools": [TOOL]},
        "messages[1].tools: allowed only in a system message whose content is empty",
    ),
    "partial of a user": (
        {"role": "user", "content": "x", "partial": True},
        "messages[1].partial: allowed only in an assistant message without tool_calls",
    ),
    "partial with calls": (
        {**calls(("a", "scale")), "partial": True},
        "messages[1].partial: allowed only in an assistant message without tool_calls",
    ),
    "partial in the middle": (
        {"role": "assistant", "content": "x", "partial": True},
        "messages[1].partial: allowed only in the last message",
    ),
    "a call that is a string": (
        {"role": "assistant", "tool_calls": ["scale"]},
        "messages[1].tool_calls[0] is 'scale'; allowed: an object with a function that has name and arguments",
    ),
    "a function that is a string": (
        {"role": "assistant", "tool_calls": [{"function": "scale"}]},
        "messages[1].tool_calls[0] is {'function': 'scale'}; allowed: an object with a function that has name and "
        "arguments",
    ),
    "a call without a name": (
        {"role": "assistant", "tool_calls": [calls(("a", "scale"))["tool_calls"][0], {"function": {"arguments": {}}}]},
        "messages[1].tool_calls[1].function.name is None; allowed: a string that is not empty",
    ),
    "arguments that are a list": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "scale", "arguments": [2]}}]},
        "messages[1].tool_calls[0].function.arguments is [2]; allowed: an object, or the JSON text of one",
    ),
    "arguments whose text is a number": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "scale", "arguments": "2"}}]},
        "messages[1].tool_calls[0].function.arguments is '2'; allowed: an object, or the JSON text of one",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    message, said = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        read_messages([ASK, message, ASK])


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(ValueError) as error:
        read_messages([{"role": "x" * 10_000}])
    assert len(str(error.value)) < 200
