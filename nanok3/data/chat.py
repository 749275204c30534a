r"""K3's chat markup (XTML): a conversation becomes tokens in which nobody's words can pass for the program's.

    element = open body close
    open    = <|open|> tag { ' ' key '="' value '"' } <|sep|>
    close   = <|close|> tag <|sep|>

Only the markers `<|open|>`, `<|close|>`, `<|sep|>` and `<|end_of_msg|>` are control tokens. Tags, attributes and
bodies are ordinary text, and every piece is encoded by itself, so `<|sep|>` typed by a user is seven characters and
no piece merges with its neighbour. In an attribute `&` is written `&amp;` and `"` is written `&quot;`; bodies are
never escaped.

    prompt  = [tool-declare] [thinking-effort] { message } [tool-choice] [response-format] [start]
    message = open("message", role, ...) body close("message") <|end_of_msg|>
    body    = text and pictures                             role system, user, tool
            | [think] response [tools]                      role assistant: the channels
    tools   = { call(tool, index) }                         in the channel "tools"
    call    = { argument(key, type) } | json(type)          a string raw, any other type as JSON
    start   = open("message", role="assistant") open("think" | "response")

The four names in brackets are messages of the role system with that `type`, written by the program. What holds for
the whole conversation stands before it; what holds for one answer stands behind it, so that the keys and states of
the history stay valid when it changes. Tools that arrive later are a system message of their own, in place. A result
repeats the name of its call, and its number; results of one round stand in the order of their calls.

With thinking the channel `think` is always there, empty if nothing was thought, and past thinking is kept. Without,
no message has one. Either way an answer follows `start` seamlessly: `render(m) + answer(a) = render(m + [a])` without
its start. So a conversation only ever grows at its end, with the exceptions listed in docs/formats.md.

Sources: report app. F (the grammar, the zones, the channels) and the released encoder's output (the order of keys, the
cuts between pieces). Ours: the words of the messages in brackets (`OURS`), `sampled`, `answer`, `partial`, and the
refusals; the released encoder drops a message of an unknown role and ignores a `tool_choice` that it does not know.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanok3.data.messages import MEDIA_TYPES, Call, Message, Turn, pictures, read_message, read_messages, refuse

if TYPE_CHECKING:
    from nanok3.data.tokenizer import Tokenizer

MARKERS = OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

CHANNELS = {"reasoning_content": "think", "content": "response", "tool_calls": "tools"}
"""Field of an assistant's message -> the channel it is written to, in the order of the channels."""
THINK, RESPONSE, TOOLS = CHANNELS.values()

EFFORTS = ("low", "high", "max")
"""Values of `thinking_effort`. `medium` is reserved (report app. F), and refused by the released encoder."""

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
"""Where a picture will stand. No control token: it is replaced by a media block before anything is encoded."""

TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

SENTENCES_FILE = "chat_sentences.json"
"""Where a model's or tokenizer's folder keeps sentences other than OURS."""


# ---------------------------------------------------------------------- what the program says


