"""Small pictures as inline SVG: line charts, heat maps, histograms. Nothing is fetched and nothing is scripted.

    axis = fit("tokens", values)                  a range with round ticks, linear or logarithmic
    line_chart([Line("train", points)], x, y)     -> "<svg ...>"

Colours are names (`c0` ... `c5`, `heat`, `cool`) that the page's style sheet fills in for light, dark and paper; a line
also differs from its neighbour by its label or its dashes, a cell by its opacity, so that nothing hangs on hue alone.
Under the pointer a chart shows the value (CSS `:hover`). Text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

WIDTH, HEIGHT = 460, 262
"""Units of a chart; the page scales it."""
COLOURS = 6
MOST_POINTS = 400
MOST_HOVERS = 72
_KEY = 34
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Point = tuple[float, float]


def escape(text: object) -> str:
    """HTML text or attribute. Control characters and lone surrogates, which HTML cannot hold, become visible signs."""
    shown = "".join(_visible(c) for c in str(text))
    return html.escape(shown)


def _visible(c: str) -> str:
    if c in "\n\t":
        return c
    if c < " ":
        return chr(0x2400 + ord(c))
    return "\ufffd" if "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" else c


def compact(value: float) -> str:
    """At most three digits: 0.25, 4, 1.2k, 35M, 2·10⁻⁴."""
    size = abs(value)
    if not math.isfinite(value):
        return "–"
    if size and size < 9.995e-4:
        power = math.floor(math.log10(size))
        digits = f"{value / 10**power:.2g}"
        exponent = "10" + str(power).translate(_SUPERSCRIPT)
        return exponent if digits == "1" else f"{digits}·{exponent}"
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * unit:
            return f"{_three_digits(value / unit)}{name}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    text = f"{value:.3g}"
    return f"{float(text):.0f}" if "e" in text else text


# ---------------------------------------------------------------------- axes


@dataclass(frozen=True)
class Axis:
    """A labelled range. `ticks` overrides the round numbers it would choose, `show` writes them."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    show: Callable[[float], str] = compact

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high end; outside values stay at the ends."""
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def marks(self, most: int = 6) -> list[float]:
        """Round values inside the range."""
        if self.ticks:
            found: Iterable[float] = self.ticks
        else:
            found = _log_marks(self.low, self.high, most) if self.log else _marks(self.low, self.high, most)
        slack = 1e-9 * (self.high - self.low)
        return [v for v in found if self.low - slack <= v <= self.high + slack]


def fit(label: str, values: Iterable[float], log: bool = False, zero: bool = False, pad: float = 0.06) -> Axis:
    """The axis that holds all finite `values` (positive ones if `log`) with a little room; from 0 if `zero`."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(kept), max(kept)) if kept else ((1.0, 10.0) if log else (0.0, 1.0))
    if log:
        room = (high / low) ** pad if high > low else 1.5
        return Axis(label, low / room, high * room, log=True)
    room = (high - low) * pad or abs(high) * 0.1 or 1.0
    return Axis(label, 0.0 if zero and low >= 0 else low - room, high + room)


