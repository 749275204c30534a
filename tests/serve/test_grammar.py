"""Structured output: whatever is sampled under a grammar is what the request asked for, and can always go on."""

from __future__ import annotations

import json
import random
import re
import sys
import threading

import pytest
import torch
from jsonschema import Draft202012Validator

from nanok3.config import K3Config
from nanok3.data.chat import answer, encode
from nanok3.data.tokenizer import train_tokenizer
from nanok3.model.decoder import K3
from nanok3.serve.answer_grammar import MAX_CALLS
from nanok3.serve.constrained import Constrained
from nanok3.serve.engine import Constraint, Engine, Job, Settings
from nanok3.serve.events import Answer
from nanok3.serve.fields import RequestError
from nanok3.serve.generate import unnamed_ids
from nanok3.serve.grammar import MAX_SIZE, Grammars, for_request
from nanok3.serve.protocol import read_chat, read_completion
from nanok3.serve.rules import prepared
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.tool_schema import between_slashes

USER = [{"role": "user", "content": "x"}]
SAMPLE = json.dumps([{"name": "Ann", "age": 12, "on": True, "no": None, "a b": [1.5, -2, {"x": "é, ж"}]}] * 3, indent=1)
WORDS = "think response tools call argument json message tool index key type string number object array null boolean "


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS * 3, SAMPLE, SAMPLE.replace("\n", ""), '"}, {"": [], [[ }} ]} \n\n  '] * 3, 620)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    """For a model with more rows than the tokenizer has ids."""
    return Grammars(tokenizer, tokenizer.vocab_size + 7)


def chat(**fields):
    return read_chat({"messages": USER, **fields})


def schema_request(schema, **fields):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}, **fields)


def tool(parameters, name="f", **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def walk(tokenizer, constraint, chance, thinks=True, free=25, most=4000):
    """A random model: for `free` ids it says anything that is allowed, then whatever brings it to an end."""
    special = {name: tokenizer.special[name] for name in ("<|close|>", "<|end_of_msg|>", "<|open|>", "<|sep|>")}
    ends = [*special.values(), tokenizer.eos_id]
    ends += [tokenizer.encode(sign)[0] for sign in '"}],:</!10aeZ-. ']
    ids = []
    if thinks:
        ids = [*tokenizer.encode("well"), special["<|close|>"]]
        for token in ids:
            assert constraint.allowed()[token]
            constraint.advance(token)
    while not ids or ids[-1] not in (special["<|end_of_msg|>"], tokenizer.eos_id):
        mask = constraint.allowed().tolist()
        choices = [token for token, fits in enumerate(mask) if fits]
        assert choices and choices[-1] < tokenizer.vocab_size
        assert len(ids) < most, tokenizer.decode(ids[-200:])
        last = [token for token in ends if mask[token]]
        token = chance.choice(choices) if len(ids) < free or not last else last[0]
        if len(ids) < free and last and last[0] in special.values() and chance.random() < 0.3:
            token = last[0]
        ids.append(token)
        constraint.advance(token)
    return ids


def read(request, tokenizer, ids):
    """What the parser makes of it; nothing may be wrong with the markup."""
    parser = request.parser(tokenizer)
    events = parser.feed(ids)
    assert parser.done
    answered = Answer(events + parser.finish("stop"))
    assert not answered.problems, (answered.problems, tokenizer.decode(ids))
    return answered


SCHEMAS = {
    "object": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
               "required": ["name", "age"], "additionalProperties": False},
    "not ascii": {"type": "object", "properties": {"имя": {"type": "string", "maxLength": 9}, "年": {"enum": ["да",
                  "нет"]}, 'q"&': {"type": "boolean"}}, "required": ["имя", 'q"&'], "additionalProperties": False},
    "nullable": {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "null"},
                 {"type": "integer"}]}}, "required": ["a", "b"], "additionalProperties": False},
    "references": {"$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"type":
                   "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "required": ["v"],
                   "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    "array": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 4},
    "bounds": {"type": "object", "properties": {"n": {"type": "integer", "minimum": -3, "maximum": 40},
               "s": {"type": "string", "pattern": "^[a-c]{2,5}$"}, "d": {"type": "string", "format": "date"}},
               "required": ["n", "s", "d"], "additionalProperties": False},
    "const": {"const": {"a": [1, "two", None]}},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
}  # fmt: skip


TIMES = pytest.mark.parametrize("times", [12, pytest.param(200, marks=pytest.mark.slow)])


