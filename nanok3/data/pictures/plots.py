"""Small plots and tables, drawn from data that the text repeats.

    plots      three to five bars with values from one to nine, or a line through four to six points
    tables     a header and two to four lines

The key is the data, so a held-out plot or table has numbers that no training picture of its kind has.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell
from nanok3.data.pictures.drawing import COLOURS, NUMBERS, canvas, font, shade, text_size
from nanok3.data.pictures.words import HEADERS, LABELS, NAMES

_BLACK, _GREY, _WHITE = (20, 20, 20), (205, 205, 205), (255, 255, 255)
_TOP = 10
"""The axis ends there; values are smaller."""


def _axes(pen: Any, left: int, top: int, right: int, bottom: int, small: Any) -> None:
    """Lines at 0, 5 and 10, with their numbers."""
    for value in (0, 5, 10):
        y = bottom - (bottom - top) * value // _TOP
        pen.line((left, y, right, y), fill=_BLACK if value == 0 else _GREY)
        x, upper, width, height = text_size(str(value), small)
        pen.text((left - 3 - width - x, y - height // 2 - upper), str(value), fill=_BLACK, font=small)


def _centred(pen: Any, text: str, x: float, y: float, with_font: Any) -> None:
    left, top, width, _ = text_size(text, with_font)
    pen.text((x - width / 2 - left, y - top), text, fill=_BLACK, font=with_font)


def draw_bars(random: Random, labels: Sequence[str], values: Sequence[int]) -> Picture:
    """Bars of one colour; every other picture writes the values above them."""
    small = font(9)
    widest = max(text_size(label, small)[2] for label in labels)
    step = max(18, widest + 4)
    width, height = 18 + step * len(labels) + 2, random.choice((84, 98))
    picture, pen = canvas(width, height, _WHITE)
    left, top, bottom = 18, 14, height - 14
    _axes(pen, left, top, width - 2, bottom, small)
    ink, numbered = shade(random, random.choice(list(COLOURS))), random.random() < 0.5
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        x = left + step * i + step / 2
        y = bottom - (bottom - top) * value / _TOP
        pen.rectangle((x - step * 0.3, y, x + step * 0.3, bottom - 1), fill=ink)
        _centred(pen, label, x, bottom + 3, small)
        if numbered:
            _centred(pen, str(value), x, y - 9, small)
    return Picture((picture,))


def draw_line(random: Random, values: Sequence[int]) -> Picture:
    """Points joined by a line, numbered from one below."""
    small, step = font(9), 18
    width, height = 18 + step * len(values) + 2, random.choice((84, 98))
    picture, pen = canvas(width, height, _WHITE)
    left, top, bottom = 18, 8, height - 14
    _axes(pen, left, top, width - 2, bottom, small)
    ink = shade(random, random.choice(list(COLOURS)))
    points = [(left + step * (i + 0.5), bottom - (bottom - top) * v / _TOP) for i, v in enumerate(values)]
    pen.line(points, fill=ink, width=2)
    for number, (x, y) in enumerate(points, 1):
        pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill=ink)
        _centred(pen, str(number), x, bottom + 3, small)
    return Picture((picture,))


def _bars(random: Random) -> PictureDocument:
    values = random.sample(range(1, _TOP), random.randint(3, 5))  # no two alike: one is highest
    labels = random.choice((list("ABCDE")[: len(values)], random.sample(LABELS, len(values))))
    data = dict(zip(labels, values, strict=True))
    told = ", ".join(f"{label} {value}" for label, value in data.items())
    label = random.choice(labels)
    captions = (f"A bar chart: {told}.", f"Bars: {told}.", f"The chart shows {told}.")
    asks = [
        Ask("value", (f"What is the value of {label}?", f"How high is {label}?"), str(data[label])),
        Ask("highest", ("Which bar is highest?", "Which is the largest?"), max(data, key=data.__getitem__)),
        Ask("lowest", ("Which bar is lowest?", "Which is the smallest?"), min(data, key=data.__getitem__)),
        Ask("bars", ("How many bars are there?", "Count the bars."), NUMBERS[len(values)]),
    ]
    return tell(random, "plots", [draw_bars(random, labels, values)], [f"bars {told}"], captions, asks, [told])


def _line(random: Random) -> PictureDocument:
    values = [random.randint(0, _TOP) for _ in range(random.randint(4, 6))]
    told = ", ".join(map(str, values))
    number = random.randint(1, len(values))
    captions = (f"A line through {told}.", f"The line goes {told}.", f"A line chart with the values {told}.")
    asks = [
        Ask("value", (f"What is the value at {number}?", f"How high is point {number}?"), str(values[number - 1])),
        Ask("points", ("How many points are there?", "Count the points."), str(len(values))),
    ]
    return tell(random, "plots", [draw_line(random, values)], [f"line {told}"], captions, asks, [told])


def plots(random: Random) -> PictureDocument:
    """A bar chart or a line chart."""
    return random.choice((_bars, _line))(random)


def draw_table(random: Random, lines: Sequence[Sequence[str]]) -> Picture:
    """A grid of texts, the first line dark."""
    size = font(random.randint(10, 12))
    tall = size.size + 4
    widths = [max(text_size(line[column], size)[2] for line in lines) + 8 for column in range(len(lines[0]))]
    picture, pen = canvas(sum(widths) + 3, tall * len(lines) + 3, _WHITE)
    pen.rectangle((1, 1, sum(widths) + 1, tall), fill=(225, 232, 240))
    y = 1
    for line in lines:
        x = 1
        for text, width in zip(line, widths, strict=True):
            pen.rectangle((x, y, x + width, y + tall), outline=_GREY)
            pen.text((x + 4, y + 1), text, fill=_BLACK, font=size)
            x += width
        y += tall
    return Picture((picture,))


def tables(random: Random) -> PictureDocument:
    """Names or things with a number or two each."""
    people = random.random() < 0.5
    first = "name" if people else "item"
    header = [first, *random.sample([h for h in HEADERS if h not in ("name", "item")], random.randint(1, 2))]
    rows = random.sample(NAMES if people else LABELS, random.randint(2, 4))
    lines = [[row, *(str(random.randint(1, 99)) for _ in header[1:])] for row in rows]
    line, column = random.choice(lines), random.randrange(1, len(header))
    code = "\n".join(",".join(cells) for cells in [header, *lines])
    captions = (
        f"A table:\n{code}",
        code,
        "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["-"] * len(header), *lines]),
    )
    asks = [
        Ask("cell", (f"What is the {header[column]} of {line[0]}?", f"{line[0]}: {header[column]}?"), line[column]),
        Ask("lines", ("How many lines are below the header?", "How many rows of data?"), NUMBERS[len(lines)]),
        Ask("columns", ("How many columns are there?", "Count the columns."), NUMBERS[len(header)]),
    ]
    cells = [text for cells in [header, *lines] for text in cells]
    return tell(random, "tables", [draw_table(random, [header, *lines])], [f"table {code}"], captions, asks, cells)
