"""Rendered text, in several fonts, sizes and colours.

    letters      a word of one to six letters, each in a cell of its own, large and dark on middle grey: spelled
    spelling     the same in all sizes, inks and papers
    words        a word, or two below each other, as it is printed: read

A spelled word is one token a letter ("s t o c k"), and each is in one feature row: a new tower learns to read so.
Three of four are common words of the training texts, the others letters by chance, which no language model can guess.
The key is the word in small letters. Labels of plots and tables (`LABELS`) are never among the words, so that a
held-out word is drawn nowhere else.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell
from nanok3.data.pictures.drawing import CELL, PAPERS, SILHOUETTE, Colour, canvas, font, text_size

FACES = (None, "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono")
LABELS = ("north", "south", "east", "west", "spring", "summer", "autumn", "winter", "tea", "milk", "rice", "corn")
HEADERS = ("item", "size", "price", "age", "name", "score")
NAMES = ("Ann", "Bob", "Cem", "Dora", "Eva", "Finn", "Gita", "Hugo")

_WORD = re.compile(r"(?<![A-Za-z'])[A-Za-z]{1,6}(?![A-Za-z'])")
_INKS: list[Colour] = [(15, 15, 15), (170, 20, 20), (20, 60, 170), (10, 100, 40), (90, 30, 120)]
_CHALK: list[Colour] = [(250, 250, 250), (250, 220, 120), (150, 220, 250)]


def common_words(texts: Iterable[str], most: int = 3000) -> list[str]:
    """The words of one to six letters that the texts use most often, in small letters."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word.lower() for word in _WORD.findall(text))
    taken = {word.lower() for word in (*LABELS, *HEADERS, *NAMES)}
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [word for word in ranked if counts[word] > 1 and word not in taken][:most]


def _letters(random: Random) -> str:
    while True:
        word = "".join(random.choices(string.ascii_lowercase, k=random.randint(2, 6)))
        if word not in LABELS and word not in HEADERS:
            return word


def _whole_rows(side: int) -> int:
    """The next side that is not filled up with black when the picture is prepared."""
    return -(-side // 28) * 28


def _look(random: Random) -> tuple[Colour, Colour]:
    """Paper and ink."""
    paper = random.choice(PAPERS)
    return paper, random.choice(_INKS if sum(paper) > 300 else _CHALK)


def write(random: Random, lines: Sequence[str]) -> Picture:
    """The lines below each other, with chance deciding on font, size, colours and place."""
    face = font(random.randint(13, 22), random.choice(FACES))
    boxes = [text_size(line, face) for line in lines]
    tall = face.size + 2
    room_x, room_y = random.randint(4, 24), random.randint(4, 14)
    width = _whole_rows(max(box[2] for box in boxes) + room_x)
    height = _whole_rows(tall * len(lines) + room_y)
    paper, ink = _look(random)
    picture, pen = canvas(width, height, paper)
    x, y = random.randint(2, width - max(box[2] for box in boxes) - 2), random.randint(2, height - tall * len(lines))
    for number, (line, (left, _, _, _)) in enumerate(zip(lines, boxes, strict=True)):
        pen.text((x - left, y + number * tall - face.size // 6), line, fill=ink, font=face)
    return Picture((picture,))


def _set(random: Random, word: str, face: Any, look: tuple[Colour, Colour], slack: float) -> Picture:
    """A word with a cell for every letter, each up to `slack` pixels off its place. The letters stand on one line."""
    paper, ink = look
    lines = random.randint(1, 2)
    picture, pen = canvas(CELL * len(word), CELL * lines, paper)
    base = CELL * random.randrange(lines) + CELL / 2 + 0.36 * face.size + random.uniform(-slack, slack)
    for number, letter in enumerate(word):
        at = CELL * (number + 0.5) + random.uniform(-slack, slack), base
        pen.text(at, letter, fill=ink, font=face, anchor="ms")
    return Picture((picture,))


def _spelled(random: Random, kind: str, word: str, picture: Picture) -> PictureDocument:
    said = " ".join(word)
    captions = f"The letters are {said}.", f"It reads {said}."
    asks = [Ask("spelling", ("Which letters?",), said)]
    return tell(random, kind, [picture], [f"word {word}"], captions, asks)


def letters_from(vocabulary: Sequence[str]) -> Callable[[Random], PictureDocument]:
    """Documents of spelled words that are easy to read; `vocabulary` as for `words_from`."""

    def letters(random: Random) -> PictureDocument:
        word, face = _any_word(random, vocabulary), font(random.randint(20, 24), FACES[1])
        return _spelled(random, "letters", word, _set(random, word, face, SILHOUETTE, 1.0))

    return letters


def spelling_from(vocabulary: Sequence[str]) -> Callable[[Random], PictureDocument]:
    """Documents of spelled words; `vocabulary` as for `words_from`."""

    def spelling(random: Random) -> PictureDocument:
        word, face = _any_word(random, vocabulary), font(random.randint(15, 24), random.choice(FACES))
        return _spelled(random, "spelling", word, _set(random, word, face, _look(random), 2.0))

    return spelling


def _any_word(random: Random, vocabulary: Sequence[str]) -> str:
    return random.choice(vocabulary) if vocabulary and random.random() < 0.75 else _letters(random)


def words_from(vocabulary: Sequence[str]) -> Callable[[Random], PictureDocument]:
    """Documents with words of `vocabulary` (it may be empty: then letters by chance)."""

    def one(random: Random) -> str:
        word = _any_word(random, vocabulary)
        return random.choice((word, word, word, word.upper(), word.capitalize()))

    def words(random: Random) -> PictureDocument:
        lines = [one(random) for _ in range(1 if random.random() < 0.8 else 2)]
        said = " ".join(lines)
        captions = (f'The picture says "{said}".', f'It reads: "{said}".', f'The text is "{said}".', said)
        asks = [
            Ask("word", ("What does it say?", "Read the text.", "Which text is in the picture?"), said),
            Ask("length", ("How many letters are there?", "Count the letters."), str(sum(map(len, lines)))),
        ]
        keys = [f"word {line.lower()}" for line in lines]
        return tell(random, "words", [write(random, lines)], keys, captions, asks)

    return words