@TIMES
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_are_valid_under_the_schema(name, times, tokenizer, grammars):
    schema, chance = SCHEMAS[name], random.Random(name)
    request, valid = schema_request(schema), Draft202012Validator(schema)
    for _ in range(times):
        constraint = grammars.for_request(request)
        ids = walk(tokenizer, constraint, chance, free=chance.choice([0, 12, 40]))
        answered = read(request, tokenizer, ids)
        assert answered.reasoning == "well" and not answered.calls
        valid.validate(json.loads(answered.content))


def test_nullable_of_another_dialect(tokenizer, grammars):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "nullable": True}, "b": {"enum": ["x"],
              "nullable": True}}, "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    request = schema_request(schema)
    chance, seen = random.Random(1), set()
    for _ in range(40):
        found = json.loads(read(request, tokenizer, walk(tokenizer, grammars.for_request(request), chance)).content)
        seen |= {("a", found["a"] is None), ("b", found["b"])}
    assert {("a", True), ("a", False), ("b", "x"), ("b", None)} <= seen


@pytest.mark.parametrize("start", ["think", "response"])
def test_any_object_any_json_regex_choice_and_grammar(start, tokenizer, grammars):
    chance = random.Random(3)
    thinking = {"thinking": {"type": "enabled" if start == "think" else "disabled"}}
    cases = [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"regex": r"(\d\d/){2}[xö]+"}}, re.compile(r"(\d\d/){2}[xö]+").fullmatch),
        ({"structured_outputs": {"choice": ["yes", 'a "no"', "ждать"]}}, ["yes", 'a "no"', "ждать"].__contains__),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | /[a-z]+</ "!"'}}, lambda text: "<!" in text),
        ({"structured_outputs": {"json": {"type": "integer"}}}, lambda text: int(text) is not None),
    ]
    for fields, holds in cases:
        request = chat(**fields, **thinking)
        for _ in range(30):
            ids = walk(tokenizer, grammars.for_request(request), chance, thinks=start == "think")
            text = read(request, tokenizer, ids).content
            assert holds(text), text


def test_a_plain_completion_ends_with_the_documents_end(tokenizer, grammars):
    request = read_completion({"prompt": "x", "structured_outputs": {"regex": "ab?"}})
    ids = walk(tokenizer, grammars.for_request(request), random.Random(0), thinks=False)
    assert ids[-1] == tokenizer.eos_id and tokenizer.decode(ids[:-1]) in ("a", "ab")


# ---------------------------------------------------------------------- calls

