"""Coloured shapes: how many of which, where one of them is, and which of two pictures has more.

    colours    one shape and its colour, nothing else: what a new tower learns first (docs/vision.md)
    basics     one shape, its colour and the third of the picture that it is in
    shapes     one to five shapes of one colour and form
    places     one shape, its centre in pixels and as fractions of the sides (the report's two forms of coordinates)
    tiles      as shapes, every shape in a cell of its own
    spots      as places, the shape in a cell
    silhouettes    one to five shapes in cells, dark on middle grey: form, number, and where a single one is
    inks       the same in all colours, which are asked for, too
    compare    two pictures in one document

The key of a picture is count, colour, form and the cells of a 4 x 4 grid that the centres lie in. Its hash decides
the split, so a held-out picture shows an arrangement that was never trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell
from nanok3.data.pictures.drawing import (
    COLOURS,
    NUMBERS,
    PAPERS,
    SHAPES,
    Colour,
    Point,
    canvas,
    cell,
    draw_shape,
    place,
    shade,
)

SIDES = (56, 84)
"""Whole feature rows: another side is filled up with black when a picture is prepared, and a new tower sees the bar."""
CELL = 28
"""Pixels of one feature row's square: four patches."""
SILHOUETTE: tuple[Colour, Colour] = (128, 128, 128), (20, 20, 20)
"""Paper and ink. The paper is zero where pixels go into the tower."""


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
    width, height = random.choice(SIDES), random.choice(SIDES)
    radius = random.uniform(6.0, {1: 15.0, 2: 13.0, 3: 9.5}.get(count, 7.5))
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


def _any_scene(random: Random, count: int) -> Scene:
    return _any(random, scene, count)


_COLOUR = ("What colour is it?", "Which colour do you see?", "Name the colour.")


def _says_colour(colour: str) -> tuple[str, ...]:
    return f"It is {colour}.", f"{colour.capitalize()}.", f"The colour is {colour}."


def colours(random: Random) -> PictureDocument:
    """One shape whose colour alone is asked for."""
    shown = _any_scene(random, 1)
    asks = [Ask("colour", _COLOUR, shown.colour)]
    return tell(random, "colours", [shown.picture], [shown.key], _says_colour(shown.colour), asks)


def basics(random: Random) -> PictureDocument:
    """One shape; every answer is a word."""
    shown = _any_scene(random, 1)
    (x, y), (width, height) = shown.centres[0], shown.picture.size
    across, down = ("left", "middle", "right")[int(3 * x / width)], ("top", "middle", "bottom")[int(3 * y / height)]
    asks = [
        Ask("colour", _COLOUR, shown.colour),
        Ask("across", ("Is it left, middle or right?", "Left, middle or right?"), across),
        Ask("down", ("Is it top, middle or bottom?", "Top, middle or bottom?"), down),
    ]
    return tell(random, "basics", [shown.picture], [shown.key], _says_colour(shown.colour), asks, [shown.colour])


def shapes(random: Random) -> PictureDocument:
    """One to five shapes."""
    return _what(random, "shapes", _any(random, scene, random.randint(1, 5)))


def tiles(random: Random) -> PictureDocument:
    """One to five shapes in cells."""
    return _what(random, "tiles", _any(random, in_cells, random.randint(1, 5)))


_COUNT = ("How many shapes are there?", "Count the shapes.", "How many?")
_SHAPE = ("Which shape is it?", "What shape do you see?", "Name the shape.")


def silhouettes(random: Random) -> PictureDocument:
    """Shapes in cells without colours: a row is empty or it is not, and that is all that differs between rows besides
    the form. Where ink and paper vary, too, a tower from noise says colours first and for long nothing else."""
    shown = in_cells(random, random.randint(1, 5), "black", random.choice(SHAPES), SILHOUETTE)
    number, many = NUMBERS[shown.count], plural(shown.shape, shown.count)
    captions = f"{number.capitalize()} {many}.", f"{number.capitalize()}.", f"{shown.shape.capitalize()}."
    facts = [number, many, shown.shape]
    return tell(random, "silhouettes", [shown.picture], [shown.key], captions, _form(shown), facts)


def inks(random: Random) -> PictureDocument:
    """Coloured silhouettes: the paper is still the same grey, so that a row without ink still says nothing."""
    colour = random.choice(list(COLOURS))
    look = SILHOUETTE[0], shade(random, colour)
    shown = in_cells(random, random.randint(1, 5), colour, random.choice(SHAPES), look)
    captions = f"{shown.name.capitalize()}.", f"{colour.capitalize()} {plural(shown.shape, shown.count)}."
    asks = [Ask("colour", _COLOUR, colour), *_form(shown)]
    return tell(random, "inks", [shown.picture], [shown.key], captions, asks, shown.name.split())


def _form(shown: Scene) -> list[Ask]:
    """Number, form, and where a single shape is."""
    shape, centre = shown.shape, shown.centres[0]
    asks = [Ask("count", _COUNT, NUMBERS[shown.count]), Ask("shape", _SHAPE, shape)]
    if shown.count == 1:
        asks += [
            Ask("pixel", (f"At which pixel is the {shape}?",), pixels(centre)),
            Ask("position", (f"Where is the {shape}, from 0 to 1?",), fractions(centre, shown.picture.size)),
        ]
    return asks


def _what(random: Random, kind: str, shown: Scene) -> PictureDocument:
    verb = "is" if shown.count == 1 else "are"
    captions = (
        f"There {verb} {shown.name} in the picture.",
        f"A picture of {shown.name}.",
        f"{shown.name.capitalize()}.",
        f"We see {shown.name}.",
    )
    asks = [
        Ask("colour", _COLOUR, shown.colour),
        Ask("count", _COUNT, NUMBERS[shown.count]),
        Ask("shape", _SHAPE, shown.shape),
    ]
    return tell(random, kind, [shown.picture], [shown.key], captions, asks, shown.name.split())


def pixels(point: Point) -> str:
    return f"({point[0]:.0f}, {point[1]:.0f})"


def fractions(point: Point, size: tuple[int, int]) -> str:
    return f"({point[0] / size[0]:.2f}, {point[1] / size[1]:.2f})"


def places(random: Random) -> PictureDocument:
    """One shape and where its centre is: x from the left, y from the top."""
    return _where(random, "places", _any(random, scene, 1))


def spots(random: Random) -> PictureDocument:
    """The same, the shape in a cell."""
    return _where(random, "spots", _any(random, in_cells, 1))


def _where(random: Random, kind: str, shown: Scene) -> PictureDocument:
    (centre,) = shown.centres
    size = shown.picture.size
    absolute, relative = pixels(centre), fractions(centre, size)
    what = f"{shown.colour} {shown.shape}"
    article = "An" if shown.colour == "orange" else "A"
    captions = (
        f"{article} {what} at {absolute} pixels, which is {relative} of the sides.",
        f"The centre of the {what} is at {relative}.",
        f"The centre of the {what} is at pixel {absolute}.",
    )
    asks = [
        Ask(
            "pixel",
            (f"At which pixel is the {shown.shape}?", f"Where is the {shown.shape}, in pixels?"),
            absolute,
        ),
        Ask(
            "position",
            (f"Where is the {shown.shape}, from 0 to 1?", f"Give the position of the {shown.shape} from 0 to 1."),
            relative,
        ),
    ]
    facts = (shown.colour, shown.shape, absolute, relative)
    return tell(random, kind, [shown.picture], [shown.key], captions, asks, facts)


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
