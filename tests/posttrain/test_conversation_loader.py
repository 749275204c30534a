"""The order of conversations: each once an epoch, and exact where a run goes on."""

from collections import Counter

import numpy as np
import pytest

from nanok3.posttrain.conversation_loader import ConversationLoader
from nanok3.posttrain.conversations import Conversations, Example


def source(count=700, name="some"):
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        ids = random.integers(0, 500, random.integers(3, 30))
        made.append(Example(ids, np.array([0, *[1] * (len(ids) - 1)], np.uint8), "here"))
    return Conversations(name, made, 511)


def same(one, two):
    return (one.input_ids == two.input_ids).all() and (one.targets == two.targets).all() and one.ids == two.ids


def test_every_conversation_once_an_epoch_in_another_order():
    loader = ConversationLoader(source(), 1, 64)
    epochs = []
    for epoch in range(2):
        rows = [next(loader)]
        while loader.row < len(loader.rows):
            rows.append(next(loader))
        assert loader.epoch == epoch
        counts = Counter(piece.document for row in rows for piece in row.ids if piece)
        assert counts == Counter(range(700))
        epochs.append([tuple(piece.document for piece in row.ids if piece) for row in rows])
    assert set(epochs[0]) != set(epochs[1])


@pytest.mark.parametrize("before", [0, 3, 61, 90])
def test_a_saved_position_goes_on_to_the_row(before):
    whole, begun = ConversationLoader(source(), 3, 64, seed=5), ConversationLoader(source(), 3, 64, seed=5)
    for _ in range(before):
        next(whole)
        next(begun)
    resumed = ConversationLoader(source(), 3, 64, seed=5)
    resumed.load_state_dict(begun.state_dict())
    assert all(same(next(whole), next(resumed)) for _ in range(120))


def test_a_position_of_other_data_is_refused():
    state = ConversationLoader(source(), 3, 64).state_dict()
    for other, what in (
        (ConversationLoader(source(699), 3, 64), "data"),
        (ConversationLoader(source(), 3, 64, seed=1), "seed was 0, is 1"),
        (ConversationLoader(source(), 3, 65), "seq_len was 64, is 65"),
    ):
        with pytest.raises(ValueError, match=f"data position: {what}"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="there are no conversations"):
        ConversationLoader(source(0), 3, 64)
