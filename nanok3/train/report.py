"""`report.html`: what a run did and what it learned, on one page that can be mailed to a colleague.

    write_report(run_dir)          reads config.yaml, metrics.jsonl and final.json; writes run_dir/report.html

The page is one file: style and pictures are inside, nothing is fetched, nothing is scripted. A part whose numbers are
not there (yet) says so in a line, so that the report can be written while the run goes on. Every text of the run is
escaped: a sample may contain anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from nanok3.data.files import write_file
from nanok3.train import report_conversations, report_vision
from nanok3.train import report_pictures as pictures
from nanok3.train.report_conversations import has_conversations
from nanok3.train.report_pictures import COMPRESSORS, missing, note, smoothed, spaced
from nanok3.train.run_record import Record, Run, mapping_of, number, read_run
from nanok3.train.svg import compact, escape, median

_STYLE = Path(__file__).with_name("report.css")
_SHOWN_SAMPLES, _SAMPLE_CHARS = 5, 2000


def write_report(run_dir: Path | str) -> Path:
    """Write `run_dir/report.html` from what lies there and return its path. ValueError if there is no such folder."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"run folder {folder} does not exist; nothing to report")
    path = folder / "report.html"
    write_file(path, page(read_run(folder)).encode("utf-8"))
    return path


# ---------------------------------------------------------------------- the page


