"""The definition by hand, and that packing and windows do not change it."""

from __future__ import annotations

import lzma
import math
import zlib

import pytest
import torch
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.eval.bits_per_byte import (
    bits_per_byte,
    compressors,
    cut,
    evaluate_slices,
    evaluating,
    first_bytes,
    next_token_nats,
    pack,
)
from nanok3.model.decoder import K3


class Table(nn.Module):
    """A bigram model: `log_p[token]` are the logits of the next token, whatever came before."""

    def __init__(self, log_p: Tensor) -> None:
        super().__init__()
        self.log_p = log_p
        self.rows: list[int] = []

    def hidden_states(self, input_ids: Tensor, cu_seqlens: Tensor | None = None, state: object = None) -> Tensor:
        self.rows.append(input_ids.shape[1])
        return self.log_p[input_ids]

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def new_state(self, batch_size: int = 1) -> list[None]:
        return []


class Bytes:
    """A tokenizer without merges."""

    def encode_batch(self, texts) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


@pytest.fixture(scope="module")
def k3() -> K3:
    torch.manual_seed(3)
    return K3(K3Config.tiny()).double()


def documents(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]


def test_a_uniform_model_pays_log2_vocabulary_for_every_token() -> None:
    score = bits_per_byte(Table(torch.zeros(16, 16)), [[1, 2, 3], [4], [], [5, 6]], byte_count=12, vocab_size=16)
    assert (score.tokens, score.bytes) == (6, 12)
    assert score.bits_per_byte == pytest.approx(6 * math.log2(16) / 12)
    assert score.loss == pytest.approx(math.log(16))


def test_a_bigram_model_by_hand() -> None:
    """Two letters; after a comes b with 3/4, after b comes a with 1/2. "ab", "bba" of 5 bytes."""
    table = Table(torch.tensor([[1 / 4, 3 / 4], [1 / 2, 1 / 2]]).log())
    score = bits_per_byte(table, [[0, 1], [1, 1, 0]], byte_count=5, vocab_size=2)
    bits = [1, -math.log2(3 / 4), 1, 1, 1]  # a first token costs log2(2) = 1
    assert score.bits_per_byte == pytest.approx(sum(bits) / 5)


def test_a_perfect_model_pays_for_first_tokens_only() -> None:
    cycle = torch.full((4, 4), -1e4)
    cycle[torch.arange(4), (torch.arange(4) + 1) % 4] = 0
    score = bits_per_byte(Table(cycle), [[0, 1, 2, 3, 0, 1]], byte_count=6, vocab_size=4)
    assert score.bits_per_byte == pytest.approx(2 / 6)
    in_pieces = bits_per_byte(Table(cycle), [[0, 1, 2, 3, 0, 1]], byte_count=6, vocab_size=4, context=2)
    assert in_pieces.bits_per_byte == pytest.approx(2 / 6)  # a piece's first token was the last of the piece before


def test_packed_equals_one_document_at_a_time(k3: K3) -> None:
    texts = documents(5, 40, 1, 17, 64, 3)
    together = bits_per_byte(k3, texts, 100, 1024, row=80)
    alone = [bits_per_byte(k3, [text], 100, 1024) for text in texts]
    assert together.nats == pytest.approx(sum(score.nats for score in alone), rel=1e-9)
    assert together.tokens == 130


def test_windows_of_a_long_document_are_exact(k3: K3) -> None:
    whole = bits_per_byte(k3, documents(150), 100, 1024, row=4096)
    for row in (16, 33, 148, 149, 150):
        assert bits_per_byte(k3, documents(150), 100, 1024, row=row).nats == pytest.approx(whole.nats, rel=1e-9)
    assert bits_per_byte(k3, documents(150), 100, 1024, context=None, row=16).nats == pytest.approx(whole.nats)


