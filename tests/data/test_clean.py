from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanok3.data.clean import clean, digest, scrub, sections, unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n"),
        ("\ufeffa é", "a é"),
        ("a \t\n  b\u00a0\n", "a\n  b\u00a0\n"),
        ("\n\n  a\n\n\nb\n\n\n", "  a\n\n\nb\n"),
        ("a\0b", "ab"),
        (" \n\t\n", ""),
        ("\u3000\n\ufeff", ""),
        ("", ""),
        ("a\ud83d\ude42\ud800", "a🙂\ufffd"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert clean(text) == expected


@given(st.text(alphabet="a \t\n\r\0é\ufeff\ud800"))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean(text)
    assert clean(once) == once
    once.encode()


def test_scrub() -> None:
    text = "Write to Jo.Doe+x@mail.example.org, or call (808) 555-1234, 808-555-1234."
    assert scrub(text) == "Write to someone@example.com, or call 555-0100, 555-0100."
    for kept in ("A @ B.T", "x@y", "2018-05-02T19:38:15", "259-264 1970", "3.141592653589", "123456-789-1234567"):
        assert scrub(kept) == kept


def test_digest_depends_on_text_and_seed_alone() -> None:
    assert digest("a") == digest("a") and len(digest("a")) == 16
    assert len({digest("a"), digest("b"), digest("a", 1), digest("a", 2**64 - 1)}) == 4
    halves = [(unit(digest(str(i)), 0), unit(digest(str(i)), 1)) for i in range(2000)]
    for half in zip(*halves, strict=True):
        assert 0 <= min(half) < 0.01 and 0.99 < max(half) < 1 and abs(sum(half) / 2000 - 0.5) < 0.02
    both = sum(a < 0.5 and b < 0.5 for a, b in halves)
    assert abs(both / 2000 - 0.25) < 0.03


PLAY = "# Play\n\n" + "\n\n".join(f"## ACT {act}\n\n" + "**A**  \nshort line\n\n" * 20 for act in range(6))


def test_sections_begin_at_headings() -> None:
    parts = sections(PLAY, 300, 900)
    assert "".join(parts) == PLAY and max(map(len, parts)) <= 900
    assert [part.split("\n")[0] for part in parts] == ["# Play", *(f"## ACT {act}" for act in range(1, 6))]


def test_sections_end_at_paragraphs_then_lines_then_anywhere() -> None:
    assert sections("aaaa\n\nbbbb\n\ncccc", 100, 12) == ["aaaa\n\nbbbb\n\n", "cccc"]
    assert sections("aa\nbb\ncc", 100, 6) == ["aa\nbb\n", "cc"]
    assert sections("a" * 25, 100, 10) == ["a" * 10, "a" * 10, "a" * 5]
    assert sections("", 5, 10) == []


@given(st.text(alphabet="ab#\n ", max_size=200), st.integers(1, 40), st.integers(1, 60))
def test_sections_give_the_text_back(text: str, least: int, most: int) -> None:
    parts = sections(text, least, most)
    assert "".join(parts) == text and all(0 < len(part) <= most for part in parts)