def page(run: Run) -> str:
    """The whole document."""
    sections = [
        *([_section("What was taught", report_conversations.taught(run))] if has_conversations(run) else []),
        _section("Against compressors", _compression(run)),
        _section("Learning", pictures.learning(run)),
        _section("Held-out text over time", pictures.validation(run)),
        _section("Optimization and speed", pictures.optimization(run)),
        *([_section("What it sees", report_vision.sees(run))] if report_vision.has_eyes(run) else []),
        _section("Experts", pictures.experts(run)),
        _section("Reading over depth", pictures.depth(run)),
        _section("How long memory lasts", pictures.retention(run)),
        _section("Looking things up", pictures.recall(run)),
        _section("Samples over time", _samples(run)),
        _section("How this was made", _making(run)),
        _section("What this does not show", _limits(run)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} – nanok3 run report</title>\n"
        f"<style>\n{_STYLE.read_text('utf-8')}</style>\n</head>\n"
        f"<body>\n{_header(run)}\n<main>\n{''.join(sections)}</main>\n{_footer(run)}\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>\n"


def _footer(run: Run) -> str:
    lines = sum(map(len, run.records.values()))
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"<footer>Written by nanok3 on {now} from {lines} records of metrics.jsonl.</footer>"


# ---------------------------------------------------------------------- head


def _header(run: Run) -> str:
    state = "finished run" if run.ended else "unfinished run"
    return (
        f'<header>\n<p class="kind">nanok3 · {state}</p>\n<h1>{escape(run.name)}</h1>\n'
        f'<p class="lede">{_lede(run)}</p>\n<dl class="tiles">{"".join(_tiles(run))}</dl>\n</header>'
    )


def _lede(run: Run) -> str:
    total, active = _parameters(run)
    size = f", with <b>{compact(total)} parameters</b>" if total else ""
    size += f" ({compact(active)} of them at work on a token)" if active else ""
    last = run.kind("train")[-1] if run.kind("train") else {}
    read = number(last.get("tokens"))
    if read is None:
        return f"A model built like Kimi K3{size}. It has not trained yet."
    seconds = number(run.final.get("seconds")) or number(last.get("seconds"))
    took = f" in <b>{duration(seconds)}</b>" if seconds else ""
    processor = mapping_of(run.final, "hardware").get("processor")
    on = f" on {escape(processor)}" if processor else ""
    return f"A model built like Kimi K3{size}. It read <b>{compact(read)} tokens</b>{took}{on}."


def _tiles(run: Run) -> Iterable[str]:
    slices = _slices(run)
    bits = overall(slices, "bits_per_byte")
    if bits is not None:
        rivals = ((name, overall(slices, key)) for key, name in COMPRESSORS.items())
        under = " · ".join(f"{name} {value:.2f}" for name, value in rivals if value is not None)
        yield _tile("Held-out text", f"{bits:.3f} <small>bits/byte</small>", under or "at the last validation")
    losses = [y for _, y in run.curve("train", "loss") if math.isfinite(y)]
    if losses:
        smooth = smoothed([(0.0, y) for y in losses])[-1][1]
        yield _tile("Training loss", f"{smooth:.3f} <small>nats/token</small>", f"from {losses[0]:.2f} at the start")
    total, active = _parameters(run)
    if total:
        yield _tile("Parameters", compact(total), f"{compact(active)} active per token" if active else "")
    rates = [y for _, y in run.curve("train", "tokens_per_second") if math.isfinite(y)]
    if rates:
        used = [y for _, y in run.curve("train", "flop_utilisation") if math.isfinite(y)]
        under = f"median; {median(used):.0%} of the measured peak" if used else "median"
        yield _tile("Speed", f"{compact(median(rates))} <small>tokens/s</small>", under)
    loads = [y for _, y in run.curve("train", "load_max_over_mean") if math.isfinite(y)]
    if loads:
        under = f"of a fair share, from {loads[0]:.1f}× at the start"
        yield _tile("Busiest expert", f"{median(loads[-10:]):.2f}×", under)


def _tile(name: str, value: str, under: str) -> str:
    return f'<div><dt>{escape(name)}</dt><dd class="figure">{value}</dd><dd class="under">{escape(under)}</dd></div>'


def _parameters(run: Run) -> tuple[float, float]:
    for holder in (run.final, run.config):
        counts = mapping_of(holder, "parameters")
        if number(counts.get("total")):
            return number(counts["total"]) or 0, number(counts.get("active")) or 0
    return 0, 0


def _slices(run: Run) -> dict[str, Record]:
    """The final slices, or those of the last validation."""
    last = run.kind("eval")[-1:] or [{}]
    slices = mapping_of(run.final, "slices") or mapping_of(last[0], "slices")
    return {str(name): s for name, s in slices.items() if isinstance(s, dict)}


def overall(slices: dict[str, Record], name: str) -> float | None:
    """Bits of all slices over bytes of all slices; None unless every slice has the value."""
    pairs = [(number(s.get(name)), number(s.get("bytes"))) for s in slices.values()]
    if not pairs or any(bits is None or not size for bits, size in pairs):
        return None
    return sum((bits or 0) * (size or 0) for bits, size in pairs) / sum(size or 0 for _, size in pairs)


def duration(seconds: float) -> str:
    """45 s, 2.5 min, 12 min, 1 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 570:
        return f"{seconds / 60:.2g} min"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


# ---------------------------------------------------------------------- bits per byte


def _compression(run: Run) -> str:
    slices = {k: v for k, v in mapping_of(run.final, "slices").items() if isinstance(v, dict)}
    if not slices:
        return missing("Not measured yet: `nanok3 eval` runs the model, zlib and xz on the same held-out bytes.")
    values = [number(s.get(name)) or 0.0 for s in slices.values() for name in ("bits_per_byte", *COMPRESSORS)]
    rows = [_compression_row(name, s, max(values) or 1.0) for name, s in slices.items()]
    if len(slices) > 1:
        whole: Record = {name: overall(slices, name) for name in ("bits_per_byte", *COMPRESSORS)}
        whole |= {name: sum(number(s.get(name)) or 0 for s in slices.values()) for name in ("bytes", "tokens")}
        rows.append(_compression_row("all together", whole, max(values) or 1.0))
    keys = [("model", "model"), *COMPRESSORS.items()]
    heads = "".join(f'<th class="number"><span class="swatch {key}"></span>{escape(name)}</th>' for key, name in keys)
    return (
        note("Bits needed for one byte of text that was held out of training; less is better.")
        + f'<table><thead><tr><th>Text</th><th class="bars"></th>{heads}<th class="number">beside xz</th></tr></thead>'
        + f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _compression_row(name: str, s: Record, highest: float) -> str:
    values = {"model": number(s.get("bits_per_byte")), **{key: number(s.get(key)) for key in COMPRESSORS}}
    bars = "".join(
        f'<div class="bar {k}" style="width:{100 * v / highest:.1f}%"></div>' for k, v in values.items() if v
    )
    cells = "".join(f'<td class="number">{"–" if v is None else f"{v:.3f}"}</td>' for v in values.values())
    size, tokens = number(s.get("bytes")), number(s.get("tokens"))
    under = ", ".join(f"{compact(n)} {unit}" for n, unit in ((size, "bytes"), (tokens, "tokens")) if n)
    model, xz = values["model"], values["xz"]
    beside = f"{model / xz - 1:+.0%}".replace("-", "−") if model is not None and xz else "–"
    return (
        f'<tr><td>{escape(name)}<small>{under}</small></td><td class="bars">{bars}</td>{cells}'
        f'<td class="number">{beside}</td></tr>'
    )


# ---------------------------------------------------------------------- words


def _samples(run: Run) -> str:
    records = [r for r in run.kind("sample") if isinstance(r.get("text"), str)]
    if not records:
        return missing("No sample has been logged.")
    prompts = list(dict.fromkeys(str(r.get("prompt") or "") for r in records))
    parts = []
    for prompt in prompts:
        of_prompt = [r for r in records if str(r.get("prompt") or "") == prompt]
        shown = spaced(len(of_prompt), _SHOWN_SAMPLES)
        parts += [_sample(run, of_prompt[i]) for i in shown]
        if len(shown) < len(of_prompt):
            every = "".join(_sample(run, r) for r in of_prompt)
            parts.append(f"<details><summary>all {len(of_prompt)} samples of this prompt</summary>{every}</details>")
    return note("The prompt is grey; what follows is the model's, as it came.") + "".join(parts)


def _sample(run: Run, record: Record) -> str:
    prompt, text = str(record.get("prompt") or ""), record["text"]
    text = text.removeprefix(prompt)
    text = text if len(text) <= _SAMPLE_CHARS else text[:_SAMPLE_CHARS] + " …"
    read = f"{compact(run.x(record))} tokens" if run.x_name == "tokens" else ""
    return (
        f'<div class="sample"><div class="when"><b>step {record["step"]}</b> {read}</div>'
        f'<pre><span class="prompt">{escape(prompt)}</span>{escape(text)}</pre></div>'
    )


def _making(run: Run) -> str:
    command = run.config.get("command")
    command = " ".join(map(str, command)) if isinstance(command, list) else command
    parts = [f'<pre class="command">{escape(command)}</pre>' if command else missing("config.yaml names no command.")]
    tables = [_facts(title, mapping_of(run.final, name)) for name, title in _FACTS.items()]
    known = "".join(table for table in tables if table)
    parts.append(
        f'<div class="columns">{known}</div>' if known else missing("Hardware and versions are noted by `nanok3 eval`.")
    )
    events = [f"<li>step {r['step']}: {escape(r.get('message', ''))}</li>" for r in run.kind("event")]
    parts.append(f"<ul>{''.join(events)}</ul>" if events else "")
    parts.append(_settings(run.config))
    if run.config_text:
        whole = f"<pre>{escape(run.config_text.strip())}</pre>"
        parts.append(f"<details><summary>config.yaml, whole</summary>{whole}</details>")
    else:
        parts.append(missing("There is no config.yaml in the run folder."))
    return "".join(parts)


def _settings(config: Record) -> str:
    """The resolved settings, nested ones by their dotted names; the model's config stays in the whole file."""
    settings = mapping_of(config, "settings") or {k: v for k, v in config.items() if k not in ("command", "model")}
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _flat(settings))
    return f'<dl class="settings">{rows}</dl>' if rows else ""


