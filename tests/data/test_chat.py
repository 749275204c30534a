"""K3's markup: the official segments and ids, nobody's words as markup, who writes what, and what only grows."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

import nanok3
from nanok3.data import chat
from nanok3.data.chat import (
    IMAGE_PLACEHOLDER,
    OURS,
    SENTENCES_FILE,
    Segment,
    Sentences,
    answer,
    encode,
    encode_with_mask,
    listing,
    render,
    to_text,
)
from nanok3.data.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
OFFICIAL = ROOT.parent / "shared" / "golden"
official = pytest.mark.skipif(
    not OFFICIAL.is_dir(), reason="needs the official cases in ../shared/golden, which are not part of the repository"
)

MARKS = dict(zip(chat.MARKERS, "«»·¶"))


def short(segments):
    """The text with one letter a marker: « opens, » closes, · ends a tag, ¶ a message. Markup that is text stays."""
    return "".join(MARKS.get(s.text, s.text) if s.allow_special else s.text for s in segments)


def pieces(segments):
    return [(s.text, s.allow_special) for s in segments]


def said(messages, **options):
    return short(render(messages, add_generation_prompt=False, **options))


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def reply(content="", thought=None, calls=(), **fields):
    """An assistant's message; calls are (tool, arguments), with the ids c1, c2, ..."""
    made = [
        {"id": f"c{k}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for k, (tool, arguments) in enumerate(calls, 1)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": made, **fields}
    return message if thought is None else {**message, "reasoning_content": thought}


def result(number, content):
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


# ------------------------------------------------------------------ equal to the official encoder


@pytest.fixture(scope="module")
def official_tokenizer():
    return Tokenizer.load(OFFICIAL / "tokenizer")


def official_json(name):
    return json.loads((OFFICIAL / "xtml" / name).read_text("utf-8"))


def program_text(case, kind):
    """The body of the program's message of this type: what stands behind `type="..."` and the marker."""
    texts = [s["text"] for s in case["segments"]]
    at = texts.index(kind)
    assert texts[at - 2 : at + 3] == [" type", '="', kind, '"', "<|sep|>"] and texts[at + 4] == "<|close|>"
    return texts[at + 3]


def with_place(text, pattern):
    """The text with its one match of a pattern as the place."""
    cut, count = re.subn(pattern, "{}", text, flags=re.DOTALL)
    assert count == 1
    return cut


@pytest.fixture(scope="module")
def official_sentences(tmp_path_factory):
    """The released wording, cut out of one official case a sentence and read the way a user would give it. No case
    declares tools among its messages, so `new_tools` is ours and the golden tests leave that message's words open."""
    cases = official_json("cases.json")["cases"]
    assert not any(message.get("tools") for case in cases.values() for message in case["input"]["messages"])
    block = r"```json\n.*\n```$"
    found = {
        "tools": with_place(program_text(cases["with_tools"], "tool-declare"), block),
        "new_tools": OURS.new_tools,
        "thinking_effort": with_place(
            program_text(cases["thinking_effort_low"], "thinking-effort"), r"(?<=`thinking_effort=)low(?=`)"
        ),
        "tool_choice_none": program_text(cases["tool_choice_none"], "tool-choice"),
        "tool_choice_required": program_text(cases["tool_choice_required"], "tool-choice"),
        "json_object": program_text(cases["response_json_object"], "response-format"),
        "json_schema": with_place(program_text(cases["response_json_schema"], "response-format"), block),
    }
    folder = tmp_path_factory.mktemp("released")
    (folder / SENTENCES_FILE).write_text(json.dumps(found, ensure_ascii=False), "utf-8")
    return Sentences.of(folder)


@official
def test_every_official_case_has_its_segments_text_and_ids(official_tokenizer, official_sentences):
    cases = official_json("cases.json")["cases"]
    assert len(cases) == 27
    for name, case in cases.items():
        segments = render(**case["input"], sentences=official_sentences)
        assert pieces(segments) == [(s["text"], s["allow_special"]) for s in case["segments"]], name
        assert to_text(segments) == case["text"], name
        assert encode(segments, official_tokenizer) == case["ids"], name


@official
def test_every_fixture_of_the_public_port_has_its_segments_and_text(official_sentences):
    inputs = official_json("upstream_fixture_inputs.json")
    fixtures = official_json("upstream_fixtures.json")
    assert len(fixtures) == 5 and fixtures.keys() == inputs.keys()
    for name, wanted in fixtures.items():
        segments = render(**inputs[name], sentences=official_sentences)
        assert pieces(segments) == [(s["text"], s["allow_special"]) for s in wanted["segments"]], name
        assert to_text(segments) == wanted["text"], name


@official
def test_our_sentences_change_nothing_but_the_bodies_of_the_programs_messages(official_sentences):
    for name, case in official_json("cases.json")["cases"].items():
        ours, theirs = render(**case["input"]), render(**case["input"], sentences=official_sentences)
        differing = [k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        bodies = [k + 5 for k, s in enumerate(ours) if s.text == " type" and ours[k - 2].text == "system"]
        assert differing == bodies, name
        assert all(not ours[k].allow_special and not ours[k].sampled for k in bodies), name


@official
def test_our_sentences_are_no_copy(official_sentences):
    """Not even three words in a row, headings and settings aside."""

    def runs(text):
        words = re.findall(r"\w+", re.sub(r"^#.*$|`[^`]*`", "\n", text, flags=re.MULTILINE).lower())
        return {tuple(words[k : k + 3]) for k in range(len(words) - 2)}

    theirs = {run for name, text in asdict(official_sentences).items() if name != "new_tools" for run in runs(text)}
    assert len(theirs) > 30
    assert theirs & {run for text in asdict(OURS).values() for run in runs(text)} == set()


@official
def test_what_the_official_encoder_refuses_is_a_value_error_that_names_the_place():
    places = {
        "effort_medium": "thinking_effort is 'medium'; allowed: low, high, max",
        "args_not_object": r"messages\[1\].tool_calls\[0\].function.arguments is .*; allowed: an object",
        "tool_without_name": r"messages\[0\] is the result of no call; allowed: a name",
        "too_few_image_prompts": "image_prompts: 1 for 2 pictures in the messages; allowed: one for each",
    }
    errors = official_json("cases.json")["errors"]
    assert errors.keys() == places.keys()
    for name, case in errors.items():
        with pytest.raises(ValueError, match=places[name]):
            render(**case["input"])


# ------------------------------------------------------------------ the grammar


def test_an_opening_tag_is_cut_into_marker_name_and_four_pieces_an_attribute():
    start = [("<|open|>", True), ("message", False), (" role", False), ('="', False), ("user", False), ('"', False)]
    end = [("<|sep|>", True), ("Hi", False), ("<|close|>", True), ("message", False), ("<|sep|>", True)]
    segments = render([user("Hi")], add_generation_prompt=False)
    assert pieces(segments) == [*start, *end, ("<|end_of_msg|>", True)]


def test_a_conversation_and_the_start_of_an_answer():
    talk = [{"role": "system", "content": "Be brief."}, user("Two?", name="Ann"), reply("2", "1 + 1")]
    text = '«message role="system"·Be brief.»message·¶«message role="user" name="Ann"·Two?»message·¶'
    thought = '«message role="assistant"·«think·1 + 1»think·«response·2»response·»message·¶'
    start = '«message role="assistant"·«'
    assert said(talk) == text + thought
    assert short(render(talk)) == text + thought + start + "think·"
    assert short(render(talk, thinking=False)) == text + start + "response·2»response·»message·¶" + start + "response·"
    assert short(render([])) == start + "think·"


@pytest.mark.parametrize(
    ("fields", "channel"),
    [
        ({}, ""),
        ({"reasoning_content": ""}, ""),
        ({"reasoning_content": " \n\t"}, ""),
        ({"reasoning_content": None, "reasoning": "so"}, "so"),
        ({"reasoning_content": "", "reasoning": "so"}, "so"),
        ({"reasoning_content": "thus", "reasoning": "so"}, "thus"),
        ({"reasoning_content": " thus\n"}, " thus\n"),
    ],
)
def test_the_channel_think_is_always_there_and_holds_the_thought_unchanged(fields, channel):
    message = {"role": "assistant", "content": "x", **fields}
    begin = '«message role="assistant"·'
    assert said([message]) == f"{begin}«think·{channel}»think·«response·x»response·»message·¶"
    assert said([message], thinking=False) == f"{begin}«response·x»response·»message·¶"


def test_content_of_parts_of_nothing_and_of_an_assistant():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    assert [s.text for s in render([user(parts)])][6:10] == ["<|sep|>", "a", "b", "<|close|>"]
    assert said([user(None)]) == said([user("")]) == said([{"role": "user"}]) == '«message role="user"·»message·¶'
    assert "«response·ab»response·" in said([reply(parts)])
    assert "«response·»response·" in said([reply(None)])


def test_arguments_by_type():
    arguments = {
        "text": 'a "b" & c',
        "count": 3,
        "big": 10**20,
        "share": 0.5,
        "whole": 2.0,
        "tiny": 1e-7,
        "open": True,
        "none": None,
        "box": {"z": [1, 2], "a": "ü"},
        "list": ["x", None],
        "empty": "",
    }
    wanted = [
        ("text", "string", 'a "b" & c'),
        ("count", "number", "3"),
        ("big", "number", "100000000000000000000"),
        ("share", "number", "0.5"),
        ("whole", "number", "2.0"),
        ("tiny", "number", "1e-07"),
        ("open", "boolean", "true"),
        ("none", "null", "null"),
        ("box", "object", '{"z": [1, 2], "a": "ü"}'),
        ("list", "array", '["x", null]'),
        ("empty", "string", ""),
    ]
    elements = "".join(f'«argument key="{key}" type="{kind}"·{text}»argument·' for key, kind, text in wanted)
    call = f'«tools·«call tool="f" index="1"·{elements}»call·»tools·'
    assert call in said([reply(calls=[("f", arguments)])])
    assert call in said([reply(calls=[("f", json.dumps(arguments))])])


def test_calls_are_numbered_and_calls_without_arguments_are_empty():
    text = said([reply("ok", calls=[("f", {}), ("g", None), ("f", "")])])
    calls = "".join(f'«call tool="{tool}" index="{k}"·»call·' for k, tool in enumerate("fgf", 1))
    assert text.endswith(f"«response·ok»response·«tools·{calls}»tools·»message·¶")
    assert "tools" not in said([reply("ok", calls=[])])


def test_arguments_that_are_no_json_are_one_raw_element():
    raw = '{"a": "b'
    call = f'«call tool="f" index="1"·«json type="object"·{raw}»json·»call·'
    assert call in said([reply(calls=[("f", raw)])])


def test_only_attributes_are_escaped():
    nasty = 'a "&quot;" <&amp;>'
    escaped = "a &quot;&amp;quot;&quot; <&amp;amp;>"
    talk = [user(nasty, name=nasty), reply(nasty, nasty, [(nasty, {nasty: nasty})]), result(1, nasty)]
    text = said(talk)
    assert text.count(escaped) == 4 and text.count(nasty) == 5
    for attribute in ("name", "tool", "key"):
        assert f' {attribute}="{escaped}"' in text


def test_keys_of_tools_and_schemas_are_sorted_at_every_depth_and_lists_are_not():
    def tool(*keys):
        every = {"name": "f", "z": [{"d": 1, "c": 2}], "a": {"y": "é", "x": None}}
        return {"type": "function", "function": {key: every[key] for key in keys}}

    text = '{"function":{"a":{"x":null,"y":"é"},"name":"f","z":[{"c":2,"d":1}]},"type":"function"}'
    other = {"type": "function", "function": {"name": "a"}}
    one, two = render([], tools=[tool("z", "a", "name"), other]), render([], tools=[tool("name", "z", "a"), other])
    assert one == two
    assert f'```json\n[{text},{{"function":{{"name":"a"}},"type":"function"}}]\n```»message·¶' in short(one)
    schema = {"type": "json_schema", "json_schema": {"schema": tool("z", "name", "a")}}
    assert f"```json\n{text}\n```»message·¶" in short(render([], response_format=schema))
    assert '·{"z": 1, "a": 2}»argument' in said([reply(calls=[("f", {"x": {"z": 1, "a": 2}})])])


def test_the_order_of_what_the_program_writes():
    tool = {"type": "function", "function": {"name": "f"}}
    more = {"role": "system", "content": "", "tools": [tool]}
    options = {"thinking_effort": "max", "tool_choice": "required", "response_format": {"type": "json_object"}}
    text = short(render([user("a"), more, user("b")], tools=[tool], **options))
    heads = [(role, kind) for role, kind in re.findall(r'«message role="(\w+)"(?: type="([\w-]+)")?·', text)]
    assert heads == [
        ("system", "tool-declare"),
        ("system", "thinking-effort"),
        ("user", ""),
        ("system", "tool-declare"),
        ("user", ""),
        ("system", "tool-choice"),
        ("system", "response-format"),
        ("assistant", ""),
    ]
    assert text.count("# Tools\n") == text.count("## New Tools Available\n") == 1


def test_options_that_say_nothing():
    plain = render([user("a")])
    silent = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "thinking_effort": None}
    assert render([user("a")], **silent) == plain
    off = render([user("a")], thinking=False)
    assert render([user("a")], thinking=False, thinking_effort="high") == off


def test_results_repeat_name_and_number_and_go_on_counting_until_the_next_answer():
    asked = reply(calls=[("f", {}), ("g", {})])
    given = [result(2, "2"), result(1, "1"), user("wait"), result(2, "3"), reply("x"), asked, result(1, "4")]
    heads = re.findall(r'tool="(\w)" index="(\d)"·(\d)»message', said([asked, *given]))
    assert heads == [("f", "1", "1"), ("g", "2", "2"), ("g", "3", "3"), ("f", "1", "4")]


def test_a_result_without_id_or_name_takes_the_name_of_the_call_at_its_place():
    asked = reply(calls=[("f", {}), ("g", {})])
    nameless = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert re.findall(r'tool="(\w)" index="(\d)"·(\d)', said([asked, *nameless])) == [("f", "1", "1"), ("g", "2", "2")]
    with pytest.raises(ValueError, match=r"messages\[3\] is the result of no call; allowed: .* 2 tool_calls"):
        render([asked, *nameless, nameless[0]])


def test_a_partial_answer_is_left_open_behind_the_options():
    last = {**reply("Once", "Begin."), "partial": True}
    text = short(render([user("Tell."), last], response_format={"type": "json_object"}))
    assert text.endswith('»message·¶«message role="assistant"·«think·Begin.»think·«response·Once')
    assert text.index("response-format") < text.index("Begin.")
    assert short(render([last], thinking=False)) == '«message role="assistant"·«response·Once'
    assert not any(s.sampled for s in render([last]))


# ------------------------------------------------------------------ what the program says

NAMES = [field.name for field in fields(Sentences)]
PLAIN = Sentences("TOOLS {}.", "MORE {}.", "EFFORT {}.", "NO CALL", "A CALL", "JSON", "JSON LIKE {}.")


@pytest.mark.parametrize(
    ("options", "kind", "body"),
    [
        ({"tools": [{"name": "{}"}]}, "tool-declare", 'TOOLS ```json\n[{"name":"{}"}]\n```.'),
        ({"thinking_effort": "max"}, "thinking-effort", "EFFORT max."),
        ({"tool_choice": "none"}, "tool-choice", "NO CALL"),
        ({"response_format": {"type": "json_object"}}, "response-format", "JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": {}}}}},
            "response-format",
            'JSON LIKE ```json\n{"a":{}}\n```.',
        ),
    ],
)
def test_each_option_has_its_sentence(options, kind, body):
    assert f'«message role="system" type="{kind}"·{body}»message·¶' in said([user("x")], sentences=PLAIN, **options)


