"""What a picture document is, how its text is chosen, and what decides on which side of the split it falls.

    document = picture, newline, caption             or
               picture, newline, Question: ... Answer: ...  (one to three of them)

Captions and questions have several phrasings. The first phrasing of each question is kept with its answer as the
document's `questions`, so that a held-out picture can be asked.

`keys` name what is to be seen ("word stock", "3 red star 00 13 32"). A document is validation if any of its keys is:

    unit(digest(key), 0) < share      the same hash as for text (clean.py)

so whatever a validation picture shows is on no training picture, of whichever kind. A document without keys is
always training.

`told` marks what of the text the picture tells: the answers, and the like in a caption. The rest is what any document
of the kind says, and may weigh less in training (packing.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from nanok3.data.clean import digest, unit

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


CAPTIONS = 0.2
"""The share of captions. Answers are shorter, so more pictures fit into a row."""


@dataclass(frozen=True)
class Picture:
    """One media item: a picture, or with `start` (seconds) a chunk of one to four video frames of one size."""

    frames: tuple[PILImage, ...]
    start: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = self.frames[0].size
        return width, height


class Question(NamedTuple):
    """`field` names what is asked for: colour, count, word, ... A position has its two numbers exactly, too, since the
    answer rounds them."""

    field: str
    text: str
    answer: str
    exact: Sequence[float] | None = None


class Ask(NamedTuple):
    """A question in all its phrasings, the first of which is the one that is kept."""

    field: str
    phrasings: Sequence[str]
    answer: str
    exact: Sequence[float] | None = None


@dataclass(frozen=True)
class PictureDocument:
    """Texts and pictures in order, what they show, and the questions that they answer. `told` bounds the characters of
    the last part that only the pictures tell."""

    kind: str
    parts: tuple[str | Picture, ...]
    keys: tuple[str, ...]
    questions: tuple[Question, ...]
    told: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        """The text without the pictures."""
        return "".join(part for part in self.parts if isinstance(part, str))


def question_text(question: str, answer: str = "") -> str:
    """How a question stands in a document; without an answer, the prompt that asks it."""
    return f"\nQuestion: {question}\nAnswer:" + (f" {answer}" if answer else "")


def tell(
    random: Random,
    kind: str,
    shown: Sequence[str | Picture],
    keys: Sequence[str],
    captions: Sequence[str],
    asks: Sequence[Ask],
    facts: Sequence[str] = (),
) -> PictureDocument:
    """A document with either one of the captions or some of the questions behind what is shown. `facts` are what of a
    caption the picture tells, if these are not the answers."""
    if random.random() < CAPTIONS:
        text = "\n" + random.choice(captions)
        told = occurrences(text, facts or [ask.answer for ask in asks])
    else:
        chosen = random.sample(asks, min(len(asks), random.randint(1, 3)))
        text, told = "", []
        for ask in chosen:
            text += question_text(random.choice(ask.phrasings), ask.answer)
            told.append((len(text) - len(ask.answer), len(text)))
    questions = tuple(Question(ask.field, ask.phrasings[0], ask.answer, ask.exact) for ask in asks)
    return PictureDocument(kind, (*shown, text), tuple(keys), questions, tuple(told))


def occurrences(text: str, facts: Iterable[str]) -> list[tuple[int, int]]:
    """Where the facts stand in a text, as whole words, in small or capital letters."""
    found = set()
    for fact in facts:
        found |= {match.span() for match in re.finditer(rf"(?<!\w){re.escape(fact)}(?!\w)", text, re.IGNORECASE)}
    return sorted(found)


def split_of(keys: Sequence[str], share: float, seed: int) -> str:
    """Train or validation."""
    held_out = any(unit(digest(key, seed), 0) < share for key in keys)
    return "validation" if held_out else "train"
