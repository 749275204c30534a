"""How a request wants its tokens drawn, as its JSON says it: ranges, other servers' names, and K3's fixed values.

Kimi's own service fixes what the model was tuned for: top_p 0.95, no penalties, one choice, a temperature of at most
1; any other value is a mistake there. `Rules.K3` checks the same, for clients that test for it. `Rules.FREE` takes what
the OpenAI API takes, and what the field's open servers added: top_k, min_p, repetition_penalty, stop_token_ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanok3.serve.fields import Fields, refuse

STOPS, STOP_BYTES = 5, 32
"""At most so many stop strings, of so many bytes each."""
TOP_LOGPROBS = 20
CHOICES = 128


class Rules(Enum):
    """Which values of sampling fields are mistakes."""

    FREE = "free"
    K3 = "k3"


FIXED = {"top_p": 0.95, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
"""What K3's own service allows of these."""


@dataclass(frozen=True)
class Sampling:
    """The fields of `sampler.SamplingParams` that a request can set, checked."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def params(self, max_tokens: int) -> dict[str, Any]:
        """Arguments for `SamplingParams`."""
        return {**vars(self), "max_tokens": max_tokens}


def read_sampling(f: Fields, rules: Rules, top_p: float, vocab_size: int | None = None) -> Sampling:
    """`top_p` is what holds where the request says nothing."""
    if rules is Rules.K3:
        _check_fixed(f)
    temperature = f.number("temperature", 0, 1 if rules is Rules.K3 else 2)
    seed = f.integer("seed", -(2**63), 2**63 - 1)
    given_top_p = f.number("top_p", 0, 1)
    if given_top_p == 0:
        raise f.refuse("top_p", "a number above 0, at most 1")
    return Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=top_p if given_top_p is None else given_top_p,
        top_k=_top_k(f),
        min_p=f.number("min_p", 0, 1) or 0.0,
        seed=None if seed is None else seed % 2**63,
        stop=_stops(f),
        stop_ids=_stop_ids(f, vocab_size),
        repetition_penalty=_repetition(f),
        presence_penalty=f.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=f.number("frequency_penalty", -2, 2) or 0.0,
        logit_bias=_bias(f, vocab_size),
    )


def _check_fixed(f: Fields) -> None:
    for name, fixed in FIXED.items():
        if f.has(name) and (isinstance(f.get(name), bool) or f.get(name) != fixed):
            raise f.refuse(name, f"{fixed:g}, which is fixed, or no such field")


def _top_k(f: Fields) -> int | None:
    """Other servers write 0 or -1 for all tokens."""
    top_k = f.integer("top_k", -1, 2**31)
    return top_k if top_k is not None and top_k > 0 else None


def _repetition(f: Fields) -> float:
    """Logits are divided by it: what is nearly 0 makes them infinite."""
    penalty = f.number("repetition_penalty", 0.01, 100)
    return 1.0 if penalty is None else penalty


def _stops(f: Fields) -> tuple[str, ...]:
    if f.boolean("include_stop_str_in_output"):
        raise f.refuse("include_stop_str_in_output", "false; an answer ends before the string that stops it")
    given = f.get("stop")
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops) or len(stops) > STOPS:
        raise f.refuse("stop", f"a string, or a list of at most {STOPS}")
    for k, stop in enumerate(stops):
        if not 1 <= len(stop.encode("utf-8", "replace")) <= STOP_BYTES:
            where = f.path("stop") if isinstance(given, str) else f"{f.path('stop')}[{k}]"
            raise refuse(where, stop, f"a string of 1 to {STOP_BYTES} bytes")
    return tuple(stops)


def _stop_ids(f: Fields, vocab_size: int | None) -> tuple[int, ...]:
    ids = f.list("stop_token_ids")
    for k, token in enumerate(ids):
        if not is_id(token, vocab_size):
            raise refuse(f"{f.path('stop_token_ids')}[{k}]", token, allowed_ids(vocab_size))
    return tuple(ids)


def _bias(f: Fields, vocab_size: int | None) -> dict[int, float]:
    given = f.object("logit_bias")
    bias: dict[int, float] = {}
    for name in given.given:
        token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else -1
        if not is_id(token, vocab_size):
            raise refuse(given.path(name), given.get(name), f"as its name {allowed_ids(vocab_size)}")
        bias[token] = given.number(name, -100, 100) or 0.0
    return bias


def is_id(token: object, vocab_size: int | None) -> bool:
    """Whether a value is an id of the vocabulary, or could be one where its size is not known."""
    known = isinstance(token, int) and not isinstance(token, bool)
    return known and 0 <= token < (vocab_size or 2**31)  # type: ignore[operator]


def allowed_ids(vocab_size: int | None) -> str:
    return "a token id" if vocab_size is None else f"a token id, 0 to {vocab_size - 1}"


def read_logprobs(f: Fields) -> int | None:
    """How many alternatives each token of the content is to have; None for no log-probabilities at all."""
    wanted = f.boolean("logprobs")
    top = f.integer("top_logprobs", 0, TOP_LOGPROBS)
    if top is not None and not wanted:
        raise f.refuse("top_logprobs", "a number only with logprobs true")
    return (top or 0) if wanted else None
