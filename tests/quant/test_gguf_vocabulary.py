"""Merges instead of ranks: applied in order they give our tokenizer's ids; control tokens stay out of reach."""

from __future__ import annotations

import pytest

from nanok3.data.tokenizer import Tokenizer, train_tokenizer
from nanok3.quant.gguf_vocabulary import CONTROL, NORMAL, UNUSED, halves, merges, printable, vocabulary

TEXT = "the cat sat on the mat, the hat; naïve façade 漢字 12345 don't DON'T camelCase\n\n" * 3


def ranks_of(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size - len(tokenizer.special))]


def merged(word: bytes, order: dict[str, int]) -> list[str]:
    """As llama.cpp does: the pair that stands first in the list, the leftmost of equals."""
    parts = [printable(word[i : i + 1]) for i in range(len(word))]
    while True:
        places = [order.get(f"{a} {b}", len(order)) for a, b in zip(parts, parts[1:])]
        if not places or min(places) == len(order):
            return parts
        at = places.index(min(places))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT, "ab abc abcd bcd " * 4], 560)


def test_merging_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    tokens = ranks_of(tokenizer)
    order = {pair: i for i, pair in enumerate(merges(tokens))}
    ids = {printable(token): i for i, token in enumerate(tokens)}
    assert len(order) == len(tokens) - 256, "every token but the bytes has a merge"
    for word in ("the", " cat", "abcdbcd", "naïve", "漢字", "zzz", " DON'T"):
        assert [ids[part] for part in merged(word.encode(), order)] == tokenizer.encode(word), word


def test_a_token_that_no_merging_reaches_has_no_merge() -> None:
    tokens = [b"a", b"b", b"c", b"abc"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    assert halves(b"abc", ranks) == [b"a", b"b", b"c"] and merges(tokens) == []


def test_bytes_are_written_as_byte_level_files_do() -> None:
    assert printable(b" a\n\xff\x00\xad") == "ĠaĊÿĀŃ"
    assert len({printable(bytes([byte])) for byte in range(256)}) == 256


def test_kinds_and_special_ids(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size + 3
    keys = vocabulary(ranks_of(tokenizer), tokenizer.special, size, {"eos": tokenizer.eos_id})
    texts, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(texts) == len(kinds) == len(set(texts)) == size
    assert texts[tokenizer.eos_id] == "[EOS]" and keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_id
    assert kinds == [NORMAL] * (tokenizer.vocab_size - 256) + [CONTROL] * 256 + [UNUSED] * 3


def test_a_tokenizer_of_bytes_has_no_merges() -> None:
    assert "tokenizer.ggml.merges" not in vocabulary([bytes([b]) for b in range(256)], {"[EOS]": 256}, 257, {})


def test_what_cannot_be_written_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="the model only 500"):
        vocabulary(ranks_of(tokenizer), tokenizer.special, 500, {})
    with pytest.raises(ValueError, match="both written 'a'"):
        vocabulary([b"a"], {"a": 1}, 2, {})