def test_sentences_of_tools_that_arrive_later_and_of_a_required_call():
    more = {"role": "system", "content": "", "tools": [{"name": "f"}]}
    bodies = re.findall(r'type="[\w-]+"·([^»]*)', said([more], sentences=PLAIN, tool_choice="required"))
    assert bodies == ['MORE ```json\n[{"name":"f"}]\n```.', "A CALL"]


def test_a_sentence_holds_no_control_token(tokenizer):
    odd = replace(PLAIN, json_object="<|close|>message<|sep|>[EOS]")
    options = {"response_format": {"type": "json_object"}}
    control = [
        [i for i in encode(render([], sentences=s, **options), tokenizer) if i in tokenizer.special.values()]
        for s in (PLAIN, odd)
    ]
    assert control[0] == control[1]


def test_ours_names_the_setting_in_each_option():
    settings = {
        "thinking_effort": "`thinking_effort={}`",
        "tool_choice_none": "`tool_choice=none`",
        "tool_choice_required": "`tool_choice=required`",
        "json_object": "`response_format=json_object`",
        "json_schema": "`response_format=json_schema`",
    }
    assert [name for name, setting in settings.items() if setting not in asdict(OURS)[name]] == []


def test_a_folder_may_carry_its_sentences(tmp_path):
    assert Sentences.of(tmp_path) == OURS
    (tmp_path / SENTENCES_FILE).write_text(json.dumps({**asdict(PLAIN), "json_object": "{} é"}), "utf-8")
    assert Sentences.of(tmp_path) == Sentences.load(tmp_path / SENTENCES_FILE) == replace(PLAIN, json_object="{} é")


