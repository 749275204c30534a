"""Can the model look something up in what it has just read? Two probes on random tokens, which no knowledge of
language can solve:

    copy     s_1 ... s_m  noise  s_1 ... s_m       having read s_1 ... s_j again, what is s_(j+1)?     by distance
    pairs    k_1 v_1 ... k_n v_n  k_3 v_3 ...      what stood after this key?                           by number

The first is in-context copying (induction); the second is multi-query associative recall, the task on which models
with a fixed-size memory separate. A copy may lean on all of s_1 ... s_j, a pair on its key alone.

A greedy answer is the best-scored token among those that could stand there, so that chance is known: 1 / tokens for a
copy, 1 / values for a pair. `shown` is 1 / n, the score of a model that remembers which values it saw but not what they
belong to. An answer's `nats` are taken over the whole vocabulary.

What to expect (ours to say, from small runs): a base model of a few million parameters trained on prose and code learns
to copy over short distances first, falls with distance, and stays near chance on many pairs, since prose asks for
neither; the same model trained on `recall_task` answers almost everything. Random tokens are far from any text, and a
low score here does not say that a name is forgotten within a story.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nanok3.eval.bits_per_byte import LanguageModel, evaluating, model_device, next_token_nats

IGNORE = -100
"""Target of a position that is not asked for, as in the training loss."""
SEGMENT = 16
"""Tokens of a copied segment."""
DISTANCES = (16, 32, 64, 128, 256, 512, 1024, 2048)
PAIRS = (1, 2, 4, 8, 16, 32, 64)
_TOKENS_AT_ONCE = 8192
_FEWEST_ANSWERS = 128


@dataclass(frozen=True)
class RecallBatch:
    """inputs: sequences; targets: the next token where an answer is asked for, -100 elsewhere. With a loss over
    `targets` this trains a model, with `accuracy` it examines one."""

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]

    @property
    def asked(self) -> Bool[Tensor, "B T"]:
        return self.targets != IGNORE


# ---------------------------------------------------------------------- the tasks


def copy_batch(
    ids: Int[Tensor, " n"], distance: int, samples: int, generator: torch.Generator, segment: int = SEGMENT
) -> RecallBatch:
    """A segment, noise, the segment again; a repeated token stands `distance` after its first occurrence. Asked for:
    all of the repetition but its first token. A distance below `segment` shortens the segment to it."""
    if distance < 2:
        raise ValueError(f"distance is {distance}; it must be at least 2 tokens")
    length = min(segment, distance)
    first = ids[torch.randint(len(ids), (samples, distance), generator=generator)]
    sequence = torch.cat((first, first[:, :length]), dim=1)
    targets = torch.full((samples, distance + length - 1), IGNORE)
    targets[:, distance:] = sequence[:, distance + 1 :]
    return RecallBatch(sequence[:, :-1], targets)


def pairs_batch(
    ids: Int[Tensor, " n"], pairs: int, samples: int, generator: torch.Generator, queries: int | None = None
) -> RecallBatch:
    """`pairs` distinct keys, each followed by its value, then `queries` of these pairs (all unless said otherwise) in
    another order. Keys are drawn from the first half of `ids`, values from the second, so that a token's role is
    plain. Asked for: the value after each key of the second part."""
    keys, values = key_ids(ids), value_ids(ids)
    if not 1 <= pairs <= len(keys):
        raise ValueError(f"pairs is {pairs}; {len(ids)} token ids allow 1 to {len(keys)}")
    queries = pairs if queries is None else queries
    if not 1 <= queries <= pairs:
        raise ValueError(f"queries is {queries}; it must lie between 1 and pairs = {pairs}")
    k = keys[_distinct(samples, len(keys), pairs, generator)]
    v = values[torch.randint(len(values), (samples, pairs), generator=generator)]
    shown = torch.stack((k, v), dim=-1)
    order = _distinct(samples, pairs, queries, generator)
    asked = shown.gather(1, order[:, :, None].expand(-1, -1, 2))
    sequence = torch.cat((shown, asked), dim=1).flatten(1)
    targets = torch.full_like(sequence, IGNORE)
    targets[:, 2 * pairs :: 2] = asked[:, :, 1]
    return RecallBatch(sequence[:, :-1], targets[:, :-1])


def key_ids(ids: Int[Tensor, " n"]) -> Int[Tensor, " k"]:
    return ids[: len(ids) // 2]


def value_ids(ids: Int[Tensor, " n"]) -> Int[Tensor, " v"]:
    return ids[len(ids) // 2 :]


def recall_task(
    ids: Sequence[int], pairs: int, samples: int, seed: int = 0, queries: int | None = None
) -> Iterator[RecallBatch]:
    """Endless fresh batches of `pairs_batch`, to train on. Equal seeds give equal batches."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor(ids)
    while True:
        yield pairs_batch(allowed, pairs, samples, generator, queries)


