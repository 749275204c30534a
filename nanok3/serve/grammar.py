"""Structured output with llguidance: from a checked request to the constraint of its answer.

    request -> what it asks for (answer_grammar.py) -> one grammar -> compiled once, copied for each answer

One grammar describes the whole rest of an answer: it closes `think` if the model did not, opens a channel, and after
the body, or the calls, closes the channel and the message. So nobody else has to know where the prefix ends, and the
parser reads what it always reads. Markup is ids, values are bytes, and no text yields a control token.

Arguments follow their schemas (tool_schema.py): of a strict tool always, of the others where calls are grammar at all
and the schema can be said. A body or a strict tool that cannot be said is a `RequestError` with the field. Sizes and
the compiler's and the matcher's work are bounded. The library is an optional one.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nanok3.data.chat import CLOSE, OPEN, THINK
from nanok3.serve.answer_grammar import Form, Tool, answer, body, callable_tools, calls
from nanok3.serve.constrained import Constrained, Thought, reason
from nanok3.serve.fields import RequestError
from nanok3.serve.protocol import ChatRequest, Common
from nanok3.serve.rules import Rules, prepared
from nanok3.serve.tool_schema import Unfit

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanok3.data.tokenizer import Tokenizer

MAX_SIZE = 1 << 18
"""Characters of one schema, grammar, expression or list of texts."""
LEVELS = 8_000
"""Of brackets that references can put inside one another, or rules of a grammar."""
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
STACK = 64 << 20
"""Bytes for the compiler, which calls itself at each of them and would end the process where they run out."""
KEPT = 128
"""Compiled grammars that are remembered."""


def for_request(request: Common, tokenizer: Tokenizer, vocab_size: int) -> Constrained | None:
    """The constraint of one answer to a request; None where anything may be said. RequestError names the field that
    asks for what no grammar can say. vocab_size: that of the model, at least the tokenizer's."""
    return _grammars(tokenizer, vocab_size).for_request(request)