WRONG_FILES = {
    "no JSON": ("{", " is no JSON: "),
    "a list": ("[]", f" is []; allowed: an object with the fields {', '.join(NAMES)}"),
    "a field missing": (
        json.dumps({name: "{}" for name in NAMES if name not in ("tools", "json_object")}),
        f" misses json_object, tools; allowed: exactly {', '.join(NAMES)}",
    ),
    "an unknown field": (
        json.dumps({**asdict(OURS), "effort": "{}"}),
        f" has unknown effort; allowed: exactly {', '.join(NAMES)}",
    ),
    "no string": (json.dumps({**asdict(PLAIN), "json_object": 3}), ": json_object is 3; allowed: a string"),
    **{
        f"no place in {name}": (
            json.dumps({**asdict(PLAIN), name: "x"}),
            f": {name} is 'x'; allowed: a text with one place {{}}",
        )
        for name in ("tools", "new_tools", "thinking_effort", "json_schema")
    },
    "two places": (
        json.dumps({**asdict(PLAIN), "tools": "{} {}"}),
        ": tools is '{} {}'; allowed: a text with one place {}",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_FILES)
def test_a_wrong_file_of_sentences_is_refused(mistake, tmp_path):
    content, said = WRONG_FILES[mistake]
    path = tmp_path / "sentences.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}{said}')}"):
        Sentences.load(path)