def test_nats_equal_a_plain_cross_entropy(k3: K3) -> None:
    [text] = documents(50)
    with torch.no_grad():
        logits = k3(torch.tensor([text])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum").item()
    assert bits_per_byte(k3, [text], 100, 1024).nats == pytest.approx(expected + math.log(1024), rel=1e-9)


def test_context_limits_what_a_token_sees(k3: K3) -> None:
    """Pieces of 30 predictions are scored like documents that begin with the last token of the piece before."""
    [text] = documents(70)
    limited = bits_per_byte(k3, [text], 100, 1024, context=30)
    pieces = bits_per_byte(k3, [text[:31], text[30:61], text[60:]], 100, 1024)
    assert limited.nats == pytest.approx(pieces.nats - 2 * math.log(1024), rel=1e-9)
    assert limited.nats != pytest.approx(bits_per_byte(k3, [text], 100, 1024).nats, rel=1e-9)


def test_every_token_is_predicted_once() -> None:
    pieces = cut(range(10), 4)
    assert [list(piece) for piece in pieces] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    assert list(cut(range(10), None)[0]) == list(range(10))
    assert cut([], 4) == cut([7], 4) == cut([7], None) == []


def test_rows_hold_as_many_whole_pieces_as_fit() -> None:
    assert [[len(p) for p in group] for group in pack(documents(6, 5, 4, 10, 2), 9)] == [[6, 5], [4], [10], [2]]
    table = Table(torch.zeros(1000, 1000))
    bits_per_byte(table, documents(6, 5, 4, 10, 2), 1, 1000, row=9)
    assert table.rows == [9, 3, 9, 1]


def test_chunks_of_logits_do_not_show() -> None:
    hidden, targets = torch.randn(2500, 7), torch.randint(0, 7, (2500,))
    expected = torch.nn.functional.cross_entropy(hidden, targets, reduction="none").double()
    torch.testing.assert_close(next_token_nats(Table(hidden), hidden, targets), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name, value", [("context", 1), ("row", 0), ("context", -5)])
def test_sizes_below_two_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        bits_per_byte(Table(torch.zeros(2, 2)), [[0, 1]], 2, 2, **{name: value})


def test_evaluation_mode_is_left_behind(k3: K3) -> None:
    k3.train()
    with pytest.raises(RuntimeError), evaluating(k3):
        assert not k3.training and not torch.is_grad_enabled()
        raise RuntimeError
    assert k3.training and torch.is_grad_enabled()


def test_compressors_on_the_same_bytes() -> None:
    text = b"to be or not to be, " * 100
    found = compressors(text)
    assert found == {
        "zlib": len(zlib.compress(text, 9)) * 8 / 2000,
        "xz": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) * 8 / 2000,
    }
    with pytest.raises(ValueError, match="at least one byte"):
        compressors(b"")


def test_a_slice_is_scored_on_the_bytes_that_were_compressed() -> None:
    slices = {"prose": ["Grüße, Welt. " * 30, "more"], "code": ["x = 1\n"], "empty": ["", ""], "none": []}
    found = evaluate_slices(Table(torch.zeros(256, 256)), Bytes(), slices, vocab_size=256)
    assert list(found) == ["prose", "code"]
    joined = "".join(slices["prose"]).encode()
    assert found["prose"]["bytes"] == found["prose"]["tokens"] == len(joined) and found["prose"]["documents"] == 2
    assert found["prose"]["bits_per_byte"] == pytest.approx(8)  # 256 equally likely bytes
    assert found["prose"]["zlib"] == compressors(joined)["zlib"] and found["prose"]["xz"] == compressors(joined)["xz"]


def test_the_first_bytes_of_a_slice() -> None:
    assert first_bytes(["abc", "def"], 5) == ["abc", "de"]
    assert first_bytes(["aü", "x"], 2) == ["a"]  # the umlaut's two bytes are not split
    assert first_bytes(["abc", "def"], None) == ["abc", "def"]
    assert first_bytes(["a\ud800b"], 10) == ["a\ufffdb"]  # a lone surrogate, as the tokenizer reads it
