"""Ink for picture documents: colours, shapes, places that do not overlap, fonts.

A shape of radius r has its corners on a circle of radius r round its centre, so that the centre of the circle is the
centre of mass, too. Shapes are drawn without smoothing: every pixel is either ink or paper. Letters are smoothed by
Pillow; with another Pillow they may differ in a few grey levels.
"""

from __future__ import annotations

import importlib.util
import math
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from nanok3.data.images import pillow

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

Colour = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Colour] = {
    "red": (220, 40, 40),
    "green": (40, 165, 70),
    "blue": (50, 85, 225),
    "yellow": (240, 205, 30),
    "orange": (245, 135, 25),
    "purple": (140, 55, 175),
    "pink": (245, 140, 190),
    "brown": (125, 80, 40),
}
_MIDDLE: list[Colour] = [(128, 128, 128), (120, 120, 120), (136, 136, 136), (128, 132, 140)]
PAPERS: list[Colour] = [(255, 255, 255), (232, 232, 232), (222, 234, 246), (24, 26, 34), *_MIDDLE]
"""Backgrounds: white, light grey, pale blue, nearly black; and for half of the pictures a middle grey, which is zero
where pixels go into the tower. On such paper a new tower sees ink and nothing else, and what it learns there holds on
the others. Without it, paper is nearly all that its rows say, and the text learns to pass over them (docs/log.md)."""

SILHOUETTE: tuple[Colour, Colour] = (128, 128, 128), (20, 20, 20)
"""Paper and ink. The paper is zero where pixels go into the tower."""
CELL = 28
"""Pixels of one feature row's square: four patches."""

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
NUMBERS = ("zero", "one", "two", "three", "four", "five")
CELLS = 4
"""For the split, a place is named by its cell in a grid of 4 x 4."""

_CROSS = [(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1), (1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)]


def imaging(name: str) -> Any:
    """A module of Pillow: ImageDraw, ImageFont; an error that names the extra where Pillow is missing."""
    pillow()
    from PIL import ImageDraw, ImageFont

    return {"ImageDraw": ImageDraw, "ImageFont": ImageFont}[name]


def canvas(width: int, height: int, paper: Colour) -> tuple[PILImage, Any]:
    """An empty picture and the pen that draws on it."""
    picture = pillow().new("RGB", (width, height), paper)
    pen = imaging("ImageDraw").Draw(picture)
    pen.fontmode = "L"
    return picture, pen


def shade(random: Random, name: str) -> Colour:
    """The colour of that name, a little off."""
    red, green, blue = (min(255, max(0, level + random.randint(-10, 10))) for level in COLOURS[name])
    return red, green, blue


def _corners(shape: str, radius: float) -> list[Point]:
    if shape == "cross":
        unit = radius / math.hypot(1, 3)
        return [(x * unit, y * unit) for x, y in _CROSS]
    turn, count, inner = {
        "square": (45, 4, 1.0),
        "diamond": (90, 4, 1.0),
        "triangle": (90, 3, 1.0),
        "star": (90, 10, 0.42),
    }[shape]
    angles = [math.radians(turn + 360 / count * i) for i in range(count)]
    radii = [radius * (inner if i % 2 else 1.0) for i in range(count)]
    return [(r * math.cos(angle), -r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True)]


def draw_shape(pen: Any, shape: str, centre: Point, radius: float, colour: Colour) -> None:
    """One filled shape."""
    x, y = centre
    if shape == "circle":
        r = radius * 0.9  # so that it is not the largest of them all
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    else:
        pen.polygon([(x + dx, y + dy) for dx, dy in _corners(shape, radius)], fill=colour)


def place(random: Random, count: int, width: int, height: int, radius: float) -> list[Point]:
    """Whole-numbered centres of `count` shapes that neither touch each other nor leave the picture. There must be
    ample room: it is tried until it works."""
    margin, apart = math.ceil(radius) + 1, 2 * radius + 3
    while True:
        centres: list[Point] = []
        for _ in range(60):
            point = random.randint(margin, width - margin - 1), random.randint(margin, height - margin - 1)
            if all(math.dist(point, other) > apart for other in centres):
                centres.append(point)
            if len(centres) == count:
                return centres


def cell(point: Point, width: int, height: int) -> str:
    """Row and column of the cell that a point lies in."""
    x, y = point
    return f"{int(y * CELLS // height)}{int(x * CELLS // width)}"


@lru_cache(maxsize=256)
def font(size: int, face: str | None = None) -> Any:
    """Pillow's own font, or a face of DejaVu ("DejaVuSans", "DejaVuSerif", ...) from matplotlib's files."""
    module = imaging("ImageFont")
    if face is None:
        return module.load_default(size)
    return module.truetype(str(dejavu_folder() / f"{face}.ttf"), size)


def dejavu_folder() -> Path:
    """The folder of the DejaVu fonts; matplotlib is not imported for it."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ImportError("rendered words need the DejaVu fonts that matplotlib has: pip install 'nanok3[pictures]'")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


def text_size(text: str, with_font: Any) -> tuple[int, int, int, int]:
    """Left, top, width and height of a text's ink, from where it is drawn."""
    left, top, right, bottom = with_font.getbbox(text)
    return math.floor(left), math.floor(top), math.ceil(right - left), math.ceil(bottom - top)
