"""`POST /v1/chat/completions`: whole, or as a stream of chunks; both are the same events.

The first chunk, with the role, goes out before the prompt is read; while it is, and whenever nothing comes for some
seconds, a comment keeps the connection alive. An error behind the first chunk is an event of the stream, and the last.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from nanok3.serve.answers import Answers, Ended, Piece, check_outcome
from nanok3.serve.events import Answer, Problem
from nanok3.serve.fields import RequestError
from nanok3.serve.replies import DONE, KEEP_ALIVE, ChatReply, chat_logprobs, problems, sse
from nanok3.serve.server import Asked, Call, Server, debug, new_id, usage


async def chat_completions(server: Server, call: Call) -> dict[str, Any] | AsyncIterator[bytes]:
    """The endpoint."""
    asked = await server.read_chat(call.body, call)
    answers = server.start_chat(asked, call)
    reply = ChatReply(new_id("chatcmpl"), asked.request.model or server.name, int(time.time()))
    if asked.request.stream:
        return _stream(server, call, asked, answers, reply)
    return await _whole(call, asked, answers, reply)


async def _whole(call: Call, asked: Asked, answers: Answers, reply: ChatReply) -> dict[str, Any]:
    wholes = await answers.all()
    ends = [whole.ended for whole in wholes if whole.ended is not None]
    messages = [Answer(whole.events, asked.request.start == "think") for whole in wholes]
    wanted = asked.request.logprobs is not None
    logprobs = [chat_logprobs(whole.logprobs) for whole in wholes] if wanted else []
    found = [problem for whole in wholes for problem in problems(whole.events)]
    used = usage(asked.prompt_tokens, ends)
    note(call, ends)
    return reply.whole(messages, used, logprobs, {**debug(ends), **({"problems": found} if found else {})})


async def _stream(server: Server, call: Call, asked: Asked, answers: Answers, reply: ChatReply) -> AsyncIterator[bytes]:
    ends: list[Ended] = []
    found: dict[int, list[Problem]] = {}
    try:
        for k in range(asked.request.n):
            yield sse(reply.begin(k))
        async for items in answers.pieces(server.settings.keep_alive):
            if not items:
                yield KEEP_ALIVE
            for item in items:
                found.setdefault(item.index, []).extend(e for e in item.events if isinstance(e, Problem))
                for chunk in _chunks(asked, reply, item, found[item.index]):
                    yield sse(chunk)
                if isinstance(item, Ended):
                    ends.append(item)
        if asked.request.include_usage:
            yield sse(reply.usage(usage(asked.prompt_tokens, ends)))
        yield DONE
    except RequestError as error:
        yield sse(error.body())
    finally:
        answers.close()
        note(call, ends)


def _chunks(asked: Asked, reply: ChatReply, item: Piece | Ended, found: list[Problem]) -> list[dict[str, Any]]:
    if isinstance(item, Piece):
        logprobs = chat_logprobs(item.logprobs) if item.logprobs else None
        return list(reply.chunks(item.events, item.index, logprobs=logprobs))
    check_outcome(item.outcome)
    *more, end = item.events
    extra = {**debug([item]), **({"problems": problems(found)} if found else {})}
    chunks = list(reply.chunks(more, item.index))
    return chunks + list(reply.chunks([end], item.index, usage(asked.prompt_tokens, [item]), None, extra))


def note(call: Call, ends: list[Ended]) -> None:
    """For the log."""
    call.facts.update(
        cached_tokens=sum(end.outcome.cached_tokens for end in ends),
        completion_tokens=sum(end.outcome.said_tokens for end in ends),
        finish=[end.outcome.finish_reason for end in ends],
    )
