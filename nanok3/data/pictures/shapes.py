"""Shapes on a plain ground: which form, which colour, how many, where, and two pictures side by side.

    forms        one to five equal shapes in cells, dark on middle grey: their form
    silhouettes  the same: form, number, and where a single one is
    tiles        the same in all colours on all papers, the colour, too
    shapes       one to five equal shapes anywhere, of any size
    places       one shape anywhere
    compare      two pictures in one document

The key of a picture is count, colour, form and the cells of a 4 x 4 grid that the centres lie in. Its hash decides
the split, so a held-out picture shows an arrangement that was never trained on.

A position is said to the tenth of the sides, or to five pixels, and judged by the exact centre (eval/pictures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell
from nanok3.data.pictures.drawing import (
    CELL,
    COLOURS,
    NUMBERS,
    PAPERS,
    SHAPES,
    SILHOUETTE,
    Colour,
    Point,
    canvas,
    cell,
    draw_shape,
    place,
    shade,
)

SIDES = (56, 84, 112)
"""Whole feature rows: another side is filled up with black when a picture is prepared, and a new tower sees the bar."""
PIXELS = 5
"""A pixel is said to this many: a tenth of the smallest side, and most such numbers are one token."""


@dataclass(frozen=True)
class Scene:
    """A picture of equal shapes and what is on it."""

    picture: Picture
    count: int
    colour: str
    shape: str
    centres: list[Point]

    @property
    def key(self) -> str:
        cells = sorted(cell(centre, *self.picture.size) for centre in self.centres)
        return f"{self.count} {self.colour} {self.shape} {' '.join(cells)}"

    @property
    def name(self) -> str:
        """`three red stars`, `one blue cross`."""
        return f"{NUMBERS[self.count]} {self.colour} {plural(self.shape, self.count)}"


def plural(shape: str, count: int) -> str:
    if count == 1:
        return shape
    return shape + ("es" if shape == "cross" else "s")


def scene(random: Random, count: int, colour: str, shape: str) -> Scene:
    """Paper, sizes and places are drawn by chance."""
    least, most = {1: (8.0, 16.0), 2: (8.0, 13.0)}.get(count, (7.5, 10.5))
    sides = SIDES if count < 3 else SIDES[1:]
    width, height = random.choice(sides), random.choice(sides)
    radius = random.uniform(least, most)
    centres = place(random, count, width, height, radius)
    look = random.choice(PAPERS), shade(random, colour)
    return _draw((width, height), look, radius, centres, colour, shape)


def _draw(
    size: tuple[int, int], look: tuple[Colour, Colour], radius: float, centres: list[Point], colour: str, shape: str
) -> Scene:
    """`look` is paper and ink."""
    paper, ink = look
    picture, pen = canvas(*size, paper)
    for centre in centres:
        draw_shape(pen, shape, centre, radius, ink)
    return Scene(Picture((picture,)), len(centres), colour, shape, centres)


def in_cells(random: Random, count: int, colour: str, shape: str, look: tuple[Colour, Colour] | None = None) -> Scene:
    """Every shape in another of the cells that become feature rows, a little off its centre. What a thing is then
    stands in one row, and how many there are is how many rows are not empty: a new tower learns this first."""
    sides = [(w, h) for w in SIDES for h in SIDES if (w // CELL) * (h // CELL) >= count]
    width, height = random.choice(sides)
    radius = random.uniform(9.0, 12.0)
    off = int(13 - radius)
    cells = random.sample([(x, y) for x in range(width // CELL) for y in range(height // CELL)], count)
    centres: list[Point] = [
        tuple(CELL * at + CELL // 2 + random.randint(-off, off) for at in where)  # type: ignore[misc]
        for where in cells
    ]
    look = look or (random.choice(PAPERS), shade(random, colour))
    return _draw((width, height), look, radius, centres, colour, shape)


def _any(random: Random, draw: Callable[[Random, int, str, str], Scene], count: int) -> Scene:
    return draw(random, count, random.choice(list(COLOURS)), random.choice(SHAPES))


# One phrasing each: with two, forms come after twice as many pictures (docs/log.md).
_COLOUR = ("Which colour?",)
_COUNT = ("How many?",)
_SHAPE = ("Which shape?",)
_PIXEL = ("At which pixel?",)
_POSITION = ("Where, from 0 to 1?",)


def forms(random: Random) -> PictureDocument:
    """Silhouettes that are asked for nothing but their form, which comes last or never where number is asked for, too:
    a new tower begins here."""
    shown = in_cells(random, random.randint(1, 5), "black", random.choice(SHAPES), SILHOUETTE)
    captions = (f"{plural(shown.shape, shown.count).capitalize()}.",)
    asks = [Ask("shape", _SHAPE, shown.shape)]
    return tell(random, "forms", [shown.picture], [shown.key], captions, asks, [plural(shown.shape, shown.count)])


def silhouettes(random: Random) -> PictureDocument:
    """Shapes in cells without colours: a row is empty or it is not, and that is all that differs between rows besides
    the form. A tower from noise learns number and place here first, and then in colours."""
    shown = in_cells(random, _number(random), "black", random.choice(SHAPES), SILHOUETTE)
    number, many = NUMBERS[shown.count], plural(shown.shape, shown.count)
    captions = f"{number.capitalize()} {many}.", f"We see {number} {many}."
    return tell(random, "silhouettes", [shown.picture], [shown.key], captions, _form(shown), [number, many])


def tiles(random: Random) -> PictureDocument:
    """One to five shapes in cells."""
    return _what(random, "tiles", _any(random, in_cells, _number(random)))


def shapes(random: Random) -> PictureDocument:
    """One to five shapes."""
    return _what(random, "shapes", _any(random, scene, _number(random)))


def _number(random: Random) -> int:
    """One more often than the others: only of a single shape a place can be asked."""
    return 1 if random.random() < 0.25 else random.randint(1, 5)


def _form(shown: Scene) -> list[Ask]:
    """Number, form, and where a single shape is."""
    asks = [Ask("count", _COUNT, NUMBERS[shown.count]), Ask("shape", _SHAPE, shown.shape)]
    return asks + _places(shown) if shown.count == 1 else asks


def _places(shown: Scene) -> list[Ask]:
    centre, size = shown.centres[0], shown.picture.size
    exact = [centre[0] / size[0], centre[1] / size[1]]
    return [
        Ask("pixel", _PIXEL, pixels(centre), [*centre]),
        Ask("position", _POSITION, fractions(centre, size), exact),
    ]


def _what(random: Random, kind: str, shown: Scene) -> PictureDocument:
    captions = f"{shown.name.capitalize()}.", f"We see {shown.name}.", f"A picture of {shown.name}."
    asks = [Ask("colour", _COLOUR, shown.colour), *_form(shown)]
    return tell(random, kind, [shown.picture], [shown.key], captions, asks, shown.name.split())


def pixels(point: Point) -> str:
    """`45, 30`."""
    x, y = (PIXELS * round(at / PIXELS) for at in point)
    return f"{x}, {y}"


def fractions(point: Point, size: tuple[int, int]) -> str:
    """`0.5, 0.4`."""
    return f"{point[0] / size[0]:.1f}, {point[1] / size[1]:.1f}"


def places(random: Random) -> PictureDocument:
    """One shape and where its centre is: x from the left, y from the top."""
    shown = _any(random, scene, 1)
    what, (absolute, relative) = f"{shown.colour} {shown.shape}", _places(shown)
    article = "An" if shown.colour == "orange" else "A"
    captions = (
        f"{article} {what} at {relative.answer} of the sides.",
        f"{article} {what} at pixel {absolute.answer}.",
    )
    facts = (shown.colour, shown.shape, absolute.answer, relative.answer)
    return tell(random, "places", [shown.picture], [shown.key], captions, [absolute, relative], facts)


def compare(random: Random) -> PictureDocument:
    """Two pictures of the same form in other numbers or colours."""
    counts = random.sample(range(1, 6), 2)
    colours = random.sample(list(COLOURS), 2)
    shape = random.choice(SHAPES)
    first, second = (scene(random, n, c, shape) for n, c in zip(counts, colours, strict=True))
    more = "the first" if first.count > second.count else "the second"
    many = plural(shape, 2)
    captions = (
        f"First {first.name}, then {second.name}.",
        f"The first picture has {first.name}, the second {second.name}.",
    )
    asks = [
        Ask("more", (f"Which picture has more {many}?", f"Where are more {many}?"), more),
        Ask("first colour", ("What colour is the first picture's?", "Name the colour in the first."), first.colour),
        Ask("second colour", ("What colour is the second picture's?", "Name the colour in the second."), second.colour),
        Ask("total", (f"How many {many} are there in all?", "How many together?"), str(first.count + second.count)),
    ]
    shown: list[str | Picture] = ["First: ", first.picture, "\nSecond: ", second.picture]
    facts = [*first.name.split(), *second.name.split()]
    return tell(random, "compare", shown, [first.key, second.key], captions, asks, facts)
