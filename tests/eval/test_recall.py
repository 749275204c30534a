"""The recall tasks: an oracle answers everything, a blind guess is right as often as chance says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.eval.recall import IGNORE, SEGMENT, copy_batch, key_ids, pairs_batch, recall_probe, recall_task, value_ids
from nanok3.model.decoder import K3

IDS = list(range(100, 164))


class Answering(nn.Module):
    """A model whose next token is `answer(inputs)`, one id a position, with all of the probability."""

    def __init__(self, answer: Callable[[Tensor], Tensor], vocab: int = 256) -> None:
        super().__init__()
        self.answer, self.vocab = answer, vocab

    def hidden_states(self, input_ids: Tensor, cu_seqlens: object = None, state: object = None) -> Tensor:
        return 100.0 * torch.nn.functional.one_hot(self.answer(input_ids), self.vocab).float()

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def new_state(self, batch_size: int = 1) -> None:
        return None


def after_the_last_occurrence(inputs: Tensor) -> Tensor:
    """The token that followed the latest earlier occurrence of the current one (itself if there is none)."""
    out = inputs.clone()
    for row, sequence in enumerate(inputs.tolist()):
        follower: dict[int, int] = {}
        for t, token in enumerate(sequence):
            out[row, t] = follower.get(token, token)
            if t + 1 < len(sequence):
                follower[token] = sequence[t + 1]
    return out


def guessing(ids: Tensor) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(11)
    return lambda inputs: ids[torch.randint(len(ids), inputs.shape, generator=generator)]


def test_a_copy_repeats_its_segment_at_the_distance() -> None:
    batch = copy_batch(torch.tensor(IDS), 40, 3, torch.Generator().manual_seed(0))
    assert batch.inputs.shape == batch.targets.shape == (3, 40 + SEGMENT - 1)
    assert batch.asked.sum(1).tolist() == [SEGMENT - 1] * 3 and not batch.asked[:, :40].any()
    torch.testing.assert_close(batch.inputs[:, 40:], batch.inputs[:, : SEGMENT - 1])
    torch.testing.assert_close(batch.targets[:, 40:], batch.inputs[:, 1:SEGMENT])


def test_a_short_distance_shortens_the_segment() -> None:
    batch = copy_batch(torch.tensor(IDS), 4, 2, torch.Generator().manual_seed(0))
    assert batch.inputs.shape == (2, 7) and batch.asked.sum(1).tolist() == [3, 3]
    torch.testing.assert_close(batch.targets[:, 4:], batch.inputs[:, 1:4])


def test_pairs_are_asked_for_once_each_in_another_order() -> None:
    ids = torch.tensor(IDS)
    batch = pairs_batch(ids, 8, 5, torch.Generator().manual_seed(0))
    assert batch.inputs.shape == (5, 31)
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist()):
        binding = dict(zip(inputs[0:16:2], inputs[1:16:2]))
        assert len(binding) == 8 and set(binding) <= set(key_ids(ids).tolist())
        assert set(binding.values()) <= set(value_ids(ids).tolist())
        assert sorted(inputs[16::2]) == sorted(binding) and inputs[16::2] != inputs[0:16:2]
        assert targets[16::2] == [binding[key] for key in inputs[16::2]]
        assert set(targets[:16] + targets[17::2]) == {IGNORE}


def test_fewer_queries_than_pairs() -> None:
    batch = pairs_batch(torch.tensor(IDS), 8, 5, torch.Generator().manual_seed(0), queries=2)
    assert batch.inputs.shape == (5, 19) and batch.asked.sum(1).tolist() == [2] * 5


@pytest.mark.parametrize(
    "pairs, queries, message", [(0, None, "pairs is 0"), (33, None, "allow 1 to 32"), (4, 5, "queries is 5")]
)
def test_impossible_tasks_are_refused(pairs: int, queries: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pairs_batch(torch.tensor(IDS), pairs, 1, torch.Generator(), queries)


def test_a_distance_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="distance is 1"):
        copy_batch(torch.tensor(IDS), 1, 1, torch.Generator())


def test_an_oracle_answers_all_pairs() -> None:
    found = recall_probe(Answering(after_the_last_occurrence), IDS, distances=(), pairs=(1, 8, 32, 33), samples=4)
    assert [entry["pairs"] for entry in found["pairs"]] == [1, 8, 32]  # 64 ids have no 33 keys
    assert all(entry["accuracy"] == 1.0 and entry["nats"] < 1e-6 for entry in found["pairs"])
    assert [entry["predictions"] for entry in found["pairs"]] == [128, 128, 128]
    assert [entry["shown"] for entry in found["pairs"]] == [1, 1 / 8, 1 / 32]


@pytest.mark.parametrize("distance", [4, 16, 100])
def test_an_oracle_that_looks_back_copies_at_its_distance_only(distance: int) -> None:
    oracle = Answering(lambda inputs: inputs.roll(distance - 1, dims=1))
    found = recall_probe(oracle, IDS, distances=(distance, distance + 7), pairs=(), samples=8)
    right, wrong = found["copy"]
    assert right["accuracy"] == 1.0 and right["distance"] == distance
    assert wrong["accuracy"] < 0.2


def test_guesses_are_right_as_often_as_chance_says() -> None:
    ids = list(range(8))
    found = recall_probe(Answering(guessing(torch.tensor(ids)), 8), ids, (64,), (4,), samples=200)
    copies, pairs = found["copy"][0], found["pairs"][0]
    assert found["copy_chance"] == 1 / 8 and found["pairs_chance"] == 1 / 4
    assert abs(copies["accuracy"] - 1 / 8) < 4 * math.sqrt(1 / 8 * 7 / 8 / copies["predictions"])
    values = Answering(guessing(torch.tensor(ids[4:])), 8)
    pairs = recall_probe(values, ids, (), (4,), samples=200)["pairs"][0]
    assert abs(pairs["accuracy"] - 1 / 4) < 4 * math.sqrt(1 / 4 * 3 / 4 / pairs["predictions"])


def test_the_probe_is_the_same_every_time_and_leaves_the_model_alone() -> None:
    torch.manual_seed(5)
    model = K3(K3Config.tiny()).train()
    state = torch.get_rng_state()
    first = recall_probe(model, IDS, (16, 32), (2, 4), samples=2)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert first == recall_probe(model, IDS, (16, 32), (2, 4), samples=2)
    assert first != recall_probe(model, IDS, (16, 32), (2, 4), samples=2, seed=1)
    assert all(entry["nats"] == pytest.approx(math.log(1024), abs=0.5) for entry in first["copy"])  # untrained


def test_the_training_task_is_endless_and_seeded() -> None:
    one, same, other = (recall_task(IDS, 4, 2, seed) for seed in (0, 0, 1))
    first = next(one)
    assert torch.equal(first.inputs, next(same).inputs) and not torch.equal(first.inputs, next(other).inputs)
    assert not torch.equal(first.inputs, next(one).inputs)


def test_too_few_or_repeated_ids_are_refused() -> None:
    for ids in ([1, 2, 3], [1, 2, 2, 3, 4]):
        with pytest.raises(ValueError, match="at least 4, each once"):
            recall_probe(Answering(after_the_last_occurrence), ids)


@pytest.mark.slow
def test_a_tiny_model_learns_the_pairs() -> None:
    model = K3(K3Config.tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for _, batch in zip(range(300), recall_task(IDS, 4, 64)):
        logits = model(batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert recall_probe(model, IDS, (), (4,), seed=99)["pairs"][0]["accuracy"] > 0.9
