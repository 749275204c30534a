"""The kinds of picture documents, what each needs, and an endless stream of each by a seed.

| kind | needs | weight |
|---|---|---|
| forms, silhouettes, tiles, shapes, places | Pillow | 0.05, 0.15, 0.25, 0.25, 0.10 |
| letters, spelling | Pillow, and matplotlib for its fonts | 0.10, 0.20 |
| compare, plots, tables, motion | Pillow | 0.05, 0.08, 0.08, 0.09 |
| words | Pillow, and matplotlib for its fonts | 0.10 |
| digits, photos | Pillow; 10 MB by pip, once | 0.10, 0.01 |
| svg | resvg-py | 0.08 |
| icons, flags | resvg-py; npm, 8 MB | 0.05, 0.02 |

`CORE` is for a new tower, easy kinds first (docs/vision.md). It and `FURTHER` work with what `make demo` installs.
Document number n of a kind is a function of (seed, kind, n) and of the words of the training texts, so any part of the
stream can be made again alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from nanok3.data.images import pillow
from nanok3.data.npm import npm_client
from nanok3.data.pictures.code import resvg, svg_from
from nanok3.data.pictures.document import PictureDocument, split_of
from nanok3.data.pictures.drawing import dejavu_folder
from nanok3.data.pictures.motion import motion
from nanok3.data.pictures.packaged import digits_from, flags_from, icons_from, photos_from
from nanok3.data.pictures.plots import plots, tables
from nanok3.data.pictures.shapes import compare, forms, places, shapes, silhouettes, tiles
from nanok3.data.pictures.words import letters_from, spelling_from, words_from

Maker = Callable[[Random], PictureDocument]

CORE = ("forms", "silhouettes", "tiles", "shapes", "places", "letters", "spelling")
FURTHER = ("compare", "words", "plots", "tables", "motion")
MORE = ("digits", "photos", "svg")
WRITTEN = ("letters", "spelling", "words")
NPM = ("icons", "flags")

WEIGHTS = {
    "forms": 0.05,
    "silhouettes": 0.15,
    "tiles": 0.25,
    "shapes": 0.25,
    "places": 0.10,
    "letters": 0.10,
    "spelling": 0.20,
    "compare": 0.05,
    "words": 0.10,
    "plots": 0.08,
    "tables": 0.08,
    "motion": 0.09,
    "digits": 0.10,
    "photos": 0.01,
    "svg": 0.08,
    "icons": 0.05,
    "flags": 0.02,
}
"""Shares of the picture documents, before they are scaled to one."""

_SECOND, _THIRD = ("letters", "tiles"), ("shapes", "places", "spelling")
BEGINS = {"silhouettes": 480} | dict.fromkeys(_SECOND, 800) | dict.fromkeys(_THIRD, 2000)
"""Rows of a run before a kind takes part, where there are `forms` to begin with. A new tower learns these within 120
steps of four rows and keeps them; with all questions at once they come much later (docs/vision.md)."""

PROFILE_KINDS = {"tiny": CORE, "full": (*CORE, *FURTHER, *MORE)}


@dataclass(frozen=True)
class PictureMix:
    """How many picture documents of which kinds, and their share of all training tokens."""

    share: float
    documents: int
    kinds: tuple[str, ...] = CORE

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"pictures: {self.share}; expected a share of the training tokens between 0 and 1")
        if not 1 <= self.documents <= 10**8:
            raise ValueError(f"picture_documents: {self.documents}; expected 1 to 10^8")
        for kind in self.kinds:
            if kind not in WEIGHTS:
                raise ValueError(f"picture_kinds: {kind!r}; expected some of {', '.join(WEIGHTS)}")
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"picture_kinds: {' '.join(self.kinds) or 'none'}; expected each kind once, at least one")

    def counts(self) -> dict[str, int]:
        """Documents of every kind, at least two."""
        whole = sum(WEIGHTS[kind] for kind in self.kinds)
        return {kind: max(2, round(self.documents * WEIGHTS[kind] / whole)) for kind in self.kinds}

    def begins(self) -> dict[str, int]:
        """The first row of a run that each kind may have."""
        return {kind: BEGINS.get(kind, 0) if "forms" in self.kinds else 0 for kind in self.kinds}

    def weights(self, text: float) -> dict[str, float]:
        """The weights of the kinds in a mixture whose texts weigh `text`."""
        whole = sum(WEIGHTS[kind] for kind in self.kinds)
        pictures = text * self.share / (1 - self.share)
        return {kind: pictures * WEIGHTS[kind] / whole for kind in self.kinds}


def open_kind(kind: str, words: Sequence[str] = (), cache: Path | None = None) -> Maker:
    """What makes documents of a kind. Raises ImportError with the line to install if a package is missing."""
    drawn: dict[str, Maker] = {
        "forms": forms,
        "silhouettes": silhouettes,
        "tiles": tiles,
        "shapes": shapes,
        "places": places,
        "compare": compare,
        "plots": plots,
        "tables": tables,
        "motion": motion,
    }
    packaged = {"digits": digits_from, "photos": photos_from, "icons": icons_from, "flags": flags_from}
    if kind in drawn:
        return drawn[kind]
    if kind in packaged:
        return packaged[kind](cache)
    written = {"letters": letters_from, "spelling": spelling_from, "words": words_from}
    return written[kind](words) if kind in written else svg_from(resvg())


def check_needs(kind: str) -> None:
    """ImportError with the line to install if a kind's package is missing; nothing is downloaded."""
    pillow()
    if kind in WRITTEN:
        dejavu_folder()
    if kind in ("svg", *NPM):
        resvg()
    if kind in NPM:
        npm_client()


def picture_documents(kind: str, make: Maker, count: int, seed: int) -> Iterator[PictureDocument]:
    """The first `count` documents of a kind."""
    for number in range(count):
        yield make(Random(f"{seed} {kind} {number}"))


def with_split(
    documents: Iterator[PictureDocument], validation: float, seed: int
) -> Iterator[tuple[str, PictureDocument]]:
    """Each document with its side of the split."""
    for document in documents:
        yield split_of(document.keys, validation, seed), document