def test_wrong_sentences_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^sentences: thinking_effort is 'much'; allowed: a text with one place"):
        replace(PLAIN, thinking_effort="much")
    with pytest.raises(ValueError, match=r"^sentences: no file .*none\.json$"):
        Sentences.load(tmp_path / "none.json")


# ------------------------------------------------------------------ nobody's words are markup


CONTROL = [*chat.MARKERS, "[EOS]", "[BOS]", "<|media_pad|>", "<|media_begin|>"]
words = st.lists(st.sampled_from([*CONTROL, IMAGE_PLACEHOLDER, "a", " ", '"', "&", "\n", "é", "message", "think"]))
texts = words.map("".join)
values = st.recursive(
    texts | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
names = texts.filter(bool)


@st.composite
def conversations(draw, text=texts):
    """Messages with calls, and results in the order of the calls."""
    messages = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["system", "user", "assistant", "assistant"]))
        if kind != "assistant":
            messages.append({"role": kind, "content": draw(text), "name": draw(text)})
            continue
        calls = draw(st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), max_size=3))
        messages.append(reply(draw(text), draw(text), calls))
        messages += [result(k, draw(text)) for k in range(1, draw(st.integers(0, len(calls))) + 1)]
    return messages


def test_markup_of_a_user_stays_text(tokenizer):
    markup = to_text(render([user("x"), reply("y", "z", [("f", {"a": 1})])]))
    ids = encode(render([user(markup)]), tokenizer)
    (_, _, text), *_ = Reader(ids, tokenizer).messages(1)
    assert text == markup
    control = tokenizer.special.values()
    harmless = encode(render([user("hello")]), tokenizer)
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]