def _marks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_marks(low: float, high: float, most: int) -> list[float]:
    """The finest of several sets of round numbers whose neighbours keep their distance."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    least = math.log(high / low) / (1.7 * most)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if all(math.log(b / a) >= least for a, b in zip(found, found[1:])):
            return found
    decades = [10.0**p for p in powers if low <= 10.0**p <= high]
    return decades[:: max(1, -(-len(decades) // most))]


# ---------------------------------------------------------------------- lines


@dataclass(frozen=True)
class Line:
    """Points from left to right; a y that is not finite breaks the line. `colour`: 0 to 5, or None for grey."""

    name: str
    points: Sequence[Point]
    colour: int | None = 0
    style: Literal["line", "faint", "dots", "dashes"] = "line"
    label: bool = True
    """Whether its name stands at its right end."""
    spans: Sequence[tuple[float, float]] = ()
    """For each point an interval (low, high), drawn as a whisker."""


@dataclass(frozen=True)
class Mark:
    """A horizontal dashed line across the chart: a level to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class _Frame:
    """The plotting area of a chart, in its units."""

    x: Axis
    y: Axis
    left: float
    top: float
    width: float
    height: float

    def px(self, value: float) -> float:
        return self.left + self.width * self.x.at(value)

    def py(self, value: float) -> float:
        return self.top + self.height * (1 - self.y.at(value))


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    width: float = WIDTH,
    height: float = HEIGHT,
    show: Callable[[float], str] = compact,
) -> str:
    """One chart. The first line that is not faint answers to the pointer; `show` writes its values."""
    labels = [(line.name, _last(line.points), _class(line)) for line in lines if line.label and line.points]
    labels += [(mark.name, mark.value, "grey") for mark in marks]
    left = 10 + 6.8 * max((len(y.show(v)) for v in y.marks()), default=1)
    right = 10 + max((6.7 * len(name) for name, _, _ in labels), default=4)
    frame = _Frame(x, y, left, 28, width - left - right, height - 28 - 40)
    parts = [*_grid(frame), *(_level(frame, mark) for mark in marks), *(_draw(frame, line) for line in lines)]
    parts += _end_labels(frame, labels)
    loud = next((line for line in lines if line.style != "faint"), None)
    if loud is not None:
        parts += _hovers(frame, loud, show)
    return svg(parts, width, height, f"{y.label} against {x.label}")


