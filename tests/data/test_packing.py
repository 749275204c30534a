from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanok3.data.packing import NO_TARGET, Piece, Segment, collate, one_pass, pack
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, TokenSource, prepare
from nanok3.data.tokenizer import Tokenizer


def test_pack_by_hand() -> None:
    assert pack([(0, 11), (1, 4)], 5) == [[Piece(0, 0, 5)], [Piece(0, 5, 5)], [Piece(1, 0, 3)]]
    assert pack([(0, 4), (1, 3)], 5) == [[Piece(0, 0, 3), Piece(1, 0, 2)]]
    assert pack([(0, 8)], 7) == [[Piece(0, 0, 7)]]
    assert pack([(0, 9)], 7) == [[Piece(0, 0, 7)], [Piece(0, 7, 1)]]
    assert pack([(0, 1), (1, 0)], 7) == [] == pack([], 7)
    # nothing fits behind the first: the other is cut to fill the row
    assert pack([(0, 5), (1, 5)], 6) == [[Piece(1, 0, 4), Piece(0, 0, 2)], [Piece(0, 2, 2)]]


@given(st.lists(st.integers(0, 90), max_size=40), st.sampled_from([1, 2, 7, 16, 32, 64]))
def test_every_prediction_is_in_one_row(lengths: list[int], seq_len: int) -> None:
    rows = pack(enumerate(lengths), seq_len)
    seen = Counter((p.document, p.start + i) for row in rows for p in row for i in range(p.length))
    assert seen == Counter((document, i) for document, tokens in enumerate(lengths) for i in range(tokens - 1))
    sizes = [sum(piece.length for piece in row) for row in rows]
    assert all(seq_len - size < max(1, seq_len // 16) for size in sizes[:-1]) and all(
        0 < size <= seq_len for size in sizes
    )


@pytest.fixture
def source(tmp_path: Path, tokenizer: Tokenizer, prose: str) -> TokenSource:
    (tmp_path / "notes").mkdir()
    for number, paragraph in enumerate(prose.split("\n\n")):
        (tmp_path / "notes" / f"{number:02}.txt").write_text(paragraph, "utf-8")
    prepare([Source("notes", 1.0, tmp_path / "notes")], tokenizer, tmp_path / "out", validation=0.0)
    (opened,) = Prepared(tmp_path / "out").sources()
    return opened


def test_collate(source: TokenSource) -> None:
    rows = [(source, [Piece(2, 3, 5), Piece(0, 0, 2)]), (source, [Piece(1, 0, 8)])]
    batch = collate(rows, 8)
    two, zero, one = (source.tokens(document).tolist() for document in (2, 0, 1))
    assert batch.input_ids.dtype == batch.targets.dtype == batch.cu_seqlens.dtype == torch.int64
    assert batch.input_ids.tolist() == [[*two[3:8], *zero[:2], source.pad_id], one[:8]]
    assert batch.targets.tolist() == [[*two[4:9], *zero[1:3], NO_TARGET], one[1:9]]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 8, 16]
    assert batch.ids == [Segment("notes", 2, 3), Segment("notes", 0, 0), None, Segment("notes", 1, 0)]


@pytest.mark.parametrize("seq_len", [1, 8, 33, 4096])
def test_one_pass_sees_every_token_once(source: TokenSource, tokenizer: Tokenizer, seq_len: int) -> None:
    predicted: dict[int, dict[int, tuple[int, int]]] = {document: {} for document in range(len(source))}
    for batch in one_pass(source, 3, seq_len):
        assert batch.input_ids.shape == batch.targets.shape and batch.input_ids.shape[0] <= 3
        flat, bounds = (batch.input_ids.flatten(), batch.targets.flatten()), batch.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == flat[0].numel() and set(range(0, bounds[-1], seq_len)) <= set(bounds)
        for segment, begin, end in zip(batch.ids, bounds, bounds[1:], strict=False):
            if segment is None:
                assert (flat[1][begin:end] == NO_TARGET).all()
                continue
            for i in range(begin, end):
                at = segment.offset + i - begin
                assert at not in predicted[segment.document]
                predicted[segment.document][at] = (int(flat[0][i]), int(flat[1][i]))
    for document, found in predicted.items():
        tokens = source.tokens(document).tolist()
        assert [found[i] for i in range(len(found))] == list(zip(tokens, tokens[1:], strict=False))
        assert tokens[-1] == tokenizer.eos_id and tokenizer.eos_id not in tokens[:-1]
