"""From logits to one token: how a request turns what the model believes into what it says.

    z = logits + bias                       ids named in logit_bias
    z = z / r if z > 0 else z r             ids in the prompt or said before; r = repetition_penalty
    z = z - presence [n > 0] - frequency n  n = times the id was said
    p = softmax(z / temperature)            temperature 0: the largest z, the lowest id on ties, and no randomness
    keep the top_k most probable; of these, renormalised, the fewest whose sum reaches top_p; of these the ones with
    p >= min_p max(p)
    token = the first id at which the running sum of the kept p passes u, one uniform number of [0, 1)

The order is that of transformers; vLLM applies min_p first, which differs only where top_p is set too. Everything
runs in float64 on the CPU, and one number is drawn per token, so a seed means the same on every device as far as the
logits agree.

The tokens of a step are sampled as the rows of one matrix. Yet a row has the same bits whatever stands beside it: each
operation on the matrix is exact (differences, quotients, maxima), runs along a row from its beginning (softmax, running
sums), or is left to the row alone (bias, penalties, filters). What breaks a row is that row's error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanok3.serve.filters import keep_probable

AT_ONCE = 2**18
"""Numbers of a matrix of rows: two mebibytes, which stay near the core."""


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. ValueError names a field outside its range."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_p: float = 1.0
    """In (0, 1]: keep the fewest tokens whose probabilities reach this sum."""
    top_k: int | None = None
    """Keep this many tokens; None keeps all."""
    min_p: float = 0.0
    """In [0, 1]: keep tokens at least this probable, relative to the most probable one."""
    seed: int | None = None
    """In [0, 2^63): equal seeds give equal tokens. None draws a fresh one."""
    max_tokens: int = 256
    """Tokens to say at most."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; neither they nor what follows is given out."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside the tokenizer's own ends."""
    repetition_penalty: float = 1.0
    """Above 1 makes ids of the prompt and of the answer less likely."""
    presence_penalty: float = 0.0
    """Taken from the logit of every id said before."""
    frequency_penalty: float = 0.0
    """Taken from the logit of an id once for each time it was said."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """id -> number added to its logit; -inf forbids the id."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number of at least 0")
        _within("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _within("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1, or None for all tokens")
        _within("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _within("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63 - 1, or None")
        _within("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _within("stop", self.stop, not isinstance(self.stop, str) and all(self.stop), "a tuple of non-empty strings")
        positive = 0 < self.repetition_penalty < math.inf
        _within("repetition_penalty", self.repetition_penalty, positive, "a finite number above 0; 1 changes nothing")
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), math.isfinite(getattr(self, name)), "a finite number")
        usable = all(value < math.inf for value in self.logit_bias.values())
        _within("logit_bias", self.logit_bias, usable, "numbers below +inf (-inf forbids an id)")

    @property
    def counts_tokens(self) -> bool:
        """Whether what was said before changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        """Whether some ids are left out for being improbable."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def _within(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass
class TokenCounts:
    """What the penalties look at: which ids stood in the prompt, and how often each was said since."""

    prompt: Bool[Tensor, " vocab"]
    said: Int[Tensor, " vocab"]

    @classmethod
    def of(cls, prompt_ids: Iterable[int], vocab_size: int) -> TokenCounts:
        prompt = torch.zeros(vocab_size, dtype=torch.bool)
        prompt[list(prompt_ids)] = True
        return cls(prompt, torch.zeros(vocab_size, dtype=torch.int64))

    def add(self, token: int) -> None:
        self.said[token] += 1


def new_generator(seed: int | None) -> torch.Generator:
    """The random numbers of one request; `initial_seed()` tells the seed that None drew."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


@dataclass(frozen=True, eq=False)
class Row:
    """What one request's next token is drawn from."""

    logits: Float[Tensor, " vocab"]
    params: SamplingParams
    generator: torch.Generator
    counts: TokenCounts | None = None
    allowed: Bool[Tensor, " vocab"] | None = None
    """True for the ids that may come; None for all."""
    top: int = 0
    """How many of the most probable ids are asked for."""


@dataclass(frozen=True)
class Sampled:
    """A token and its log-probability under softmax(z / temperature), before top_k, top_p and min_p: what a trainer
    that knows the temperature computes for the same token. Greedy choices report it at temperature 1."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable ids with theirs."""


def sample(
    logits: Float[Tensor, " vocab"],
    params: SamplingParams,
    generator: torch.Generator,
    counts: TokenCounts | None = None,
) -> tuple[int, float]:
    """One token and its log-probability. ValueError if a logit is NaN or +inf, or every one is -inf; ids at -inf are
    never chosen."""
    (found,) = sample_rows([Row(logits, params, generator, counts)])
    if isinstance(found, ValueError):
        raise found
    return found.token, found.logprob


def sample_rows(rows: Sequence[Row], forbidden: Int[Tensor, " ids"] | None = None) -> list[Sampled | ValueError]:
    """Of each row a token, or why there is none. forbidden: ids that are never said."""
    found: dict[int, Sampled | ValueError] = {}
    for greedy in (True, False):
        places = [k for k, row in enumerate(rows) if (row.params.temperature == 0) == greedy]
        some = max(1, AT_ONCE // len(rows[0].logits)) if places else 1
        for first in range(0, len(places), some):
            group = places[first : first + some]
            found.update(zip(group, _sample_group([rows[k] for k in group], forbidden, greedy), strict=True))
    return [found[k] for k in range(len(rows))]


def _sample_group(rows: Sequence[Row], forbidden: Tensor | None, greedy: bool) -> list[Sampled | ValueError]:
    z, errors = _adjusted(rows, forbidden)
    z -= z.amax(-1, keepdim=True)  # first, so that the smallest temperature overflows to -inf, not to NaN
    if not greedy:
        z /= torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64)
    p = z.softmax(-1)
    likeliest = [math.log(highest) for highest in p.amax(-1).tolist()]  # of which z is 0 now
    tokens = z.argmax(-1) if greedy else _draw_filtered(p, rows)
    logprobs = z.gather(1, tokens[:, None])[:, 0].tolist()
    found: list[Sampled | ValueError] = []
    for k, (row, error, token) in enumerate(zip(rows, errors, tokens.tolist(), strict=True)):
        top = best(z[k], row.top, likeliest[k]) if row.top else ()
        found.append(error or Sampled(token, logprobs[k] + likeliest[k], top))
    return found


def _adjusted(
    rows: Sequence[Row], forbidden: Tensor | None
) -> tuple[Float[Tensor, "rows vocab"], list[ValueError | None]]:
    """z of the docstring above, and what is wrong with each row; one that is broken has zeros instead."""
    z = torch.stack([row.logits.detach() for row in rows]).to("cpu", torch.float64)
    errors = _faults(z, nan_only=True)  # one at an id that may not come anyway, too
    if forbidden is not None:
        z.index_fill_(1, forbidden, -torch.inf)
    for k, row in enumerate(rows):
        try:
            if row.allowed is not None:
                z[k].masked_fill_(~row.allowed, -torch.inf)
            if row.params.logit_bias or row.params.counts_tokens:
                _penalize(z[k], row.params, row.counts)
        except (ValueError, RuntimeError) as error:
            errors[k] = errors[k] or ValueError(str(error))
    errors = [before or after for before, after in zip(errors, _faults(z))]
    for k in (k for k, found in enumerate(errors) if found is not None):
        z[k] = 0
    return z, errors


def _faults(z: Float[Tensor, "rows vocab"], nan_only: bool = False) -> list[ValueError | None]:
    highest = z.amax(-1).tolist()
    return [None if math.isfinite(one) else _fault(z[k], one, nan_only) for k, one in enumerate(highest)]


def _draw_filtered(p: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> Int[Tensor, " rows"]:
    """p is changed."""
    for k, params in enumerate(row.params for row in rows):
        if params.filters:
            keep_probable(p[k].numpy(), params.top_k, params.top_p, params.min_p)
    return draw_rows(p, [row.generator for row in rows])


def best(logp: Float[Tensor, " vocab"], count: int, more: float = 0.0) -> tuple[tuple[int, float], ...]:
    """The most probable ids, with logp + more."""
    found = logp.topk(min(count, len(logp)))
    return tuple(zip(found.indices.tolist(), (found.values + more).tolist()))


def probabilities(
    logits: Float[Tensor, " vocab"], params: SamplingParams, counts: TokenCounts | None = None
) -> Float[Tensor, " vocab"]:
    """The distribution that `sample` draws from, float64: after all filters, summing to 1."""
    z = adjust(logits, params, counts)
    if params.temperature == 0:
        return torch.zeros_like(z).index_fill_(0, z.argmax(), 1.0)
    return truncate(tempered(z, params.temperature).exp(), params)


def adjust(
    logits: Float[Tensor, " vocab"], params: SamplingParams, counts: TokenCounts | None = None
) -> Float[Tensor, " vocab"]:
    """z of the docstring above for one row, float64 on the CPU. ValueError as `sample`."""
    z = logits.detach().to("cpu", torch.float64, copy=True)
    _penalize(z, params, counts)
    fault = _fault(z, float(z.max()))
    if fault is not None:
        raise fault
    return z


def _penalize(z: Float[Tensor, " vocab"], params: SamplingParams, counts: TokenCounts | None) -> None:
    """Bias and penalties, in place."""
    for token, bias in params.logit_bias.items():
        if not 0 <= token < len(z):
            raise ValueError(f"logit_bias names id {token}; the model's ids are 0 to {len(z) - 1}")
        z[token] += bias
    if params.counts_tokens and counts is not None:
        said, r = counts.said.double(), params.repetition_penalty
        z.copy_(torch.where(counts.prompt | (said > 0), torch.where(z > 0, z / r, z * r), z))
        z -= params.presence_penalty * (said > 0).double() + params.frequency_penalty * said


def _fault(z: Tensor, highest: float, nan_only: bool = False) -> ValueError | None:
    """What is wrong with logits whose maximum, NaN if there is one among them, is `highest`."""
    if math.isnan(highest):
        bad = int(z.isnan().nonzero()[0])
        return ValueError(f"the logit of id {bad} is NaN: the weights or the computation are broken")
    if math.isinf(highest) and not nan_only:
        what = "a logit is +inf" if highest > 0 else "every logit is -inf, no token may follow"
        return ValueError(f"{what}; there is no distribution to sample from")
    return None


def tempered(z: Float[Tensor, " vocab"], temperature: float) -> Float[Tensor, " vocab"]:
    """log softmax(z / temperature), shifted first so that the smallest temperature overflows to -inf, not to NaN."""
    return ((z - z.max()) / temperature).log_softmax(-1)


def truncate(p: Float[Tensor, " vocab"], params: SamplingParams) -> Float[Tensor, " vocab"]:
    """p after top_k, top_p and min_p, renormalised. Of equal probabilities the lower ids are kept first."""
    kept = p.to("cpu", torch.float64, copy=True)
    keep_probable(kept.numpy(), params.top_k, params.top_p, params.min_p)
    return kept.div_(kept.sum())


def draw(p: Float[Tensor, " vocab"], generator: torch.Generator) -> int:
    """An id with probability p[id], by one uniform number."""
    return int(draw_rows(p[None], [generator]))


def draw_rows(p: Float[Tensor, "rows vocab"], generators: Sequence[torch.Generator]) -> Int[Tensor, " rows"]:
    """Of each row an id, by one uniform number of its generator. An id with p = 0 never comes: the running sum does
    not move there, and the first sum strictly above u is taken."""
    sums = p.cumsum(-1)
    u = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
    return torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]
