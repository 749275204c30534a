"""The pictures of a report: each function turns a `Run` into the HTML of one section, or into the one line that says
why there is nothing to see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from nanok3.train.run_record import Record, Run, find_number, mapping_of, number
from nanok3.train.svg import (
    RATIO_SHADE,
    Axis,
    Line,
    Mark,
    Point,
    compact,
    escape,
    fit,
    heat_map,
    line_chart,
    median,
    ridges,
    share_shade,
)

COMPRESSORS = {"zlib": "zlib -9", "xz": "xz -9e"}
_MOST_EXPERTS, _MOST_LAYERS, _MOST_PANELS, _MOST_HEADS = 128, 96, 12, 8
_SMALL = (272.0, 200.0)


def missing(reason: str) -> str:
    """The line that stands in for a part without numbers."""
    return f'<p class="missing">{escape(reason)}</p>'


def figure(title: str, picture: str, caption: str = "", layout: str = "") -> str:
    """A picture with its title. layout: 'wide' lets it scroll sideways on a narrow screen, 'beside' puts the caption
    next to it as well."""
    shown = f'<div class="wide">{picture}</div>' if layout else picture
    under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    kind = ' class="beside"' if layout == "beside" else ""
    return f"<figure{kind}><h3>{escape(title)}</h3>{shown}{under}</figure>"


def _pictures(figures: Iterable[str], kind: str = "") -> str:
    """Figures two abreast, or one ('whole')."""
    return f'<div class="pictures {kind}">{"".join(figures)}</div>'


def _small_pictures(figures: Sequence[str]) -> str:
    """Figures of `_SMALL` units, three or four abreast."""
    across = 4 if len(figures) % 4 == 0 else 3
    return f'<div class="pictures small" style="--across:{across}">{"".join(figures)}</div>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


# ---------------------------------------------------------------------- learning


def learning(run: Run) -> str:
    loss = run.curve("train", "loss")
    if not any(math.isfinite(y) for _, y in loss):
        return missing("No training step has been logged.")
    slices = _eval_curves(run, "loss")
    held_out = _mean_of_slices(slices)
    y = fit("nats per token, logarithmic", [v for _, v in loss] + [v for _, v in held_out], log=True)
    lines = [Line("each step", loss, 0, "faint", label=False), Line("training", smoothed(loss), 0)]
    lines += [Line("held out, mean of slices", held_out, 1, "dots")] if held_out else []
    ahead = run.curve("train", "mtp_loss")
    caption = "Faint: the loss of each step. Line: its running mean."
    if any(math.isfinite(v) for _, v in ahead):
        lines.append(Line("of the token after the next", smoothed(ahead), 2))
        caption += " The layer that guesses one token further has a line of its own."
    caption += " Dots: mean over the held-out slices." if held_out else ""
    bits = run.curve("train", "bits_per_byte")
    figures = [figure("Training loss", line_chart(lines, _x_axis(run, loss), y), caption)]
    if any(math.isfinite(v) for _, v in bits):
        scale = fit("bits per byte, logarithmic", [v for _, v in bits], log=True)
        lines = [Line("each step", bits, 0, "faint", label=False), Line("training", smoothed(bits), 0, label=False)]
        figures.append(
            figure(
                "Bits per byte of the training text",
                line_chart(lines, _x_axis(run, bits), scale),
                "The same steps by the byte, a unit that does not depend on the tokenizer.",
            )
        )
    return _pictures(figures)


def smoothed(points: Sequence[Point], share: float = 1 / 80) -> list[Point]:
    """At each point the mean of a window that reaches over `share` of all points (at least 2) to both sides; near the
    start it shrinks on both, so that a steep fall is not smeared. Values that are not finite are passed over."""
    finite = [p for p in points if math.isfinite(p[1])]
    sums = [0.0, *accumulate(y for _, y in finite)]
    reach = max(2, round(share * len(finite)))
    found = []
    for i, (x, _) in enumerate(finite):
        low, high = i - min(reach, i), min(len(finite), i + min(reach, i) + 1)
        found.append((x, (sums[high] - sums[low]) / (high - low)))
    return found


def _x_axis(run: Run, points: Sequence[Point]) -> Axis:
    last = max((x for x, _ in points), default=1.0)
    return Axis("tokens read" if run.x_name == "tokens" else "step", 0.0, last or 1.0)


def _eval_curves(run: Run, name: str) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for record in run.kind("eval"):
        for slice_name, s in mapping_of(record, "slices").items():
            value = number(s.get(name)) if isinstance(s, dict) else None
            if value is not None:
                curves.setdefault(str(slice_name), []).append((run.x(record), value))
    return curves


def _mean_of_slices(curves: dict[str, list[Point]]) -> list[Point]:
    points = sorted(point for curve in curves.values() for point in curve)
    groups = [(x, [y for _, y in same]) for x, same in groupby(points, key=lambda p: p[0])]
    return [(x, sum(ys) / len(ys)) for x, ys in groups if len(ys) == len(curves)]


def validation(run: Run) -> str:
    curves = _eval_curves(run, "bits_per_byte")
    if not curves:
        return missing("No validation has been logged.")
    final = mapping_of(run.final, "slices")
    levels = {
        name: [Mark(shown, v) for key, shown in COMPRESSORS.items() if (v := number(mapping_of(final, name).get(key)))]
        for name in curves
    }
    values = [y for curve in curves.values() for _, y in curve] + [m.value for ms in levels.values() for m in ms]
    y, x = fit("bits per byte, logarithmic", values, log=True), _x_axis(run, [p for c in curves.values() for p in c])
    charts = [
        figure(name, line_chart([Line("model", curve, 0, "dots")], x, y, levels[name], *_SMALL))
        for name, curve in curves.items()
    ]
    words = "Validation during training, one panel a slice, on one scale; dashed, the compressors on the same text."
    return note(words) + _small_pictures(charts)


# ---------------------------------------------------------------------- optimization


def optimization(run: Run) -> str:
    figures = [
        _curve(run, "Learning rate", "of the step", ["lr"], zero=True, share=0),
        _curve(run, "Gradient norm", "before clipping, logarithmic", ["grad_norm", "vision_grad_norm"], log=True),
        _curve(
            run, "Largest attention logit", "of the steps looked at", ["max_logit"], zero=True, share=0, positive=True
        ),
        _curve(run, "Throughput", "tokens per second", ["tokens_per_second"], zero=True),
    ]
    shown = [f for f in figures if f]
    return _small_pictures(shown) if shown else missing("No training step has been logged.")


_NAMES = {"grad_norm": "all", "vision_grad_norm": "vision"}


def _curve(
    run: Run,
    title: str,
    y_name: str,
    fields: Sequence[str],
    log: bool = False,
    zero: bool = False,
    share: float = 1 / 80,
    positive: bool = False,
) -> str:
    """A figure of fields of the train lines, or nothing where none has a value. `share`: of `smoothed`, 0 for the raw
    line alone. `positive`: a zero stands for "not measured"."""
    lines: list[Line] = []
    for i, name in enumerate(fields):
        points = run.curve("train", name)
        points = [p for p in points if p[1] > 0] if positive else points
        if not any(math.isfinite(y) for _, y in points):
            continue
        label, named = _NAMES.get(name, name), len(fields) > 1
        if share:
            lines.append(Line(label, points, i, "faint", label=False))
            points = smoothed(points, share)
        lines.append(Line(label, points, i, label=named))
    if not lines:
        return ""
    if len(lines) <= 2 and len({line.name for line in lines}) == 1:
        lines = [Line(l.name, l.points, l.colour, l.style, label=False) for l in lines]
    values = [y for line in lines for _, y in line.points]
    x = _x_axis(run, lines[0].points)
    return figure(title, line_chart(lines, x, fit(y_name, values, log=log, zero=zero), (), *_SMALL))


# ---------------------------------------------------------------------- inside the model


def experts(run: Run) -> str:
    records = [r for r in run.kind("loads") if _is_grid(r.get("loads"))]
    probe = mapping_of(mapping_of(run.final, "diagnostics"), "expert_loads")
    last = records[-1] if records else probe
    if not _is_grid(last.get("loads")):
        return missing("No expert loads have been logged (a model without experts has none).")
    loads, layers = last["loads"], _layer_names(last)
    experts = max(map(len, loads))
    ratios = [[share * len(row) for share in row] for row in loads]
    grid, rows, columns = _shrunk(ratios, layers, _MOST_LAYERS, _MOST_EXPERTS)
    cell = (max(4.0, min(30.0, 620 / max(len(columns), 1))), 20.0 if len(rows) <= 24 else 9.0)
    when = f"at step {last['step']}" if records else "on the text of the final diagnosis"
    dead = sum(share == 0 for row in loads for share in row)
    caption = f"Load of each expert in multiples of its fair share (1/{experts}), {when}; colourless is balanced. "
    caption += f"{dead} of {sum(map(len, loads))} experts received nothing."
    if len(columns) < experts or len(rows) < len(loads):
        caption += " Neighbours are averaged to fit."
    picture = heat_map(
        grid,
        rows,
        columns,
        RATIO_SHADE,
        row_name="layer ↓",
        column_name="expert →",
        key_name="times the fair share",
        cell=cell,
    )
    layout = "wide" if len(columns) > 12 else "beside"
    maps = _pictures([figure("Load of every expert", picture, caption, layout)], "whole")
    if len(records) < 2:
        return maps
    dead_history = _dead_experts(run)
    history = [_load_history(run, records, "" if dead_history else "beside"), dead_history]
    return maps + _pictures(history, "" if dead_history else "whole")


def _dead_experts(run: Run) -> str:
    points = [p for p in run.curve("train", "dead_experts") if math.isfinite(p[1])]
    if not any(y for _, y in points):
        return ""
    line = Line("experts", points, 0, label=False)
    chart = line_chart(
        [line], _x_axis(run, points), fit("experts, all layers together", [y for _, y in points], zero=True)
    )
    return figure("Experts without a token", chart, "Counted in each step.")


def _load_history(run: Run, records: Sequence[Record], layout: str) -> str:
    curves: dict[str, list[Point]] = {}
    for record in records:
        for name, row in zip(_layer_names(record), record["loads"]):
            curves.setdefault(name, []).append((run.x(record), max(row) * len(row)))
    many = len(curves) > 6
    if many:  # the worst is drawn last, on top of the others
        *others, worst = sorted(curves.items(), key=lambda c: c[1][-1][1])
        lines = [Line(name, points, None, "faint", label=False) for name, points in others]
        lines.append(Line(f"layer {worst[0]}", worst[1], 0))
    else:
        lines = [Line(f"layer {name}", points, i) for i, (name, points) in enumerate(curves.items())]
    values = [y for curve in curves.values() for _, y in curve]
    y = fit("busiest expert over the mean, logarithmic", [1.0, *values], log=True, pad=0.03)
    x = _x_axis(run, [p for c in curves.values() for p in c])
    chart = line_chart(lines, x, y, [Mark("balanced", 1.0)], show=lambda v: f"{v:.2f}×")
    caption = "Largest load of a layer over its mean load; a step's tokens are few, so that 1 is out of reach."
    caption += " Blue: the layer that is worst at the end." if many else ""
    return figure("Balance over time", chart, caption, layout)


def _is_grid(value: object) -> bool:
    rows = value if isinstance(value, list) else []
    numbers = all(isinstance(row, list) and row and all(number(v) is not None for v in row) for row in rows)
    return bool(rows) and numbers


def _layer_names(record: Record) -> list[str]:
    layers = record.get("layers")
    named = isinstance(layers, list) and len(layers) == len(record["loads"])
    return [str(l) for l in (layers if named and layers else range(len(record["loads"])))]


def _shrunk(
    grid: list[list[float]], rows: list[str], most_rows: int, most_columns: int
) -> tuple[list[list[float]], list[str], list[str]]:
    """The grid with neighbours averaged until it is small enough, with names for its rows and columns."""
    by, across = -(-len(grid) // most_rows), -(-max(map(len, grid)) // most_columns)
    mean = [
        [_mean(v for row in grid[i : i + by] for v in row[j : j + across]) for j in range(0, len(grid[i]), across)]
        for i in range(0, len(grid), by)
    ]
    return mean, rows[::by], [str(j * across) for j in range(max(map(len, mean)))]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def depth(run: Run) -> str:
    found = mapping_of(mapping_of(run.final, "diagnostics"), "depth_weights")
    weights, labels = found.get("weights"), found.get("labels")
    if not _is_grid(weights) or not isinstance(labels, list) or len(labels) != len(weights or []):
        return missing("Not measured yet: `nanok3 eval` does (a model without attention residuals has none).")
    assert weights is not None
    width = max(map(len, weights))
    sources = found.get("sources")
    sources = [str(s) for s in sources] if isinstance(sources, list) else []
    sources = (sources + [f"source {j}" for j in range(len(sources), width)])[:width]
    cell = (max(14.0, min(46.0, 620 / width)), 19.0 if len(labels) <= 60 else 8.0)
    picture = heat_map(
        weights,
        [str(label) for label in labels],
        sources,
        share_shade(1.0),
        row_name="reader ↓",
        column_name="source →",
        key_name="mean weight",
        cell=cell,
        numbers=cell[0] >= 30 and cell[1] >= 15,
        slanted=True,
        show=lambda v: f"{v:.2f}",
    )
    caption = (
        "Attention residuals: which earlier results each sub-layer reads, as the mean softmax weight over the tokens "
        "of one held-out batch. Rows sum to 1. Columns from the left: the embedding, then the sum of each block; the "
        "last cell of a row is its own block so far. An untrained model reads all its sources alike."
    )
    return _pictures([figure("Weights over depth", picture, caption, "beside")], "whole")


def retention(run: Run) -> str:
    found = mapping_of(mapping_of(run.final, "diagnostics"), "kda_half_lives")
    lives, layers = found.get("half_lives"), found.get("layers")
    usable = isinstance(lives, list) and isinstance(layers, list) and len(lives) == len(layers)
    if not usable or not lives or not all(_is_grid(heads) for heads in lives):
        return missing("Not measured yet: `nanok3 eval` does (a model without KDA layers has none).")
    assert isinstance(layers, list)
    flat = [v for heads in lives for row in heads for v in row]
    x = fit("half-life in tokens, logarithmic", [min(v, 1e6) for v in flat], log=True, pad=0.02)
    length = find_number(run.config, "seq_len")
    named = [Mark("training length", length)] if length and x.low < length < x.high else []
    marks = [Mark("", mark.value) for mark in named]
    panels = [
        figure(
            f"Layer {layers[i]}",
            ridges([(f"head {h}", lives[i][h]) for h in spaced(len(lives[i]), _MOST_HEADS)], x, marks if n else named),
        )
        for n, i in enumerate(spaced(len(layers), _MOST_PANELS))
    ]
    words = (
        "KDA forgets each key channel at a rate of its own. Shown is the half-life: after so many tokens, decay alone "
        "has halved what a channel holds, at its mean rate over one held-out batch. Each histogram counts the channels "
        f"of a head; the tick is the median. Over all {len(flat)} channels the half-life runs from "
        f"{compact(min(flat))} to {compact(max(flat))} tokens, with a median of {compact(median(flat))}."
    )
    if len(layers) > _MOST_PANELS or len(lives[0]) > _MOST_HEADS:
        words += " Layers and heads are shown at even spacing."
    return note(words) + _small_pictures(panels)


def spaced(count: int, most: int) -> list[int]:
    """At most `most` of range(count), evenly spaced, with both ends."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def recall(run: Run) -> str:
    recall = mapping_of(run.final, "recall")
    figures = [_copy_chart(recall), _pairs_chart(recall)]
    shown = [f for f in figures if f]
    if not shown:
        return missing("Not probed yet: `nanok3 eval` does.")
    words = (
        "Sequences of random tokens, which no knowledge of language can solve: the answer must be read from the "
        "context. Whiskers are 95 % intervals of the counted answers."
    )
    return note(words) + _pictures(shown)


