"""What the trainer gives sampled tokens: many samples in one packed row, their log-probabilities with a gradient.

    row     = sample | sample | ...          cu_seqlens keeps them apart; each ends before its last sampled token
    logprob = log softmax(z / temperature)[token],   z = head(hidden before the token), ids that are never said at -inf

This has to be what the sampler computes: the same temperature, nothing truncated, the same ids left out. `check_same`
holds the two against each other before a run trains on anything. Source of the bound: problem 1 of the list in
docs/rl.md; a mean difference near 0 proves nothing, so it is the largest that counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanok3.model.basics import at_least_float32
from nanok3.model.decoder import K3
from nanok3.posttrain.objective import Tokens
from nanok3.posttrain.sample import Sample

LOGITS = 2**22
"""Logits that are held at a time."""
BOUND = 1e-4
"""The largest difference between sampler and trainer in float32."""


@dataclass(frozen=True)
class Packed:
    """Samples as one row. places: of each sampled token the position that predicts it; tokens: the objective's list."""

    samples: Sequence[Sample]
    ids: Int[Tensor, "1 T"]
    bounds: Int[Tensor, " n1"]
    places: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    tokens: Tokens

    @classmethod
    def of(cls, samples: Sequence[Sample], trained: Sequence[list[bool]]) -> Packed:
        """trained: marks of each sample's sampled tokens."""
        ids: list[int] = []
        bounds, places, targets = [0], [], []
        for sample in samples:
            places += [len(ids) + place - 1 for place in sample.places]
            targets += [sample.ids[place] for place in sample.places]
            ids += sample.ids[: length(sample)]
            bounds.append(len(ids))
        listed = [(len(s.places), s.logprobs, marks) for s, marks in zip(samples, trained, strict=True)]
        bound = torch.tensor(bounds, dtype=torch.int32)
        return cls(samples, torch.tensor([ids]), bound, torch.tensor(places), torch.tensor(targets), Tokens.of(listed))


def length(sample: Sample) -> int:
    """Ids before the last sampled one: the others predict nothing."""
    return sample.places[-1]


def packed(samples: Sequence[Sample], trained: Sequence[list[bool]], most: int) -> Iterator[Packed]:
    """Rows of at most `most` tokens, or of one sample that is longer; samples without a sampled token are left out."""
    chosen: list[int] = []
    size = 0
    for number, sample in enumerate(samples):
        if not sample.places:
            continue
        if chosen and size + length(sample) > most:
            yield Packed.of([samples[i] for i in chosen], [trained[i] for i in chosen])
            chosen, size = [], 0
        chosen.append(number)
        size += length(sample)
    if chosen:
        yield Packed.of([samples[i] for i in chosen], [trained[i] for i in chosen])


def logprobs(model: K3, row: Packed, forbidden: Int[Tensor, " f"], temperature: float = 1.0) -> Float[Tensor, " n"]:
    """Of each sampled token of the row, with a gradient where there is one to be had."""
    device = model.lm_head.weight.device
    final = model.hidden_states(row.ids.to(device), cu_seqlens=row.bounds.to(device))[0]
    hidden, targets = final[row.places.to(device)], row.targets.to(device)
    rows = max(1, LOGITS // model.cfg.vocab_size)
    parts = [
        checkpoint(_chosen, model, h, t, forbidden.to(device), temperature, use_reentrant=False)
        if len(hidden) > rows
        else _chosen(model, h, t, forbidden.to(device), temperature)
        for h, t in zip(hidden.split(rows), targets.split(rows))
    ]
    return torch.cat(parts)


def _chosen(model: K3, hidden: Tensor, targets: Tensor, forbidden: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(model.lm_head(hidden)).index_fill(1, forbidden, -torch.inf)
    return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@dataclass(frozen=True)
class Difference:
    """Of |sampler - trainer| over some tokens."""

    tokens: int
    largest: float
    percentile95: float
    mean: float

    @classmethod
    def of(cls, sampler: Tensor, trainer: Tensor) -> Difference:
        apart = (sampler.double() - trainer.double().cpu()).abs()
        return cls(len(apart), float(apart.max()), float(apart.quantile(0.95)), float(apart.mean()))

    def __str__(self) -> str:
        numbers = f"largest {self.largest:.1e}, 95 % {self.percentile95:.1e}, mean {self.mean:.1e}"
        return f"sampler and trainer differ by {numbers} over {self.tokens} tokens"


def compare(
    model: K3, samples: Sequence[Sample], forbidden: Tensor, temperature: float, most: int = 4096
) -> Difference:
    """What the sampler said against what the trainer computes by the path it trains through. The samples have to be
    of the weights as they are."""
    said, found = [], []
    marks = [[True] * len(sample.places) for sample in samples]
    with torch.enable_grad():
        for row in packed(samples, marks, most):
            said.append(row.tokens.logprob)
            found.append(logprobs(model, row, forbidden, temperature).detach())
    return Difference.of(torch.cat(said), torch.cat(found))


def check_same(difference: Difference, dtype: torch.dtype) -> None:
    """ValueError where the two are not the same policy. Judged in float32 and above: below, rounding alone is more."""
    if dtype in (torch.float32, torch.float64) and not difference.largest < BOUND:
        raise ValueError(f"{difference}; allowed: less than {BOUND:g}. Training would correct what nobody said")
