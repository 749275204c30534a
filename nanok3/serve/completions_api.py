"""`POST /v1/completions`: texts or ids are continued, whole or as a stream; with `echo` the prompt is given back too.

`echo` with `logprobs` scores the prompt: each of its tokens but the first gets the log-probability that the model gave
it, which is what evaluation harnesses ask for, with one token or none to be said.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from nanok3.serve.answers import Answers, Describe, Ended, Piece, TextReader, Whole, check_outcome, describer
from nanok3.serve.chat_api import note
from nanok3.serve.events import ContentDelta, Event, MessageEnd
from nanok3.serve.fields import RequestError, read_json
from nanok3.serve.generate import StopStrings
from nanok3.serve.protocol import CompletionRequest, read_completion
from nanok3.serve.replies import DONE, KEEP_ALIVE, TextReply, TokenLogprob, Usage, sse, text_choice, text_logprobs
from nanok3.serve.server import Call, Server, debug, in_thread, new_id, usage


class _Texts:
    """A checked request and its prompts as ids: answer k belongs to prompt k // n."""

    def __init__(self, server: Server, body: bytes) -> None:
        self.request: CompletionRequest = read_completion(read_json(body), server.policy)
        server.check_model(self.request.model)
        asked, most = len(self.request.prompts) * self.request.n, server.engine.settings.max_waiting
        if asked > most:
            raise RequestError(f"the request asks for {asked} answers; allowed: {most}", "prompt")
        for prompt in self.request.prompts:
            least = server.least_tokens([prompt]) if isinstance(prompt, str) else len(prompt)
            self.request.room(least, least=True)
        encode = server.tokenizer.encode
        self.prompts = [encode(p) if isinstance(p, str) else list(p) for p in self.request.prompts]
        # As in `nanok3 generate`: a text that begins from nothing begins behind the end of another.
        self.prompts = [ids or [server.tokenizer.eos_id] for ids in self.prompts]
        self.texts = [p if isinstance(p, str) else server.tokenizer.decode(p) for p in self.request.prompts]
        self.scores = self.request.echo and self.request.logprobs is not None
        self.silent = self.request.max_tokens == 0
        self.reply = TextReply(new_id("cmpl"), self.request.model or server.name, int(time.time()))
        for ids in self.prompts:
            self.request.room(len(ids))
        self.constraints = server.constraints(self.request, len(self.prompts) * self.request.n)

    def ids(self, index: int) -> list[int]:
        return self.prompts[index // self.request.n]

    def text(self, index: int) -> str:
        """What goes before the answer."""
        return self.texts[index // self.request.n] if self.request.echo else ""

    def start(self, server: Server, call: Call) -> Answers:
        answers = Answers(server.engine, server.postbox, server.metrics.gap)
        request = self.request
        describe = None if request.logprobs is None else describer(server.tokenizer)
        hidden = {*server.engine.ends, *request.sampling.stop_ids}
        jobs = []
        for k in range(len(self.prompts) * request.n):
            ids = self.ids(k)
            stops = StopStrings(request.sampling.stop)
            reader = TextReader(k, server.tokenizer, stops, answers.tell, describe, hidden)
            most = max(1, request.room(len(ids)))
            more = {"constraint": self.constraints[k], "prompt_logprobs": self.scores}
            jobs.append(server.job(request, ids, most, k % request.n, reader, **more))
        call.facts.update(prompt_tokens=sum(map(len, self.prompts)), choices=len(jobs), stream=request.stream)
        if server.settings.gate.log_prompts:
            call.facts["prompt"] = self.texts
        answers.submit(jobs)
        answers.watch(call.receive)
        return answers

    def prompt_logprobs(self, server: Server, end: Ended, describe: Describe) -> list[TokenLogprob | bytes]:
        """Of the echoed prompt."""
        first = server.tokenizer.token_bytes(self.ids(end.index)[0])
        return [first, *(describe(token) for token in end.outcome.prompt_logprobs)]

    def usage(self, ends: list[Ended]) -> Usage:
        """Of some answers, each prompt counted once."""
        total = Usage(0, 0)
        for k, ids in enumerate(self.prompts):
            of_prompt = [end for end in ends if end.index // self.request.n == k]
            if of_prompt:
                one = usage(len(ids), of_prompt)
                said = 0 if self.silent else one.completion
                total = Usage(total.prompt + one.prompt, total.completion + said, total.cached + one.cached)
        return total


async def completions(server: Server, call: Call) -> dict[str, Any] | AsyncIterator[bytes]:
    """The endpoint."""
    texts: _Texts = await in_thread(_Texts, server, call.body)
    answers = texts.start(server, call)
    return _stream(server, call, texts, answers) if texts.request.stream else await _whole(server, call, texts, answers)


async def _whole(server: Server, call: Call, texts: _Texts, answers: Answers) -> dict[str, Any]:
    wholes = await answers.all()
    ends = [whole.ended for whole in wholes if whole.ended is not None]
    choices = [_choice(server, texts, whole) for whole in wholes]
    note(call, ends)
    return texts.reply.body(choices, texts.usage(ends), debug(ends))


def _choice(server: Server, texts: _Texts, whole: Whole) -> dict[str, Any]:
    end = whole.ended
    assert end is not None
    said = "" if texts.silent else _text(whole.events)
    logprobs = None
    if texts.request.logprobs is not None:
        describe = describer(server.tokenizer)
        before = texts.prompt_logprobs(server, end, describe) if texts.scores else []
        logprobs = text_logprobs([*before, *(() if texts.silent else whole.logprobs)])
    reason = "length" if texts.silent else end.outcome.finish_reason
    more = _sampled(server, texts, whole.logprobs)
    return text_choice(texts.text(end.index) + said, end.index, reason, logprobs, more)


def _sampled(server: Server, texts: _Texts, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """The ids of what was said, where they are asked for, and which weights said it."""
    if not texts.request.token_ids:
        return None
    return {"token_ids": [token.id for token in tokens], "weight_version": server.engine.weight_version}


async def _stream(server: Server, call: Call, texts: _Texts, answers: Answers) -> AsyncIterator[bytes]:
    ends: list[Ended] = []
    offsets: dict[int, int] = {}
    wholes: dict[int, Whole] = {}
    try:
        if texts.request.echo and not texts.scores:
            for k in range(len(answers.jobs)):
                offsets[k] = len(texts.text(k))
                yield sse(texts.reply.body([text_choice(texts.text(k), k)]))
        async for items in answers.pieces(server.settings.keep_alive):
            if not items:
                yield KEEP_ALIVE
            for item in items:
                if isinstance(item, Ended):
                    check_outcome(item.outcome)
                    ends.append(item)
                if not texts.scores:
                    yield sse(_chunk(server, texts, item, offsets))
                    continue
                wholes.setdefault(item.index, Whole()).add(item)
                if isinstance(item, Ended):  # the scores of a prompt are known at the end, and come first
                    choice = _choice(server, texts, wholes[item.index])
                    yield sse(texts.reply.body([choice], texts.usage([item]), debug([item])))
        if texts.request.include_usage:
            yield sse(texts.reply.body([], texts.usage(ends)))
        yield DONE
    except RequestError as error:
        yield sse(error.body())
    finally:
        answers.close()
        note(call, ends)


def _chunk(server: Server, texts: _Texts, item: Piece | Ended, offsets: dict[int, int]) -> dict[str, Any]:
    text = "" if texts.silent else _text(item.events)
    if isinstance(item, Ended):
        reason = "length" if texts.silent else item.outcome.finish_reason
        return texts.reply.body([text_choice(text, item.index, reason)], texts.usage([item]), debug([item]))
    offset = offsets.get(item.index, 0)
    offsets[item.index] = offset + len(text)
    logprobs = text_logprobs(item.logprobs, offset) if item.logprobs and not texts.silent else None
    return texts.reply.body([text_choice(text, item.index, None, logprobs, _sampled(server, texts, item.logprobs))])


def _text(events: list[Event]) -> str:
    assert all(isinstance(event, ContentDelta | MessageEnd) for event in events)
    return "".join(event.text for event in events if isinstance(event, ContentDelta))
