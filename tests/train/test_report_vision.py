"""The report's part on pictures: what it shows, what it says without numbers, and that no text can break it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from nanok3.train.report import write_report
from nanok3.train.report_vision import has_eyes, sees
from nanok3.train.run_record import Run

HOSTILE = "</pre><script>alert('x')</script><style>*{display:none}</style> & \" \u202e \x00 <!-- "


class Reader(HTMLParser):
    """Texts by the element they stand in, attributes, and how often each element occurs."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.last = ""
        self.count: dict[str, int] = {}
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.last = tag
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.last, []).append(data)


def test_nothing_is_said_of_a_run_on_text() -> None:
    assert not has_eyes(Run("text")) and "Not measured yet" in sees(Run("text"))


def test_a_run_with_eyes_shows_what_it_sees(tmp_path: Path) -> None:
    answers = [
        {"question": "What colour is it?", "said": "red", "true": "red", "right": True},
        {"question": "How many?", "said": HOSTILE, "true": "three", "right": False},
    ]
    example = {"kind": "shapes", "png": "aGVsbG8=", "caption": HOSTILE, "true": "Three red stars.", "answers": answers}
    wrong = {"kind": "shapes", "png": '"><script>', "caption": "", "true": None, "answers": [None]}
    field = {"kind": "shapes", "field": "colour", "count": 100, "right": 0.93, "blind": 0.11, "chance": 0.14}
    pictures = {"fields": [field, {"field": None, "right": "x"}, 3], "examples": [example, wrong]}
    (tmp_path / "final.json").write_text(json.dumps({"pictures": pictures}))
    line = {"kind": "train", "step": 1, "loss": 1.0, "pictures": 4, "patches": 90, "vision_share": 0.2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    read = Reader(page)
    assert "What it sees" in read.texts["h2"] and read.count["img"] == 1 and "script" not in read.count
    assert ("src", "data:image/png;base64,aGVsbG8=") in read.attributes
    assert all(share in read.texts["td"] for share in ("93%", "11%", "14%"))
    assert "4 pictures of 90 patches, which took 20%" in page and "three" in read.texts["i"]


def test_a_run_with_eyes_that_was_not_asked_yet_says_so(tmp_path: Path) -> None:
    line = {"kind": "train", "step": 1, "loss": 1.0, "pictures": 4, "patches": 90, "vision_share": 0.2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "nanok3 eval --pictures" in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_run_on_text_has_no_part_on_pictures(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
    assert "What it sees" not in write_report(tmp_path).read_text(encoding="utf-8")