def svg(parts: Iterable[str], width: float, height: float, description: str) -> str:
    """The element around drawn parts; on a wide page it grows a little beyond its units, not without bound."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{1.2 * width:.0f}" style="max-width:{1.2 * width:.0f}px"'
    head = f'<svg class="{"little" if width < 400 else "large"}" {size} role="img" aria-label="{escape(description)}">'
    return head + "".join(parts) + "</svg>"


def _last(points: Sequence[Point]) -> float:
    return next((y for _, y in reversed(points) if math.isfinite(y)), math.nan)


def _class(line: Line) -> str:
    return "grey" if line.colour is None else f"c{line.colour % COLOURS}"


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    words = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{words}>{escape(content)}</text>'


def _grid(frame: _Frame) -> Iterable[str]:
    bottom = frame.top + frame.height
    for value in frame.y.marks(6 if frame.height > 130 else 4):
        at = frame.py(value)
        yield f'<path class="grid" d="M{frame.left:.1f} {at:.1f}h{frame.width:.1f}"/>'
        yield text(frame.left - 6, at + 3.8, frame.y.show(value), "tick", "end")
    yield f'<path class="axis" d="M{frame.left:.1f} {bottom:.1f}h{frame.width:.1f}"/>'
    for value in frame.x.marks(6 if frame.width > 250 else 4):
        at = frame.px(value)
        yield f'<path class="axis" d="M{at:.1f} {bottom:.1f}v4"/>'
        yield text(at, bottom + 16, frame.x.show(value), "tick", "middle")
    yield text(0, 13, frame.y.label, "name")
    yield text(frame.left + frame.width, bottom + 33, frame.x.label, "name", "end")


def _level(frame: _Frame, mark: Mark) -> str:
    return f'<path class="level" d="M{frame.left:.1f} {frame.py(mark.value):.1f}h{frame.width:.1f}"/>'


def _draw(frame: _Frame, line: Line) -> str:
    runs = [list(run) for real, run in groupby(line.points, key=lambda p: math.isfinite(p[1])) if real]
    places = [[(frame.px(x), frame.py(y)) for x, y in thinned(run)] for run in runs]
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in places)
    dots = [place for run in places for place in run if line.style == "dots" or len(run) == 1]
    drawn = f'<path class="line {line.style} {_class(line)}" d="{path}"/>' if path else ""
    for (x, _), (low, high) in zip(line.points, line.spans):
        whisker = f"M{frame.px(x):.1f} {frame.py(low):.1f}V{frame.py(high):.1f}"
        drawn += f'<path class="whisker {_class(line)}" d="{whisker}"/>'
    return drawn + "".join(f'<circle class="dot {_class(line)}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in dots)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points that keep every peak: of each stretch its lowest and its highest."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = [points[0]]
    stretches = (most - 2) // 2
    for i in range(stretches):
        stretch = points[1 + i * (len(points) - 2) // stretches : 1 + (i + 1) * (len(points) - 2) // stretches]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _end_labels(frame: _Frame, labels: Sequence[tuple[str, float, str]]) -> Iterable[str]:
    """Names at the right ends of their lines, moved apart where they would overlap."""
    wanted = sorted((frame.py(value), name, kind) for name, value, kind in labels if math.isfinite(value))
    places = spread([at for at, _, _ in wanted], 12.5, frame.top, frame.top + frame.height)
    for at, (_, name, kind) in zip(places, wanted):
        yield text(frame.left + frame.width + 6, at + 3.8, name, f"label {kind}")


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places at least `gap` apart, moved as little as a push from the top and one from the bottom allow."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap if moved else low))
    limit = high
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def _hovers(frame: _Frame, line: Line, show: Callable[[float], str]) -> Iterable[str]:
    """Invisible columns, each of which shows the value of the point in its middle."""
    points = [p for p in line.points if math.isfinite(p[1])]
    if len(points) > MOST_HOVERS:
        points = [points[i * (len(points) - 1) // (MOST_HOVERS - 1)] for i in range(MOST_HOVERS)]
    centres = [frame.px(x) for x, _ in points]
    edges = [frame.left, *((a + b) / 2 for a, b in zip(centres, centres[1:])), frame.left + frame.width]
    for (x, y), centre, start, end in zip(points, centres, edges, edges[1:]):
        told = f"{show(y)} at {frame.x.show(x)}"
        yield (
            f'<g class="hover"><rect x="{start:.1f}" y="{frame.top:.1f}" width="{max(end - start, 0.1):.1f}" '
            f'height="{frame.height:.1f}"/><path class="level" d="M{centre:.1f} {frame.top:.1f}v{frame.height:.1f}"/>'
            f'<circle class="dot {_class(line)}" cx="{centre:.1f}" cy="{frame.py(y):.1f}" r="3.2"/>'
            + text(frame.left + frame.width, 13, told, "told", "end")
            + "</g>"
        )


# ---------------------------------------------------------------------- heat maps


@dataclass(frozen=True)
class Shade:
    """How a value becomes a colour: `heat` above the neutral value, `cool` below it, opacity from `strength` (0 to
    1). `scale` holds the values shown in the key."""

    strength: Callable[[float], float]
    scale: tuple[float, ...]
    neutral: float = -math.inf

    def kind(self, value: float) -> str:
        return "heat" if value >= self.neutral else "cool"


def share_shade(highest: float) -> Shade:
    """0 to `highest`, one colour."""
    top = max(highest, 1e-9)
    return Shade(lambda v: min(1.0, max(0.0, v) / top), tuple(top * i / 4 for i in range(5)))


RATIO_SHADE = Shade(lambda v: min(1.0, abs(math.log2(max(v, 2.0**-4))) / 2) ** 0.8, (0.25, 0.5, 1.0, 2.0, 4.0), 1.0)
"""Multiples of a fair share: colourless at 1, full at a quarter and at four times."""


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    shade: Shade,
    *,
    row_name: str,
    column_name: str,
    key_name: str,
    cell: tuple[float, float] = (40, 20),
    numbers: bool = False,
    slanted: bool = False,
    show: Callable[[float], str] = compact,
) -> str:
    """One cell a value, None for none; rows may end early. `numbers` writes the values into the cells; `slanted` is for
    column names that are wider than a cell. Where names would overlap only some are shown."""
    wide, high = cell
    left = 8 + 7.2 * max(len(row_name), *map(len, rows))
    longest = max(map(len, columns), default=0)
    top = 32 + 3.8 * longest if slanted else 40
    parts = [text(left - 6, 13, row_name, "name", "end"), text(left, 13, column_name, "name")]
    for j in range(0, len(columns), math.ceil((14 if slanted else 6.4 * longest + 4) / wide)):
        parts.append(_column_label(left + wide * (j + 0.5), top - 6, columns[j], slanted))
    for i, (name, row) in enumerate(zip(rows, values)):
        y = top + high * i
        if i % math.ceil(12 / high) == 0:
            parts.append(text(left - 6, y + high / 2 + 3.8, name, "tick", "end"))
        for j, value in enumerate(row):
            if value is not None:
                x = left + wide * j
                parts.append(_cell(x, y, wide, high, value, shade, f"{name}, {columns[j]}: {show(value)}"))
                if numbers:
                    ink = "ink strong" if shade.strength(value) > 0.55 else "ink"
                    parts.append(text(x + wide / 2, y + high / 2 + 3.8, show(value), ink, "middle"))
    bottom = top + high * len(rows)
    right = max(wide * len(columns) + (60 if slanted else 12), _KEY * len(shade.scale) + 12 + 7.2 * len(key_name))
    return svg([*parts, *_key(left, bottom + 16, shade, key_name, show)], left + right, bottom + 56, key_name)


def _column_label(x: float, y: float, name: str, slanted: bool) -> str:
    if not slanted:
        return text(x, y, name, "tick", "middle")
    return f'<g transform="translate({x:.1f} {y:.1f}) rotate(-35)">{text(0, 0, name, "tick")}</g>'


def _cell(x: float, y: float, wide: float, high: float, value: float, shade: Shade, told: str) -> str:
    gap = 1 if wide > 6 else 0.4
    return (
        f'<rect class="cell {shade.kind(value)}" x="{x:.1f}" y="{y:.1f}" width="{wide - gap:.1f}" '
        f'height="{high - gap:.1f}" fill-opacity="{0.03 + 0.97 * shade.strength(value):.2f}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _key(left: float, top: float, shade: Shade, name: str, show: Callable[[float], str]) -> Iterable[str]:
    for i, value in enumerate(shade.scale):
        yield _cell(left + _KEY * i, top, _KEY, 10, value, shade, show(value))
        yield text(left + _KEY * (i + 0.5), top + 23, show(value), "tick", "middle")
    yield text(left + _KEY * len(shade.scale) + 8, top + 9, name, "tick")


# ---------------------------------------------------------------------- histograms


def ridges(
    rows: Sequence[tuple[str, Sequence[float]]],
    x: Axis,
    marks: Sequence[Mark] = (),
    bins: int = 28,
    width: float = 330,
    ridge: float = 34,
) -> str:
    """One histogram a row over a common axis, each as high as its own tallest bin, with a tick at its median.
    `marks` are vertical here."""
    left, top = 50.0, 12.0
    frame = _Frame(x, Axis("", 0, 1), left, top, width - left - 14, ridge * len(rows))
    bottom = top + frame.height
    parts = []
    for value in x.marks(5):
        at = frame.px(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {top:.1f}V{bottom + 4:.1f}"/>')
        parts.append(text(at, bottom + 16, compact(value), "tick", "middle"))
    for mark in marks:
        parts.append(f'<path class="level" d="M{frame.px(mark.value):.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(text(frame.px(mark.value) - 3, top + 4, mark.name, "tick", "end"))
    for i, (name, values) in enumerate(rows):
        parts += _ridge(frame, top + ridge * (i + 1), ridge - 6, name, values, bins)
    parts.append(text(width - 14, bottom + 32, x.label, "name", "end"))
    return svg(parts, width, bottom + 40, f"histograms of {x.label}")


def _ridge(frame: _Frame, base: float, height: float, name: str, values: Sequence[float], bins: int) -> Iterable[str]:
    counts = histogram(values, frame.x, bins)
    step, peak = frame.width / bins, max(max(counts), 1)
    outline = f"M{frame.left:.1f} {base:.1f}"
    for i, count in enumerate(counts):
        outline += f"V{base - height * count / peak:.1f}H{frame.left + step * (i + 1):.1f}"
    middle = median(values)
    extent = f"{compact(min(values))} to {compact(max(values))}"
    told = f"{name}: {len(values)} channels, median {compact(middle)} tokens, {extent}"
    yield f'<path class="ridge c0" d="{outline}V{base:.1f}Z"><title>{escape(told)}</title></path>'
    yield f'<path class="axis" d="M{frame.left:.1f} {base:.1f}h{frame.width:.1f}"/>'
    yield f'<path class="median" d="M{frame.px(middle):.1f} {base - 5:.1f}v10"/>'
    yield text(frame.left - 6, base - height / 2 + 6, name, "tick", "end")


def histogram(values: Sequence[float], x: Axis, bins: int) -> list[int]:
    """How many values fall into each of `bins` equal parts of the axis; values beyond an end count in its last bin."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(x.at(value) * bins))] += 1
    return counts


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