class Reader:
    """Reads a conversation back from ids, by control tokens alone: what a decoder that sees no text boundaries does.
    An attribute ends where its quote does, since a value holds none."""

    def __init__(self, ids, tokenizer):
        self.special = {tokenizer.special[marker]: marker for marker in chat.MARKERS}
        self.tokenizer, self.ids, self.at = tokenizer, ids, 0

    def marker(self):
        return self.special.get(self.ids[self.at]) if self.at < len(self.ids) else None

    def expect(self, marker):
        assert self.marker() == marker
        self.at += 1

    def text(self):
        begin = self.at
        while self.marker() is None:
            assert self.ids[self.at] not in self.tokenizer.special.values()
            self.at += 1
        return self.tokenizer.decode(self.ids[begin : self.at])

    def element(self):
        """(tag, attributes, text or elements)"""
        self.expect("<|open|>")
        tag, _, rest = self.text().partition(" ")
        pairs = re.findall(r'(\w+)="([^"]*)"(?: |$)', rest, re.DOTALL)
        attributes = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}
        self.expect("<|sep|>")
        content = [self.text()]
        while self.marker() == "<|open|>":
            content.append(self.element())
        self.expect("<|close|>")
        assert self.text() == tag
        self.expect("<|sep|>")
        return tag, attributes, content[0] if len(content) == 1 else content[1:]

    def messages(self, count=1000):
        found = []
        while self.at < len(self.ids) and len(found) < count:
            found.append(self.element())
            self.expect("<|end_of_msg|>")
        return found


def as_elements(messages):
    """What the reader should find, told from the messages."""
    found, count, calls = [], 0, []
    for message in messages:
        body, count = message["content"], count + 1
        fields = {"role": message["role"], **({"name": message["name"]} if message.get("name") else {})}
        if message["role"] == "tool":
            fields |= {"tool": calls[count - 1]["function"]["name"], "index": str(count)}
        if message["role"] == "assistant":
            thought, calls, count = message["reasoning_content"], message["tool_calls"], 0
            body = [("think", {}, thought if thought.strip() else ""), ("response", {}, message["content"])]
            body += [("tools", {}, [as_call(call, k) for k, call in enumerate(calls, 1)])] if calls else []
        found.append(("message", fields, body))
    return found


