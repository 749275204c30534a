from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nanok3.data import contact_sheet
from nanok3.data.contact_sheet import Shown, documents, draw_sheet, write_sheet
from nanok3.data.pictures.kinds import PictureMix
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, prepare
from nanok3.data.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path, prose: str, tokenizer: Tokenizer) -> Path:
    (tmp_path / "a.txt").write_text(prose)
    mix = PictureMix(0.3, 40, ("compare", "motion"))
    prepare([Source("a", 1.0, tmp_path / "a.txt")], tokenizer, tmp_path / "out", 0.2, pictures=mix)
    return tmp_path / "out"


def test_the_sheet_shows_what_is_stored(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert write_sheet(folder, tmp_path / "sheet.png", each=4) == 8
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[0] == 4 * (contact_sheet.WIDTH + 20)
        levels = np.asarray(sheet)
    assert all((part < 255).any() for half in np.split(levels, 2) for part in np.array_split(half, 4, axis=1))
    (compare, motion) = (s for s in Prepared(folder).sources() if s.pictures)
    first = documents(compare, tokenizer, 2)[0]
    assert first.text.startswith("First: [picture]\nSecond: [picture]\n") and len(first.frames) == 2
    assert all(len(shown.frames) in (4, 8) and "video" not in shown.text for shown in documents(motion, tokenizer, 9))


def test_long_texts_are_cut_and_pictures_are_not() -> None:
    frames = [Image.new("RGB", (900, 40), (200, 0, 0)), Image.new("RGB", (20, 500), (0, 200, 0))]
    sheet = draw_sheet([Shown("a", frames, "word " * 200), Shown("b", frames[:1], "x")], columns=3)
    assert sheet.size == (3 * (contact_sheet.WIDTH + 20), contact_sheet.HEIGHT + 7 * 14 + 30)


def test_a_folder_without_pictures_is_refused(tmp_path: Path, prose: str, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(prose)
    prepare([Source("a", 1.0, tmp_path / "a.txt")], tokenizer, tmp_path / "out")
    with pytest.raises(ValueError, match="holds no pictures; prepare it with --pictures SHARE"):
        write_sheet(tmp_path / "out", tmp_path / "sheet.png")