@functools.lru_cache(maxsize=4)
def _grammars(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    return Grammars(tokenizer, vocab_size)


class Grammars:
    """Compiles for one tokenizer, and keeps what was asked for lately. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        assert vocab_size >= tokenizer.vocab_size
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        ends = [tokenizer.special[OPEN], tokenizer.special[CLOSE]]
        self._thought = Thought.of(vocab_size, min(tokenizer.special.values()), ends)
        self._matcher: Callable[[str], LLMatcher] | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler = _with_stack(STACK)

    def for_request(self, request: Common) -> Constrained | None:
        """As the function of that name."""
        if not isinstance(request, ChatRequest):
            return None if request.constraint is None else self._constrained(request, None, [], False, False)
        tools, required = callable_tools(request), request.tool_choice == "required"
        if request.constraint is None and not required and not any(tool.strict for tool in tools):
            return None
        once = request.forced_tool is not None or not request.parallel_calls
        found = self._constrained(request, request.start, tools, required, once)
        if request.continued:
            self._continue(found, request)
        return found

    def _constrained(
        self, request: Common, start: str | None, tools: list[Tool], required: bool, once: bool
    ) -> Constrained:
        asked = repr((start, request.constraint, tools, required, once))
        with self._lock:
            known = self._kept.get(asked)
        known = known or self._compile(request, start, tools, required, once)
        with self._lock:
            self._kept[asked] = known
            self._kept.move_to_end(asked)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            matcher = known.deep_copy()
        return Constrained(matcher, self.vocab_size, self._thought if start == THINK else None)

    def _continue(self, found: Constrained, request: ChatRequest) -> None:
        """Lead the grammar over the answer's given beginning."""
        content = request.messages[-1].get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        try:
            for token in (token for part in parts for token in self.tokenizer.encode(part)):
                found.advance(token)
        except ValueError:
            where = f"messages[{len(request.messages) - 1}].content"
            raise RequestError(f"{where} is no beginning of what the request asks for", where) from None

    # ---------------------------------------------------------------- compiling

    def _compile(self, request: Common, start: str | None, tools: list[Tool], required: bool, once: bool) -> LLMatcher:
        self._check_body(request)
        forms = [self._form(tool) for tool in tools]
        rules = Rules(self.tokenizer)
        whole = body(rules, request.constraint)
        if start is not None:
            called = calls(rules, tools, forms, once) if tools else None
            whole = answer(rules, start, whole, called, required)
        matcher = self._matched(rules.document(whole))
        if wrong := reason(matcher):
            raise RequestError(f"tools and response_format together cannot be followed: {wrong}", "tools")
        return matcher

    def _matched(self, document: str) -> LLMatcher:
        """A document compiled, and its first step done."""
        if self._matcher is None:
            self._matcher = _library(self.tokenizer)
        return self._compiler.submit(_begun, self._matcher, document).result()

    def _wrong(self, write: Callable[[Rules], str]) -> str:
        """What stands against an expression, empty if nothing."""
        rules = Rules(self.tokenizer)
        try:
            return _tried(self._matched(rules.document(write(rules))), self.tokenizer)
        except (Unfit, ValueError) as error:
            return str(error)

    def _check_body(self, request: Common) -> None:
        if request.constraint is None:
            return
        where = _where(request)
        _check_size(request.constraint.value, where)
        if wrong := self._wrong(lambda rules: body(rules, request.constraint)):
            raise RequestError(f"{where} cannot be followed: {wrong}", where)

    def _form(self, tool: Tool) -> Form:
        """The best way to say a tool's arguments that the library takes."""
        _check_size(tool.parameters, tool.where)
        wrong = ""
        for form in tool.forms:
            wrong = self._wrong(functools.partial(_written, form, tool))
            if not wrong:
                return form
        raise RequestError(f"{tool.where} of the strict tool {tool.name} cannot be followed: {wrong}", tool.where)


def _with_stack(size: int) -> ThreadPoolExecutor:
    """One thread with so many bytes of stack."""
    usual = threading.stack_size(size)
    thread = ThreadPoolExecutor(1, "grammar")
    thread.submit(int).result()  # it is made now
    threading.stack_size(usual)
    return thread


def _begun(compiled: Callable[[str], LLMatcher], document: str) -> LLMatcher:
    matcher = compiled(document)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _tried(matcher: LLMatcher, tokenizer: Tokenizer) -> str:
    """What stands against a grammar at its beginning, or behind a bracket, where one of too many branches shows."""
    for sign in "{[":
        behind = matcher.deep_copy()
        if not matcher.is_error() and behind.try_consume_tokens(tokenizer.encode(sign)):
            behind.compute_bitmask()
        if behind.is_error():
            return reason(behind)
    return ""


def _written(form: Form, tool: Tool, rules: Rules) -> str:
    return form(rules, prepared(tool.parameters))


def _check_size(value: Any, where: str) -> None:
    if len(str(value)) > MAX_SIZE:
        raise RequestError(f"{where} has {len(str(value))} characters; allowed: {MAX_SIZE}", where)
    levels = value.count(":") if isinstance(value, str) else _levels(value)
    if levels > LEVELS:
        raise RequestError(f"{where} has {levels} rules or levels with its references; allowed: {LEVELS}", where)


def _levels(schema: Any) -> int:
    """At most so many brackets lie inside one another when each reference stands for what it names."""
    references: set[str] = set()
    deepest, left = 0, [(schema, 1)]
    while left:
        value, depth = left.pop()
        deepest = max(deepest, depth)
        if isinstance(value, Mapping):
            references |= {str(value[key]) for key in REFERENCES if key in value}
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple):
            left += [(inner, depth + 1) for inner in value]
    return deepest * (len(references) + 1)


def _where(request: Common) -> str:
    """The field that a body's constraint came from."""
    assert request.constraint is not None
    if isinstance(request, ChatRequest) and request.response_format is not None:
        return "response_format.json_schema.schema"
    kind = request.constraint.kind
    return f"structured_outputs.{'json' if kind == 'json_schema' else kind}"


# ---------------------------------------------------------------------- the library


class _Bytes:
    """Our tokenizer as the library wants to see one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special.values())
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _library(tokenizer: Tokenizer) -> Callable[[str], LLMatcher]:
    """Compiles documents. RequestError where the library is not installed."""
    try:
        import llguidance
    except ImportError:
        what = "this server has no llguidance, which structured output needs: pip install 'nanok3[serve]'"
        raise RequestError(what, None, "not_supported", 501, "not_implemented_error") from None
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(tokenizer)), eos_token=tokenizer.eos_id)
    limits = llguidance.LLParserLimits(
        max_grammar_size=200_000,
        max_lexer_states=50_000,
        step_lexer_fuel=100_000,
        max_items_in_row=5_000,
        verbose_errors=False,
    )
    return lambda document: llguidance.LLMatcher(vocabulary, document, log_level=0, limits=limits)