def _distinct(rows: int, size: int, count: int, generator: torch.Generator) -> Int[Tensor, "rows count"]:
    """In each row `count` different numbers below `size`, in random order."""
    return torch.rand(rows, size, generator=generator).argsort(1)[:, :count]


# ---------------------------------------------------------------------- the examination


@dataclass(frozen=True)
class Answers:
    """Over `predictions` answers: how many were right, and their nats."""

    predictions: int
    right: int
    nats: float

    def record(self) -> dict[str, float | int]:
        n = max(self.predictions, 1)
        return {"accuracy": self.right / n, "nats": self.nats / n, "predictions": self.predictions}


def answers(model: LanguageModel, batch: RecallBatch, choices: Int[Tensor, " c"]) -> Answers:
    """Examine `model` on `batch`; it chooses among the ids `choices`."""
    predictions, right, nats = 0, 0, 0.0
    device = model_device(model)
    choices = choices.to(device)
    rows = max(1, _TOKENS_AT_ONCE // batch.inputs.shape[1])
    with evaluating(model):
        for inputs, targets in zip(batch.inputs.split(rows), batch.targets.split(rows)):
            inputs, targets = inputs.to(device), targets.to(device)
            hidden = model.hidden_states(inputs)[targets != IGNORE]
            wanted = targets[targets != IGNORE]
            chosen = choices[model.lm_head(hidden)[:, choices].argmax(-1)]
            predictions += len(wanted)
            right += int((chosen == wanted).sum())
            nats += float(next_token_nats(model, hidden, wanted).sum())
    return Answers(predictions, right, nats)


def recall_probe(
    model: LanguageModel,
    ids: Sequence[int],
    distances: Sequence[int] = DISTANCES,
    pairs: Sequence[int] = PAIRS,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Both probes with random tokens of `ids` (at least 4; take tokens the model has often seen).

    {"copy": [{"distance", "accuracy", "nats", "predictions"}, ...], "copy_chance": 1 / tokens, "segment": 16,
     "pairs": [{"pairs", "accuracy", "nats", "predictions", "shown"}, ...], "pairs_chance": 1 / values,
     "tokens", "samples", "seed"}

    samples: sequences of each distance and number of pairs; a few pairs get more, for at least 128 answers. Numbers of
    pairs beyond half of `ids` are left out. Equal arguments give equal sequences, whatever the model.
    """
    allowed = torch.tensor(ids)
    if len(allowed) < 4 or len(set(ids)) < len(ids):
        raise ValueError(
            f"ids holds {len(ids)} token ids, {len(set(ids))} of them distinct; give at least 4, each once"
        )
    generator = torch.Generator().manual_seed(seed)
    values = value_ids(allowed)
    copies, recalls = [], []
    for distance in distances:
        found = answers(model, copy_batch(allowed, distance, samples, generator), allowed)
        copies.append({"distance": distance, **found.record()})
    for n in pairs:
        if n <= len(key_ids(allowed)):
            sequences = max(samples, -(-_FEWEST_ANSWERS // n))
            found = answers(model, pairs_batch(allowed, n, sequences, generator), values)
            recalls.append({"pairs": n, **found.record(), "shown": 1 / n})
    return {
        "copy": copies,
        "copy_chance": 1 / len(allowed),
        "segment": SEGMENT,
        "pairs": recalls,
        "pairs_chance": 1 / len(values),
        "tokens": len(allowed),
        "samples": samples,
        "seed": seed,
    }
