"""Moving shapes as video: chunks of four frames, four frames a second, each chunk under its time.

The key is colour, form, motion and the cell where it starts.
"""

from __future__ import annotations

from random import Random

from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell
from nanok3.data.pictures.drawing import COLOURS, PAPERS, SHAPES, canvas, cell, draw_shape, shade
from nanok3.data.video import CHUNK

MOTIONS = {
    "moves to the right": (1, 0, 1.0),
    "moves to the left": (-1, 0, 1.0),
    "moves up": (0, -1, 1.0),
    "moves down": (0, 1, 1.0),
    "grows": (0, 0, 2.0),
    "shrinks": (0, 0, 0.5),
    "stays where it is": (0, 0, 1.0),
}
"""What it does: steps to the right and down, and the factor by which it grows."""

RATE = 4
"""Frames of a second."""


def _start(random: Random, direction: int, side: int, radius: float) -> int:
    """A coordinate from which half the side is free in the direction of the motion."""
    margin = int(radius) + 2
    low, high = margin, side - margin - 1
    if direction:
        low, high = (low, low + side // 6) if direction > 0 else (high - side // 6, high)
    return random.randint(low, high)


def motion(random: Random) -> PictureDocument:
    """One shape in one or two chunks."""
    does, (dx, dy, factor) = random.choice(list(MOTIONS.items()))
    colour, shape = random.choice(list(COLOURS)), random.choice(SHAPES)
    width, height = random.choice((56, 84)), 56
    chunks = random.choice((1, 1, 2))
    small, large = random.uniform(6, 7), random.uniform(12, 14)
    begin, end = {2.0: (small, large), 0.5: (large, small)}.get(factor, (8.0, 8.0))
    x, y = _start(random, dx, width, max(begin, end)), _start(random, dy, height, max(begin, end))
    ink, paper = shade(random, colour), random.choice(PAPERS)
    frames = []
    for number in range(chunks * CHUNK):
        part = number / (chunks * CHUNK - 1)
        picture, pen = canvas(width, height, paper)
        centre = x + dx * part * width / 2, y + dy * part * height / 2
        draw_shape(pen, shape, centre, begin + (end - begin) * part, ink)
        frames.append(picture)
    shown: list[str | Picture] = [Picture(tuple(frames[i : i + CHUNK]), i / RATE) for i in range(0, len(frames), CHUNK)]
    what = f"{colour} {shape}"
    article = "An" if colour == "orange" else "A"
    captions = (f"{article} {what} {does}.", f"The {what} {does}.", f"A video: the {what} {does}.")
    asks = [
        Ask("motion", (f"What does the {shape} do?", "What happens?"), f"it {does}"),
        Ask("colour", ("What colour is it?", "Which colour do you see?"), colour),
        Ask("shape", ("Which shape is it?", "What shape do you see?"), shape),
    ]
    key = f"motion {does} {what} {cell((x, y), width, height)}"
    return tell(random, "motion", shown, [key], captions, asks, (does, colour, shape))