def as_call(call, number):
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", dict: "object"}
    arguments = [
        (
            "argument",
            {"key": key, "type": kinds.get(type(value), "array")},
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        )
        for key, value in call["function"]["arguments"].items()
    ]
    return "call", {"tool": call["function"]["name"], "index": str(number)}, arguments or ""


@settings(max_examples=60)
@given(messages=conversations())
def test_a_reader_of_ids_finds_every_message_again(tokenizer, messages):
    segments = render(messages, add_generation_prompt=False)
    assert Reader(encode(segments, tokenizer), tokenizer).messages() == as_elements(messages)


@settings(max_examples=30)
@given(name=names, value=values, schema=st.dictionaries(texts, values, max_size=2))
def test_what_the_program_writes_about_tools_and_schemas_holds_no_control_token_of_theirs(
    tokenizer, name, value, schema
):
    def control(name, value, schema):
        tools = [{"type": "function", "function": {"name": name, "x": value}}]
        options = {"type": "json_schema", "json_schema": {"schema": schema}}
        ids = encode(render([user("x")], tools=tools, response_format=options), tokenizer)
        return [i for i in ids if i in tokenizer.special.values()]

    assert control(name, value, schema) == control("f", 1, {"a": 1})


def test_strange_text_is_encoded(tokenizer):
    for strange in ("\ud800", "\x00", "x" * 26_000, " " * 26_000):
        ids = encode(render([user(strange, name=strange), reply(strange, strange)]), tokenizer)
        assert tokenizer.decode(ids).count(strange.replace("\ud800", "\ufffd")) >= 3


# ------------------------------------------------------------------ pictures

BLOCKS = [f"<|media_begin|>image {n}x{n}<|media_content|><|media_pad|><|media_end|>" for n in (28, 56, 84)]
PART = {"type": "image_url", "image_url": {"url": "data:..."}}


def test_blocks_stand_where_the_parts_are_and_their_names_are_control_tokens(tokenizer):
    asked = [user([{"type": "text", "text": "see "}, PART, {"type": "text", "text": " and"}, {"type": "image"}])]
    segments = render(asked, image_prompts=BLOCKS[:2], add_generation_prompt=False)
    assert pieces(segments)[7:11] == [
        ("see ", False),
        (BLOCKS[0], True),
        (" and", False),
        (BLOCKS[1], True),
    ]
    assert encode(segments, tokenizer).count(tokenizer.special["<|media_pad|>"]) == 2


def test_blocks_follow_the_sorted_results():
    """A part's picture must not end up in another tool's result."""
    first, second = ({**PART, "n": n} for n in (1, 2))
    talk = [reply(calls=[("near", {}), ("far", {})]), result(2, [second]), result(1, [first])]
    assert chat.image_parts(talk) == [first, second]
    text = said(talk, image_prompts=[BLOCKS[part["n"]] for part in chat.image_parts(talk)])
    assert re.findall(r'tool="(\w+)" index="\d"·\S+ (\d+)x', text) == [("near", "56"), ("far", "84")]


def test_a_placeholder_typed_by_somebody_is_text_where_every_part_has_its_block():
    typed = f"look: {IMAGE_PLACEHOLDER}"
    assert f"·{typed}»message" in said([user(typed)])
    assert f"·{typed}»message" in said([user(typed)], image_prompts=[])
    text = said([user(typed), user([PART])], image_prompts=BLOCKS[:1])
    assert f"·{typed}»message" in text and f"·{BLOCKS[0]}»message" in text


def test_a_placeholder_stands_for_a_picture_where_there_are_more_blocks_than_parts():
    text = said([user(f"{IMAGE_PLACEHOLDER} or"), user([PART])], image_prompts=BLOCKS[:2])
    assert f"·{BLOCKS[0]} or»message" in text and f"·{BLOCKS[1]}»message" in text


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_blocks_than_of_pictures_is_refused(count):
    with pytest.raises(ValueError, match=rf"image_prompts: {count} for 2 pictures in the messages; allowed: one for"):
        render([user([PART, PART])], image_prompts=BLOCKS[:count])


def test_a_picture_without_a_block_is_a_placeholder_and_is_not_encoded(tokenizer):
    segments = render([user([PART])])
    assert Segment(IMAGE_PLACEHOLDER, True) in segments
    with pytest.raises(ValueError, match="a picture has no media block yet; pass image_prompts to render"):
        encode(segments, tokenizer)


# ------------------------------------------------------------------ who writes what


