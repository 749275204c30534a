"""A sheet that a person can look at: picture documents in a grid, each above its own text.

Documents come from a prepared folder, as training reads them: pictures from their shards, texts decoded from ids with
`[picture]` where one stands. Frames of a video stand side by side, four in a line.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nanok3.data.files import write_file
from nanok3.data.images import pillow
from nanok3.data.picture_shards import StoredPicture
from nanok3.data.pictures.drawing import canvas, font
from nanok3.data.prepared import Prepared, TokenSource
from nanok3.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from PIL.Image import Image as PILImage

WIDTH, HEIGHT = 250, 150
"""Room for the pictures of one document; a picture is enlarged up to twice and never cut."""
_LINES, _LINE, _GAP, _CHARS, _FRAMES = 6, 14, 10, 40, 4


class Shown(NamedTuple):
    """One place of the sheet."""

    title: str
    frames: Sequence[PILImage]
    text: str


def documents(source: TokenSource, tokenizer: Tokenizer, count: int) -> list[Shown]:
    """The first `count` documents of a picture source."""
    assert source.pictures is not None
    found = []
    for document in range(min(count, len(source))):
        pictures = source.pictures_of(document)
        frames = [frame for picture in pictures for frame in source.pictures.frames(picture)]
        text = _without_blocks(source.tokens(document)[:-1].tolist(), pictures, tokenizer)
        found.append(Shown(f"{source.name} · {source.split}", frames, text))
    return found


def _without_blocks(ids: list[int], pictures: Sequence[StoredPicture], tokenizer: Tokenizer) -> str:
    """The text of a document with each media block as `[picture]`, but for a first one."""
    parts, at = [], 0
    for picture in pictures:
        parts.append(tokenizer.decode(ids[at : picture.begin]))
        at = picture.end
    text = "[picture]".join([*parts, tokenizer.decode(ids[at:])])
    return text.removeprefix("[picture]").strip()


def _together(frames: Sequence[PILImage]) -> PILImage:
    """All frames, four in a line, as large as the room allows."""
    gap = 3
    wide, tall = max(frame.width for frame in frames) + gap, max(frame.height for frame in frames) + gap
    width, height = min(len(frames), _FRAMES) * wide, -(-len(frames) // _FRAMES) * tall
    whole, pen = canvas(width, height, (255, 255, 255))
    for number, frame in enumerate(frames):
        x, y = number % _FRAMES * wide + 1, number // _FRAMES * tall + 1
        whole.paste(frame, (x, y))
        pen.rectangle((x - 1, y - 1, x + frame.width, y + frame.height), outline=(150, 150, 150))
    scale = min(2.0, WIDTH / width, HEIGHT / height)
    size = max(1, int(width * scale)), max(1, int(height * scale))
    return whole.resize(size, pillow().Resampling.NEAREST if scale == 2 else pillow().Resampling.BICUBIC)


def draw_sheet(shown: Sequence[Shown], columns: int = 5) -> PILImage:
    """The sheet; texts longer than six lines end in `...`."""
    cell_width, cell_height = WIDTH + 2 * _GAP, HEIGHT + (_LINES + 1) * _LINE + 3 * _GAP
    rows = -(-len(shown) // columns)
    sheet, pen = canvas(columns * cell_width, rows * cell_height, (255, 255, 255))
    small, title = font(11), font(10)
    for number, each in enumerate(shown):
        x, y = number % columns * cell_width + _GAP, number // columns * cell_height + _GAP
        pen.text((x, y), each.title, fill=(120, 120, 120), font=title)
        sheet.paste(_together(each.frames), (x, y + _LINE))
        lines = [part for line in each.text.split("\n") for part in textwrap.wrap(line, _CHARS) or [""]]
        if len(lines) > _LINES:
            lines = [*lines[: _LINES - 1], lines[_LINES - 1][: _CHARS - 4] + " ..."]
        pen.multiline_text((x, y + _LINE + HEIGHT + 4), "\n".join(lines), fill=(20, 20, 20), font=small, spacing=2)
    return sheet


def write_sheet(folder: str | PathLike[str], path: Path, each: int = 5) -> int:
    """Draw `each` documents of every picture source of a prepared folder, one of them held out, into a PNG. Returns
    how many. Raises ValueError if there are none."""
    prepared = Prepared(folder)
    tokenizer = prepared.tokenizer()
    held_out = {source.name: source for source in prepared.sources("validation") if source.pictures}
    shown: list[Shown] = []
    for source in prepared.sources("train"):
        if source.pictures:
            validation = documents(held_out[source.name], tokenizer, 1) if source.name in held_out else []
            shown += documents(source, tokenizer, each - len(validation)) + validation
    if not shown:
        raise ValueError(f"{folder}: holds no pictures; prepare it with --pictures SHARE")
    file = io.BytesIO()
    draw_sheet(shown, each).save(file, format="PNG")
    write_file(path, file.getvalue())
    return len(shown)
