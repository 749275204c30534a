"""Put feature rows where a text holds media placeholders.

A prompt may hold one placeholder per item, as the tokenizer writes it and the official model takes it, or one
per feature row, as servers prefer because then every position is a token id. The first form is widened to the
second,

    a b <pad> c   with 3 rows   ->   a b <pad> <pad> <pad> c

and the embeddings of the placeholders are replaced by the rows, in order. Text embeddings stay as they are. A
placeholder without rows, or rows without a placeholder, is an error and never silently dropped (two public
ports kept one row per picture; the official merge ignores the picture of a one-token prompt).

Legend: B batch, T tokens, T2 tokens after widening, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def splice(
    embeddings: Float[Tensor, "B T D"],
    input_ids: Int[Tensor, "B T"],
    features: Float[Tensor, "rows D"],
    rows_per_item: Sequence[int],
    placeholder_id: int,
) -> tuple[Float[Tensor, "B T2 D"], Int[Tensor, "B T2"]]:
    """Embeddings with the features in place, and the ids they stand for: T2 = T where `input_ids` holds one
    placeholder per feature row, T2 > T where it holds one per item. Items are counted along the batch.

    ValueError: neither count fits; the rows of one item are torn apart by text; or widening would give the
    rows of a batch different lengths.
    """
    if sum(rows_per_item) != len(features):
        raise ValueError(f"{len(features)} feature rows, but the items have {sum(rows_per_item)} {list(rows_per_item)}")
    pads = input_ids == placeholder_id
    count = int(pads.sum())
    if count != len(features):
        if count != len(rows_per_item):
            raise ValueError(
                f"input_ids holds {count} placeholders (id {placeholder_id}) for {len(rows_per_item)} media "
                f"items with {len(features)} feature rows; allowed: one placeholder per item or one per row"
            )
        source = widen(pads, rows_per_item)
        embeddings = embeddings.flatten(0, 1)[source]
        input_ids = input_ids.flatten()[source]
        pads = pads.flatten()[source]
    where = torch.nonzero(pads.flatten())[:, 0]
    check_unbroken(where, rows_per_item, input_ids.shape[1])
    filled = embeddings.flatten(0, 1).index_copy(0, where, features.to(embeddings.dtype))
    return filled.view_as(embeddings), input_ids


def widen(pads: Bool[Tensor, "B T"], rows_per_item: Sequence[int]) -> Int[Tensor, "B T2"]:
    """For each position of the widened batch, the position in the flattened old one that it repeats."""
    repeats = torch.ones_like(pads, dtype=torch.long)
    repeats[pads] = torch.as_tensor(rows_per_item, device=pads.device)
    lengths = repeats.sum(dim=1).tolist()
    if len(set(lengths)) > 1:
        raise ValueError(
            f"one placeholder per item would make the sequences of the batch {lengths} tokens long; "
            "write one placeholder per feature row, and pad, or run them one by one"
        )
    source = torch.arange(pads.numel(), device=pads.device)
    return source.repeat_interleave(repeats.flatten()).view(len(lengths), -1)


def check_unbroken(where: Int[Tensor, " rows"], rows_per_item: Sequence[int], tokens: int) -> None:
    """Refuse an item whose placeholders are not neighbours in one sequence: cut, or in the wrong order."""
    start = 0
    ends = where.tolist()
    for item, rows in enumerate(rows_per_item):
        first, last = ends[start], ends[start + rows - 1]
        if last - first != rows - 1 or first // tokens != last // tokens:
            raise ValueError(
                f"the {rows} placeholders of media item {item} are not side by side (first at "
                f"{first % tokens}, last at {last % tokens} of {tokens} tokens): items in another order?"
            )
        start += rows