@dataclass(frozen=True)
class Sentences:
    """The texts of the program's own messages, each whole; `{}` is where the level or the code block goes.

    The markup does not fix them. K3 has learned the released encoder's wording; a model trained here learns OURS. To
    prompt the released checkpoint word for word, write its wording into a JSON file, one object with a string for each
    field below, and pass `render(..., sentences=Sentences.load(path))`. Under the name SENTENCES_FILE the file may lie
    in a model's or tokenizer's folder, for `Sentences.of(folder)`.

    ValueError for a field that is no string, or one of _PLACES that does not have `{}` once.
    """

    tools: str
    """Before everything: the tools there are. `{}` is their code block."""
    new_tools: str
    """Among the messages: more tools. `{}` is their code block."""
    thinking_effort: str
    """`{}` is one of EFFORTS."""
    tool_choice_none: str
    tool_choice_required: str
    json_object: str
    json_schema: str
    """`{}` is the code block of the schema."""

    def __post_init__(self) -> None:
        _check_sentences(asdict(self), "sentences")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sentences:
        """Read such a file. ValueError for a missing one, and for fields that are missing, unknown or wrong."""
        if not Path(path).is_file():
            raise ValueError(f"sentences: no file {path}")
        try:
            given = json.loads(Path(path).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict):
            raise refuse(str(path), given, f"an object with the fields {', '.join(names)}")
        for what, wrong in (("misses", set(names) - set(given)), ("has unknown", set(given) - set(names))):
            if wrong:
                raise ValueError(f"{path} {what} {', '.join(sorted(wrong))}; allowed: exactly {', '.join(names)}")
        _check_sentences(given, str(path))
        return cls(**given)

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> Sentences:
        """Those a folder carries in SENTENCES_FILE, or else OURS."""
        path = Path(folder) / SENTENCES_FILE
        return cls.load(path) if path.exists() else OURS


_PLACES = ("tools", "new_tools", "thinking_effort", "json_schema")
"""Sentences with a place `{}`. In the others `{}` is text."""


def _check_sentences(given: Mapping[str, object], where: str) -> None:
    for name, text in given.items():
        if not isinstance(text, str):
            raise refuse(f"{where}: {name}", text, "a string")
        if name in _PLACES and text.count("{}") != 1:
            raise refuse(f"{where}: {name}", text, "a text with one place {}")


OURS = Sentences(
    tools="# Tools\n\nCall these functions by name, with arguments that fit their parameters:\n{}",
    new_tools="## New Tools Available\n\nFrom here on these may be called too:\n{}",
    thinking_effort="`thinking_effort={}`, on a scale from low to max: the higher, the more thought before an answer.",
    tool_choice_none="`tool_choice=none`: answer in words alone, without a call.",
    tool_choice_required="`tool_choice=required`: this answer has to make at least one call.",
    json_object="`response_format=json_object`: answer with one JSON object and nothing around it.",
    json_schema="`response_format=json_schema`: answer with JSON and nothing around it, valid under this schema:\n{}",
)


# ---------------------------------------------------------------------- from segments to ids


class Segment(NamedTuple):
    """A piece of a prompt that is encoded by itself."""

    text: str
    allow_special: bool
    """Written by the program: names of control tokens in it are control tokens."""
    sampled: bool = False
    """Written by the model: part of a loss. False for prompts, results, pictures and the start of an answer."""


