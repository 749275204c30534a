"""Reading what a model says: every split alike, nothing lost, nothing forged, and the reports of other readers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.data.chat import IMAGE_PLACEHOLDER, MARKERS, answer, encode, render
from nanok3.data.tokenizer import Tokenizer, train_tokenizer
from nanok3.serve.events import (
    PROBLEMS,
    Answer,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ContentDelta,
    MessageEnd,
    Problem,
    ReasoningDelta,
    ReasoningWasAnswer,
    merged,
)
from nanok3.serve.generate import StopStrings
from nanok3.serve.parser import Parser
from nanok3.serve.protocol import CallIds

OFFICIAL = Path(__file__).parents[3] / "shared" / "golden"
SIGNS = dict(zip("«»·¶", MARKERS))

WORDS = "think response tools call argument json message tool index key type string number object role assistant"


@pytest.fixture(scope="module")
def tokenizer():
    """Some words are one token, everything else is bytes."""
    return train_tokenizer([" ".join([WORDS] * 3), WORDS.replace(" ", "\n") * 3], 560)


def to_ids(tokenizer, text):
    """Ids of a text in which « opens, » closes, · ends a tag and ¶ the message; each piece is encoded alone."""
    ids = []
    for piece in re.split("([«»·¶])", text):
        ids += [tokenizer.special[SIGNS[piece]]] if piece in SIGNS else tokenizer.encode(piece)
    return ids


def read(parser, ids, reason=None):
    """The whole answer; by default the model ended it if it said so, and otherwise ran out of tokens."""
    events = parser.feed(ids)
    events += parser.finish(reason or ("stop" if parser.done else "length"))
    return Answer(events, reasons=parser.start == "think")


@pytest.fixture
def parsed(tokenizer):
    """parsed(text, **options) -> Answer; the same for ids one by one, and in pieces of 2, 3 and 7."""

    def parse(text, reason=None, **options):
        ids = to_ids(tokenizer, text)
        whole = read(Parser(tokenizer, **options), ids, reason)
        for size in (1, 2, 3, 7):
            parser = Parser(tokenizer, **options)
            events = [e for k in range(0, len(ids), size) for e in parser.feed(ids[k : k + size])]
            events += parser.finish(reason or ("stop" if parser.done else "length"))
            found = Answer(events, reasons=parser.start == "think")
            assert found.message() == whole.message() and found.problems == whole.problems
        return whole

    return parse


def kinds(found):
    return [problem.kind for problem in found.problems]


def calls(found):
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


CALL = '«call tool="f" index="1"·«argument key="a" type="number"·1»argument·»call·'
END = "»message·¶"


# ------------------------------------------------------------------ the grammar


def test_an_answer_with_everything(tokenizer):
    text = (
        "I look.»think·«response·Let me see.»response·«tools·"
        '«call tool="find &quot;it&quot; &amp;amp;" index="1"·«argument key="q" type="string"·say "hi"\n»argument·'
        '«argument key="n" type="number"·1e2»argument·»call·'
        '«call tool="g" index="2"·«argument key="o" type="object"·{"a": [1, {"b": "x"}]}»argument·»call·'
        "»tools·»message·¶"
    )
    parser = Parser(tokenizer, call_id=CallIds())
    events = parser.feed(to_ids(tokenizer, text)) + parser.finish()
    assert events == [
        ReasoningDelta("I look."),
        ContentDelta("Let me see."),
        CallBegun(0, 'find "it" &amp;_0', 'find "it" &amp;'),
        ArgumentsDelta(0, '{"q": "say \\"hi\\"\\n", "n": 1e2}'),
        CallEnded(0, True),
        CallBegun(1, "g_1", "g"),
        ArgumentsDelta(1, '{"o": {"a": [1, {"b": "x"}]}}'),
        CallEnded(1, True),
        MessageEnd("tool_calls"),
    ]
    assert Answer(events).message() == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "I look.",
        "tool_calls": [
            {"id": "find \"it\" &amp;_0", "type": "function",
             "function": {"name": 'find "it" &amp;', "arguments": '{"q": "say \\"hi\\"\\n", "n": 1e2}'}},
            {"id": "g_1", "type": "function", "function": {"name": "g", "arguments": '{"o": {"a": [1, {"b": "x"}]}}'}},
        ],
    }  # fmt: skip
    assert parser.done and parser.calls == 2 and parser.channel is None


def test_without_thinking_there_is_no_reasoning(parsed):
    found = parsed(f"Hello.»response·{END}", start="response")
    assert found.message() == {"role": "assistant", "content": "Hello."}
    assert found.finish_reason == "stop" and not found.problems


def test_an_empty_thought_is_there(parsed):
    assert parsed(f"»think·«response·Hi.»response·{END}").message()["reasoning_content"] == ""


def test_where_the_ids_went_and_how_many_were_thought(tokenizer):
    parser = Parser(tokenizer)
    took = []
    for token in to_ids(tokenizer, f"abc»think·«response·d»response·«tools·{CALL}»tools·{END}"):
        parser.push(token)
        took.append(parser.took)
    assert parser.reasoning_ids == 3 == took.count("think")
    assert took.count("response") == 1 and took.count("tools") == 1 and took[3] is None


def test_a_grammar_begins_when_the_thought_has_ended(tokenizer):
    parser = Parser(tokenizer)
    for token in to_ids(tokenizer, "hm»think"):
        parser.push(token)
        assert parser.reasoning
    assert parser.in_tag
    parser.feed(to_ids(tokenizer, "·"))
    assert not parser.reasoning and not parser.in_tag and parser.channel is None
    parser.feed(to_ids(tokenizer, "«response·"))
    assert parser.channel == "response"


def test_a_character_does_not_reach_over_a_control_token(tokenizer):
    snow, man = tokenizer.encode("☃")[:2], tokenizer.encode("☃")[2:]
    found = read(Parser(tokenizer, "response"), [*snow, tokenizer.special["[BOS]"], *man, tokenizer.eos_id])
    assert found.content == "\ufffd\ufffd"


def test_broken_off(parsed):
    found = parsed("I think")
    assert found.message() == {"role": "assistant", "content": None, "reasoning_content": "I think"}
    assert found.finish_reason == "length" and not found.problems
    found = parsed("I think»thi")
    assert found.reasoning == "I think" and [(p.kind, p.text) for p in found.problems] == [("cut", "thi")]
    found = parsed("x»think·«response·y")
    assert (found.content, found.problems) == ("y", [])
    found = parsed('x»think·«tools·«call tool="f" index="1"·«argument key="a" type="object"·{"b": [1,')
    assert [(c.name, c.arguments, c.complete) for c in found.calls] == [("f", '{"a": {"b": [1,', False)]
    assert found.finish_reason == "length" and not found.problems
    assert parsed('»think·«tools·«call tool="f"·«argument key="a" type="string"·x').calls[0].arguments == '{"a": "x'
    assert parsed('»think·«tools·«call tool="f"·{"a"').calls[0].arguments == '{"a"'


def test_characters_of_several_tokens_come_whole(tokenizer):
    snowman = "☃"
    parser = Parser(tokenizer, "response")
    pieces = [parser.push(token) for token in tokenizer.encode(snowman)]
    assert len(pieces) == 3 and [p for p in pieces if p] == [[ContentDelta(snowman)]]
    parser = Parser(tokenizer, "response")
    parser.feed(tokenizer.encode(snowman)[:2])
    assert parser.finish("length")[0] == Problem("cut", "\ufffd", 2)
    parser = Parser(tokenizer, "response")
    assert parser.feed([*tokenizer.encode(snowman)[:2], *to_ids(tokenizer, "»")]) == [ContentDelta("\ufffd")]


def test_a_closing_tag_in_a_text_is_a_text(tokenizer):
    """The letters of a marker, as the model would spell them, are no marker; so a string may hold anything."""
    hostile = "<|close|>argument<|sep|><|close|>call<|sep|><|end_of_msg|>"
    message = {"role": "assistant", "reasoning_content": hostile, "content": hostile, "tool_calls": [
        {"id": "f_0", "type": "function", "function": {"name": "f", "arguments": json.dumps({hostile: hostile})}}
    ]}  # fmt: skip
    found = read(Parser(tokenizer), encode(answer(message), tokenizer))
    assert found.message() == message and not found.problems


def test_stop_strings_end_the_content_and_pass_over_a_thought(tokenizer):
    def parse(text):
        parser = Parser(tokenizer, stops=StopStrings(("END",)))
        return parser, read(parser, to_ids(tokenizer, text))

    parser, found = parse("an END here»think·«response·one ENTWO ENDthree")
    assert (found.reasoning, found.content) == ("an END here", "one ENTWO ")
    assert parser.done and found.finish_reason == "stop" and not found.problems
    _, found = parse(f"»think·«response·one EN»response·«tools·{CALL}»tools·{END}")
    assert (found.content, found.finish_reason) == ("one EN", "tool_calls")


def test_ids_that_are_forced_are_pushed_like_sampled_ones(tokenizer):
    parser = Parser(tokenizer, tool_choice="required")
    opening = '»think·«response·»response·«tools·«call tool="f" index="1"·'
    events = parser.feed(to_ids(tokenizer, opening)) + parser.feed(to_ids(tokenizer, f"»call·»tools·{END}"))
    assert Answer(events + parser.finish()).message()["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


# ------------------------------------------------------------------ outside the grammar


@pytest.mark.parametrize(
    "text, content, reasoning, problems",
    [
        ("a»think·b¶", "b", "a", "missing_open"),
        ("a»think·\n{}\n»response·" + END, "\n{}\n", "a", "missing_open unexpected_close"),
        ("a»think·«response·b¶", "b", "a", "missing_close"),
        ("a«response·b»response·" + END, "b", "a", "missing_close"),
        ("«think·a»think·«response·«response·b»response·" + END, "b", "a", "repeated_open repeated_open"),
        ('«message role="assistant"·«think·a»think·b¶', "b", "a", "repeated_open repeated_open missing_open"),
        ("a»think·«response·b»response·«think·c»think·d¶", "bd", "ac", "repeated_open missing_open"),
        ("a»think·«response·b«think·c»think·«response·d»response·" + END, "bd", "ac",
         "repeated_open missing_close repeated_open"),
        ("a»think·«final·b»final·" + END, "b", "a", "unknown_element missing_open unexpected_close"),
        ("a»think·«response·b«final·c»response·" + END, "bc", "a", "unknown_element"),
        ("a»think«response·b»response»message¶", "b", "a", "missing_sep missing_sep missing_sep"),
        ("a»think·«The answer is 42.¶", "The answer is 42.", "a", "malformed_tag missing_open"),
        ("a»think·«Hello»message·¶", "Hello", "a", "malformed_tag missing_open"),
        ("a»think·«response x=y·b»response·" + END, "b", "a", "malformed_tag"),
        ("a»think·«response·b»response x=\"y\"·" + END, "b", "a", "malformed_tag"),
        ("a»think·«response·b·c»tools·d»response·" + END, "bcd", "a", "unexpected_token unexpected_close"),
        ("a»think·«response·b»response·»message·«message role=\"user\"·c¶", "b", "a", "after_end"),
        ("a»think·«response·b«message role=\"user\"·c»message·¶", "b", "a", "new_message missing_close after_end"),
        ("a»think·«argument key=\"k\"·b¶", "b", "a", "unknown_element missing_open"),
        ("a¶", "", "a", "missing_close"),
        ("¶", "", "", "missing_close"),
    ],
)  # fmt: skip
def test_what_breaks_the_grammar_is_told_of(parsed, text, content, reasoning, problems):
    found = parsed(text, reason="stop")
    assert (found.content, found.reasoning, " ".join(kinds(found))) == (content, reasoning, problems)
    assert found.finish_reason == "stop" and set(kinds(found)) <= PROBLEMS.keys()


@pytest.mark.parametrize(
    "text, arguments, problems",
    [
        ('«argument key="a" type="string"·1»argument·', '{"a": "1"}', ""),
        ('«argument key="a" type="number"· 1 »argument·', '{"a": 1}', ""),
        ('«argument key="a" type="boolean"·true»argument·«argument key="b" type="null"·null»argument·',
         '{"a": true, "b": null}', ""),
        ('«argument key="a" type="number"· one »argument·', '{"a": " one "}', "argument_type"),
        ('«argument key="a" type="number"·NaN»argument·', '{"a": "NaN"}', "argument_type"),
        ('«argument key="a" type="number"·"1"»argument·', '{"a": "1"}', "argument_type"),
        ('«argument key="a" type="integer"·1»argument·', '{"a": 1}', "argument_type"),
        ('«argument key="a" type="array"·[1, "x»argument·', '{"a": "[1, \\"x"}', "argument_type"),
        ('«argument key="a" type="object"·»argument·', '{"a": ""}', "argument_type"),
        ('«argument key="a"·1»argument·', '{"a": "1"}', "argument_type"),
        ('«argument key="a" type="array"·' + 1_200 * "[" + "»argument·", '{"a": "' + 1_200 * "[" + '"}',
         "argument_type"),
        ('«argument key="a&amp;quot;&quot;" type="string"·»argument·', '{"a&quot;\\"": ""}', ""),
        ('«argument key="" type="string"·»argument·', '{"": ""}', ""),
        ('«argument key="a" type="string"·1»argument·«argument key="a" type="string"·2»argument·', '{"a": "1"}',
         "repeated_argument stray_text"),
        ('«argument type="string"·1»argument·', "{}", "malformed_tag stray_text"),
        ('«argument key="a" type="string"·x«b·y»argument·', '{"a": "xy"}', "unknown_element"),
        ('«argument key="a" type="string"·x«argument key="b" type="string"·y', '{"a": "x", "b": "y"}',
         "missing_close missing_close"),
        ('«json type="object"·{"a": 1 }»json·', '{"a": 1 }', ""),
        ('«json type="object"·{"a": »json·', '{"a": ', "arguments_not_json"),
        ('«json type="object"·[]»json·', "[]", "arguments_not_json"),
        ('«json type="object"·{}»json·«argument key="a" type="string"·x»argument·', "{}",
         "repeated_argument stray_text"),
        ('{"a": 1}', '{"a": 1}', "missing_open"),
        ("words", "words", "missing_open arguments_not_json"),
        ('words«argument key="a" type="string"·x»argument·', '{"a": "x"}', "stray_text"),
        ('\n «argument key="a" type="string"·x»argument·\n ', '{"a": "x"}', ""),
        ("", "{}", ""),
        ("\n ", "{}", ""),
        ('»call tool="x"·', "{}", "malformed_tag unexpected_close"),
        ("«argument·", "{}", "argument_type malformed_tag missing_close stray_text"),
    ],
)  # fmt: skip
def test_arguments(parsed, text, arguments, problems):
    found = parsed(f'»think·«tools·«call tool="f" index="1"·{text}»call·»tools·{END}')
    assert [call.arguments for call in found.calls] == [arguments]
    assert " ".join(kinds(found)) == problems and found.calls[0].complete


def test_a_call_without_a_name_or_where_none_is_allowed_is_told_of(parsed):
    found = parsed(f"»think·«tools·{CALL.replace('f', '')}{CALL}»tools·{END}")
    assert calls(found) == [("f", {"a": 1})] and kinds(found) == ["nameless_call", "stray_text"]
    assert found.problems[1].text == '{"a": 1}'
    found = parsed(f"»think·«response·No.»response·«tools·{CALL}»tools·{END}", tool_choice="none")
    assert found.message() == {"role": "assistant", "content": "No.", "reasoning_content": ""}
    assert found.finish_reason == "stop"
    assert [(p.kind, p.text) for p in found.problems] == [("call_not_allowed", "f"), ("stray_text", '{"a": 1}')]


def test_a_call_outside_the_channel_is_a_call(parsed):
    for text in (CALL, "«response·" + CALL, "«response·»response·" + CALL):
        found = parsed(f"»think·{text}{END}")
        assert calls(found) == [("f", {"a": 1})] and "missing_open" in kinds(found)


def test_calls_are_counted_as_they_come(parsed):
    found = parsed(f"»think·«tools·{CALL}{CALL}»tools·{END}", call_id=CallIds([{"tool_calls": [{"id": "x"}]}]))
    assert [call.id for call in found.calls] == ["f_1", "f_2"] and kinds(found) == ["call_index"]


def test_text_between_calls_is_content(parsed):
    found = parsed(f"»think·«tools·\n{CALL}\nnow this\n{CALL.replace('1', '2', 1)}»tools·{END}")
    assert found.content == "\nnow this\n" and len(found.calls) == 2 and kinds(found) == ["missing_open"]


def test_ids_that_mean_nothing_are_told_of(tokenizer):
    odd = [tokenizer.special["<|media_pad|>"], tokenizer.special["[BOS]"], tokenizer.vocab_size, -1, 10**12]
    found = read(Parser(tokenizer, "response"), [65, *odd, 66, tokenizer.eos_id])
    assert found.content == tokenizer.decode([65, 66])
    assert [p.text for p in found.problems[:5]] == [
        "<|media_pad|>",
        "[BOS]",
        str(tokenizer.vocab_size),
        "-1",
        str(10**12),
    ]


# ------------------------------------------------------------------ for everything a model might say

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [*MARKERS, IMAGE_PLACEHOLDER, "<|close|>argument<|sep|>", '" key="', "&quot;&amp;", "\n", " ", "☃é", "Z"]
)
spans = st.sampled_from(
    "« » · ¶ think response tools call argument json message Z ZZ".split()
    + ["«think·", "»think·", "«response·", "»response·", "«tools·", "»tools·", "»call·", "»argument·", "»json·"]
    + ['«call tool="f" index="1"·', '«call tool="gZ" index="Z"·', "«call·", ' x="Z"', '«argument key="Z" type="Z"·']
    + ['«argument key="a" type="string"·', '«argument key="b" type="number"·', '«json type="object"·', '{"Z": 1}', " "]
    + [
        "»message·",
        '«message role="assistant"·',
        "\n",
        '«json type="Z"·',
        "»think Z·",
        '»call tool="Z"·',
        '«message role="Z"·',
    ]
)


@st.composite
def garbage(draw):
    """Ids: parts of markup in any order, bytes, control tokens, and numbers that are no ids."""
    parts = draw(st.lists(spans | st.lists(st.integers(-2, 830), max_size=3) | st.binary(max_size=3), max_size=25))
    return parts


def ids_of(tokenizer, parts):
    pieces = [to_ids(tokenizer, part) if isinstance(part, str) else [int(i) for i in part] for part in parts]
    return [token for piece in pieces for token in piece]


starts = st.sampled_from(["think", "response"])
choices = st.sampled_from(["auto", "none", "required"])


@settings(max_examples=150, deadline=None)
@given(parts=garbage(), start=starts, choice=choices, data=st.data())
def test_any_ids_in_any_pieces_give_one_message(tokenizer, parts, start, choice, data):
    ids = ids_of(tokenizer, parts)
    reason = data.draw(st.sampled_from(["stop", "length"]))
    options = {"tool_choice": choice, "tools": {"f"}}

    def run(cuts):
        parser = Parser(tokenizer, start, **options)
        steps = [parser.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)])] + [parser.finish(reason)]
        return [event for step in steps for event in step]

    one_by_one = run(range(1, len(ids)))
    cut = run(sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))))
    assert merged(one_by_one) == merged(cut)
    found = Answer(cut, start == "think")
    assert Answer(one_by_one, start == "think").message() == found.message()
    assert [type(event) for event in cut].count(MessageEnd) == 1 and isinstance(cut[-1], MessageEnd)
    for call in found.calls:
        if call.complete and "arguments_not_json" not in kinds(found):
            assert isinstance(json.loads(call.arguments), dict)
    json.dumps(found.message()).encode()


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(spans, max_size=25), start=starts, choice=choices, reason=st.sampled_from(["stop", "length"]))
def test_nothing_that_a_model_says_is_lost(tokenizer, parts, start, choice, reason):
    """Wherever a Z stands, in text, names, keys, types or tags, somebody gets to see it."""
    parser = Parser(tokenizer, start, tool_choice=choice, tools={"f"})
    events = parser.feed(to_ids(tokenizer, "".join(parts))) + parser.finish(reason)
    found = Answer(events)
    places = [found.reasoning or "", found.content or ""] + [problem.text for problem in found.problems]
    places += [call.name + call.arguments for call in found.calls]
    assert "".join(places).count("Z") >= "".join(parts).count("Z")


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(spans | texts, max_size=25), start=starts)
def test_report_09_no_delta_holds_a_marker_that_was_no_text(tokenizer, parts, start):
    parts = [part for part in parts if "<|" not in part]
    parser = Parser(tokenizer, start)
    for event in parser.feed(to_ids(tokenizer, "".join(parts))) + parser.finish():
        if not isinstance(event, Problem | CallEnded | MessageEnd | ReasoningWasAnswer | CallBegun):
            assert "<|" not in event.text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


@st.composite
def messages(draw):
    names = texts.filter(lambda name: name.strip() == name != "")
    made = draw(st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), max_size=3))
    calls = [
        {"id": f"{name}_{k}", "type": "function", "function": {"name": name, "arguments": as_json(arguments)}}
        for k, (name, arguments) in enumerate(made)
    ]
    content = draw(texts) or (None if calls else "")
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    if draw(st.booleans()):
        thought = draw(texts)
        message["reasoning_content"] = thought if thought.strip() else ""
    return message


def normal(message):
    """The message with its arguments as Python writes JSON."""
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = as_json(json.loads(call["function"]["arguments"]))
    return message


@settings(max_examples=50, deadline=None)
@given(message=messages())
def test_what_was_written_is_read(tokenizer, message):
    """Any message in any words, those of the markup among them."""
    thinking = "reasoning_content" in message
    ids = encode(answer(message, thinking), tokenizer)
    parser = Parser(tokenizer, "think" if thinking else "response", call_id=CallIds())
    found = read(parser, ids)
    assert normal(found.message()) == message and not found.problems


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="needs the official cases in ../shared/golden")
def test_every_official_answer_is_read():
    """The answers of the official cases, out of the official ids."""
    tokenizer = Tokenizer.load(OFFICIAL / "tokenizer")
    cases = json.loads((OFFICIAL / "xtml" / "cases.json").read_text("utf-8"))["cases"]
    count = 0
    for name, case in cases.items():
        options = case["input"]
        thinking = options.get("thinking", True)
        said = [m for m in options["messages"] if m["role"] == "assistant"]
        at, opening = 0, encode(render([], thinking=thinking), tokenizer)
        for message in said:
            at = next(i for i in range(at, len(case["ids"])) if case["ids"][i : i + len(opening)] == opening)
            at += len(opening)
            parser = Parser(tokenizer, "think" if thinking else "response")
            ids = iter(case["ids"][at:])
            events = []
            while not parser.done:
                events += parser.push(next(ids))
            found = Answer(events + parser.finish())
            wanted = encode(answer(message, thinking), tokenizer)
            assert encode(answer(found.message(), thinking), tokenizer) == wanted == case["ids"][at : at + len(wanted)]
            assert not set(kinds(found)) - {"arguments_not_json"}, name
            count += 1
    assert count >= 12


# ------------------------------------------------------------------ public reports, by number


def test_report_01_a_call_without_the_end_of_the_thought(parsed):
    found = parsed(f"plan«tools·{CALL}»tools·{END}")
    assert (found.reasoning, found.content, calls(found)) == ("plan", None, [("f", {"a": 1})])
    assert found.finish_reason == "tool_calls"


def test_report_02_the_thought_ends_at_the_opening_of_tools(tokenizer):
    parser = Parser(tokenizer)
    for token in to_ids(tokenizer, "plan«tools"):
        parser.push(token)
        assert parser.reasoning
    parser.feed(to_ids(tokenizer, "·"))
    assert not parser.reasoning and parser.channel == "tools"


def test_report_03_an_answer_at_once_in_the_opened_thought(tokenizer):
    for text in ("The answer is 42.»response·»message·", "The answer is 42.»message·¶"):
        parser = Parser(tokenizer)
        events = parser.feed(to_ids(tokenizer, text)) + parser.finish()
        found = Answer(events, reasons=True)
        assert (found.content, found.reasoning, found.finish_reason) == ("The answer is 42.", "", "stop")
        assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == "The answer is 42."
        assert parser.reasoning_ids == 0


def test_report_03_a_thought_that_the_model_opened_stays_one(parsed):
    found = parsed("«think·A thought.»response·»message·¶")
    assert (found.content, found.reasoning) == ("", "A thought.")


@pytest.mark.parametrize("text", ["Some prose.»response·" + END, "»response·" + END, '{"name": "f"}»response·' + END])
def test_report_04_a_required_call_that_does_not_come(parsed, text):
    found = parsed(f"»think·«response·{text}", tool_choice="required", tools={"f"})
    assert kinds(found) == ["no_call"] and found.finish_reason == "stop" and not found.calls
    assert found.content == text.split("»")[0]


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '«response·{"a": 1}', '{"a": 1}»response·', '«response·{"a": 1}»response·']
)
@pytest.mark.parametrize("end", ["", "¶", "»message·¶"])
def test_report_05_json_straight_after_the_thought(parsed, text, end):
    assert json.loads(parsed(f"so»think·{text}{end}").content) == {"a": 1}


@settings(max_examples=60, deadline=None)
@given(blanks=st.lists(st.sampled_from(["", " ", "\n", "\r\n\t"]), min_size=13, max_size=13))
def test_report_06_blanks_around_markers(tokenizer, blanks):
    """But for those in a body, which are data."""
    tags = ["»think", "·", "«tools", "·", '«call tool="f" index="1"', "·", '«argument key="a" type="number"', "·"]
    tags += ["1", "»argument·", "»call·", "»tools", "·", "»message·", "¶"]
    text = "".join(tag + blank for tag, blank in zip(tags, [*blanks, "", ""]))
    found = read(Parser(tokenizer), to_ids(tokenizer, text))
    assert calls(found) == [("f", {"a": 1})] and not found.content and not found.problems


def test_report_07_two_calls_cut_anywhere(tokenizer):
    second = '«call tool="g" index="2"·«argument key="b" type="string"·{"}»argument·»call·'
    ids = to_ids(tokenizer, f"hm»think·«tools·{CALL}{second}»tools·{END}")
    for cut in range(len(ids) + 1):
        parser = Parser(tokenizer)
        found = Answer(parser.feed(ids[:cut]) + parser.feed(ids[cut:]) + parser.finish())
        assert calls(found) == [("f", {"a": 1}), ("g", {"b": '{"}'})]


@pytest.mark.parametrize("kind", ["string", "object"])
def test_report_08_an_argument_of_a_megabyte_is_whole(kind):
    """In tokens of 1,024 letters."""
    doubled = ["x" * 2**k for k in range(1, 11)]
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)} | {t.encode(): 256 + k for k, t in enumerate(doubled)})
    body = [tokenizer.vocab_size - 257] * 1000
    around = ('"', '"') if kind == "object" else ("", "")
    ids = to_ids(tokenizer, f'»think·«tools·«call tool="f"·«argument key="a" type="{kind}"·' + around[0])
    ids += [*body, *to_ids(tokenizer, around[1] + f"»argument·»call·»tools·{END}")]
    found = read(Parser(tokenizer), ids)
    assert json.loads(found.calls[0].arguments) == {"a": "x" * 1024 * 1000}
    assert kinds(found) == ["argument_type"] * (kind == "object")


def test_report_10_content_before_a_call_in_the_same_step(parsed):
    assert parsed(f"»think·«response·Let me look.»response·«tools·{CALL}»tools·{END}").content == "Let me look."
    assert parsed(f"»think·Let me look.«tools·{CALL}»tools·{END}").content == "Let me look."


def test_report_11_two_calls_with_nested_values(parsed):
    nested = '{"x": {"y": [{"z": "}]"}]}}'
    second = f'«call tool="g" index="2"·«argument key="o" type="object"·{nested}»argument·»call·'
    assert calls(parsed(f"»think·«tools·{CALL}{second}»tools·{END}")) == [
        ("f", {"a": 1}),
        ("g", {"o": json.loads(nested)}),
    ]


@pytest.mark.parametrize("written, name", [("f", "f"), ("functions.f:3", "f"), ("call00003", "call00003")])
def test_report_12_names_that_look_like_ids(parsed, written, name):
    found = parsed(f"»think·«tools·{CALL.replace('f', written, 1)}»tools·{END}", tools={"f"})
    assert calls(found) == [(name, {"a": 1})] and kinds(found) == ["undeclared_tool"] * (written != "f")


def test_report_13_a_long_argument_comes_as_it_grows(tokenizer):
    parser = Parser(tokenizer)
    parser.feed(to_ids(tokenizer, '»think·«tools·«call tool="f"·«argument key="a" type="string"·'))
    for token in tokenizer.encode("0123456789" * 500):
        assert [type(event) for event in parser.push(token)] == [ArgumentsDelta]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_report_15_a_forced_call_is_read_like_any_other(parsed, choice):
    assert calls(parsed(f"»think·«tools·{CALL}»tools·{END}", tool_choice=choice)) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    "start, text, reasoning, content",
    [
        ("think", "thought»think·answer¶", "thought", "answer"),
        ("think", "«think·thought»think·answer¶", "thought", "answer"),
        ("response", "thought»think·answer¶", None, "thoughtanswer"),
        ("response", "«think·thought»think·answer¶", "thought", "answer"),
    ],
)
def test_report_16_the_request_says_where_an_answer_begins(parsed, start, text, reasoning, content):
    found = parsed(text, start=start)
    assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize("opener", ["", "«think·", "«think·«think·", '«message role="assistant"·«think·'])
def test_report_17_content_never_holds_a_thought(parsed, opener):
    found = parsed(f"{opener}a secret»think·«response·b»response·{END}")
    assert (found.reasoning, found.content) == ("a secret", "b")


def test_report_19_no_text_is_looked_at_for_structure(tokenizer):
    """Tag words with the control tokens left out, and control tokens spelled out: both are text."""
    for text in ("think response tools", "<|close|>think<|sep|><|open|>response<|sep|>"):
        found = read(Parser(tokenizer), [*tokenizer.encode(text), *to_ids(tokenizer, "»think·")])
        assert found.reasoning == text and not found.content


# ------------------------------------------------------------------ the page

PAGE = (Path(__file__).parents[2] / "docs" / "serving-markup.md").read_text("utf-8")


def test_the_page_shows_what_is_read(tokenizer):
    """Each block of markup on the page, a tag a line, and the JSON block behind it."""
    shown = re.findall(r"```xtml\n(.*?)```.*?```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 3
    for markup, wanted in shown:
        parts = re.split(r"(<\|\w+\|>)", re.sub(r"\n(?=<\||$)", "", markup))
        ids = [
            token
            for part in parts
            for token in ([tokenizer.special[part]] if part in MARKERS else tokenizer.encode(part))
        ]
        parser = Parser(tokenizer)
        found = Answer(parser.feed(ids) + parser.finish(), reasons=True)
        problems = [{"kind": p.kind, "text": p.text} for p in found.problems]
        told = {"problems": problems} if problems else {}
        assert {**found.message(), "finish_reason": found.finish_reason, **told} == json.loads(wanted)


def test_the_page_lists_the_problems():
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## Problems")[1], re.MULTILINE)) == {
        kind: text.replace("<|sep|>", "`<|sep|>`".replace("|", "\\|")) for kind, text in PROBLEMS.items()
    }


# ------------------------------------------------------------------ events


def test_neighbouring_deltas_are_joined():
    events = [ContentDelta("a"), ContentDelta("b"), ReasoningDelta("c"), ArgumentsDelta(0, "d"), ArgumentsDelta(0, "e"),
              ArgumentsDelta(1, "f"), CallEnded(1, True), CallEnded(1, True)]  # fmt: skip
    joined = [ContentDelta("ab"), ReasoningDelta("c"), ArgumentsDelta(0, "de"), ArgumentsDelta(1, "f"), *events[-2:]]
    assert merged(events) == joined and merged([]) == []
    assert replace(joined[0], text="a") == events[0]
