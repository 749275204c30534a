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
logits agree. Ours: the tolerance below, without which ten equal probabilities reach top_p = 0.7 after seven or after
eight, as rounding falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TOLERANCE = 1e-6
"""Relative slack of the top_p and min_p borders; float32 logits are no more exact."""


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


def sample(
    logits: Float[Tensor, " vocab"],
    params: SamplingParams,
    generator: torch.Generator,
    counts: TokenCounts | None = None,
) -> tuple[int, float]:
    """One token and its log-probability under softmax(z / temperature), before top_k, top_p and min_p: what a trainer
    that knows the temperature computes for the same token. Greedy choices report it at temperature 1.

    ValueError if a logit is NaN or +inf, or every one is -inf; ids at -inf are never chosen.
    """
    z = adjust(logits, params, counts)
    if params.temperature == 0:
        token = int(z.argmax())  # the first of equals
        return token, float(z.log_softmax(-1)[token])
    logp = tempered(z, params.temperature)
    token = draw(truncate(logp.exp(), params), generator)
    return token, float(logp[token])


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
    """z of the docstring above, float64 on the CPU: bias and penalties applied, values checked."""
    z = logits.detach().to("cpu", torch.float64, copy=True)
    for token, bias in params.logit_bias.items():
        if not 0 <= token < len(z):
            raise ValueError(f"logit_bias names id {token}; the model's ids are 0 to {len(z) - 1}")
        z[token] += bias
    if params.counts_tokens and counts is not None:
        said, r = counts.said.double(), params.repetition_penalty
        z = torch.where(counts.prompt | (said > 0), torch.where(z > 0, z / r, z * r), z)
        z -= params.presence_penalty * (said > 0).double() + params.frequency_penalty * said
    _check(z)
    return z


def _check(z: Tensor) -> None:
    highest = float(z.max())  # NaN if there is one
    if math.isnan(highest):
        bad = int(z.isnan().nonzero()[0])
        raise ValueError(f"the logit of id {bad} is NaN: the weights or the computation are broken")
    if math.isinf(highest):
        what = "a logit is +inf" if highest > 0 else "every logit is -inf, no token may follow"
        raise ValueError(f"{what}; there is no distribution to sample from")


def tempered(z: Float[Tensor, " vocab"], temperature: float) -> Float[Tensor, " vocab"]:
    """log softmax(z / temperature), shifted first so that the smallest temperature overflows to -inf, not to NaN."""
    return ((z - z.max()) / temperature).log_softmax(-1)


def truncate(p: Float[Tensor, " vocab"], params: SamplingParams) -> Float[Tensor, " vocab"]:
    """p after top_k, top_p and min_p, renormalised. Of equal probabilities the lower ids are kept first."""
    least = params.min_p * float(p.max()) * (1 - TOLERANCE)
    if params.top_k is None and params.top_p == 1:
        return _renormalized(torch.where(p >= least, p, 0.0))
    ids = _candidates(p, params)
    falling, order = p[ids].sort(descending=True, stable=True)
    falling, ids = falling[: params.top_k], ids[order[: params.top_k]]
    kept = falling >= least
    if params.top_p < 1:
        total = float(p.sum() if params.top_k is None else falling.sum())
        more_probable = falling.cumsum(0) - falling
        kept &= more_probable < params.top_p * total * (1 - TOLERANCE)
    return _renormalized(torch.zeros_like(p).index_put_((ids[kept],), falling[kept]))


def _candidates(p: Tensor, params: SamplingParams) -> Tensor:
    """Ids that top_k or top_p can keep, ascending, so that few of 163,840 need sorting. Of V tokens those below
    (1 - top_p) / V sum to less than 1 - top_p: the others reach top_p without them."""
    if params.top_k is not None:
        floor = p.topk(min(params.top_k, len(p))).values[-1]
    else:
        floor = p.new_tensor((1 - params.top_p) / len(p))
    return (p >= floor).nonzero().flatten()


def _renormalized(p: Tensor) -> Tensor:
    return p / p.sum()


def draw(p: Float[Tensor, " vocab"], generator: torch.Generator) -> int:
    """An id with probability p[id], by one uniform number. An id with p = 0 never comes: the running sum does not
    move there, and the first sum strictly above u is taken."""
    sums = p.cumsum(0)
    u = torch.rand((), dtype=torch.float64, generator=generator) * sums[-1]
    return int(torch.searchsorted(sums, u, right=True))
