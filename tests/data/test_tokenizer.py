from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from nanok3.data.tokenizer import (
    PATTERN,
    RESERVED,
    SPECIAL_OFFSETS,
    StreamDecoder,
    Tokenizer,
    train_tokenizer,
)

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "tokenizer"
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "tiktoken.model").exists(),
    reason="the official vocabulary lies in ../shared, not in the repository",
)
SMALL = train_tokenizer([(Path(__file__).parents[1] / "fixtures" / "data" / "prose.txt").read_text("utf-8")], 700)


@pytest.fixture(scope="module")
def official() -> Tokenizer:
    return Tokenizer.load(GOLDEN)


# official numbers


@needs_golden
def test_official_vocabulary_and_names(official: Tokenizer) -> None:
    spec = json.loads((GOLDEN / "special_tokens.json").read_text())
    assert spec["pattern"] == PATTERN
    assert official.vocab_size == spec["vocab_size"] == 163840
    assert {name: official.special[name] for name in spec["named"]} == spec["named"]
    assert len(official.special) == spec["num_reserved"] == RESERVED
    assert official.special["<|reserved_token_163592|>"] == 163592
    assert [official.end_of_msg_id, official.eos_id] == spec["stop_ids"]
    assert (official.bos_id, official.pad_id) == (163584, 163839)


@needs_golden
def test_official_cases(official: Tokenizer) -> None:
    cases = json.loads((GOLDEN / "cases.json").read_text("utf-8"))["cases"]
    assert len(cases) == 65
    for case in cases:
        assert official.encode(case["text"]) == case["ids_plain"], case["name"]
        assert official.encode(case["text"], allow_special=True) == case["ids_special"], case["name"]
        assert official.decode(case["ids_plain"]) == official.decode(case["ids_special"]) == case["text"]
    texts = [case["text"] for case in cases]
    assert official.encode_batch(texts) == [case["ids_plain"] for case in cases]


@needs_golden
def test_official_long_runs(official: Tokenizer) -> None:
    for case in json.loads((GOLDEN / "cases.json").read_text("utf-8"))["long_runs"]:
        build = case["build"]
        ids = official.encode(build["char"] * build["count"] + build["suffix"])
        assert len(ids) == case["n_ids"] and sum(ids) == case["sum"], case["name"]
        assert ids[:8] == case["first"] and ids[-8:] == case["last"], case["name"]


@needs_golden
def test_official_file_is_written_back_byte_for_byte(official: Tokenizer) -> None:
    assert official.to_bytes() == (GOLDEN / "tiktoken.model").read_bytes()


# encoding


def test_no_text_yields_a_reserved_id(tokenizer: Tokenizer) -> None:
    for name, token in tokenizer.special.items():
        plain = tokenizer.encode(f"a{name}b")
        assert max(plain) < tokenizer.vocab_size - RESERVED and tokenizer.decode(plain) == f"a{name}b"
        assert token in tokenizer.encode(f"a{name}b", allow_special=True)


def test_reserved_ids_follow_the_ranks(tokenizer: Tokenizer) -> None:
    first = tokenizer.vocab_size - RESERVED
    assert sorted(tokenizer.special.values()) == list(range(first, first + RESERVED))
    assert {name: tokenizer.special[name] - first for name in SPECIAL_OFFSETS} == SPECIAL_OFFSETS
    assert tokenizer.decode([tokenizer.eos_id, tokenizer.pad_id]) == "[EOS][PAD]"
    assert tokenizer.token_bytes(first + 8) == f"<|reserved_token_{first + 8}|>".encode()


@given(st.text(), st.text(alphabet="a \n<|>[]BOSE'sS1é好🙂\ud800\udc00"))
def test_round_trip(text: str, mixed: str) -> None:
    for candidate in (text, mixed):
        readable = candidate.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = SMALL.encode(candidate)
        assert SMALL.decode(ids) == readable
        assert SMALL.encode_batch([candidate, "x"], threads=2) == [ids, SMALL.encode("x")]


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b\udfff") == tokenizer.encode("a\ufffdb\ufffd")
    assert tokenizer.encode("\ud83d\ude42") == tokenizer.encode("\U0001f642")
    assert tokenizer.encode("\ud800", allow_special=True) == tokenizer.encode("\ufffd")


