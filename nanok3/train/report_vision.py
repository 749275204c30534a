"""The part of a report on what a model sees: held-out pictures with its words beside the true ones, and the share of
questions that it answers, beside the same model without the picture and beside the best single answer."""

from __future__ import annotations

import re

from nanok3.train.report_pictures import missing, note
from nanok3.train.run_record import Record, Run, mapping_of, number
from nanok3.train.svg import escape, median

_BARS = {"right": "model", "blind": "blind", "chance": "chance"}


def has_eyes(run: Run) -> bool:
    """Whether there is anything to say about pictures."""
    return bool(mapping_of(run.final, "pictures")) or any(number(r.get("pictures")) for r in run.kind("train"))


def sees(run: Run) -> str:
    """The whole section."""
    found = mapping_of(run.final, "pictures")
    fields = [f for f in found.get("fields") or () if isinstance(f, dict)]
    if not fields:
        return missing("Not measured yet: `nanok3 eval --pictures` asks the model about held-out pictures.") + _cost(
            run
        )
    examples = [e for e in found.get("examples") or () if isinstance(e, dict)]
    return (
        note(
            "Pictures that show what no training picture shows. In large letters what the model says of each, in grey "
            "what is true; below, questions with its answers, and in italics what was right."
        )
        + f'<div class="seen">{"".join(map(_example, examples))}</div>'
        + _accuracy(fields)
        + _cost(run)
    )


# ---------------------------------------------------------------------- pictures


def _example(example: Record) -> str:
    """A picture, what the model says, what is true, and the questions."""
    kind, said, true = (escape(example.get(name) or "") for name in ("kind", "caption", "true"))
    answers = [a for a in example.get("answers") or () if isinstance(a, dict)]
    asked = "".join(map(_answer, answers))
    return (
        f'<div class="look"><div class="shown">{_image(example.get("png"), kind)}<small>{kind}</small></div>'
        f'<div class="words"><p class="said">{said or "(nothing)"}</p><p class="true">{true}</p>'
        f"{f'<ul>{asked}</ul>' if asked else ''}</div></div>"
    )


def _image(png: object, kind: str) -> str:
    if not isinstance(png, str) or not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", png):
        return ""
    return f'<img src="data:image/png;base64,{png}" alt="a held-out picture: {kind}">'


def _answer(answer: Record) -> str:
    said, true = escape(answer.get("said") or "(nothing)"), escape(answer.get("true") or "")
    verdict = "right" if answer.get("right") else "wrong"
    correction = "" if answer.get("right") else f" <i>{true}</i>"
    return f'<li class="{verdict}">{escape(answer.get("question") or "")} <b>{said}</b>{correction}</li>'


# ---------------------------------------------------------------------- accuracy


def _accuracy(fields: list[Record]) -> str:
    heads = "".join(
        f'<th class="number"><span class="swatch {style}"></span>{escape(name)}</th>'
        for name, style in (("with picture", "model"), ("without the picture", "blind"), ("best constant", "chance"))
    )
    return (
        note(
            "Share of questions on held-out pictures that are answered right to the letter (a position: both numbers "
            "within a tenth of the side), beside the same model given the same text without the picture, and beside "
            "the one answer that is right most often."
        )
        + '<table class="eyes"><thead><tr><th>Asked for</th><th class="bars"></th>'
        + f'{heads}<th class="number">questions</th></tr></thead>'
        + f"<tbody>{''.join(map(_row, fields))}</tbody></table>"
    )


def _row(f: Record) -> str:
    shares = {name: number(f.get(name)) for name in _BARS}
    bars = "".join(
        f'<div class="bar {_BARS[name]}" style="width:{100 * min(max(share or 0, 0), 1):.1f}%"></div>'
        for name, share in shares.items()
    )
    cells = "".join(f'<td class="number">{"–" if s is None else f"{s:.0%}"}</td>' for s in shares.values())
    count = number(f.get("count"))
    return (
        f"<tr><td>{escape(f.get('field') or '')}<small>{escape(f.get('kind') or '')}</small></td>"
        f'<td class="bars">{bars}</td>{cells}<td class="number">{"–" if count is None else f"{count:,.0f}"}</td></tr>'
    )


def _cost(run: Run) -> str:
    """What the tower took of the training."""
    shares = [s for s in (number(r.get("vision_share")) for r in run.kind("train")) if s is not None]
    patches = sum(number(r.get("patches")) or 0 for r in run.kind("train"))
    if not shares or not patches:
        return ""
    pictures = sum(number(r.get("pictures")) or 0 for r in run.kind("train"))
    return note(
        f"In training the vision tower read {pictures:,.0f} pictures of {patches:,.0f} patches, which took "
        f"{median(shares):.0%} of the time (median of the steps). The gradient norm of the tower is among the curves."
    )