def encode(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt, each segment encoded alone. ValueError for a picture without its media block, and for a
    tokenizer that has no markers."""
    return [token for _, ids in _encoded(segments, tokenizer) for token in ids]


def encode_with_mask(segments: Iterable[Segment], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The ids, and for each whether the model samples it."""
    encoded = [(segment.sampled, ids) for segment, ids in _encoded(segments, tokenizer)]
    return [token for _, ids in encoded for token in ids], [sampled for sampled, ids in encoded for _ in ids]


def _encoded(segments: Iterable[Segment], tokenizer: Tokenizer) -> Iterator[tuple[Segment, list[int]]]:
    known: dict[tuple[str, bool], list[int]] = {}  # most segments are a few markers, tags and quotes
    for segment in segments:
        piece = segment.text, segment.allow_special
        if piece not in known:
            known[piece] = _ids(segment, tokenizer)
        yield segment, known[piece]


def _ids(segment: Segment, tokenizer: Tokenizer) -> list[int]:
    if not segment.allow_special:
        return tokenizer.encode(segment.text)
    if segment.text == IMAGE_PLACEHOLDER:
        raise ValueError("a picture has no media block yet; pass image_prompts to render, one for each picture")
    if segment.text in MARKERS and segment.text not in tokenizer.special:
        raise ValueError(f"the tokenizer has no control token {segment.text}; chat needs {' '.join(MARKERS)}")
    return tokenizer.encode(segment.text, allow_special=True)


def to_text(segments: Iterable[Segment]) -> str:
    """The whole prompt as one string. Encoding that string would give other ids; use `encode`."""
    return "".join(segment.text for segment in segments)


def listing(segments: Iterable[Segment]) -> str:
    """For people: a tag a line, and at the left who writes it; further lines of a body are indented."""
    lines: list[str] = []
    before: Segment | None = None
    for segment in segments:
        tag = segment.allow_special and segment.text in (OPEN, CLOSE)
        if before is None or before.sampled != segment.sampled or (tag and before.allow_special):
            lines.append("sampled  " if segment.sampled else "given    ")
        lines[-1] += re.sub(r"\n(?!\n)", "\n" + " " * 9, segment.text)
        before = segment
    return "".join(f"{line}\n" for line in lines)


# ---------------------------------------------------------------------- writing


def _escape(value: object) -> str:
    return str(value).replace("&", "&amp;").replace('"', "&quot;")


class _Writer:
    """Collects segments. `sampled` says who writes the next ones; pictures take their blocks in order."""

    def __init__(self, image_prompts: Sequence[str] | None = None, image_parts: int = 0) -> None:
        self.segments: list[Segment] = []
        self.sampled = False
        self.image_prompts = image_prompts
        self.pictures = 0
        # With one block for each part, a placeholder that somebody typed is text. Otherwise it is a picture too.
        self.typed = image_prompts is not None and len(image_prompts) != image_parts

    def marker(self, marker: str) -> None:
        self.segments.append(Segment(marker, True, self.sampled))

    def plain(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False, self.sampled))

    def picture(self) -> None:
        blocks = self.image_prompts or ()
        block = blocks[self.pictures] if self.pictures < len(blocks) else IMAGE_PLACEHOLDER
        self.segments.append(Segment(block, True))
        self.pictures += 1

    def text(self, text: str) -> None:
        first, *others = text.split(IMAGE_PLACEHOLDER) if self.typed else [text]
        self.plain(first)
        for other in others:
            self.picture()
            self.plain(other)

    def parts(self, parts: list[Mapping[str, Any]]) -> None:
        for part in parts:
            if part["type"] in MEDIA_TYPES:
                self.picture()
            else:
                self.text(part["text"])

    def open(self, tag: str, **attributes: object) -> None:
        """An opening tag; attributes that are None are left out."""
        self.marker(OPEN)
        self.plain(tag)
        for key, value in attributes.items():
            if value is not None:
                for piece in (f" {key}", '="', _escape(value), '"'):
                    self.plain(piece)
        self.marker(SEP)

    def close(self, tag: str) -> None:
        self.marker(CLOSE)
        self.plain(tag)
        self.marker(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.marker(END_OF_MSG)

    def system(self, kind: str, text: str) -> None:
        """A message of the program itself."""
        self.open("message", role="system", type=kind)
        self.plain(text)
        self.end_message()

    def check_pictures(self) -> None:
        if self.image_prompts is not None and len(self.image_prompts) != self.pictures:
            raise ValueError(
                f"image_prompts: {len(self.image_prompts)} for {self.pictures} pictures in the messages; "
                f"allowed: one for each part of type {' or '.join(MEDIA_TYPES)} and each {IMAGE_PLACEHOLDER} in text"
            )


def _json(value: object, where: str, **style: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **style)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from None


def _fenced(value: object, where: str) -> str:
    """A code block of compact JSON, keys sorted at every depth: equal values are equal tokens."""
    return f"```json\n{_json(value, where, sort_keys=True, separators=(',', ':'))}\n```"


# ---------------------------------------------------------------------- the messages


def _begin_answer(w: _Writer, thinking: bool, name: str | None = None) -> None:
    """What stands before the first token the model samples."""
    w.open("message", role="assistant", name=name)
    w.open(THINK if thinking else RESPONSE)


def _write_answer(w: _Writer, turn: Turn, thinking: bool) -> None:
    """What the model samples, from the first token to `<|end_of_msg|>`. Of a partial message, the text it is to
    continue, which is given."""
    partial = bool(turn.message.get("partial"))
    w.sampled = not partial
    if thinking:
        w.text(_reasoning(turn))
        w.close(THINK)
        w.open(RESPONSE)
    w.parts(turn.parts)
    if not partial:
        w.close(RESPONSE)
        if turn.calls:
            _write_calls(w, turn.calls)
        w.end_message()
    w.sampled = False


def _reasoning(turn: Turn) -> str:
    """`reasoning_content`, or else `reasoning`, as some servers call it; blanks alone are no thought."""
    text = turn.message.get("reasoning_content") or turn.message.get("reasoning") or ""
    if not isinstance(text, str):
        raise refuse(f"{turn.where}.reasoning_content", text, "a string")
    return text if text.strip() else ""


def _write_calls(w: _Writer, calls: list[Call]) -> None:
    w.open(TOOLS)
    for number, call in enumerate(calls, 1):
        w.open("call", tool=call.tool, index=number)
        if isinstance(call.arguments, str):
            _write_unparsed(w, call.arguments)
        else:
            for key, value in call.arguments.items():
                where = f"{call.where}.function.arguments[{key!r}]"
                w.open("argument", key=key, type=_json_type(value, where))
                w.text(value if isinstance(value, str) else _json(value, where))
                w.close("argument")
        w.close("call")
    w.close(TOOLS)


def _write_unparsed(w: _Writer, arguments: str) -> None:
    """Arguments that are no JSON, from a model gone astray: part of a history, but nothing to learn."""
    sampled, w.sampled = w.sampled, False
    w.open("json", type="object")
    w.text(arguments)
    w.close("json")
    w.sampled = sampled


def _json_type(value: object, where: str) -> str:
    """JSON's name of a value's type. bool comes before number: in Python it is one."""
    for types, name in (
        (str, "string"),
        (bool, "boolean"),
        (int | float, "number"),
        (type(None), "null"),
        (dict, "object"),
        (list | tuple, "array"),
    ):
        if isinstance(value, types):
            return name
    raise refuse(where, value, "what JSON can hold")


def _write_result(w: _Writer, turn: Turn, number: int, calls: list[Call]) -> None:
    """The number-th result since the last answer. One without a name takes that of the number-th call."""
    name = turn.name or (calls[number - 1].tool if number <= len(calls) else None)
    if name is None:
        raise ValueError(
            f"{turn.where} is the result of no call; allowed: a name, or a tool_call_id out of the "
            f"{len(calls)} tool_calls of the last assistant message"
        )
    w.open("message", role="tool", tool=name, index=number)
    w.parts(turn.parts)
    w.end_message()


def _write_messages(w: _Writer, turns: Iterable[Turn], thinking: bool, sentences: Sentences) -> None:
    calls: list[Call] = []
    results = 0
    for turn in turns:
        if turn.role == "assistant":
            _begin_answer(w, thinking, turn.name)
            _write_answer(w, turn, thinking)
            calls, results = turn.calls, 0
        elif turn.role == "tool":
            results += 1
            _write_result(w, turn, results, calls)
        elif turn.message.get("tools"):
            _declare_tools(w, sentences.new_tools, turn.message["tools"], f"{turn.where}.tools")
        else:
            w.open("message", role=turn.role, name=turn.name)
            w.parts(turn.parts)
            w.end_message()


# ---------------------------------------------------------------------- the options


def _declare_tools(w: _Writer, sentence: str, tools: Any, where: str) -> None:
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise refuse(where, tools, "a list of objects, each the description of a tool")
    w.system("tool-declare", sentence.replace("{}", _fenced(tools, where)))


def _write_tool_choice(w: _Writer, choice: object, has_tools: bool, sentences: Sentences) -> None:
    if choice not in TOOL_CHOICES:
        raise refuse("tool_choice", choice, ", ".join(TOOL_CHOICES))
    if choice == "required" and not has_tools:
        raise ValueError("tool_choice is 'required', but there are no tools; allowed: auto, none")
    if choice != "auto":
        w.system("tool-choice", sentences.tool_choice_none if choice == "none" else sentences.tool_choice_required)


def _write_response_format(w: _Writer, given: object, sentences: Sentences) -> None:
    form = given if isinstance(given, Mapping) else {}
    kind = form.get("type")
    if kind not in RESPONSE_FORMATS:
        raise refuse("response_format", given, f"an object of type {', '.join(RESPONSE_FORMATS)}")
    if kind == "json_object":
        w.system("response-format", sentences.json_object)
    if kind == "json_schema":
        wrapper = form.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        where = "response_format.json_schema.schema"
        if not isinstance(schema, Mapping):
            raise refuse(where, schema, "a JSON schema, an object")
        w.system("response-format", sentences.json_schema.replace("{}", _fenced(schema, where)))


# ---------------------------------------------------------------------- the whole


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    *,
    thinking_effort: str | None = None,
    tool_choice: Any = None,
    response_format: Any = None,
    image_prompts: Sequence[str] | None = None,
    add_generation_prompt: bool = True,
    sentences: Sentences = OURS,
) -> list[Segment]:
    """The prompt of a conversation, messages and options as in the OpenAI chat API.

    thinking: with or without the channel `think`. thinking_effort: one of EFFORTS, for thinking only; None writes
    nothing (what the release's tokenizer calls writes `max`). tool_choice: auto, none, required. image_prompts: the
    media blocks (`Image.prompt`, `Video.prompt`) of each part, in the order of `image_parts(messages)`; control tokens
    in them are recognized, so they must be the program's own; without, pictures stay placeholders.
    add_generation_prompt: whether to end with the start of an answer. A last message with `partial: True` is that start
    and the answer's first words.
    sentences: the words for tools and options. K3 has learned the released wording, a model trained here learns OURS;
    `Sentences.load(path)` or `Sentences.of(folder)` reads another.

    ValueError names the message, the field and what is allowed there.
    """
    turns = read_messages(messages)
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise refuse("thinking_effort", thinking_effort, ", ".join(EFFORTS))
    w = _Writer(image_prompts, len(pictures(turns)))
    if tools:
        _declare_tools(w, sentences.tools, tools, "tools")
    if thinking and thinking_effort:
        w.system("thinking-effort", sentences.thinking_effort.replace("{}", thinking_effort))
    partial = [turns.pop()] if turns and turns[-1].message.get("partial") else []
    _write_messages(w, turns, thinking, sentences)
    if tool_choice is not None:
        has_tools = bool(tools) or any(turn.message.get("tools") for turn in turns)
        _write_tool_choice(w, tool_choice, has_tools, sentences)
    if response_format is not None:
        _write_response_format(w, response_format, sentences)
    if partial:
        _write_messages(w, partial, thinking, sentences)
    elif add_generation_prompt:
        _begin_answer(w, thinking)
    w.check_pictures()
    return w.segments


def answer(message: Message, thinking: bool = True) -> list[Segment]:
    """What a model has to sample behind `render(...)` to have said this assistant's message.

    A training example with options for its last answer is `render(messages, ..., tool_choice=...) + answer(last)`.
    """
    turn = read_message(message, "message")
    if turn.role != "assistant" or message.get("partial"):
        raise refuse("message", message, "an assistant's, not partial")
    w = _Writer()
    _write_answer(w, turn, thinking)
    return w.segments


def image_parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The picture parts in the order in which the prompt shows them; that of tool results may differ from the order
    of the messages. `pixel_values` and `image_prompts` have to follow it."""
    return pictures(read_messages(messages))
