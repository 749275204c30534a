"""What a client is answered: the events of an answer in the shapes of the OpenAI API, whole and in chunks.

    chat.completion          one message, with finish_reason and usage
    chat.completion.chunk    a delta each: reasoning_content, content, tool_calls; at last finish_reason and usage
    text_completion          the same for plain text, whole or in chunks

The first delta has the role. A call is opened by an entry with index, id and name, and extended by entries that only
have arguments. Usage stands where Kimi's clients look, in the last chunk's choice, and, if the request asks for it,
where OpenAI's do, in a chunk of its own; the cached part has both its names.

Another API is another reader of the same events: see `ChatReply.deltas`, the only function that knows how a delta is
written. `extra` goes into the body beside the standard fields, as the problems of an answer do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanok3.serve.events import (
    Answer,
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
    Event,
    MessageEnd,
    Problem,
    ReasoningDelta,
)

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment that tells a waiting client that it is not forgotten."""
DONE = b"data: [DONE]\n\n"


def sse(body: Mapping[str, Any]) -> bytes:
    """One server-sent event. ASCII, since some readers cut lines at characters that JSON does not escape."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def named_sse(kind: str, body: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name, as other APIs than OpenAI's first one send."""
    return f"event: {kind}\n".encode() + sse(body)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: of its prompt without the opener, of them from the cache; sampled, of them thought."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "cached_tokens": self.cached,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(frozen=True)
class TokenLogprob:
    """A sampled token, its log-probability, and the likeliest alternatives as (bytes, log-probability)."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    id: int | None = None


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    # JSON has no -inf; -9999 is what the field writes for a token that cannot come.
    shown = token.decode("utf-8", "replace")
    return {"token": shown, "logprob": max(logprob, -9999.0), "bytes": list(token)}


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        {**_entry(one.token, one.logprob), "top_logprobs": [_entry(*other) for other in one.top]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob | bytes], offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion. A token that is bytes alone, as the first of an echoed prompt, has no
    log-probability. offset: characters of the text before the first token. As OpenAI has it, the token itself is among
    the alternatives, whatever its rank; and what is no UTF-8 is told apart as `bytes:\\xe2\\x80`."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in tokens:
        piece = one if isinstance(one, bytes) else one.token
        found["tokens"].append(_name(piece))
        found["text_offset"].append(offset)
        offset += len(piece.decode("utf-8", "replace"))
        if isinstance(one, bytes):
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
        else:
            found["token_logprobs"].append(max(one.logprob, -9999.0))
            top = dict((*one.top, (piece, one.logprob)))
            found["top_logprobs"].append({_name(t): max(p, -9999.0) for t, p in top.items()})
    return found


def _name(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


@dataclass(frozen=True)
class _Reply:
    """What every body of one reply repeats."""

    id: str
    model: str
    created: int

    def _body(self, kind: str, choices: list[dict[str, Any]], extra: Mapping[str, Any] | None) -> dict[str, Any]:
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**fields, "choices": choices, **(extra or {})}


def problems(found: Iterable[Event]) -> list[dict[str, Any]]:
    """The problems among some events, as JSON."""
    return [asdict(event) for event in found if isinstance(event, Problem)]


class ChatReply(_Reply):
    """Writes the bodies of a chat reply; `id` begins with "chatcmpl-"."""

    def whole(
        self,
        answers: Sequence[Answer],
        usage: Usage,
        logprobs: Sequence[dict[str, Any] | None] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The reply in one piece; `logprobs` of each answer, if they were asked for."""
        choices = [
            {
                "index": k,
                "message": answer.message(),
                "logprobs": logprobs[k] if logprobs else None,
                "finish_reason": answer.finish_reason,
            }
            for k, answer in enumerate(answers)
        ]
        return {**self._body("chat.completion", choices, extra), "usage": usage.body()}

    def begin(self, index: int = 0) -> dict[str, Any]:
        """The first chunk of a choice."""
        return self._chunk(index, {"role": "assistant"})

    def chunks(
        self,
        events: Iterable[Event],
        index: int = 0,
        usage: Usage | None = None,
        logprobs: dict[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Chunks for some events. `usage` goes into the chunk that ends the choice; `logprobs`, of the content's tokens
        since the last call, and `extra` into the first or only one."""
        for delta, reason in self.deltas(events):
            chunk = self._chunk(index, delta, reason, logprobs, extra)
            if reason is not None and usage is not None:
                chunk["choices"][0]["usage"] = usage.body()
            logprobs = extra = None
            yield chunk
        if logprobs is not None or extra:
            yield self._chunk(index, {}, None, logprobs, extra)

    @staticmethod
    def deltas(events: Iterable[Event]) -> Iterator[tuple[dict[str, Any], str | None]]:
        """Deltas, and with the last one its finish_reason. Problems have none, and what a stream cannot take back is
        not told."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    yield {"reasoning_content": text}, None
                case ContentDelta(text):
                    yield {"content": text}, None
                case CallBegun(number, id, name):
                    function = {"name": name, "arguments": ""}
                    yield {"tool_calls": [{"index": number, "id": id, "type": "function", "function": function}]}, None
                case ArgumentsDelta(number, text):
                    yield {"tool_calls": [{"index": number, "function": {"arguments": text}}]}, None
                case MessageEnd(reason):
                    yield {}, reason

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after the last, for `stream_options.include_usage`."""
        return {**self._body("chat.completion.chunk", [], None), "usage": usage.body()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._body("chat.completion.chunk", [choice], extra)


class TextReply(_Reply):
    """Writes the bodies of a plain completion, whole or chunk; `id` begins with "cmpl-"."""

    def body(
        self, choices: Sequence[dict[str, Any]], usage: Usage | None = None, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        found = self._body("text_completion", list(choices), extra)
        return found if usage is None else {**found, "usage": usage.body()}


def text_choice(
    text: str,
    index: int = 0,
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One choice of a plain completion, or a piece of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **(more or {})}
