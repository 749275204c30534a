"""What an answer is made of, as it comes: one stream of events, from which every shape of reply is written.

    ids -> Parser -> events -> Answer               the whole message, when it is complete
                            -> chunks on the wire   the same, piece by piece

An `Answer` is the sum of its events and nothing else, so a streamed and a whole reply cannot differ. One exception is
of the kind that no stream can take back: `ReasoningWasAnswer` says that what was called reasoning so far was the
answer. It follows in full as content; a reader of the stream has then seen it twice, a reader of the whole once.

A `Problem` tells of output that breaks the grammar. It is no error of the request: the answer goes on. `text` holds
the words that found no other place, so that nothing the model said is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

PROBLEMS = {
    "missing_open": "an element stands outside the one that has to hold it",
    "missing_close": "an element ended with another one, or with the message",
    "missing_sep": "a tag has no <|sep|>",
    "repeated_open": "an element was opened inside itself, or a channel a second time",
    "unexpected_close": "a tag closes what is not open",
    "unexpected_token": "a control token or an id without a meaning here",
    "unknown_element": "the markup has no such element, or not here",
    "malformed_tag": "a tag holds what is no tag or attribute",
    "new_message": "another message was opened inside this one",
    "after_end": "the message had ended",
    "cut": "a tag or a character was not complete when the answer broke off",
    "stray_text": "text between the parts of a call, or a value that has no place",
    "nameless_call": "a call without the name of a tool",
    "call_index": "a call with another number than the next",
    "call_not_allowed": "a call where tool_choice is none",
    "undeclared_tool": "a call of a tool that nobody declared",
    "no_call": "an answer without a call where tool_choice is required",
    "argument_type": "an argument without a type, or of another type than it says",
    "repeated_argument": "an argument given a second time",
    "arguments_not_json": "arguments that are no JSON object",
}
"""Kinds of `Problem`."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the channel `think`."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the channel `response`."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningWasAnswer:
    """All reasoning so far was the answer; its text follows as content."""


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call: `index` counts the calls of this message from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """`complete` is False if the answer broke off inside the call: its arguments are the beginning of a text."""

    index: int
    complete: bool


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """The last event. `finish_reason` is 'tool_calls', 'stop', 'length' or another word of the engine's."""

    finish_reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Output that breaks the grammar: which rule (of PROBLEMS), the words, and the place of the id."""

    kind: str
    text: str
    at: int


Event = (
    ReasoningDelta | ContentDelta | ReasoningWasAnswer | CallBegun | ArgumentsDelta | CallEnded | MessageEnd | Problem
)


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbouring deltas of one kind joined."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and _joins(runs[-1][0], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_joined(run) for run in runs]


def _joins(first: Event, second: Event) -> bool:
    if isinstance(first, ArgumentsDelta) and isinstance(second, ArgumentsDelta):
        return first.index == second.index
    return type(first) is type(second) and isinstance(first, ReasoningDelta | ContentDelta)


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if len(run) == 1 or not isinstance(first, ReasoningDelta | ContentDelta | ArgumentsDelta):
        return first
    return replace(first, text="".join(getattr(event, "text", "") for event in run))


@dataclass
class Call:
    """A tool call of an answer."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        """A JSON object as text, or what the model wrote instead of one."""
        return "".join(self.parts)


class Answer:
    """A message, added up from its events."""

    def __init__(self, events: Iterable[Event] = (), reasons: bool = False) -> None:
        """reasons: whether the answer began in the channel `think`; then its reasoning is "" where there is none."""
        self.calls: list[Call] = []
        self.problems: list[Problem] = []
        self.finish_reason: str | None = None
        self._reasons = reasons
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.add(*events)

    def add(self, *events: Event) -> None:
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningWasAnswer():
                    self._reasoning.clear()
                case CallBegun(_, id, name):
                    self.calls.append(Call(id, name))
                case ArgumentsDelta(index, text):
                    self.calls[index].parts.append(text)
                case CallEnded(index, complete):
                    self.calls[index].complete = complete
                case MessageEnd(reason):
                    self.finish_reason = reason
                case Problem():
                    self.problems.append(event)

    @property
    def reasoning(self) -> str | None:
        """None without the channel. An empty one is "", which is another thing: a client has to send it back."""
        return "".join(self._reasoning) or ("" if self._reasons else None)

    @property
    def content(self) -> str | None:
        """None if there are calls instead, or if the answer broke off before it."""
        return "".join(self._content) or (None if self.calls or self.finish_reason != "stop" else "")

    def message(self) -> dict[str, Any]:
        """In the shape of the OpenAI chat API, with `reasoning_content`."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return found