def _official_cuts(text: str) -> list[str]:
    """The official cutting as its comments describe it, character by character."""
    parts = []
    for begin in range(0, len(text), 400_000):
        part, run = "", 0
        for character in text[begin : begin + 400_000]:
            run = run + 1 if part and part[-1].isspace() == character.isspace() else 1
            if run > 25_000:
                parts.append(part)
                part, run = "", 1
            part += character
        parts.append(part)
    return parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 25_000,
        "a" * 25_001,
        "a" * 75_001 + " b",
        "  " + "\u3000" * 50_000 + "x" * 25_001,
        "ab " * 133_334 + "abc",
    ],
    ids=["empty", "one run", "one more", "three runs", "blanks", "beyond 400,000"],
)
def test_long_texts_are_cut_like_the_official_ones(tokenizer: Tokenizer, text: str) -> None:
    parts = _official_cuts(text)
    assert tokenizer.encode(text) == [token for part in parts for token in tokenizer.encode(part)]
    assert max((len(part) for part in parts), default=0) <= 400_000


def test_the_cut_is_visible(tokenizer: Tokenizer) -> None:
    """A token never spans the cut: a pair that is one token elsewhere is two there."""
    (pair,) = tokenizer.encode("he")
    assert tokenizer.encode("x" * 24_998 + "he")[-1] == pair
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("x" * 24_999 + "he")[-2:]] == [b"h", b"e"]
    assert len(tokenizer.encode("  ")) == 1
    assert len(tokenizer.encode(" " * 25_001)) == len(tokenizer.encode(" " * 25_000)) + 1
    assert tokenizer.token_bytes(tokenizer.encode(" " * 25_001)[-1]) == b" "


# decoding


@given(st.lists(st.integers(0, SMALL.vocab_size - 1), max_size=30))
def test_stream_is_decode_in_parts(ids: list[int]) -> None:
    stream = StreamDecoder(SMALL)
    assert "".join(map(stream.push, ids)) + stream.flush() == SMALL.decode(ids)


def test_stream_holds_back_half_characters() -> None:
    stream = StreamDecoder(SMALL)
    rank = {SMALL.token_bytes(token): token for token in range(SMALL.vocab_size - RESERVED)}
    given_out = [stream.push(rank[bytes([byte])]) for byte in "é🙂a".encode()]
    assert given_out == ["", "é", "", "", "", "🙂", "a"]
    assert stream.push(rank["🙂".encode()[:1]]) == "" and stream.flush() == "\ufffd" and stream.flush() == ""
    assert stream.push(rank["🙂".encode()[:1]]) + stream.push(rank[b"a"]) == "\ufffda"


def test_unknown_ids_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {token} .* 0 to {tokenizer.vocab_size - 1}"):
            tokenizer.decode([5, token])
        with pytest.raises(ValueError, match=f"token id {token}"):
            StreamDecoder(tokenizer).push(token)


# files


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path, prose: str) -> None:
    tokenizer.save(tmp_path / "new" / "folder")
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "tiktoken.model",
        "tokenizer_config.json",
    ]
    for where in (tmp_path / "new" / "folder", tmp_path / "new" / "folder" / "tiktoken.model"):
        again = Tokenizer.load(where)
        assert again.encode(prose) == tokenizer.encode(prose)
        assert again.special == tokenizer.special and again.fingerprint() == tokenizer.fingerprint()
    added = json.loads((tmp_path / "new/folder/tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert added[str(tokenizer.special["<|open|>"])] == {"content": "<|open|>", "special": False}
    assert added[str(tokenizer.eos_id)] == {"content": "[EOS]", "special": True}


def test_names_of_an_earlier_model_of_the_family(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    added = {
        str(tokenizer.end_of_msg_id): {"content": "<|im_end|>"},
        str(tokenizer.eos_id): {"content": "[EOS]"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    earlier = Tokenizer.load(tmp_path)
    assert earlier.encode("<|im_end|>", allow_special=True) == [tokenizer.end_of_msg_id] == [earlier.end_of_msg_id]
    assert "<|end_of_msg|>" not in earlier.special and earlier.fingerprint() != tokenizer.fingerprint()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"3": {"content": "x"}}}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: special id 3 is outside"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:9], b"not a token", *lines[9:]], "line 10 is b'not a token'"),
        (lambda lines: [*lines[:9], b"IQ=== 9", *lines[10:]], "line 10"),
        (lambda lines: lines[1:], "do not have the ranks 0 to 442"),
        (lambda lines: [*lines, lines[-1]], None),
        (lambda lines: [*lines[:-1], b"AAAA 5"], "do not have the ranks"),
        (lambda lines: [*lines, b"AAAA " + b"9" * 5000], "line 445 is b'AAAA 9999"),
        (lambda lines: [b"AAAA 0", *lines[1:]], "byte 33 is not a token"),
        (lambda lines: [], "byte 0 is not a token"),
    ],
)
def test_malformed_files(tokenizer: Tokenizer, tmp_path: Path, change, message: str | None) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\n".join(change(tokenizer.to_bytes().splitlines())))
    if message is None:
        assert Tokenizer.load(path).vocab_size == tokenizer.vocab_size
        return
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[]", r"\[\]; expected a mapping"),
        (b'{"added_tokens_decoder": []}', r"added_tokens_decoder is '\[\]'; expected a mapping"),
        (b'{"added_tokens_decoder": "x"}', "added_tokens_decoder is 'x'"),
        (b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "special id 'x'; expected a number"),
        (b'{"added_tokens_decoder": {"-1": {"content": "a"}}}', "special id '-1'"),
        ('{"added_tokens_decoder": {"²": {"content": "a"}}}'.encode(), "special id '²'"),
        (b'{"added_tokens_decoder": {"445": []}}', r"special id 445 is '\[\]'; expected a mapping with its content"),
        (b'{"added_tokens_decoder": {"445": {"content": 5}}}', "special id 445"),
        (b'{"added_tokens_decoder": {"445": {"content": ""}}}', "special id 445"),
        (b'{"added_tokens_decoder": {"445": {"content": "\\ud800"}}}', "special id 445"),
        (b'{"added_tokens_decoder": {"445": {"content": "a"}, "446": {"content": "a"}}}', "share the name 'a'"),
    ],
)
def test_malformed_names(tokenizer: Tokenizer, tmp_path: Path, content: bytes, message: str) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", ["{}", '{"added_tokens_decoder": null}', '{"added_tokens_decoder": {}}'])
def test_without_names_those_of_the_release_hold(tokenizer: Tokenizer, tmp_path: Path, content: str) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert Tokenizer.load(tmp_path).special == tokenizer.special


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no .*tiktoken\.model"):
        Tokenizer.load(tmp_path)