def _flat(settings: Record, prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "–" if value is None or value == [] else value


_FACTS = {"hardware": "Hardware", "versions": "Versions"}


def _facts(title: str, facts: Record) -> str:
    if not facts:
        return ""
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f'<dl class="facts" aria-label="{escape(title)}">{rows}</dl>'


def _limits(run: Run) -> str:
    return f"<ul>{''.join(f'<li>{escape(limit)}</li>' for limit in (*_defects(run), *_ALWAYS))}</ul>"


def _defects(run: Run) -> Iterable[str]:
    """What is particular about this run's numbers."""
    if not run.ended:
        yield "The run has not ended: every curve stops where it stands."
    bad = [r["step"] for r in run.kind("train") if number(r.get("loss")) is None]
    if bad:
        yield f"{len(bad)} training steps have no finite loss (the first is step {bad[0]}); the curves leave them out."
    if run.repeated:
        yield f"{run.repeated} records were superseded, since the run went back to a checkpoint and repeated them."
    if run.unreadable:
        yield f"{run.unreadable} lines of metrics.jsonl could not be read and are left out."


_ALWAYS = (
    "This is one run with one seed: nothing here says how far another would land from it.",
    "zlib and xz start from nothing and carry no weights, while the model has read a corpus of the same kinds of text "
    "and its own size is not counted. The comparison tells how much regularity was found, not who compresses better.",
    "Held-out text comes from the same sources as the training text. Other text will cost more bits.",
    "Validation during training reads a small fixed sample of each slice and counts the tokens that have a "
    "predecessor; the final table reads more text and charges every token, first tokens as a uniform guess. The two "
    "differ.",
    "Recall is probed on random tokens. It does not measure remembering names or facts in running text.",
    "Half-lives tell how fast decay forgets. The delta rule also overwrites, and gates and later layers decide what is "
    "used, so that a long half-life is not yet a long memory.",
    "Weights over depth tell what is read, not what matters: a large weight on a small vector may change little.",
    "Speed was measured on the machine as it was, with whatever else ran on it.",
    "Samples come from fixed prompts and were not chosen.",
)