def by_writer(segments):
    """(sampled, text) of each stretch."""
    stretches = []
    for s in segments:
        if stretches and stretches[-1][0] == s.sampled:
            stretches[-1][1] += short([s])
        else:
            stretches.append([s.sampled, short([s])])
    return [tuple(stretch) for stretch in stretches]


def test_the_model_writes_from_the_start_of_an_answer_to_its_end():
    talk = [user("Go."), reply("ok", "hm", [("f", {"a": 1})]), result(1, "r"), reply("done")]
    start = '«message role="assistant"·«think·'
    call = '«tools·«call tool="f" index="1"·«argument key="a" type="number"·1»argument·»call·»tools·'
    assert by_writer(render(talk, tools=[{"name": "f"}], add_generation_prompt=False))[1:] == [
        (True, f"hm»think·«response·ok»response·{call}»message·¶"),
        (False, f'«message role="tool" tool="f" index="1"·r»message·¶{start}'),
        (True, "»think·«response·done»response·»message·¶"),
    ]
    assert by_writer(render(talk[:2], thinking=False, add_generation_prompt=False))[1:] == [
        (True, f"ok»response·{call}»message·¶")
    ]
    assert not any(s.sampled for s in render([user("Go.")]))


def test_arguments_that_are_no_json_are_not_learned():
    stretches = by_writer(render([reply(calls=[("f", "{"), ("g", "{}")])], add_generation_prompt=False))
    assert stretches[1:] == [
        (True, '»think·«response·»response·«tools·«call tool="f" index="1"·'),
        (False, '«json type="object"·{»json·'),
        (True, '»call·«call tool="g" index="2"·»call·»tools·»message·¶'),
    ]


def test_a_picture_is_never_sampled():
    segments = render([reply([PART])], image_prompts=BLOCKS[:1], add_generation_prompt=False)
    assert Segment(BLOCKS[0], True, False) in segments


def test_the_mask_of_the_ids(tokenizer):
    segments = render([user("One and two?"), reply("Three.", "1 + 2")])
    ids, mask = encode_with_mask(segments, tokenizer)
    assert ids == encode(segments, tokenizer) and len(mask) == len(ids)
    learned = [token for token, sampled in zip(ids, mask) if sampled]
    assert learned == encode([s for s in segments if s.sampled], tokenizer)
    assert tokenizer.decode(learned).startswith("1 + 2<|close|>think<|sep|>")
    assert learned[-1] == tokenizer.end_of_msg_id


def test_a_tokenizer_without_the_markers_is_refused(tokenizer):
    ranks = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size - 256)}
    older = Tokenizer(ranks, {len(ranks): "<|im_end|>"})
    with pytest.raises(ValueError, match=r"the tokenizer has no control token <\|open\|>"):
        encode(render([user("x")]), older)


# ------------------------------------------------------------------ what only grows


@settings(max_examples=60)
@given(messages=conversations(), thinking=st.booleans())
def test_a_conversation_grows_at_its_end(tokenizer, messages, thinking):
    prompts = [render(messages[:k], thinking=thinking, add_generation_prompt=False) for k in range(len(messages) + 1)]
    rows = [encode(prompt, tokenizer) for prompt in prompts]
    for shorter, longer in zip(rows, rows[1:]):
        assert len(shorter) < len(longer) and longer[: len(shorter)] == shorter


@settings(max_examples=60)
@given(messages=conversations(), thinking=st.booleans())
def test_a_prompt_and_its_answer_are_the_conversation(messages, thinking):
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            whole = render(messages[: k + 1], thinking=thinking, add_generation_prompt=False)
            assert render(messages[:k], thinking=thinking) + answer(message, thinking) == whole


def begins(shorter, longer):
    return longer[: len(shorter)] == shorter


def test_where_a_conversation_does_not_only_grow():
    """The exceptions in docs/formats.md."""
    asked = reply(calls=[("f", {}), ("g", {})])
    late = [asked, result(2, "2"), result(1, "1")]
    stranger = [*late, {"role": "tool", "content": "?", "name": "h"}]
    options = {"add_generation_prompt": False}
    assert not begins(render(late[:2], **options), render(late, **options))
    assert not begins(render(late, **options), render(stranger, **options))
    talk = [user("a"), reply("b")]
    wished = render(talk[:1], response_format={"type": "json_object"})
    assert not begins(wished, render(talk)) and begins(render(talk[:1], **options), wished)
    assert not begins(render(talk[:1]), render([talk[0], {**talk[1], "name": "Bea"}]))
    for change in ({"thinking": False}, {"thinking_effort": "low"}, {"tools": [{"name": "f"}]}):
        assert not begins(render(talk, **options), render([*talk, user("c")], **options, **change))