CITY = {"type": "object", "required": ["city", "when"], "additionalProperties": False, "properties": {
    "city": {"type": "string"}, "when": {"$ref": "#/$defs/when"}, "unit": {"enum": ["C", "°F & K"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 9}, "note": {"anyOf": [{"type": "string", "maxLength": 4},
    {"type": "null"}]}, "at": {"type": "object", "properties": {"é": {"type": "number"}}, "required": ["é"],
    "additionalProperties": False}, "id": {"type": "string", "pattern": "^[0-9a-f]+/[xy]$"}},
    "$defs": {"when": {"type": "string", "enum": ["now", "later", ""]}}}  # fmt: skip
EITHER = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
          "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}  # fmt: skip


@TIMES
def test_required_calls_are_valid_under_their_parameters(times, tokenizer, grammars):
    """Reports 4, 11, 15: calls, also several, in markup that the parser reads; arguments under their schema."""
    request = chat(tools=[tool(CITY, "get-weather"), tool(EITHER, "either", strict=True), {"type": "function",
                   "function": {"name": "nothing"}}], tool_choice="required")  # fmt: skip
    schemas = {"get-weather": CITY, "either": EITHER, "nothing": {"maxProperties": 0}}
    chance, seen, most = random.Random(5), set(), 0
    for _ in range(times):
        ids = walk(tokenizer, grammars.for_request(request), chance, free=chance.choice([0, 40, 150]))
        answered = read(request, tokenizer, ids)
        assert answered.calls and answered.finish_reason == "tool_calls"
        most = max(most, len(answered.calls))
        for call in answered.calls:
            arguments = json.loads(call.arguments)
            Draft202012Validator(schemas[call.name]).validate(arguments)
            seen |= {call.name, *arguments}
    assert most > 1 and {"nothing", "either", "city"} <= seen
    assert times < 200 or {"unit", "days", "note", "at", "id"} <= seen


def test_what_rendering_writes_is_allowed_id_by_id(tokenizer, grammars):
    """Also with an opening of `tools` right out of the thought, or out of an answer that was not closed."""
    request = chat(tools=[tool(CITY, "get-weather")], tool_choice="required")
    arguments = {"city": "Ü<|close|>argument", "when": "later", "unit": "°F & K", "days": 3, "note": None,
                 "at": {"é": 1.5}, "id": "0/x"}  # fmt: skip
    call = {"id": "0", "type": "function", "function": {"name": "get-weather", "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [call, call, call]}
    ids = encode(answer(message), tokenizer)
    close, opens = tokenizer.special["<|close|>"], tokenizer.special["<|open|>"]
    places = [at for at, token in enumerate(ids) if token == opens]
    for given in (ids, ids[: ids.index(close)] + ids[places[1] :], ids[: places[0]] + ids[places[1] :]):
        constraint = grammars.for_request(request)
        for token in given:
            assert constraint.allowed()[token], tokenizer.token_name(token)
            constraint.advance(token)
    assert constraint.allowed().sum() == 1


def test_a_named_tool_is_called_once_and_one_call_is_one(tokenizer, grammars):
    tools = [tool(CITY, "a"), tool(CITY, "b")]
    named = {"type": "function", "function": {"name": "b"}}
    chance = random.Random(7)
    for fields in ({"tool_choice": named}, {"tool_choice": "required", "parallel_tool_calls": False}):
        request = chat(tools=tools, **fields)
        for _ in range(20):
            answered = read(request, tokenizer, walk(tokenizer, grammars.for_request(request), chance, free=90))
            assert len(answered.calls) == 1
            assert answered.calls[0].name == "b" or fields["tool_choice"] == "required"


def test_calls_count_up_to_their_bound(tokenizer, grammars):
    nothing = {"type": "function", "function": {"name": "f"}}
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ids = encode(answer({"role": "assistant", "content": "", "tool_calls": [call] * MAX_CALLS}), tokenizer)
    constraint = grammars.for_request(chat(tools=[nothing], tool_choice="required"))
    for token in ids:
        mask = constraint.allowed()
        assert mask[token]
        constraint.advance(token)
    more = encode(answer({"role": "assistant", "content": "", "tool_calls": [call] * (MAX_CALLS + 1)}), tokenizer)
    parted = next(at for at, (one, other) in enumerate(zip(ids, more, strict=False)) if one != other)
    constraint = grammars.for_request(chat(tools=[nothing], tool_choice="required"))
    for token in ids[:parted]:
        constraint.advance(token)
    assert not constraint.allowed()[more[parted]]


def test_auto_leaves_the_choice_and_strict_arguments_follow(tokenizer, grammars):
    request = chat(tools=[tool(CITY, strict=True)])
    chance, kinds = random.Random(8), set()
    for _ in range(40):
        answered = read(request, tokenizer, walk(tokenizer, grammars.for_request(request), chance, free=60))
        kinds.add((bool(answered.calls), bool(answered.content)))
    assert {(True, False), (False, True)} <= kinds
    assert grammars.for_request(chat(tools=[tool(CITY)])) is None
    assert grammars.for_request(chat(tools=[tool(CITY, strict=True)], tool_choice="none")) is None


def test_json_or_a_call(tokenizer, grammars):
    request = schema_request(SCHEMAS["array"], tools=[tool(CITY)])
    chance, called = random.Random(9), set()
    for _ in range(30):
        answered = read(request, tokenizer, walk(tokenizer, grammars.for_request(request), chance))
        called.add(bool(answered.calls))
        if not answered.calls:
            Draft202012Validator(SCHEMAS["array"]).validate(json.loads(answered.content))
    assert called == {True, False}


def test_tools_declared_in_messages_and_built_in_ones_can_be_called(tokenizer, grammars):
    builtin = {"type": "builtin_function", "function": {"name": "$web"}}
    messages = [*USER, {"role": "system", "content": "", "tools": [builtin]}]
    request = read_chat({"messages": messages, "tool_choice": "required"})
    answered = read(request, tokenizer, walk(tokenizer, grammars.for_request(request), random.Random(2), free=80))
    assert {call.name for call in answered.calls} == {"$web"}


def test_parameters_that_cannot_be_said_are_free_unless_strict(tokenizer, grammars):
    strange = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    free = chat(tools=[tool(strange)], tool_choice="required")
    assert read(free, tokenizer, walk(tokenizer, grammars.for_request(free), random.Random(2), free=50)).calls
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters of the strict tool f .*uniqueItems") as e:
        grammars.for_request(chat(tools=[tool(strange, strict=True)]))
    assert e.value.param == "tools[0].function.parameters" and e.value.status == 400


# ---------------------------------------------------------------------- thought, continuation, drafts


def test_a_thought_is_free_and_cannot_end_the_answer(tokenizer, grammars):
    constraint = grammars.for_request(schema_request({"type": "integer"}))
    special, text = tokenizer.special, tokenizer.encode('"free [ text')
    for token in text:
        mask = constraint.allowed()
        assert mask[token] and not mask[[special["<|end_of_msg|>"], special["<|sep|>"], tokenizer.eos_id]].any()
        constraint.advance(token)
    constraint.advance(special["<|close|>"])
    assert constraint.allowed().nonzero().tolist() == [[tokenizer.encode("think")[0]]]


def test_a_given_beginning_is_continued_and_a_wrong_one_named(tokenizer, grammars):
    def request(begun):
        messages = [*USER, {"role": "assistant", "content": begun, "partial": True}]
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["object"]}}
        return read_chat({"messages": messages, "response_format": form})

    begun = '{"name": "Ya'
    ids = walk(tokenizer, grammars.for_request(request(begun)), random.Random(4), thinks=False, free=0)
    found = json.loads(begun + read(request(begun), tokenizer, ids).content)
    assert found["name"].startswith("Ya") and isinstance(found["age"], int)
    with pytest.raises(RequestError, match=r"messages\[1\].content is no beginning"):
        grammars.for_request(request("Sure!"))


def test_a_clone_goes_its_own_way(tokenizer, grammars):
    """Report 39a: a draft is tried on a copy."""
    constraint = grammars.for_request(chat(response_format={"type": "json_object"}, thinking={"type": "disabled"}))
    constraint.advance(tokenizer.encode("{")[0])
    draft = constraint.clone()
    draft.advance(tokenizer.encode('"')[0])
    close = tokenizer.encode("}")[0]
    assert constraint.allowed()[close]
    constraint.advance(close)
    assert draft.allowed()[tokenizer.encode("a")[0]] and constraint.allowed()[tokenizer.special["<|close|>"]]
    with pytest.raises(ValueError, match="does not allow id"):
        constraint.advance(close)


def test_many_threads_ask_at_once(tokenizer):
    grammars, failed = Grammars(tokenizer, tokenizer.vocab_size), []

    def ask(seed):
        try:
            for k in range(6):
                request = schema_request({"enum": list(range(seed % 3, k + 4))})
                ids = walk(tokenizer, grammars.for_request(request), random.Random(seed))
                int(read(request, tokenizer, ids).content)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---------------------------------------------------------------------- mistakes


def nested(depth):
    return {} if not depth else {"type": "array", "items": nested(depth - 1)}


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"not": {"type": "string"}}, r'Unimplemented keys: \["not"\]'),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "http://a.b/c"}, "a.b/c"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
        ({"multipleOf": 999983}, "multipleOf 999983; allowed: at most 10000"),
        (nested(70), "deeper than 64"),
        ({"enum": ["x" * MAX_SIZE]}, "characters; allowed"),
        ({"enum": [f"value {k}" for k in range(20_000)]}, ""),
        ({"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(3000)}}, ""),
    ],
)
def test_schemas_that_cannot_be_followed_are_named(schema, what, grammars):
    with pytest.raises(RequestError, match=f"response_format.json_schema.schema .*{what}") as error:
        grammars.for_request(schema_request(schema))
    assert error.value.param == "response_format.json_schema.schema" and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("regex", "a(b", "unclosed group"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", "start: <[3]>", "names a control token"),
        ("grammar", 'start: "a" <|open|>', "names a control token"),
    ],
)
def test_expressions_that_cannot_be_followed_are_named(field, value, what, grammars):
    with pytest.raises(RequestError, match=f"structured_outputs.{field} cannot be followed: .*{what}"):
        grammars.for_request(chat(structured_outputs={field: value}))


