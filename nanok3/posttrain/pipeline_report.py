"""`report.html` of `nanok3 posttrain`: what was wanted and found, the table of teachers, how the experts learned, and
answers before and after.

Each part's own report lies in its folder and is linked; a draft has none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanok3.data.chat import EFFORTS
from nanok3.data.files import write_file
from nanok3.posttrain.pipeline import Row, claims, table
from nanok3.train import report_pictures
from nanok3.train.report_pictures import figure, smoothed
from nanok3.train.run_record import read_run
from nanok3.train.svg import Axis, Line, escape, fit, line_chart

STYLE = Path(report_pictures.__file__).with_name("report.css")
SHARE = Axis("share right", 0.0, 1.0)
CUT_OFF = """high and low begin as max, and their budget falls over the first half. An answer that reaches it is cut off
there, which is not right."""


def write_pipeline_report(out: Path, steps: dict[str, Any]) -> Path:
    """Write `out/report.html`."""
    path = out / "report.html"
    write_file(path, page(out.name, steps, curves(out, steps)).encode())
    return path


def page(name: str, steps: dict[str, Any], learned: str = "") -> str:
    """The whole document; `learned` is the section of the curves."""
    rows = table(steps)
    sections = {
        "What was wanted, and what came of it": wanted(claims(rows)),
        f"{_counted(len(rows))} and their student": teachers(rows) + costs(rows),
        "How the experts learned": learned,
        "Held-out tasks, before and after": transcripts(steps),
        "The parts": parts(steps),
    }
    sections = {title: text for title, text in sections.items() if text}
    body = "".join(f"<section>\n<h2>{escape(title)}</h2>\n{text}\n</section>\n" for title, text in sections.items())
    head = f'<meta charset="utf-8"><title>{escape(name)} – nanok3 post-training</title>\n'
    style = f"<style>\n{STYLE.read_text('utf-8')}</style>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}{style}</head>\n<body>\n<header>'
        f'<p class="kind">nanok3 · post-training</p>\n<h1>{escape(name)}</h1></header>\n<main>\n{body}</main>\n'
        "</body>\n</html>\n"
    )


def _counted(count: int) -> str:
    words = {1: "One teacher", 3: "Three teachers", 6: "Six teachers", 9: "Nine teachers"}
    return words.get(count, f"{count} teachers")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: int) -> str:
    """The last `numbers` columns are set to the right."""
    first = len(head) - numbers

    def line(tag: str, cells: tuple[str, ...]) -> str:
        kinds = ["" if i < first else ' class="number"' for i in range(len(cells))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells))

    lines = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{line("th", head)}</tr></thead><tbody>{lines}</tbody></table></div>'


def wanted(found: list[tuple[str, str, bool]]) -> str:
    said = [(what, said, "yes" if holds else "no") for what, said, holds in found]
    return _table(("wanted", "found", "reached"), said, 2)


def teachers(rows: list[Row]) -> str:
    """Accuracy, and tokens: thinking and all that was sampled."""
    cells = []
    for r in rows:
        sides = (r.cold, r.teacher, r.student)
        right, thinking, output = ([f"{side[i]:.{3 if i == 0 else 1}f}" for side in sides] for i in range(3))
        cells.append((r.domain, r.effort, *right, *thinking, *output))
    sides_of = ("cold start", "teacher", "student")
    names = [
        f"{what}: {who}" if who == "cold start" else who for what in ("right", "thinking", "all") for who in sides_of
    ]
    legend = (
        "<p>Share right, thinking tokens and all sampled tokens of an answer, on held-out tasks at temperature 1.</p>"
    )
    return legend + _table(("domain", "effort", *names), cells, len(names))


def costs(rows: list[Row]) -> str:
    """For each domain what thinking costs and brings: cold start, teachers and student, from low to max."""
    found = []
    for name in dict.fromkeys(row.domain for row in rows):
        of = {row.effort: row for row in rows if row.domain == name}
        ordered = [of[effort] for effort in EFFORTS if effort in of]
        sides = {
            "cold start": [r.cold for r in ordered],
            "teachers": [r.teacher for r in ordered],
            "student": [r.student for r in ordered],
        }
        lines = [
            Line(who, sorted((side[1], side[0]) for side in of_who), None if who == "cold start" else colour)
            for colour, (who, of_who) in enumerate(sides.items())
        ]
        x = fit("thinking tokens", [p[0] for line in lines for p in line.points], zero=True)
        found.append(figure(f"{name}: what thinking brings", line_chart(lines, x, SHARE)))
    return f'<div class="pictures">{"".join(found)}</div>'


def curves(out: Path, steps: dict[str, Any]) -> str:
    """For each domain the share of right rollouts over the iterations of its experts."""
    found = []
    for name in dict.fromkeys(row["domain"] for row in steps["student"]["table"]):
        lines = []
        for colour, effort in enumerate(reversed(EFFORTS)):
            points = read_run(out / f"{name}-{effort}").curve("rl", "accuracy")
            if points:
                lines += [Line(effort, points, colour, "faint", False), Line(effort, smoothed(points, 0.1), colour)]
        if lines:
            x = fit("iteration", [p[0] for line in lines for p in line.points], pad=0)
            found.append(figure(f"{name}: rollouts that are right", line_chart(lines, x, SHARE), CUT_OFF))
    return f'<div class="pictures">{"".join(found)}</div>' if found else ""


_PLAIN = (
    (r'<\|open\|>message role="system".*?<\|end_of_msg\|>', ""),
    (r"<\|open\|>think<\|sep\|>(.*?)<\|close\|>think<\|sep\|>", r"  thinks  \1\n"),
    (r"<\|open\|>response<\|sep\|>(.*?)<\|close\|>response<\|sep\|>", r"  says    \1\n"),
    (r'<\|open\|>argument key="([^"<]*)"[^<]*<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>', r" \1=\2"),
    (r'<\|open\|>call tool="([^"<]*)"[^<]*<\|sep\|>(.*?)<\|close\|>call<\|sep\|>', r"  calls   \1\2\n"),
    (r"<\|open\|>tools<\|sep\|>(.*?)<\|close\|>tools<\|sep\|>", r"\1"),
    (r'<\|open\|>message role="(\w+)"[^<]*<\|sep\|>(.*?)<\|close\|>message<\|sep\|><\|end_of_msg\|>', r"\1\n\2\n"),
    (r"(?m)^  (thinks|says) *\n", ""),
)
"""Markup and what a reader sees instead, in this order; what is not well formed stays as it was said."""


def readable(text: str) -> str:
    """A conversation without its options and markup: who, and below it what is thought, said and called."""
    for markup, plain in _PLAIN:
        text = re.sub(markup, plain, text, flags=re.DOTALL)
    return re.sub(r"\n\n+", "\n", text).strip()


def transcripts(steps: dict[str, Any]) -> str:
    shown = []
    for name in steps["cold"]["samples"]:
        for who, part in (("cold start", "cold"), ("student", "student")):
            sample = steps[part]["samples"][name]
            when = f"<b>{escape(name)}, {who}</b> reward {sample['reward']:g}"
            text = escape(readable(sample["text"]))
            shown.append(f'<div class="sample"><div class="when">{when}</div><pre>{text}</pre></div>')
    return "\n".join(shown)


def parts(steps: dict[str, Any]) -> str:
    lines = []
    for name, facts in steps.items():
        link = escape(name) if name == "draft" else f'<a href="{escape(name)}/report.html">{escape(name)}</a>'
        lines.append(f"<li>{link}: {facts['seconds']:.0f} s, {facts['cpu_seconds']:.0f} s of CPU time</li>")
    total, used = (sum(facts[name] for facts in steps.values()) / 60 for name in ("seconds", "cpu_seconds"))
    return f"<ul>{''.join(lines)}</ul><p>{total:.1f} minutes in all, {used:.1f} minutes of CPU time.</p>"