def test_an_answer_is_an_assistants():
    for message in (user("x"), {**reply("x"), "partial": True}):
        with pytest.raises(ValueError, match=r"message is .*; allowed: an assistant's, not partial"):
            answer(message)
    with pytest.raises(ValueError, match=r"message.content\[0\] is 'x'"):
        answer(reply(["x"]))


# ------------------------------------------------------------------ options that are refused

FORMATS = "an object of type text, json_object, json_schema"
REFUSED = {
    "thinking_effort": ({"thinking_effort": "medium"}, "thinking_effort is 'medium'; allowed: low, high, max"),
    "thinking_effort without thinking": (
        {"thinking_effort": "much", "thinking": False},
        "thinking_effort is 'much'; allowed: low, high, max",
    ),
    "tool_choice": ({"tool_choice": "any"}, "tool_choice is 'any'; allowed: auto, none, required"),
    "tool_choice of a function": (
        {"tool_choice": {"type": "function"}},
        "tool_choice is {'type': 'function'}; allowed: auto, none, required",
    ),
    "required without tools": (
        {"tool_choice": "required"},
        "tool_choice is 'required', but there are no tools; allowed: auto, none",
    ),
    "response_format": (
        {"response_format": {"type": "xml"}},
        f"response_format is {{'type': 'xml'}}; allowed: {FORMATS}",
    ),
    "response_format as a string": (
        {"response_format": "json_object"},
        f"response_format is 'json_object'; allowed: {FORMATS}",
    ),
    "json_schema without schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema is None; allowed: a JSON schema, an object",
    ),
    "tools that are no JSON": (
        {"tools": [{"name": {1, 2}}]},
        "tools cannot be written as JSON: Object of type set is not JSON serializable",
    ),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_is_refused(option):
    options, message = REFUSED[option]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        render([user("x")], **options)


def test_fields_that_only_writing_reads_are_refused_too():
    cases = [
        (reply("x", 3), "messages[0].reasoning_content is 3; allowed: a string"),
        (
            reply(calls=[("f", {"a": {1}})]),
            "messages[0].tool_calls[0].function.arguments['a'] is {1}; allowed: what JSON can hold",
        ),
        (
            {"role": "system", "tools": ["f"]},
            "messages[0].tools is ['f']; allowed: a list of objects, each the description of a tool",
        ),
    ]
    for message, wanted in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
            render([message])


def test_required_needs_tools_from_anywhere():
    more = {"role": "system", "content": "", "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert OURS.tool_choice_required in short(render([user("x"), more], tool_choice="required"))


# ------------------------------------------------------------------ docs/formats.md

EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n(`{3,})\n(.*?)^\2\n", re.DOTALL | re.MULTILINE)


def value_of(code, variables):
    """Run the statements; the value of the last, an expression."""
    *statements, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(statements, []), "formats.md", "exec"), variables)
    return eval(compile(ast.Expression(last.value), "formats.md", "eval"), variables)


def test_every_example_in_the_docs_is_what_the_code_gives(tokenizer):
    doc = (ROOT / "docs" / "formats.md").read_text("utf-8")
    examples = EXAMPLE.findall(doc)
    assert len(examples) == doc.count("```python") >= 10
    image = nanok3.preprocess_image(Pillow.new("RGB", (640, 480)))
    variables = {"nanok3": nanok3, "tok": tokenizer, "image": image}
    for code, _, wanted in examples:
        value = value_of(code, variables)
        shown = listing(value) if isinstance(value[0], Segment) else tokenizer.decode(value) + "\n"
        assert shown == wanted, code


def test_a_listing_tells_writers_apart_and_loses_nothing():
    segments = render([user("a\n\nb\n"), reply("c", "d")])
    assert listing(segments) == (
        'given    <|open|>message role="user"<|sep|>a\n\n         b\n         <|close|>message<|sep|><|end_of_msg|>\n'
        'given    <|open|>message role="assistant"<|sep|>\n'
        "given    <|open|>think<|sep|>\n"
        "sampled  d<|close|>think<|sep|>\n"
        "sampled  <|open|>response<|sep|>c<|close|>response<|sep|>\n"
        "sampled  <|close|>message<|sep|><|end_of_msg|>\n"
        'given    <|open|>message role="assistant"<|sep|>\n'
        "given    <|open|>think<|sep|>\n"
    )
    assert listing([]) == ""


def test_the_module_is_nanok3_chat():
    assert nanok3.chat is chat
