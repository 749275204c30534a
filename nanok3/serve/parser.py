"""From the ids a model samples to the events of an answer: the reader of K3's markup (data/chat.py has its grammar).

    answer  = [thought close("think")] [open("response") text close("response")] [tools] close("message") <|end_of_msg|>
    tools   = open("tools") { open("call", tool, index) { argument | json } close("call") } close("tools")

Structure comes from the ids of the four markers alone. The letters `<|close|>` are letters, whoever wrote them, so no
text can pass for markup, and a string argument may hold a closing tag. Each id is taken by itself and the state
between two ids is all that is known: how the ids were cut into steps cannot matter.

A prompt ends inside a channel, so an answer begins there: `start` is "think", or "response" without thinking and where
a given beginning is continued. Ids that are forced, such as the opening of a call, are pushed like sampled ones.

What breaks the grammar is a `Problem`, never an exception, and the reading goes on (the rules are ours):

- an opened channel ends the one before it, a closed element ends those inside it, and so does the end of the message
- text outside the channels is content; blanks there, and between the parts of a call, are nothing
- an element nobody knows is its text; a tag without its `<|sep|>` is taken if it is one, or else is text as well
- a call outside `tools` is a call; one without a name, or where `tool_choice` is "none", is told of in a problem
- a prompt opened `think`, the model never did, and the first thing it closes is `response` or `message`: it answered
  at once, and its reasoning was the answer
- what follows the end of the message is told of, and nothing else

Stop strings are looked for in the content only: a thought may pass over them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from nanok3.data.chat import CLOSE, END_OF_MSG, MARKERS, OPEN, RESPONSE, SEP, THINK, TOOLS
from nanok3.data.tokenizer import RESERVED
from nanok3.serve.arguments import Arguments
from nanok3.serve.events import (
    PROBLEMS,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ContentDelta,
    Event,
    MessageEnd,
    Problem,
    ReasoningDelta,
    ReasoningWasAnswer,
    merged,
)
from nanok3.serve.tags import ATTRIBUTES, Tag, begins_tag, read_tag

if TYPE_CHECKING:
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.serve.generate import StopStrings


def numbered(name: str, index: int) -> str:
    """Ids of the calls of a first answer; `protocol.CallIds` counts on from a history."""
    return f"{name}_{index}"


class Parser:
    """Reads one answer: `push` each id, then `finish`. `done` says that nothing more is needed of the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: str = THINK,
        *,
        tool_choice: str = "auto",
        tools: Collection[str] | None = None,
        call_id: Callable[[str, int], str] = numbered,
        stops: StopStrings | None = None,
    ) -> None:
        """tools: the declared names, None for any. call_id: name and number to an id. stops: strings
        that end the content."""
        assert start in (THINK, RESPONSE), start
        self.start = start
        self.done = False
        self.ids = 0
        """How many were pushed."""
        self.reasoning_ids = 0
        """How many of them were text of the channel `think`."""
        self.took: str | None = None
        """The channel that the last id was text of; None for markup."""
        self.calls = 0
        self._tokenizer, self._stops = tokenizer, stops
        self._tool_choice, self._tools, self._call_id = tool_choice, tools, call_id
        self._markers = {tokenizer.special[marker]: marker for marker in MARKERS}
        self._markers |= {tokenizer.eos_id: END_OF_MSG, tokenizer.end_of_msg_id: END_OF_MSG}
        self._names = {token: name for name, token in tokenizer.special.items()}
        self._text_ids = range(tokenizer.vocab_size - RESERVED)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._events: list[Event] = []
        self._stack = [start]
        self._seen = {start}
        self._fresh = True  # nothing was said or opened
        self._prefilled: list[str] | None = [] if start == THINK else None  # the thought, while it may be the answer
        self._tag: bytearray | None = None
        self._opens = False  # whether the tag is an opening one
        self._blanks: list[str] | None = []  # outside of channels; None once text has come
        self._closed = False
        self._late = bytearray()
        self._call: Arguments | None = None
        self._dropped: list[str] | None = None  # of a call that is not handed on

    @property
    def channel(self) -> str | None:
        """The open one, "think", "response" or "tools"; None between them."""
        return self._stack[0] if self._stack else None

    @property
    def reasoning(self) -> bool:
        """Whether the channel `think` is open: a grammar for the answer has not begun."""
        return self.channel == THINK

    @property
    def in_tag(self) -> bool:
        """Whether a tag has begun and its `<|sep|>` is missing."""
        return self._tag is not None

    # ------------------------------------------------------------------ ids

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Events of several ids, deltas joined."""
        return merged(event for token in ids for event in self.push(token))

    def push(self, token: int) -> list[Event]:
        """Events of one id."""
        self._events = []
        self.took = None
        marker = self._markers.get(token)
        self.done |= self._closed and marker != END_OF_MSG
        if self.done:
            self._late += self._tokenizer.token_bytes(token) if token in self._text_ids else b""
        elif marker is not None:
            self._read_marker(marker)
        elif token in self._text_ids:
            self._read_bytes(self._tokenizer.token_bytes(token))
        else:
            self._flush()
            self._report("unexpected_token", self._names.get(token, str(token)))
        self.ids += 1
        return self._events

    def _read_bytes(self, piece: bytes) -> None:
        if self._tag is not None:
            self._tag += piece
            return
        self.took = self.channel or RESPONSE
        self.reasoning_ids += self.took == THINK
        if text := self._utf8.decode(piece):
            self._text(text)

    def _read_marker(self, marker: str) -> None:
        self._flush()
        self._blanks = []
        if self._tag is not None:
            self._end_tag(whole=marker == SEP)
        elif marker == SEP:
            self._report("unexpected_token", SEP)
        if marker in (OPEN, CLOSE):
            self._tag, self._opens = bytearray(), marker == OPEN
        elif marker == END_OF_MSG:
            self._close_to(0)
            self.done = True

    def _flush(self) -> None:
        """End of a text: bytes that are no whole character, and what was held as the beginning of a stop string."""
        if text := self._utf8.decode(b"", final=True):
            self._text(text)
        if self._stops is not None and (held := self._stops.flush()):
            self._emit(ContentDelta(held))

    def finish(self, reason: str = "stop") -> list[Event]:
        """The last events. reason: "stop" if the model ended, or whatever else made the engine end."""
        self._events = []
        if not self.done:
            self._flush() if reason == "stop" else self._cut()
            if self._tag is not None:
                self._end_tag(whole=False)
            if reason == "stop":
                self._close_to(0)
        if self._late and not self._stopped:
            self._report("after_end", self._late.decode("utf-8", "replace"))
        if self._tool_choice == "required" and not self.calls and reason == "stop":
            self._report("no_call", "")
        called = reason == "stop" and self.calls and not self._stopped
        self._emit(MessageEnd("tool_calls" if called else reason))
        self.done = True
        return self._events

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.found is not None

    def _cut(self) -> None:
        """The answer broke off: a fault of nobody's, so elements stay open."""
        unfinished, _ = self._utf8.getstate()
        self._utf8.reset()
        if unfinished:
            self._report("cut", unfinished.decode("utf-8", "replace"))
        self._flush()
        tag = None if self._tag is None else self._tag.decode("utf-8", "replace")
        if tag is not None and begins_tag(tag):
            self._tag = None
            self._report("cut", tag)
        elif tag is not None:
            self._end_tag(whole=False)
        if self._call is not None:
            self._call.cut()
            self._end_call(complete=False)

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._fresh &= isinstance(event, Problem)

    def _report(self, kind: str, text: str) -> None:
        assert kind in PROBLEMS, kind
        self._emit(Problem(kind, text, self.ids))

    # ------------------------------------------------------------------ text

    def _text(self, text: str) -> None:
        """Text of the innermost open element."""
        if self._call is not None:
            self._call.text(text)
        elif self.channel == THINK:
            self._emit(ReasoningDelta(text))
            if self._prefilled is not None:
                self._prefilled.append(text)
        elif self.channel == RESPONSE or self._blanks is None:
            self._content(text)
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._report("missing_open", RESPONSE)
            text = "".join(self._blanks) + text
            self._blanks = None
            self._content(text)

    def _content(self, text: str) -> None:
        if self._stops is not None:
            text = self._stops.push(text)
            self.done |= self._stops.found is not None
        if text:
            self._emit(ContentDelta(text))

    # ------------------------------------------------------------------ elements

    def _end_tag(self, whole: bool) -> None:
        assert self._tag is not None
        text, self._tag = self._tag.decode("utf-8", "replace"), None
        tag = read_tag(text)
        if not whole and (tag.rest or tag.name not in ATTRIBUTES):
            self._report("malformed_tag", "")
            if text:
                self._text(text)
            return
        if not whole:
            self._report("missing_sep", tag.name)
        strange = [key for key in tag.attributes if key not in ATTRIBUTES.get(tag.name, tag.attributes)]
        if tag.rest or strange or (tag.attributes and not self._opens):
            self._report("malformed_tag", text)
        self._open(tag, text) if self._opens else self._close(tag.name, text)

    def _open(self, tag: Tag, text: str) -> None:
        match tag.name:
            case "think" | "response" | "tools":
                self._open_channel(tag.name)
            case "call":
                self._open_call(tag.attributes)
            case "argument" | "json" if self._call is not None:
                self._close_to(2)
                self._stack.append(tag.name)
                self._open_value(tag)
            case "message" if self._fresh and tag.attributes.get("role") == "assistant":
                self._report("repeated_open", text)
            case "message":
                self._report("new_message", text)
                self._close_to(0)
                self._closed = True
            case _:
                self._report("unknown_element", text)

    def _open_channel(self, name: str) -> None:
        if name in self._seen:
            self._report("repeated_open", name)
        if name == THINK:
            self._prefilled = None
        if self._stack == [name]:
            return
        self._close_to(0)
        self._stack.append(name)
        self._seen.add(name)
        self._fresh = False

    def _open_value(self, tag: Tag) -> None:
        assert self._call is not None
        kind = tag.attributes.get("type")
        if tag.name == "json":
            self._call.open_json(kind)
        else:
            self._call.open_argument(tag.attributes.get("key"), kind)

    def _open_call(self, attributes: dict[str, str]) -> None:
        if self.channel != TOOLS:
            self._report("missing_open", TOOLS)
            self._open_channel(TOOLS)
        self._close_to(1)
        self._stack.append("call")
        name = self._declared(attributes.get("tool", "").strip())
        if attributes.get("index", str(self.calls + 1)) != str(self.calls + 1):
            self._report("call_index", attributes["index"])
        index = self.calls
        if name and self._tool_choice != "none":
            self.calls += 1
            self._emit(CallBegun(index, self._call_id(name, index), name))
            self._call = Arguments(lambda text: self._emit(ArgumentsDelta(index, text)), self._report)
        else:
            self._report("call_not_allowed" if name else "nameless_call", name)
            self._dropped = []
            self._call = Arguments(self._dropped.append, self._report)

    def _declared(self, name: str) -> str:
        """The name of a declared tool. `functions.f:3`, which an earlier model of the family writes, is `f`."""
        if self._tools is None or not name or name in self._tools:
            return name
        self._report("undeclared_tool", name)
        bare = re.sub(r":\d+$", "", name.removeprefix("functions."))
        return bare if bare in self._tools else name

    def _close(self, name: str, text: str) -> None:
        if self._prefilled is not None and self.reasoning and name in (RESPONSE, "message"):
            self._answer_was_thought()
        elif name in self._stack:
            self._close_to(self._stack.index(name) + 1)
            self._leave()
        elif name != "message":
            self._report("unexpected_close", text)
        if name == "message":
            self._close_to(0)
            self._closed = True

    def _answer_was_thought(self) -> None:
        thought = "".join(self._prefilled or ())
        self._report("missing_close", THINK)
        self._emit(ReasoningWasAnswer())
        self._leave()
        self.reasoning_ids = 0
        if thought:
            self._content(thought)

    def _close_to(self, depth: int) -> None:
        """End the elements below this depth, which the model did not."""
        while len(self._stack) > depth:
            self._report("missing_close", self._stack[-1])
            self._leave()

    def _leave(self) -> None:
        """The innermost element ends."""
        name = self._stack.pop()
        self._fresh = False
        if name == THINK:
            self._prefilled = None
        elif name == "call":
            assert self._call is not None
            self._call.end()
            self._end_call(complete=True)
        elif self._call is not None:
            self._call.close()

    def _end_call(self, complete: bool) -> None:
        self._call = None
        if self._dropped is None:
            self._emit(CallEnded(self.calls - 1, complete))
        else:
            self._report("stray_text", "".join(self._dropped))
            self._dropped = None