# training


def test_training_is_repeatable_and_exact_in_size(prose: str) -> None:
    first, second, only_bytes = (train_tokenizer(iter([prose]), size) for size in (640, 640, 512))
    assert first.vocab_size == 640 and first.to_bytes() == second.to_bytes()
    assert all(len(first.token_bytes(token)) == 1 for token in range(256))
    assert {first.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert len(first.encode(prose)) < len(only_bytes.encode(prose)) == len(prose.encode())


def test_sizes_that_cannot_be_reached(prose: str) -> None:
    with pytest.raises(ValueError, match="vocab_size: 511 is below 512"):
        train_tokenizer([prose], 511)
    with pytest.raises(ValueError, match="vocab_size: 16777217 is above 16777216"):
        train_tokenizer([prose], (1 << 24) + 1)
    with pytest.raises(ValueError, match=r"vocab_size: 9000 is more .* they give \d+ at most"):
        train_tokenizer([prose], 9000)


def test_training_survives_odd_texts() -> None:
    odd = ["", "\ud800 \udfff", "a" * 60_000, "\0\x01 \u2028", "\U0001f642" * 3]
    assert train_tokenizer(odd * 2, 515).decode(train_tokenizer(odd * 2, 515).encode("aaa\ud800")) == "aaa\ufffd"


def test_merges_stay_inside_the_pieces_of_the_pattern(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    for token in range(256, tokenizer.vocab_size - RESERVED):
        text = tokenizer.token_bytes(token).decode("utf-8", "ignore")
        assert len(split.pre_tokenize_str(text)) <= 1, text


def _pieces_of_both(text: str) -> tuple[list[bytes], list[bytes]]:
    """The pieces by the trainer's regular expressions and by tiktoken's. The latter shows them if every piece of
    the former is a token of its own: a piece cut elsewhere comes out as other tokens."""
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    pieces = [piece.encode() for piece, _ in split.pre_tokenize_str(text)]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys([*(bytes([b]) for b in range(256)), *pieces]))}
    encoding = tiktoken.Encoding("pieces", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return pieces, [encoding.decode_single_token_bytes(token) for token in encoding.encode_ordinary(text)]


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_training_cuts_every_character_like_tiktoken(step: int) -> None:
    """`&&` and the classes mean the same in both regular-expression engines, for all of Unicode."""
    codes = (code for code in range(sys.maxunicode + 1) if code < 0x600 or code % step == 0)
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    for begin in range(0, len(characters), 1 << 16):
        block = characters[begin : begin + (1 << 16)]
        ours, theirs = _pieces_of_both("".join(f"a{c}b {c}{c}X{c}\n" for c in block))
        assert ours == theirs


@given(
    st.text(alphabet=st.characters(codec="utf-8")),
    st.text(alphabet="aAdlmrstv'’ßſ1 \t\r\n\u0085\u00a0好éǅʰ́.-"),
)
def test_training_cuts_texts_like_tiktoken(text: str, mixed: str) -> None:
    for candidate in (text, mixed):
        ours, theirs = _pieces_of_both(candidate)
        assert ours == theirs
