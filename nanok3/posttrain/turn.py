"""One turn of a sample: what the engine's reader keeps, what it means to an environment, and what is read next.

    engine token -> Turn: id, log-probability and version are kept; the serving parser reads along
    turn's end   -> Reply(text, calls, thinking)                        the parser's own events, nothing is re-read
    observation  -> ids behind those that were said                     tool results and the start of the next answer

The parser is the one that the server and evaluations use, so a call that a client would see is a call here. Broken
markup is counted, and whatever could be read of it goes to the environment, whose answer is an error to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanok3.data.chat import Sentences, encode, render
from nanok3.data.tokenizer import Tokenizer
from nanok3.envs.environment import Observation, Reply
from nanok3.envs.tools import Call
from nanok3.posttrain.sample import Sample
from nanok3.serve.engine import Outcome, Token
from nanok3.serve.events import Answer, Event
from nanok3.serve.parser import Parser


class Turn:
    """The engine's reader of one job: a turn of `sample`, from where it was left."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer, counted: str, limit: int | None, version: int) -> None:
        """counted, limit: what a budget counts, and after how many tokens there is no point in going on."""
        self.sample, self.counted, self.limit, self.version = sample, counted, limit, version
        self.parser = Parser(tokenizer)
        self.events: list[Event] = []
        self.outcome: Outcome | None = None
        for token in sample.ids[sample.begins :]:
            self.events += self.parser.push(token)

    @property
    def spent(self) -> int:
        """T(y) so far."""
        if self.counted == "output":
            return self.sample.output
        return self.sample.thinking + self.parser.reasoning_ids

    @property
    def over(self) -> bool:
        return self.limit is not None and self.spent > self.limit

    def push(self, token: Token) -> bool:
        self.sample.say(token.id, token.logprob, self.version)
        self.events += self.parser.push(token.id)
        return self.parser.done or self.over

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def reply(self) -> Reply:
        """What was said, once it has ended."""
        answer = Answer([*self.events, *self.parser.finish("stop")], reasons=True)
        self.sample.problems += len(answer.problems)
        calls = tuple(Call(call.name, call.arguments) for call in answer.calls)
        return Reply(answer.content or "", calls, answer.reasoning or "")


def following(reply: Reply, seen: Observation, tokenizer: Tokenizer, sentences: Sentences) -> list[int]:
    """The ids between a turn that made calls and the next: results in the order of the calls, and the start of an
    answer. They are the end of a conversation of two, so they are what `render` gives for the whole one."""
    calls = [_call(number, call.name) for number, call in enumerate(reply.calls)]
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    results: Sequence[dict[str, Any]] = [
        {"role": "tool", "content": result.content, "tool_call_id": str(number)}
        for number, result in enumerate(seen.results)
    ]
    told = [{"role": "user", "content": seen.text}] if seen.text else []
    before = render([said], add_generation_prompt=False, sentences=sentences)
    whole = render([said, *results, *told], sentences=sentences)
    return encode(whole[len(before) :], tokenizer)


def _call(number: int, name: str) -> dict[str, Any]:
    return {"id": str(number), "type": "function", "function": {"name": name, "arguments": {}}}