def chained(count):
    names = {f"d{k}": {"properties": {"a": {"$ref": f"#/$defs/d{k + 1}"}}} for k in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": names | {f"d{count}": {"type": "string"}}}


def rules_in_rules(count):
    return "\n".join(["start: x0", *(f'x{k}: "a" x{k + 1}?' for k in range(count)), f'x{count}: "b"'])


def test_references_and_rules_inside_one_another_are_bounded(grammars):
    """The compiler calls itself for each: without bounds, and a stack for what they allow, the process dies."""
    for asked in ({"json": chained(1200)}, {"grammar": rules_in_rules(7000)}):
        assert grammars.for_request(chat(structured_outputs=asked)).allowed().any()
    for asked in ({"json": chained(3000)}, {"grammar": rules_in_rules(9000)}):
        with pytest.raises(RequestError, match="levels with its references; allowed: 8000"):
            grammars.for_request(chat(structured_outputs=asked))
    with pytest.raises(RequestError, match="no text can ever fit"):
        grammars.for_request(chat(structured_outputs={"json": {"$ref": "#"}}))


def test_nothing_is_constrained_that_need_not_be(grammars):
    assert grammars.for_request(chat()) is None
    assert grammars.for_request(read_completion({"prompt": "x"})) is None


def test_nullable_is_written_as_json_schema_does():
    null = {"type": "null"}
    assert prepared({"type": "string", "nullable": True}) == {"type": ["string", "null"]}
    assert prepared({"anyOf": [{}], "nullable": True}) == {"anyOf": [{"anyOf": [{}]}, null]}
    assert prepared({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1]}}, "nullable": True}) == {
        "anyOf": [{"$ref": "#/$defs/a"}, null], "$defs": {"a": {"enum": [1]}}}  # fmt: skip
    named = {"properties": {"nullable": {"const": {"nullable": True}}}, "nullable": False, "x-guidance": {}}
    assert prepared(named) == {"properties": {"nullable": {"const": {"nullable": True}}}}


