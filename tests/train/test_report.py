"""The page: every part with numbers is shown, every part without them says why, and no text of the run can break it."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nanok3.train.report import duration, overall, write_report
from nanok3.train.report_pictures import smoothed, spaced, wilson

HOSTILE = "</pre><script>alert('x')</script><style>*{display:none}</style> & \" \u202e \x00 \x1b[2J \ud800 <!-- "
SECTIONS = [
    "Against compressors",
    "Learning",
    "Held-out text over time",
    "Optimization and speed",
    "Experts",
    "Reading over depth",
    "How long memory lasts",
    "Looking things up",
    "Samples over time",
    "How this was made",
    "What this does not show",
]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Checks that elements close in order; keeps headings, texts, attributes and how often each element occurs."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def report(folder: Path) -> tuple[str, Reader]:
    page = write_report(folder).read_text("utf-8")
    return page, Reader(page)


def write_run(
    folder: Path, records: list[dict[str, Any]], final: dict[str, Any] | None = None, config: str = ""
) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if final is not None:
        (folder / "final.json").write_text(json.dumps(final))
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
    if config:
        (folder / "config.yaml").write_text(config)


def train(step: int, **fields: Any) -> dict[str, Any]:
    loss = 2 + 5 / step
    values = {"tokens": 1000 * step, "loss": loss, "bits_per_byte": loss / 2, "lr": 0.004, "grad_norm": 1 / step}
    values |= {
        "tokens_per_second": 5000.0,
        "flop_utilisation": 0.25,
        "load_max_over_mean": 1.5,
        "dead_experts": step % 2,
    }
    return {"kind": "train", "step": step, **values, "max_logit": 3.0, "seconds": 0.2 * step, **fields}


def slices(bits: float) -> dict[str, Any]:
    return {name: {"loss": 2.0, "bits_per_byte": bits, "tokens": 300, "bytes": 1000} for name in ("prose", "code")}


def whole_run(prompt: str = "Once", text: str = "Once upon a time") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, 41):
        records.append(train(step))
        if step % 10 == 0:
            records.append({"kind": "eval", "step": step, "slices": slices(2 + 1 / step)})
            records.append(
                {"kind": "loads", "step": step, "layers": [1, 2], "loads": [[0.5, 0.25, 0.25, 0], [0.25] * 4]}
            )
            records.append({"kind": "sample", "step": step, "prompt": prompt, "text": text})
    final = {
        "slices": {name: {**s, "zlib": 2.5, "xz": 2.25} for name, s in slices(1.8).items()},
        "recall": {
            "copy": [{"distance": d, "accuracy": 0.5, "predictions": 100} for d in (16, 32)],
            "copy_chance": 0.01,
            "segment": 16,
            "pairs": [{"pairs": n, "accuracy": 1 / n, "predictions": 100, "shown": 1 / n} for n in (1, 2, 4)],
            "pairs_chance": 0.02,
        },
        "diagnostics": {
            "depth_weights": {
                "labels": ["0 KDA", "0 MLP", "output"],
                "sources": ["embedding", "layer 0"],
                "weights": [[1.0], [0.7, 0.3], [0.4, 0.6]],
            },
            "kda_half_lives": {"layers": [0], "half_lives": [[[1.0, 10.0, 100.0], [5.0, 5.0, 5.0]]]},
        },
        "parameters": {"total": 17_057_208, "active": 7_751_096},
        "hardware": {"processor": "one that counts"},
        "versions": {"torch": "2.13.0"},
        "seconds": 600,
    }
    return records, final


def test_a_whole_run_fills_every_section(tmp_path: Path) -> None:
    write_run(tmp_path, *whole_run(), config="command: nanok3 pretrain --out x\nsettings: {train: {seq_len: 64}}\n")
    page, read = report(tmp_path)
    assert read.texts["h2"] == SECTIONS and 'class="missing"' not in page
    charts = ["Training loss", "prose", "code", "Learning rate", "Gradient norm", "Throughput", "Load of every expert"]
    charts += ["Balance over time", "Experts without a token", "Weights over depth", "Layer 0", "Copying"]
    assert set(charts) <= set(read.texts["h3"]) and read.count["svg"] == read.count["h3"] == read.count["figure"]
    for shown in (
        "17.1M",
        "one that counts",
        "2.13.0",
        "nanok3 pretrain --out x",
        "upon a time",
        "10 min",
        "train.seq_len",
    ):
        assert shown in page, shown
    assert "finished run" in page


def test_every_chart_names_its_axes(tmp_path: Path) -> None:
    write_run(tmp_path, *whole_run())
    page, _ = report(tmp_path)
    for picture in re.findall(r"<svg.*?</svg>", page, re.S):
        assert picture.count('class="name"') >= 1 and "aria-label" in picture


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path, *whole_run())
    page, read = report(tmp_path)
    assert not {"script", "link", "img", "iframe", "object"} & set(read.count)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in read.attributes}
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_the_table_compares_on_the_same_bytes(tmp_path: Path) -> None:
    write_run(tmp_path, *whole_run())
    _, read = report(tmp_path)
    cells = [text for text in read.texts["td"] if text.strip()]
    assert cells[:5] == ["prose", "1.800", "2.500", "2.250", "−20%"]
    assert cells[10:15] == ["all together", "1.800", "2.500", "2.250", "−20%"]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    records, final = whole_run(HOSTILE, HOSTILE + HOSTILE)
    records.append({"kind": "event", "step": 40, "message": HOSTILE})
    final["slices"] = {HOSTILE: {**final["slices"]["prose"]}}
    final["hardware"] = {HOSTILE: HOSTILE}
    final["diagnostics"]["depth_weights"]["labels"][0] = HOSTILE
    config = json.dumps({"command": HOSTILE, "settings": {HOSTILE: HOSTILE}})
    write_run(tmp_path, records, final, config)
    page, read = report(tmp_path)
    assert "script" not in read.count and read.count["style"] == 1
    assert page.count("&lt;script&gt;alert") >= 8
    assert "\x00" not in page and "\x1b" not in page and "␀" in page


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    page, read = report(tmp_path)
    assert read.texts["h2"] == SECTIONS and "svg" not in read.count
    assert page.count('class="missing"') == 12
    assert "unfinished run" in page and "has not trained yet" in page and "The run has not ended" in page


def test_a_run_in_progress_shows_what_there_is(tmp_path: Path) -> None:
    records = [r for r in whole_run()[0] if r["kind"] in ("train", "eval")]
    write_run(tmp_path, records)
    page, read = report(tmp_path)
    assert {"Training loss", "prose", "Learning rate"} <= set(read.texts["h3"]) and "Copying" not in read.texts["h3"]
    assert "at the last validation" in page and "Not probed yet" in page


def test_a_half_written_last_line_changes_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, *whole_run())
    before = [line for line in report(tmp_path)[0].splitlines() if "Written by" not in line]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 41, "tok')
    after = [line for line in report(tmp_path)[0].splitlines() if "Written by" not in line]
    assert before == after


def test_losses_that_are_not_numbers_are_left_out_and_told(tmp_path: Path) -> None:
    records = [train(step, loss=math.nan if step in (3, 4) else 2.0, bits_per_byte=None) for step in range(1, 9)]
    write_run(tmp_path, records)
    page, read = report(tmp_path)
    assert "2 training steps have no finite loss (the first is step 3)" in page
    assert "Training loss" in read.texts["h3"] and "nan" not in re.sub("nanok3", "", page).lower()


def test_a_run_of_nothing_but_nan_still_gives_a_page(tmp_path: Path) -> None:
    write_run(tmp_path, [train(step, **dict.fromkeys(("loss", "lr", "grad_norm"), math.nan)) for step in range(1, 4)])
    page, _ = report(tmp_path)
    assert "No training step has been logged." in page


def test_one_step_is_enough(tmp_path: Path) -> None:
    write_run(tmp_path, [train(1), {"kind": "eval", "step": 1, "slices": slices(2.0)}])
    _, read = report(tmp_path)
    assert "Training loss" in read.texts["h3"]


def test_malformed_numbers_hide_a_part_not_the_page(tmp_path: Path) -> None:
    records = [train(1), {"kind": "loads", "step": 1, "layers": [1], "loads": [["a", None]]}]
    records += [{"kind": "eval", "step": 1, "slices": {"prose": 3}}, {"kind": "sample", "step": 1, "text": None}]
    final = {"slices": [1], "recall": {"copy": "no", "pairs": [{"pairs": 0, "accuracy": 1}]}, "hardware": None}
    final["diagnostics"] = {"depth_weights": {"weights": [[]]}, "kda_half_lives": {"layers": [0], "half_lives": [[1]]}}
    write_run(tmp_path, records, final, "just text")
    page, _ = report(tmp_path)
    assert page.count('class="missing"') >= 7


def test_large_models_are_drawn_small(tmp_path: Path) -> None:
    """Experts, layers and heads of the release (with fewer channels): the page stays small."""
    loads = [[1 / 896] * 896 for _ in range(92)]
    lives = [[[float(c + 1) for c in range(16)] for _ in range(96)] for _ in range(69)]
    weights = [[1 / 9] * 9 for _ in range(187)]
    final = {
        "diagnostics": {
            "depth_weights": {"labels": [str(i) for i in range(187)], "sources": [], "weights": weights},
            "kda_half_lives": {"layers": list(range(69)), "half_lives": lives},
        }
    }
    write_run(tmp_path, [train(1), {"kind": "loads", "step": 1, "layers": list(range(92)), "loads": loads}], final)
    page, read = report(tmp_path)
    assert len(page) < 4e6 and "Neighbours are averaged" in page
    assert len([title for title in read.texts["h3"] if title.startswith("Layer ")]) == 12


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    write_run(tmp_path, [train(step) for step in range(1, 5001)])
    assert len(report(tmp_path)[0]) < 400_000


def test_a_missing_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        write_report(tmp_path / "nowhere")


def test_smoothing_follows_a_line_and_damps_noise() -> None:
    straight = [(float(i), 3.0 * i) for i in range(100)]
    assert [y for _, y in smoothed(straight)[:-3]] == pytest.approx([y for _, y in straight[:-3]])
    noisy = [(float(i), (-1.0) ** i) for i in range(800)]
    assert max(abs(y) for _, y in smoothed(noisy)[10:]) < 0.11
    assert [x for x, _ in smoothed([(0.0, math.nan), (1.0, 2.0)])] == [1.0]


def test_wilson_intervals() -> None:
    low, high = wilson(0.5, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.0, 10)[0] == 0 and wilson(1.0, 10)[1] == 1 and wilson(0.3, 0) == (0.3, 0.3)


def test_the_whole_weighs_slices_by_their_bytes() -> None:
    two = {"a": {"x": 1.0, "bytes": 300}, "b": {"x": 3.0, "bytes": 100}}
    assert overall(two, "x") == 1.5
    assert overall({**two, "c": {"bytes": 5}}, "x") is None and overall({}, "x") is None


def test_even_spacing_and_durations() -> None:
    assert spaced(3, 5) == [0, 1, 2] and spaced(100, 5) == [0, 24, 49, 74, 99]
    assert [duration(s) for s in (45, 150, 720, 3900)] == ["45 s", "2.5 min", "12 min", "65 min"]
    assert duration(7500) == "2 h 05 min"
