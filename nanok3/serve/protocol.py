"""What a client may ask: the JSON of a request becomes a record in which every field is checked.

    body -> read_json -> read_chat(body, policy) -> ChatRequest -> .prompt() segments, .parser() of the answer
                         read_completion(...)    -> CompletionRequest

The rules are those of K3's own service: its conformance suite and its clients (the docs page has them as a table).
What they leave open is as in the OpenAI API; unknown fields are ignored, as everywhere, except those that would change
an answer and cannot be honoured. Every mistake is a `RequestError` with the field, the value, and what is allowed.

Thinking: `thinking.type`, else `chat_template_kwargs.thinking` or `.enable_thinking`, else what the server is set to.
Effort: `thinking.effort`, else `chat_template_kwargs.thinking_effort`, else `reasoning_effort`, else the server's. The
first two are K3's own and have to be one of EFFORTS. `reasoning_effort` is everybody's: a word that K3 has not learned
(`medium`) writes no directive, and `none` switches thinking off.

Nothing here needs torch, a tokenizer or a web server: a request is checked in microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanok3.data.chat import OURS, RESPONSE, THINK, Segment, Sentences, render
from nanok3.serve.chat_fields import (
    Constraint,
    read_conversation,
    read_response_format,
    read_structured,
    read_thinking,
    read_tool_choice,
    read_tools,
    tool_names,
)
from nanok3.serve.fields import Fields, RequestError, refuse, refused
from nanok3.serve.parser import Parser
from nanok3.serve.sampling_fields import (
    CHOICES,
    Rules,
    Sampling,
    allowed_ids,
    is_id,
    read_logprobs,
    read_sampling,
)

if TYPE_CHECKING:
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.serve.generate import StopStrings

MAX_TOKENS = 1_048_576


@dataclass(frozen=True)
class Policy:
    """What the server decides where requests do not, and its bounds."""

    rules: Rules = Rules.FREE
    thinking: bool = True
    effort: str | None = "max"
    top_p: float = 0.95
    """Of chat answers."""
    answer: int = 131_072
    """Tokens an answer may have where its request says nothing, if the context has the room."""
    context: int = MAX_TOKENS
    vocab_size: int | None = None
    from_web: bool = False
    """Whether pictures may be named by web addresses."""


@dataclass(frozen=True)
class Common:
    """What chat and plain completions both have."""

    model: str | None
    sampling: Sampling
    max_tokens: int | None
    n: int
    logprobs: int | None
    """Alternatives wanted for each token; None for no log-probabilities."""
    stream: bool
    include_usage: bool
    ignore_eos: bool
    constraint: Constraint | None
    priority: int
    timeout: float | None
    """Seconds after which the client no longer wants the answer."""
    cache_key: str | None
    """A hint where the conversation's cache may lie."""
    cache_salt: str | None
    """Requests with different salts share nothing."""
    user: str | None
    metadata: dict[str, Any]
    policy: Policy

    def room(self, prompt: int, least: bool = False) -> int:
        """Tokens the answer may have behind a prompt of so many. RequestError if that is none or too few. least: that
        many are there, and more may be."""
        left = self.policy.context - prompt
        wanted = self.max_tokens
        if left < 1 or (wanted or 0) > left:
            asked = "" if wanted is None else f" and {wanted} for the answer"
            number = f"at least {prompt}" if least else str(prompt)
            raise RequestError(
                f"the prompt has {number} tokens{asked}; allowed: {self.policy.context} together",
                "messages" if isinstance(self, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        return min(left, self.policy.answer) if wanted is None else wanted


@dataclass(frozen=True)
class ChatRequest(Common):
    """A checked request for the next message of a conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """Those of the request; messages may declare more."""
    tool_names: frozenset[str]
    """Of all of them."""
    tool_choice: str
    forced_tool: str | None
    """The one tool that has to be called; `tool_choice` is then "required"."""
    parallel_calls: bool
    response_format: dict[str, Any] | None
    thinking: bool
    effort: str | None

    @property
    def continued(self) -> bool:
        """Whether the answer's beginning is given."""
        return bool(self.messages[-1].get("partial"))

    @property
    def start(self) -> str:
        """The channel in which the answer begins."""
        return THINK if self.thinking and not self.continued else RESPONSE

    def prompt(self, sentences: Sentences = OURS, image_prompts: Sequence[str] | None = None) -> list[Segment]:
        """The segments to encode. RequestError for what shows only now, as a result that belongs to no call."""
        try:
            return render(
                self.messages,
                self.tools or None,
                self.thinking,
                thinking_effort=self.effort,
                tool_choice=self.tool_choice,
                response_format=self.response_format,
                image_prompts=image_prompts,
                sentences=sentences,
            )
        except ValueError as error:
            raise refused(error) from None

    def opener(self, tokenizer: Tokenizer) -> int:
        """Ids at the prompt's end that open the answer's channel; `usage.prompt_tokens` is without them."""
        return 0 if self.continued else 2 + len(tokenizer.encode(self.start))

    def parser(self, tokenizer: Tokenizer, stops: StopStrings | None = None) -> Parser:
        """A reader of one answer; each choice needs its own."""
        return Parser(
            tokenizer,
            self.start,
            tool_choice=self.tool_choice,
            tools=self.tool_names,
            call_id=CallIds(self.messages),
            stops=stops,
        )


@dataclass(frozen=True)
class CompletionRequest(Common):
    """A checked request to continue texts."""

    prompts: list[str | list[int]]
    echo: bool
    token_ids: bool
    """Whether choices have the ids that were sampled, and the number of the weights."""


class CallIds:
    """Ids for tool calls, `name_n`: n counts the calls of the whole conversation from 0. If earlier ids have higher
    numbers, it counts on from these, so that no id comes twice."""

    def __init__(self, messages: Iterable[Mapping[str, Any]] = ()) -> None:
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        used = [re.search(r"_(\d{1,6})$", str(call.get("id"))) for call in calls]
        self.first = max([len(calls), *(int(found[1]) + 1 for found in used if found)])

    def __call__(self, name: str, index: int) -> str:
        """The id of the call with this index in its message."""
        return f"{name}_{self.first + index}"


# ---------------------------------------------------------------------- chat


def read_chat(body: Mapping[str, Any], policy: Policy | None = None) -> ChatRequest:
    """Check a chat request."""
    f, policy = Fields(body), policy or Policy()
    for name in ("functions", "function_call"):
        if f.has(name):
            raise f.refuse(name, "no such field; declare tools, and choose with tool_choice")
    messages = read_conversation(f, policy.from_web)
    tools = read_tools(f)
    names = tool_names(tools, messages)
    tool_choice, forced = read_tool_choice(f, names)
    response_format, constraint = read_response_format(f)
    structured = read_structured(f)
    thinking, effort = read_thinking(f, policy.thinking, policy.effort)
    return ChatRequest(
        **_read_common(f, policy, policy.top_p),
        max_tokens=_read_max_tokens(f),
        logprobs=read_logprobs(f),
        constraint=constraint or structured,
        messages=messages,
        tools=tools,
        tool_names=names,
        tool_choice=tool_choice,
        forced_tool=forced,
        parallel_calls=f.boolean("parallel_tool_calls", True),
        response_format=response_format,
        thinking=thinking,
        effort=effort,
    )


def _read_common(f: Fields, policy: Policy, top_p: float) -> dict[str, Any]:
    options = f.object("stream_options")
    stream = f.boolean("stream")
    if f.has("stream_options") and not stream:
        raise f.refuse("stream_options", "an object only with stream true")
    return {
        "model": f.string("model"),
        "sampling": read_sampling(f, policy.rules, top_p, policy.vocab_size),
        "n": f.integer("n", 1, CHOICES) or 1,
        "stream": stream,
        "include_usage": options.boolean("include_usage"),
        "ignore_eos": f.boolean("ignore_eos"),
        "priority": f.integer("priority", -(2**31), 2**31) or 0,
        "timeout": f.number("timeout", 0, 10**6),
        "cache_key": f.string("prompt_cache_key"),
        "cache_salt": f.string("cache_salt"),
        "user": f.string("user"),
        "metadata": dict(f.object("metadata").given),
        "policy": policy,
    }


def _read_max_tokens(f: Fields) -> int | None:
    """`max_completion_tokens`, of which `max_tokens` is the old name."""
    old = f.integer("max_tokens", 1, MAX_TOKENS)
    new = f.integer("max_completion_tokens", 1, MAX_TOKENS)
    return old if new is None else new


# ---------------------------------------------------------------------- plain completions


def read_completion(body: Mapping[str, Any], policy: Policy | None = None) -> CompletionRequest:
    """Check a request for plain text."""
    f, policy = Fields(body), policy or Policy()
    if f.get("suffix"):
        raise f.refuse("suffix", "no such field; the model reads from left to right")
    if f.has("best_of") and f.get("best_of") != (f.get("n") or 1):
        raise f.refuse("best_of", "the same number as n")
    echo = f.boolean("echo")
    max_tokens = f.integer("max_tokens", 0 if echo else 1, MAX_TOKENS)
    return CompletionRequest(
        **_read_common(f, policy, 1.0),
        max_tokens=16 if max_tokens is None else max_tokens,
        logprobs=f.integer("logprobs", 0, 20),
        constraint=read_structured(f),
        prompts=_read_prompts(f, policy.vocab_size),
        echo=echo,
        token_ids=_read_token_ids(f),
    )


def _read_token_ids(f: Fields) -> bool:
    """Other servers' `return_token_ids`; ids are told beside the log-probabilities, of what is sampled."""
    wanted = f.boolean("return_token_ids")
    if wanted and (f.get("logprobs") is None or f.boolean("echo")):
        raise f.refuse("return_token_ids", "true only with logprobs, and without echo")
    return wanted


def _read_prompts(f: Fields, vocab_size: int | None) -> list[str | list[int]]:
    """A text, a list of ids, or a list of several of them."""
    given = f.get("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise f.refuse("prompt", "a string, a list of token ids, or a list of several")
    if not isinstance(given[0], str | list):
        return [_ids(given, f.path("prompt"), vocab_size)]
    return [
        one if isinstance(one, str) else _ids(one, f"{f.path('prompt')}[{k}]", vocab_size)
        for k, one in enumerate(given)
    ]


def _ids(given: Any, where: str, vocab_size: int | None) -> list[int]:
    if not isinstance(given, list) or not given:
        raise refuse(where, given, "a list of at least one token id")
    for k, token in enumerate(given):
        if not is_id(token, vocab_size):
            raise refuse(f"{where}[{k}]", token, allowed_ids(vocab_size))
    return given
