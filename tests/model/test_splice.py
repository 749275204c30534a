"""Placeholders and feature rows: two ways of writing a prompt, one result, and no picture lost on the way."""

from __future__ import annotations

import pytest
import torch

from nanok3.model.splice import splice

PAD = 9


def embed(ids, width=3):
    """A text embedding from which the id can be read back."""
    return ids[..., None].double() * torch.ones(width, dtype=torch.float64)


def rows(count, width=3):
    """Feature rows numbered -1, -2, ..., unlike any text embedding."""
    return -torch.arange(1, count + 1, dtype=torch.float64)[:, None] * torch.ones(width, dtype=torch.float64)


def run(ids, rows_per_item, count=None):
    ids = torch.tensor(ids)
    return splice(embed(ids), ids, rows(sum(rows_per_item) if count is None else count), rows_per_item, PAD)


SINGLE_AND_EXPANDED = [
    ([1, PAD, 2], [1, PAD, PAD, PAD, 2], [3]),
    ([PAD, 1], [PAD, PAD, 1], [2]),
    ([1, PAD], [1, PAD, PAD], [2]),
    ([PAD], [PAD, PAD], [2]),
    ([1, PAD, PAD, 2], [1, PAD, PAD, PAD, PAD, PAD, 2], [2, 3]),
    ([PAD, 1, PAD, 2, PAD], [PAD, PAD, 1, PAD, 2, PAD, PAD], [2, 1, 2]),
    ([1, PAD, 2, PAD], [1, PAD, 2, PAD], [1, 1]),
]


@pytest.mark.parametrize(("single", "expanded", "rows_per_item"), SINGLE_AND_EXPANDED)
def test_both_ways_of_writing_give_the_same(single, expanded, rows_per_item):
    embeddings, ids = run([single], rows_per_item)
    again, same_ids = run([expanded], rows_per_item)
    assert ids.tolist() == [expanded] and same_ids.tolist() == [expanded]
    assert torch.equal(embeddings, again)


@pytest.mark.parametrize(("single", "expanded", "rows_per_item"), SINGLE_AND_EXPANDED)
def test_rows_stand_in_order_and_text_stays(single, expanded, rows_per_item):
    embeddings, _ = run([single], rows_per_item)
    row = iter(range(-1, -100, -1))
    wanted = [next(row) if token == PAD else token for token in expanded]
    assert embeddings[0].tolist() == [[value] * 3 for value in wanted]


def test_a_batch_is_filled_sequence_by_sequence():
    embeddings, ids = run([[1, PAD, 2], [PAD, 3, 4]], [2, 2])
    assert ids.tolist() == [[1, PAD, PAD, 2], [PAD, PAD, 3, 4]]
    assert embeddings[..., 0].tolist() == [[1, -1, -2, 2], [-3, -4, 3, 4]]


def test_an_expanded_batch_may_mix_sizes_and_counts():
    embeddings, ids = run([[PAD, PAD, PAD, 2], [PAD, 3, 4, 5], [1, 1, 1, 1]], [3, 1])
    assert ids.shape == (3, 4)
    assert embeddings[..., 0].tolist() == [[-1, -2, -3, 2], [-4, 3, 4, 5], [1, 1, 1, 1]]


def test_text_alone_passes_through():
    embeddings, ids = run([[1, 2]], [])
    assert ids.tolist() == [[1, 2]] and embeddings[0, :, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "rows_per_item", "count", "message"),
    [
        ([[1, PAD, 2]], [], None, "1 placeholders .id 9. for 0 media items with 0 feature rows"),
        ([[1, 2]], [2], None, "0 placeholders .id 9. for 1 media items with 2 feature rows"),
        ([[PAD, PAD, 1]], [3], None, "2 placeholders .id 9. for 1 media items with 3 feature rows"),
        ([[PAD, 1, PAD]], [4], None, "2 placeholders .id 9. for 1 media items with 4 feature rows"),
        ([[PAD, PAD, 1, PAD, PAD]], [2, 4], None, "4 placeholders .id 9. for 2 media items with 6"),
        ([[PAD]], [2], 3, r"3 feature rows, but the items have 2 \[2\]"),
        ([[PAD, PAD, 1, PAD, PAD]], [3, 1], None, "the 3 placeholders of media item 0 are not side by side"),
        ([[1, PAD], [PAD, 1]], [2], None, "placeholders of media item 0 are not side by side"),
        ([[PAD, 1], [2, 3]], [2], None, r"sequences of the batch \[3, 2\] tokens long"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_counts(ids, rows_per_item, count, message):
    with pytest.raises(ValueError, match=message):
        run(ids, rows_per_item, count)


def test_gradients_go_to_the_features_and_to_the_text_only():
    ids = torch.tensor([[1, PAD, 2]])
    embeddings, features = embed(ids).requires_grad_(), rows(2).requires_grad_()
    out, _ = splice(embeddings, ids, features, [2], PAD)
    (out * torch.tensor([1.0, 10, 100, 1000], dtype=torch.float64)[:, None]).sum().backward()
    assert features.grad[:, 0].tolist() == [10, 100]
    assert embeddings.grad[0, :, 0].tolist() == [1, 0, 1000]


def test_features_take_the_dtype_of_the_text():
    ids = torch.tensor([[1, PAD]])
    embeddings, _ = splice(embed(ids).bfloat16(), ids, rows(1), [1], PAD)
    assert embeddings.dtype == torch.bfloat16