def _copy_chart(recall: Record) -> str:
    rows = _rows(recall, "copy", "distance")
    if not rows:
        return ""
    line = _accuracy_line(rows, "distance")
    x = _doubling_axis("tokens back, logarithmic", [r["distance"] for r in rows])
    marks = _chance(recall, "copy_chance")
    caption = (
        f"A segment of {recall.get('segment', 'some')} random tokens comes again after a distance; counted are its "
    )
    caption += "tokens after the first."
    return figure("Copying", line_chart([line], x, _percent(), marks, show=_show_percent), caption)


def _pairs_chart(recall: Record) -> str:
    rows = _rows(recall, "pairs", "pairs")
    if not rows:
        return ""
    lines = [_accuracy_line(rows, "pairs")]
    shown = [(float(r["pairs"]), 100 * v) for r in rows if (v := number(r.get("shown"))) is not None]
    lines += [Line("guess", shown, None, "dashes")] if shown else []
    x = _doubling_axis("pairs held at once, logarithmic", [r["pairs"] for r in rows])
    marks = _chance(recall, "pairs_chance")
    caption = "Pairs of a key and a value are shown, then all keys are asked for in another order. Dashed curve: "
    caption += "guessing among the values that were shown."
    return figure("Recalling pairs", line_chart(lines, x, _percent(), marks, show=_show_percent), caption)


