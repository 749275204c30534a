"""What happens to a text before it is trained on: light cleaning, scrubbing, hashing, cutting into sections.

Cleaning keeps the words and drops what no reader sees: other line ends, blanks at line ends, a byte-order mark,
zero bytes, half surrogates. Scrubbing, for the built-in conversations and code only, replaces e-mail addresses and
telephone numbers. A document's hash decides everything that must not depend on order or chance:

    digest = blake2b(text, salt = seed)      equal digests are duplicates; one is kept
    unit(digest, 0) < share                  the document belongs to the validation split
    unit(digest, 1)                          its rank when only part of a source is taken
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b")
_TELEPHONE = re.compile(r"\(\d{3}\) ?\d{3}-\d{4}\b|(?<![\w-])\d{3}([.-])\d{3}\1\d{4}\b")


def without_lone_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs joined, lone surrogates become U+FFFD, as in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean(text: str) -> str:
    """`text` with line ends as `\\n`, without byte-order marks, zero bytes, blanks at line ends and empty lines at
    either end; a last line end stays. A text of blanks becomes empty."""
    if not text.isascii():
        text = without_lone_surrogates(text).replace("\ufeff", "")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    if not text.strip():
        return ""
    return text.strip("\n") + ("\n" if text.endswith("\n") else "")


def scrub(text: str) -> str:
    """`text` with e-mail addresses and ten-digit telephone numbers replaced by ones that nobody has."""
    return _TELEPHONE.sub("555-0100", _EMAIL.sub("someone@example.com", text))


def digest(text: str, seed: int = 0) -> bytes:
    """16 bytes that stand for `text`: blake2b salted with `seed` (0 to 2**64 - 1)."""
    return hashlib.blake2b(text.encode(), digest_size=16, salt=seed.to_bytes(8, "little")).digest()


def unit(digest: bytes, half: int) -> float:
    """One of the two independent uniform numbers in [0, 1) that a digest holds (`half` 0 or 1)."""
    return int.from_bytes(digest[8 * half : 8 * half + 8], "little") / 2**64


def _blocks(text: str, most: int) -> Iterator[str]:
    """Paragraphs with the blank lines behind them; one longer than `most` by lines, a longer line by length."""
    for paragraph in re.split(r"(?<=\n\n)(?=[^\n])", text):
        for line in [paragraph] if len(paragraph) <= most else paragraph.splitlines(keepends=True):
            for begin in range(0, len(line), most):
                yield line[begin : begin + most]


def sections(text: str, least: int, most: int) -> list[str]:
    """Consecutive parts of at most `most` characters that give `text` when joined. A part of at least `least`
    ends before a heading (`#` at the line's start); otherwise parts end at the last paragraph that fits."""
    parts: list[str] = []
    current: list[str] = []
    size = 0
    for block in _blocks(text, most):
        if current and (size + len(block) > most or (size >= least and block.startswith("#"))):
            parts.append("".join(current))
            current, size = [], 0
        current.append(block)
        size += len(block)
    return [*parts, "".join(current)] if current else parts
