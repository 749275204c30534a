from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from nanok3.data import loader as loader_module
from nanok3.data import prepared
from nanok3.data.loader import MixtureLoader, Span
from nanok3.data.packing import NO_TARGET, Batch
from nanok3.data.pictures.kinds import PictureMix
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, TokenSource, prepare
from nanok3.data.tokenizer import Tokenizer

T = 48


@pytest.fixture
def sources(tmp_path: Path, tokenizer: Tokenizer, prose: str, monkeypatch: pytest.MonkeyPatch) -> list[TokenSource]:
    """Two sources of many documents in several shards, with epochs of several groups."""
    monkeypatch.setattr(prepared, "_SHARD_TOKENS", 700)
    monkeypatch.setattr(loader_module, "_GROUP_TOKENS", 1000)
    words = prose.split()
    for name, count in (("a", 50), ("b", 30)):
        texts = [f"{name}{i} " + " ".join(words[i * 3 : i * 3 + 5 + i * 7 % 60]) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    mixture = [Source("a", 3.0, tmp_path / "a.jsonl"), Source("b", 1.0, tmp_path / "b.jsonl")]
    prepare(mixture, tokenizer, tmp_path / "out")
    return Prepared(tmp_path / "out").sources()


@pytest.fixture
def seen(tmp_path: Path, tokenizer: Tokenizer, prose: str) -> list[TokenSource]:
    """A text and pictures."""
    (tmp_path / "text.txt").write_text(prose * 20)
    mix = PictureMix(0.2, 60, ("shapes",))
    prepare([Source("text", 1.0, tmp_path / "text.txt")], tokenizer, tmp_path / "seen", 0.0, pictures=mix)
    return Prepared(tmp_path / "seen").sources()


def rows_of(batch: Batch) -> list[tuple]:
    """One record a row: ids, targets, and where the segments come from."""
    length = batch.input_ids.shape[1]
    bounds = batch.cu_seqlens.tolist()
    segments: dict[int, list] = {}
    for segment, begin, end in zip(batch.ids, bounds, bounds[1:], strict=False):
        segments.setdefault(begin // length, []).append((segment, begin % length, end - begin))
    rows = zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True)
    return [(inputs, targets, segments[number]) for number, (inputs, targets) in enumerate(rows)]


def step(loaders: list[MixtureLoader]) -> list[tuple]:
    """The rows of one step of all ranks, in the order of the sequence."""
    parts = [rows_of(next(loader)) for loader in loaders]
    return [row for place in zip(*parts, strict=True) for row in place]


def predictions(rows: list[tuple]) -> Counter:
    found: Counter = Counter()
    for _, _, segments in rows:
        for segment, _, length in segments:
            if segment is not None:
                found.update((segment.source, segment.document, segment.offset + i) for i in range(length))
    return found


def test_every_epoch_sees_every_prediction_once_in_another_order(sources: list[TokenSource]) -> None:
    source = sources[0]
    loader = MixtureLoader([source], [1.0], batch_size=1, seq_len=T)
    epochs: list[list[tuple]] = []
    while len(epochs) < 4:
        row = rows_of(next(loader))
        epoch = loader.streams[0].epoch
        epochs += [[]] * (epoch + 1 - len(epochs))
        epochs[epoch] = epochs[epoch] + row
    everything = Counter((source.name, d, i) for d, tokens in enumerate(source.lengths) for i in range(tokens - 1))
    assert all(predictions(epoch) == everything for epoch in epochs[:3])
    orders = [[segment for _, _, segments in epoch for segment, _, _ in segments] for epoch in epochs[:3]]
    assert orders[0] != orders[1] != orders[2]


def test_every_epoch_has_its_own_order(sources: list[TokenSource]) -> None:
    loader, orders = MixtureLoader(sources, [3.0, 1.0], 1, T), {}
    while loader.streams[1].epoch < 3:
        orders.update({(stream.source.name, stream.epoch): tuple(stream.order) for stream in loader.streams})
        next(loader)
    assert len(set(orders.values())) == len(orders) >= 6


def test_rows_hold_the_documents_and_never_predict_across_them(sources: list[TokenSource]) -> None:
    loader = MixtureLoader(sources, [1.0, 1.0], batch_size=4, seq_len=T)
    by_name = {source.name: source for source in sources}
    for _ in range(20):
        batch = next(loader)
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == 4 * T and (batch.cu_seqlens.diff() > 0).all()
        for inputs, targets, segments in rows_of(batch):
            for segment, begin, length in segments:
                if segment is None:
                    assert targets[begin:] == [NO_TARGET] * length
                    continue
                tokens = by_name[segment.source].tokens(segment.document).tolist()
                end = segment.offset + length
                assert inputs[begin : begin + length] == tokens[segment.offset : end]
                assert targets[begin : begin + length] == tokens[segment.offset + 1 : end + 1]


def test_the_mixture_follows_the_weights_at_every_moment(sources: list[TokenSource]) -> None:
    loader = MixtureLoader(sources, [3.0, 1.0], batch_size=1, seq_len=T)
    taken = Counter()
    for number in range(1, 200):
        (row,) = rows_of(next(loader))
        taken[row[2][0][0].source] += 1
        assert abs(taken["a"] - 0.75 * number) < 1


def resumed(
    loaders: list[MixtureLoader], sources: list[TokenSource], batch_size: int, world: int
) -> list[MixtureLoader]:
    """The same run on `world` workers, through a file."""
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1
    made = [MixtureLoader(sources, [3.0, 1.0], batch_size, T, 5, rank, world) for rank in range(world)]
    for loader in made:
        loader.load_state_dict(json.loads(states[0]))
    return made


def test_an_interrupted_run_goes_on_to_the_token(sources: list[TokenSource]) -> None:
    """Three epochs of the smaller source: uninterrupted = interrupted in the middle of epoch 2, with 1 -> 2 -> 1 -> 3
    workers."""
    (whole,) = [MixtureLoader(sources, [3.0, 1.0], 6, T, 5)]
    expected: list[tuple] = []
    bounds = [0]
    while whole.streams[1].epoch < 3:
        expected += step([whole])
        while len(bounds) <= whole.streams[1].epoch:
            bounds.append(len(expected) // 6)
    steps, second = len(expected) // 6, (bounds[1] + bounds[2]) // 2
    assert bounds[1] < second - 1 and second + 5 < bounds[2]
    loaders, rows = [MixtureLoader(sources, [3.0, 1.0], 6, T, 5)], []
    for number in range(steps):
        if number in (second - 1, second, second + 3, second + 5):
            world = {second - 1: 2, second: 1, second + 3: 3, second + 5: 2}[number]
            loaders = resumed(loaders, sources, 6 // world, world)
        rows += step(loaders)
    assert rows == expected
    assert max(loaders[0].streams[index].epoch for index in (0, 1)) >= 3


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 20])
def test_saving_changes_nothing_and_restores_everything(sources: list[TokenSource], at: int) -> None:
    first = MixtureLoader(sources, [3.0, 1.0], 5, T, 1)
    for _ in range(at):
        next(first)
    state = copy.deepcopy(first.state_dict())
    second = MixtureLoader(sources, [3.0, 1.0], 5, T, 1)
    second.load_state_dict(state)
    assert second.state_dict() == state and state["rows"] == 5 * at
    for _ in range(30):
        one, two = next(first), next(second)
        assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.targets, two.targets)
        assert torch.equal(one.cu_seqlens, two.cu_seqlens) and one.ids == two.ids