def _rows(recall: Record, name: str, key: str) -> list[Record]:
    rows = recall.get(name)
    rows = [r for r in rows if isinstance(r, dict)] if isinstance(rows, list) else []
    return [r for r in rows if (number(r.get(key)) or 0) > 0 and number(r.get("accuracy")) is not None]


def _accuracy_line(rows: Sequence[Record], key: str) -> Line:
    points = [(float(r[key]), 100 * float(r["accuracy"])) for r in rows]
    spans = [wilson(float(r["accuracy"]), number(r.get("predictions")) or 0) for r in rows]
    return Line("model", points, 0, "dots", spans=[(100 * low, 100 * high) for low, high in spans])


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95 % interval (Wilson) of a share seen in `count` trials."""
    if count <= 0:
        return share, share
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _chance(recall: Record, name: str) -> list[Mark]:
    chance = number(recall.get(name))
    return [] if chance is None else [Mark(f"chance {100 * chance:.2g} %", 100 * chance)]


def _percent() -> Axis:
    return Axis("right answers, %", 0.0, 100.0, ticks=(0, 25, 50, 75, 100))


def _show_percent(value: float) -> str:
    return f"{value:.0f} %"


def _doubling_axis(label: str, values: Sequence[float]) -> Axis:
    axis = fit(label, values, log=True, pad=0.04)
    every = -(-len(values) // 8)
    return Axis(label, axis.low, axis.high, True, tuple(values[::every]), lambda v: f"{v:g}")
