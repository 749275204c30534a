"""`report.html` of `nanok3 posttrain`: what was wanted and found, the table of teachers, answers before and after.

Each part's own report lies in its folder and is linked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanok3.data.files import write_file
from nanok3.posttrain.pipeline import Row, claims, table
from nanok3.train import report_pictures
from nanok3.train.svg import escape

STYLE = Path(report_pictures.__file__).with_name("report.css")


def write_pipeline_report(out: Path, steps: dict[str, Any]) -> Path:
    """Write `out/report.html`."""
    path = out / "report.html"
    write_file(path, page(out.name, steps).encode())
    return path


def page(name: str, steps: dict[str, Any]) -> str:
    """The whole document."""
    rows = table(steps)
    sections = {
        "What was wanted, and what came of it": wanted(claims(rows)),
        "Nine teachers, or as many as were trained, and their student": teachers(rows),
        "Held-out tasks, before and after": transcripts(steps),
        "The parts": parts(steps),
    }
    body = "".join(f"<section>\n<h2>{escape(title)}</h2>\n{text}\n</section>\n" for title, text in sections.items())
    head = f'<meta charset="utf-8"><title>{escape(name)} – nanok3 post-training</title>\n'
    style = f"<style>\n{STYLE.read_text('utf-8')}</style>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}{style}</head>\n<body>\n<header>'
        f'<p class="kind">nanok3 · post-training</p>\n<h1>{escape(name)}</h1></header>\n<main>\n{body}</main>\n'
        "</body>\n</html>\n"
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def wanted(found: list[tuple[str, str, bool]]) -> str:
    return _table(("wanted", "found", ""), [(what, said, "yes" if holds else "no") for what, said, holds in found])


def teachers(rows: list[Row]) -> str:
    """Accuracy, and tokens: thinking and all that was sampled."""

    def shown(numbers: tuple[float, float, float]) -> str:
        return f"{numbers[0]:.3f} · {numbers[1]:.1f} / {numbers[2]:.1f}"

    cells = [(r.domain, r.effort, shown(r.cold), shown(r.teacher), shown(r.student)) for r in rows]
    legend = "<p>Share right · thinking tokens / sampled tokens, on held-out tasks at temperature 1.</p>"
    return legend + _table(("domain", "effort", "cold start", "teacher", "student"), cells)


def transcripts(steps: dict[str, Any]) -> str:
    shown = []
    for name in steps["cold"]["samples"]:
        for who, part in (("cold start", "cold"), ("student", "student")):
            sample = steps[part]["samples"][name]
            title = f"{name}, {who}: reward {sample['reward']}"
            text = escape(sample["text"].replace("<|end_of_msg|>", "<|end_of_msg|>\n"))
            shown.append(f'<div class="sample"><div class="when"><b>{escape(title)}</b></div><pre>{text}</pre></div>')
    return "\n".join(shown)


def parts(steps: dict[str, Any]) -> str:
    lines = []
    for name, facts in steps.items():
        link = f'<a href="{escape(name)}/report.html">{escape(name)}</a>'
        lines.append(f"<li>{link}: {facts['seconds']:.0f} s</li>")
    total = sum(facts["seconds"] for facts in steps.values())
    return f"<ul>{''.join(lines)}</ul><p>{total / 60:.1f} minutes in all.</p>"