def test_patterns_between_slashes():
    assert between_slashes(r"a/\d\/[\w.]\\d") == r"a\/[0-9]\/[[0-9a-zA-Z_].]\\d"


# ---------------------------------------------------------------------- with a model


@pytest.mark.usefixtures("unchecked")
def test_a_model_that_knows_nothing_answers_in_json_and_calls(tokenizer):
    """Greedy, through the engine: random weights, yet valid answers; and the company keeps its own."""
    torch.manual_seed(1)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(-(-tokenizer.vocab_size // 64) * 64)
    model = K3(cfg).eval()
    engine = Engine(Runner(model, 8 << 20), {tokenizer.end_of_msg_id, tokenizer.eos_id},
                    unnamed_ids(tokenizer, cfg.vocab_size), Settings(hash_block=16))  # fmt: skip

    class Parsed:
        def __init__(self, request):
            self.parser, self.events, self.ids = request.parser(tokenizer), [], []

        def push(self, token):
            self.events += self.parser.push(token.id)
            self.ids.append(token.id)
            return self.parser.done

        def finish(self, outcome):
            self.outcome = outcome
            self.events += self.parser.finish(outcome.finish_reason)

    schema = {"type": "object", "properties": {"ж": {"enum": ["a", "b"]}, "n": {"type": "integer", "maximum": 99,
              "minimum": 0}}, "required": ["ж", "n"], "additionalProperties": False}  # fmt: skip
    off = {"thinking": {"type": "disabled"}}
    requests = [schema_request(schema, **off), chat(tools=[tool(schema)], tool_choice="required",
                parallel_tool_calls=False, **off), chat(**off)]  # fmt: skip
    jobs = []
    for request in requests:
        constraint = for_request(request, tokenizer, cfg.vocab_size)
        assert constraint is None or (isinstance(constraint, Constrained) and isinstance(constraint, Constraint))
        params = SamplingParams(temperature=0.0, max_tokens=300)
        jobs.append(Job(encode(request.prompt(), tokenizer), params, Parsed(request), constraint))
        engine.submit(jobs[-1])
    while not engine.idle:
        engine.step()
    first, second, third = (Answer(job.reader.events) for job in jobs)
    valid = Draft202012Validator(schema)
    valid.validate(json.loads(first.content))
    if second.calls:  # greedy, it may talk before its call until the tokens are out
        valid.validate(json.loads(second.calls[0].arguments))
    assert jobs[0].reader.outcome.finish_reason == "stop" and jobs[0].reader.outcome.error is None
    assert third.finish_reason in ("length", "stop")


def test_without_the_library_the_request_is_refused_and_told_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    assert grammars.for_request(chat()) is None
    for request in (schema_request({"type": "object"}), chat(tools=[tool({})], tool_choice="required")):
        with pytest.raises(RequestError, match=re.escape("pip install 'nanok3[serve]'")) as refused:
            grammars.for_request(request)
        assert (refused.value.status, refused.value.code) == (501, "not_supported")
