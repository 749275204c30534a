"""`report.html` of a run of RL or distillation: the curves by which one sees that it learns, or that it goes wrong, and
samples with what they earned.

Reward and accuracy say different things under a budget: a right answer above it earns -1. Thinking tokens beside tau
show what the budget does. Masked tokens, lag, flat groups and cut-off answers are what goes wrong first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanok3.data.files import write_file
from nanok3.train import report_pictures as pictures
from nanok3.train.report_pictures import figure, missing
from nanok3.train.run_record import Run, read_run
from nanok3.train.svg import Line, escape, fit, line_chart

STYLE = Path(pictures.__file__).with_name("report.css")
CURVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Reward and accuracy of rollouts": ("share", ("reward", "accuracy")),
    "Tokens of an answer": ("tokens", ("thinking", "output")),
    "Budget": ("tau", ("tau",)),
    "Above the budget, cut off by max_tokens": ("share", ("over_budget", "truncated")),
    "Masked and withheld tokens": ("share of tokens", ("masked", "withheld")),
    "Groups without a preference": ("share of groups", ("zero_variance",)),
    "Updates since the oldest token": ("updates", ("lag", "lag_max")),
    "Distance to the teachers": ("nats a token", ("reverse_kl",)),
    "Gradient norm": ("norm", ("grad_norm",)),
    "Tokens a second in rollouts": ("tokens/s", ("tokens_per_second",)),
}
"""Title -> label of the axis, and the fields of a line of metrics.jsonl."""
SHOWN = 12
"""Samples on the page."""


def write_rl_report(folder: Path) -> Path:
    """Write `folder/report.html` from what lies there."""
    run = read_run(folder)
    style = STYLE.read_text("utf-8")
    head = f'<meta charset="utf-8"><title>{escape(run.name)} – nanok3 run report</title>\n<style>\n{style}</style>'
    body = "".join(
        f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>\n"
        for title, content in (
            ("Held-out tasks", held_out(run)),
            ("Teachers and student", teachers(folder)),
            ("Rollouts and training", curves(run)),
            ("Samples with their rewards", samples(run)),
            ("Settings", f"<pre>{escape(run.config_text)}</pre>"),
        )
        if content
    )
    title = f'<header>\n<p class="kind">nanok3 · post-training</p>\n<h1>{escape(run.name)}</h1>\n</header>'
    page = f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{title}\n<main>\n{body}</main>\n</body>\n'
    page += "</html>\n"
    write_file(folder / "report.html", page.encode())
    return folder / "report.html"


def curves(run: Run) -> str:
    """A chart for each entry of CURVES that has numbers."""
    kind = "mopd" if run.kind("mopd") else "rl"
    found = []
    for title, (label, names) in CURVES.items():
        lines = [
            Line(name.replace("_", " "), points, colour)
            for colour, name in enumerate(names)
            if (points := [p for p in run.curve(kind, name) if p[1] == p[1]])
        ]
        if lines:
            points = [p for line in lines for p in line.points]
            x, y = fit("iteration", [p[0] for p in points], pad=0), fit(label, [p[1] for p in points], zero=True)
            found.append(figure(title, line_chart(lines, x, y)))
    charts = "".join(found)
    return f'<div class="pictures">{charts}</div>' if found else missing("No iteration has ended yet.")


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def held_out(run: Run) -> str:
    """Accuracy and tokens on tasks that were not trained on, over the run."""
    rows = [
        (str(r["step"]), f"{r['accuracy']:.3f}", f"{r['thinking']:.1f}", f"{r['output']:.1f}", str(r["count"]))
        for r in run.kind("eval")
    ]
    return _table(("iteration", "accuracy", "thinking tokens", "sampled tokens", "answers"), rows) if rows else ""


def teachers(folder: Path) -> str:
    """table.json of a distillation."""
    path = folder / "table.json"
    if not path.is_file():
        return ""
    rows = []
    for row in json.loads(path.read_text("utf-8")):
        teacher, student = row["teacher"], row["student"]
        numbers = (f"{side[name]:.{digits}f}" for name, digits in _COLUMNS for side in (teacher, student))
        rows.append((row["domain"], row["effort"], *numbers))
    names = ("right: teacher", "student", "thinking: teacher", "student", "sampled: teacher", "student")
    return _table(("domain", "effort", *names), rows)


_COLUMNS = (("accuracy", 3), ("thinking", 1), ("output", 1))


def samples(run: Run) -> str:
    """The last ones, newest first."""
    found = [_sample(record) for record in run.kind("sample")[-SHOWN:][::-1]]
    return "\n".join(found) if found else ""


def _sample(record: dict[str, Any]) -> str:
    prompt, text = escape(record.get("prompt", "")), escape(record.get("text", ""))
    when = f'<div class="when"><b>iteration {record["step"]}</b> reward {record.get("reward")}</div>'
    return f'<div class="sample">{when}<pre><span class="prompt">{prompt}</span>{text}</pre></div>'