def test_the_position_names_source_shard_document_and_offset(sources: list[TokenSource]) -> None:
    loader = MixtureLoader([sources[0]], [1.0], 1, T)
    shards = set()
    for _ in range(40):
        position = loader.state_dict()["positions"]["a"]
        segment = next(loader).ids[0]
        assert sources[0].locate(segment.document) == (position["shard"], position["document"])
        assert segment.offset == position["offset"]
        shards.add(position["shard"])
    assert len(shards) > 2


def test_ranks_share_the_rows_of_a_step(sources: list[TokenSource]) -> None:
    one = [MixtureLoader(sources, [3.0, 1.0], 6, T)]
    for world in (2, 3, 6):
        many = [MixtureLoader(sources, [3.0, 1.0], 6 // world, T, rank=rank, world=world) for rank in range(world)]
        assert step(many) == step([MixtureLoader(sources, [3.0, 1.0], 6, T)])
    assert step(one) != step(one)


def test_seeds_differ(sources: list[TokenSource]) -> None:
    firsts = [rows_of(next(MixtureLoader(sources, [3.0, 1.0], 6, T, seed))) for seed in (0, 0, 1)]
    assert firsts[0] == firsts[1] != firsts[2]


def test_a_position_in_another_run_is_refused(sources: list[TokenSource], tokenizer: Tokenizer, tmp_path: Path) -> None:
    mixture = [Source("a", 3.0, tmp_path / "a.jsonl"), Source("b", 1.0, tmp_path / "b.jsonl")]
    prepare(mixture, tokenizer, tmp_path / "other", seed=1)
    state = MixtureLoader(sources, [3.0, 1.0], 6, T).state_dict()
    for message, loader in {
        "seed was 0, is 1": MixtureLoader(sources, [3.0, 1.0], 6, T, 1),
        "seq_len was 48, is 32": MixtureLoader(sources, [3.0, 1.0], 6, 32),
        r"weights was \[0.75, 0.25\], is \[0.5, 0.5\]": MixtureLoader(sources, [1.0, 1.0], 6, T),
        "data was .*, is .*; cannot go on": MixtureLoader(Prepared(tmp_path / "other").sources(), [3.0, 1.0], 6, T),
    }.items():
        with pytest.raises(ValueError, match=f"data position: {message}"):
            loader.load_state_dict(state)


def test_another_shuffle_is_noticed(sources: list[TokenSource], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = MixtureLoader(sources, [3.0, 1.0], 6, T)
    next(loader)
    state = loader.state_dict()
    real = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: real([*key, 1]))
    with pytest.raises(ValueError, match=r"a was saved at .*, but the order here gives .* shuffles differently"):
        MixtureLoader(sources, [3.0, 1.0], 6, T).load_state_dict(state)


def test_wrong_arguments(sources: list[TokenSource], tokenizer: Tokenizer, tmp_path: Path) -> None:
    for arguments, message in {
        (2, 4, T, 0, 1): "weights: 2 for 1 sources",
        (0, 4, T, 0, 1): "weights: 0 for 1 sources",
        (1, 0, T, 0, 1): "batch_size: 0; expected at least 1",
        (1, 4, 0, 0, 1): "seq_len: 0; expected at least 1",
        (1, 4, T, 2, 2): "rank: 2; expected 0 to world - 1 = 1",
    }.items():
        weights, batch_size, seq_len, rank, world = arguments
        with pytest.raises(ValueError, match=message):
            MixtureLoader(sources[:1], [1.0] * weights, batch_size, seq_len, 0, rank, world)
    with pytest.raises(ValueError, match=r"weights: -1\.0 for source a"):
        MixtureLoader(sources, [-1.0, 2.0], 4, T)
    for weight in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"weights: {weight} for source b; expected a positive number"):
            MixtureLoader(sources, [1.0, weight], 4, T)
    with pytest.raises(ValueError, match=r"weights: \[1e\+308, 1e\+308\]; their sum"):
        MixtureLoader(sources, [1e308, 1e308], 4, T)
    with pytest.raises(ValueError, match="seed: -1; expected 0 or more"):
        MixtureLoader(sources, [1.0, 2.0], 4, T, -1)
    with pytest.raises(ValueError, match="weights: 0 for 0 sources"):
        MixtureLoader([], [], 4, T)


def test_a_source_may_take_part_in_some_rows_only(sources: list[TokenSource]) -> None:
    """Its share holds within its span; the position is restored across the bounds."""
    loader = MixtureLoader(sources, [1.0, 1.0], 1, T, spans=[Span(), Span(20, 50)])
    names = [next(loader).ids[0].source for _ in range(70)]
    second = [at for at, name in enumerate(names) if name == sources[1].name]
    assert len(second) == 15 and min(second) >= 20 and max(second) < 50
    loader = MixtureLoader(sources, [1.0, 1.0], 1, T, spans=[Span(), Span(20, 50)])
    stretches = [(loader.stretch, next(loader))[0] for _ in range(70)]
    assert stretches == [0] * 20 + [1] * 30 + [2] * 20
    swapped = MixtureLoader(sources, [1.0, 3.0], 1, T, spans=[Span(8), Span(0, 8)])
    firsts = [next(swapped) for _ in range(5)]
    again = MixtureLoader(sources, [1.0, 3.0], 1, T, spans=[Span(8), Span(0, 8)])
    again.load_state_dict(json.loads(json.dumps(swapped.state_dict())))
    rest = [next(swapped) for _ in range(8)]
    assert [batch.ids for batch in rest] == [next(again).ids for _ in range(8)]
    names = [batch.ids[0].source for batch in [*firsts, *rest]]
    assert names == [sources[1].name] * 8 + [sources[0].name] * 5
    with pytest.raises(ValueError, match="spans was None, is"):
        again.load_state_dict(MixtureLoader(sources, [1.0, 3.0], 1, T).state_dict())
    with pytest.raises(ValueError, match="no source takes part from row 8 on"):
        MixtureLoader(sources, [1.0, 1.0], 1, T, spans=[Span(0, 8), Span(0, 5)])


def test_what_waits_leaves_its_rows_to_its_own_sort() -> None:
    """Pictures that begin later do not give their rows to texts, and texts not to pictures."""
    spans = [Span(), Span(), Span(8), Span(4)]
    found = loader_module._stretches([0.2, 0.1, 0.4, 0.3], spans, [False, True, True, True])
    assert [begin for begin, _, _ in found] == [0, 4, 8]
    shares = [0.2, 0.8, 0, 0], [0.2, 0.2, 0, 0.6], [0.2, 0.1, 0.4, 0.3]
    for (_, _, share), expected in zip(found, shares, strict=True):
        assert share == pytest.approx(expected)
    (_, _, alone), _ = loader_module._stretches([0.5, 0.5], [Span(), Span(3)], [False, True])
    assert alone == [1, 0]


def test_pictures_may_lead() -> None:
    """In the first rows they have 95 of 100, whichever of them take part; then every source has its weight."""
    weights, pictured = [0.45, 0.15, 0.1, 0.3], [False, False, True, True]
    found = loader_module._stretches(weights, [Span(), Span(), Span(), Span(8)], pictured, 12)
    assert [begin for begin, _, _ in found] == [0, 8, 12]
    shares = [0.0375, 0.0125, 0.95, 0], [0.0375, 0.0125, 0.2375, 0.7125], weights
    for (_, _, share), expected in zip(found, shares, strict=True):
        assert share == pytest.approx(expected)
    few_texts = [0.02, 0.98]
    assert all(
        share == few_texts for _, _, share in loader_module._stretches(few_texts, [Span()] * 2, [False, True], 9)
    )


def test_without_pictures_nothing_leads(sources: list[TokenSource]) -> None:
    plain, led = (MixtureLoader(sources, [1.0, 1.0], 2, T, picture_lead=share) for share in (0.0, 0.5))
    assert [next(plain).ids for _ in range(12)] == [next(led).ids for _ in range(12)]
    assert plain.state_dict() == led.state_dict()


def test_the_lead_ends_where_the_run_says(seen: list[TokenSource]) -> None:
    """And a restored position goes on the same, before and after the end."""

    def loader() -> MixtureLoader:
        return MixtureLoader(seen, [0.8, 0.2], 4, 256, picture_lead=0.5)

    def pictured(loader: MixtureLoader, steps: int, share: float) -> list[bool]:
        found = []
        for _ in range(steps):
            loader.reached(share)
            for _, _, segments in rows_of(next(loader)):
                found.append(segments[0][0].source == "shapes")
        return found

    first = loader()
    assert sum(pictured(first, 10, 0.4)) == 38 and first.stretch == 0
    middle = json.loads(json.dumps(first.state_dict()))
    after = pictured(first, 10, 0.6)
    assert sum(after) == 8 and first.stretch == 1
    second = loader()
    second.load_state_dict(middle)
    assert pictured(second, 10, 0.6) == after
    third = loader()
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    rest = pictured(third, 5, 0.7)
    assert rest == pictured(first, 5, 0.7) == pictured(second, 5, 0.7) and third.stretch == 1
