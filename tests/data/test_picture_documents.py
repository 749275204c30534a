"""What a document says about its picture is read off the picture again."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from nanok3.data import npm
from nanok3.data.clean import digest, unit
from nanok3.data.packages import Package
from nanok3.data.picture_shards import encode_frames
from nanok3.data.pictures import code, drawing, kinds, motion, packaged, plots, shapes, words
from nanok3.data.pictures.document import Picture, PictureDocument, question_text, split_of, tell

DRAWN = (*kinds.CORE, *kinds.FURTHER, "svg")
WORDS = ["stock", "horse", "under", "light", "king"]


def made(kind: str, count: int, seed: int = 0) -> list[PictureDocument]:
    return list(kinds.picture_documents(kind, kinds.open_kind(kind, WORDS), count, seed))


def pictures(document: PictureDocument) -> list[Picture]:
    return [part for part in document.parts if isinstance(part, Picture)]


def answers(document: PictureDocument) -> dict[str, str]:
    return {question.field: question.answer for question in document.questions}


def ink_of(picture: Image.Image) -> np.ndarray:
    """Where the picture is not paper; the first pixel is."""
    levels = np.asarray(picture)
    return (levels != levels[0, 0]).any(axis=2)


def components(mask: np.ndarray) -> list[np.ndarray]:
    """The (y, x) pixels of each connected patch of ink, corners included."""
    left = set(map(tuple, np.argwhere(mask).tolist()))
    found = []
    while left:
        queue = [left.pop()]
        for y, x in queue:
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            queue += near
        found.append(np.array(queue))
    return found


def form(pixels: np.ndarray) -> str:
    """Which shape a patch of ink is: by how much of its box it fills, and where it is widest."""
    ys, xs = pixels[:, 0] - pixels[:, 0].min(), pixels[:, 1] - pixels[:, 1].min()
    height, width = ys.max() + 1, xs.max() + 1
    filled = np.zeros((height, width), bool)
    filled[ys, xs] = True
    share = len(pixels) / (height * width)
    if share > 0.68:
        return "square" if filled[[0, 0, -1, -1], [0, -1, 0, -1]].all() else "circle"
    if filled[-1].mean() > 0.8:
        return "triangle"
    if filled[0].mean() > 0.25:
        return "cross"
    return "diamond" if share > 0.46 else "star"


@pytest.mark.parametrize("kind", DRAWN)
def test_documents_follow_from_the_seed(kind: str) -> None:
    first, again, other = made(kind, 12), made(kind, 12), made(kind, 12, seed=1)
    for one, two in zip(first, again, strict=True):
        assert one.text == two.text and one.keys == two.keys and one.questions == two.questions
        assert [encode_frames(p.frames) for p in pictures(one)] == [encode_frames(p.frames) for p in pictures(two)]
    assert [document.keys for document in first] != [document.keys for document in other]
    assert len({document.text for document in first}) > 4
    for document in first:
        assert document.kind == kind and document.text.isascii() and all(answers(document).values())
        for picture in pictures(document):
            assert min(picture.size) >= 14 and max(picture.size) <= 280 and 1 <= len(picture.frames) <= 4
            assert all(frame.mode == "RGB" and frame.size == picture.size for frame in picture.frames)


@pytest.mark.parametrize("kind", DRAWN)
def test_the_text_is_a_caption_or_questions_with_their_answers(kind: str) -> None:
    asked = captions = 0
    for document in made(kind, 30):
        found = re.findall(r"\nQuestion: (.*)\nAnswer: (.*)", document.text)
        asked, captions = asked + bool(found), captions + (not found)
        for question, answer in found:
            assert (answer in answers(document).values() and question.endswith("?")) or question[0].isupper()
    assert asked and captions


def test_questions_have_several_phrasings() -> None:
    texts = "".join(document.text for document in made("compare", 80))
    assert len(set(re.findall(r"Question: (.*)\n", texts))) > 10
    assert question_text("How many?") == "\nQuestion: How many?\nAnswer:"


@pytest.mark.parametrize("kind", ["shapes", "tiles"])
def test_shapes_are_counted_named_and_coloured_right(kind: str) -> None:
    seen = set()
    for document in made(kind, 150):
        said, (picture,) = answers(document), pictures(document)
        patches = components(ink_of(picture.frames[0]))
        assert drawing.NUMBERS[len(patches)] == said["count"]
        assert {form(patch) for patch in patches} == {said["shape"]}, said
        levels = np.asarray(picture.frames[0], np.int64)[tuple(patches[0][0])]
        nearest = min(drawing.COLOURS, key=lambda name: np.abs(levels - drawing.COLOURS[name]).sum())
        assert nearest == said["colour"]
        seen.add((said["shape"], said["count"]))
    assert {shape for shape, _ in seen} == set(drawing.SHAPES) and len({count for _, count in seen}) == 5


@pytest.mark.parametrize("kind", ["tiles", "silhouettes", "forms"])
def test_every_shape_has_a_cell_of_its_own(kind: str) -> None:
    offs = set()
    for document in made(kind, 80):
        (picture,) = pictures(document)
        patches = components(ink_of(picture.frames[0]))
        cells = [{tuple(pixel) for pixel in (patch // drawing.CELL).tolist()} for patch in patches]
        assert all(len(cell) == 1 for cell in cells) and len(set.union(*cells)) == len(patches)
        offs |= {tuple((patch.mean(axis=0) % drawing.CELL).round().astype(int).tolist()) for patch in patches}
    assert len(offs) > 20


def test_silhouettes_differ_in_nothing_but_forms_numbers_and_places() -> None:
    seen = set()
    for document in made("silhouettes", 120):
        said, (picture,) = answers(document), pictures(document)
        assert {level for _, level in picture.frames[0].getcolors()} == set(drawing.SILHOUETTE)
        patches = components(ink_of(picture.frames[0]))
        assert drawing.NUMBERS[len(patches)] == said["count"] and {form(patch) for patch in patches} == {said["shape"]}
        seen.add((said["shape"], said["count"]))
    assert len(seen) > 20


@pytest.mark.parametrize("kind", ["places", "shapes", "tiles", "silhouettes"])
def test_places_are_where_they_are_said_to_be(kind: str) -> None:
    asked = 0
    for document in made(kind, 60):
        (picture,), questions = pictures(document), {question.field: question for question in document.questions}
        patches = components(ink_of(picture.frames[0]))
        assert ("pixel" in questions) == ("position" in questions) == (len(patches) == 1)
        if len(patches) > 1:
            continue
        asked += 1
        y, x = patches[0].mean(axis=0)
        assert math.dist((x, y), questions["pixel"].exact) < 1.6
        for field, sides, step in (("pixel", (1, 1), 5), ("position", picture.size, 0.1)):
            exact = [at / side for at, side in zip(questions["pixel"].exact, sides, strict=True)]
            assert list(questions[field].exact) == exact
            said = list(map(float, questions[field].answer.split(", ")))
            assert max(abs(a - b) for a, b in zip(said, exact, strict=True)) <= step / 2 + 1e-9
    assert asked > 10


def test_two_pictures_are_compared_right() -> None:
    for document in made("compare", 40):
        first, second = (len(components(ink_of(p.frames[0]))) for p in pictures(document))
        assert answers(document)["more"] == ("the first" if first > second else "the second")
        assert answers(document)["total"] == str(first + second)
        assert document.parts[0] == "First: " and document.parts[2] == "\nSecond: "


def test_bars_are_as_high_as_the_text_says() -> None:
    random = Random(3)
    for _ in range(20):
        values = random.sample(range(1, 10), random.randint(3, 5))
        levels = np.asarray(plots.draw_bars(random, "ABCDE"[: len(values)], values).frames[0], np.int64)
        coloured = levels.max(axis=2) - levels.min(axis=2) > 30
        columns = coloured[:, 18:].sum(axis=0)
        middles = [columns[int(18 * (i + 0.5))] for i in range(len(values))]
        assert [round(height / (len(levels) - 28) * 10) for height in middles] == values
    document = next(d for d in made("plots", 20) if d.keys[0].startswith("bars"))
    data = dict(part.split(" ") for part in document.keys[0].removeprefix("bars ").split(", "))
    assert answers(document)["highest"] == max(data, key=lambda name: int(data[name]))
    assert answers(document)["lowest"] == min(data, key=lambda name: int(data[name]))


def test_tables_answer_from_their_data() -> None:
    for document in made("tables", 20):
        header, *lines = [line.split(",") for line in document.keys[0].removeprefix("table ").split("\n")]
        column, row = re.match(r"What is the (\w+) of (\w+)\?", document.questions[0].text).groups()
        assert [line[header.index(column)] for line in lines if line[0] == row] == [answers(document)["cell"]]
        assert answers(document)["lines"] == drawing.NUMBERS[len(lines)]


def test_words_are_drawn_whole_and_differ() -> None:
    drawn = {}
    for document in made("words", 60):
        (picture,) = pictures(document)
        mask = ink_of(picture.frames[0])
        assert mask.any() and not np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]]).any()
        assert answers(document)["length"] == str(len(answers(document)["word"].replace(" ", "")))
        drawn[answers(document)["word"]] = mask.sum()
    assert len({word.lower() for word in drawn} & set(WORDS)) >= 3
    assert words.common_words(["Stock stock north don't a-b x x toolong2 horses"] * 2) == [
        *("stock", "x", "a", "b", "horses")
    ]
    assert answers(words.words_from([])(Random(0)))["word"].replace(" ", "").isalpha()


@pytest.mark.parametrize("kind", ["letters", "spelling"])
def test_every_letter_has_a_cell_and_is_said(kind: str) -> None:
    papers = set()
    for document in made(kind, 60):
        (picture,), said = pictures(document), answers(document)["spelling"].split(" ")
        mask, (width, height) = ink_of(picture.frames[0]), picture.size
        inked = [mask[:, at : at + drawing.CELL].any() for at in range(0, width, drawing.CELL)]
        assert width == drawing.CELL * len(said) and all(inked) and height in (28, 56)
        lines = [mask[at : at + drawing.CELL].sum() for at in range(0, height, drawing.CELL)]
        assert max(lines) > 0.9 * sum(lines)
        assert document.keys == ("word " + "".join(said),) and all(map(re.compile("[a-z]").fullmatch, said))
        papers.add(picture.frames[0].getpixel((0, 0)))
    assert (papers == {drawing.SILHOUETTE[0]}) == (kind == "letters")


def test_what_moves_moves_as_it_is_said_to() -> None:
    seen = set()
    for document in made("motion", 60):
        frames = [frame for picture in pictures(document) for frame in picture.frames]
        patches = [np.argwhere(ink_of(frame)) for frame in frames]
        assert [p.start for p in pictures(document)] == [0.0, 1.0][: len(frames) // 4]
        (y0, x0), (y1, x1) = patches[0].mean(axis=0), patches[-1].mean(axis=0)
        growth = len(patches[-1]) / len(patches[0])
        said = answers(document)["motion"].removeprefix("it ")
        right, down, factor = motion.MOTIONS[said]
        assert abs((x1 - x0) - right * frames[0].width / 2) < 2 and abs((y1 - y0) - down * frames[0].height / 2) < 2
        assert (growth > 2) == (factor > 1) and (growth < 0.5) == (factor < 1)
        seen.add(said)
    assert seen == motion.MOTIONS.keys()


def test_svg_code_draws_the_picture() -> None:
    for document in made("svg", 20):
        (picture,), source = pictures(document), answers(document)["code"]
        whole = source.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
        again = code.render_svg(code.resvg(), whole, *picture.size)
        assert encode_frames(again.frames) == encode_frames(picture.frames)


@pytest.mark.parametrize("seed", [0, 7])
def test_what_is_held_out_is_on_no_training_picture(seed: int) -> None:
    share, keys = 0.1, {"train": set(), "validation": set()}
    for kind in DRAWN:
        stream = kinds.picture_documents(kind, kinds.open_kind(kind, WORDS), 150, seed)
        for split, document in kinds.with_split(stream, share, seed):
            keys[split].update(document.keys)
    held_out = {key for key in keys["validation"] if unit(digest(key, seed), 0) < share}
    assert len(held_out) > 40 and not held_out & keys["train"]
    assert split_of([], 0.5, seed) == "train"
    labels = {*words.LABELS, *words.HEADERS}
    assert not labels & {key.removeprefix("word ") for side in keys.values() for key in side}


def test_tell_gives_either_a_caption_or_questions() -> None:
    picture = shapes.scene(Random(0), 1, "red", "star").picture
    told = {tell(Random(i), "x", [picture], [], ["yes"], [words.Ask("f", ("a?",), "b")]).text for i in range(20)}
    assert told == {"\nyes", "\nQuestion: a?\nAnswer: b"}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"share": 0.0}, "pictures: 0.0; expected a share"),
        ({"share": math.nan}, "pictures: nan"),
        ({"documents": 0}, "picture_documents: 0"),
        ({"kinds": ("shapes", "cats")}, "picture_kinds: 'cats'; expected some of forms"),
        ({"kinds": ("shapes", "shapes")}, "expected each kind once"),
    ],
)
def test_a_mix_that_cannot_be(change: dict, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        kinds.PictureMix(**{"share": 0.2, "documents": 10} | change)


def test_a_mix_divides_documents_and_weights() -> None:
    mix = kinds.PictureMix(0.2, 1000, ("shapes", "places"))
    assert mix.counts() == {"shapes": 714, "places": 286}
    weights = mix.weights(4.0)
    assert sum(weights.values()) == pytest.approx(1.0) and weights["shapes"] == pytest.approx(0.25 / 0.35)


def test_kinds_wait_for_forms_only_where_there_are_any() -> None:
    assert kinds.PictureMix(0.2, 10, ("forms", "tiles")).begins() == {"forms": 0, "tiles": 800}
    assert kinds.PictureMix(0.2, 10, ("shapes", "tiles")).begins() == {"shapes": 0, "tiles": 0}


def test_forms_are_asked_for_nothing_else() -> None:
    for document in made("forms", 40):
        (picture,), said = pictures(document), answers(document)
        patches = components(ink_of(picture.frames[0]))
        assert said == {"shape": form(patches[0])} and {form(patch) for patch in patches} == {said["shape"]}
        assert not set(drawing.NUMBERS) & set(document.text.lower().split())


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r"pip install 'nanok3\[pictures\]'"):
        kinds.check_needs("svg")
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"fonts .*pip install 'nanok3\[pictures\]'"):
        kinds.check_needs("spelling")
    kinds.check_needs("shapes")


# ---------------------------------------------------------------------- what packages ship


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two digits, eight pixels high, and two photographs."""
    table = "\n".join(",".join([*["0.0"] * 32, *[f"{8 + label}.0"] * 32, f"{label}.0"]) for label in (3, 7))
    path = tmp_path / "made.whl"
    with ZipFile(path, "w") as file:
        file.writestr("sklearn/datasets/data/digits.csv.gz", gzip.compress(table.encode()))
        for name, level in (("china.jpg", 200), ("flower.jpg", 20)):
            photo = io.BytesIO()
            Image.new("RGB", (640, 427), (level,) * 3).save(photo, "JPEG")
            file.writestr(f"sklearn/datasets/images/{name}", photo.getvalue())
    monkeypatch.setattr(packaged, "fetch", lambda package, cache: path)
    yield path


def test_digits_and_photographs(wheel: Path) -> None:
    for document in kinds.picture_documents("digits", kinds.open_kind("digits"), 20, 0):
        (picture,), number = pictures(document), answers(document)["digits"]
        assert set(number) <= {"3", "7"} and picture.size[0] == len(number) * picture.size[1]
        assert len(document.keys) == len(number)
    shown = set()
    for document in kinds.picture_documents("photos", kinds.open_kind("photos"), 20, 0):
        (picture,) = pictures(document)
        bright = np.asarray(picture.frames[0]).mean() > 100
        assert answers(document)["subject"] == ("a pagoda" if bright else "a flower")
        assert document.keys == () and max(picture.size) in (84, 98, 112)
        shown.add(bright)
    assert shown == {True, False}


SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 3"><rect width="4" height="3" fill="#e00"/></svg>'


def archive(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def test_icons_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    icons = {"red-square": {"body": '<path fill="currentColor" d="M0 0h32v32H0z"/>'}, "hand-light": {"body": ""}}
    country = {"cca2": "XA", "name": {"common": "Ahland"}, "capital": ["Bee"], "region": "Cia"}
    found = {
        npm.FLUENT_EMOJI: archive(tmp_path / "i.tgz", {"package/icons.json": json.dumps({"icons": icons})}),
        npm.WORLD_COUNTRIES: archive(tmp_path / "c.tgz", {"package/countries.json": json.dumps([country])}),
        npm.FLAG_ICONS: archive(tmp_path / "f.tgz", {"package/flags/4x3/xa.svg": SVG, "package/flags/1x1/xa.svg": ""}),
    }
    monkeypatch.setattr(packaged, "fetch_npm", lambda package, cache: found[package])
    for document in kinds.picture_documents("icons", kinds.open_kind("icons"), 5, 0):
        assert answers(document) == {"icon": "red square"} and document.keys == ("icon red-square",)
        assert np.asarray(pictures(document)[0].frames[0])[9, 9].tolist() == [34, 34, 34]
    for document in kinds.picture_documents("flags", kinds.open_kind("flags"), 5, 0):
        assert answers(document) == {"country": "Ahland", "capital": "Bee", "continent": "Cia"}
        assert np.asarray(pictures(document)[0].frames[0])[30, 40].tolist() == [238, 0, 0]


def test_npm_archives_are_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(tmp_path / "made.tgz", {"package/x.svg": SVG}).read_bytes()
    client = tmp_path / "npm"
    client.write_text(
        f"#!/bin/sh\necho call >> {tmp_path}/calls\n"
        f'while [ "$1" != --pack-destination ]; do shift; done\ncp {tmp_path}/made.tgz "$2/a.tgz"\n'
    )
    client.chmod(0o755)
    monkeypatch.setattr(npm.shutil, "which", lambda name: str(client))
    package = Package("@a/b", "1.0.0", npm.hashlib.sha256(content).hexdigest())
    for _ in range(2):
        path = npm.fetch_npm(package, tmp_path / "cache")
    assert path.name == "a-b-1.0.0.tgz" and (tmp_path / "calls").read_text() == "call\n"
    assert npm.read_members(path, "package/", ".svg") == {"package/x.svg": SVG.encode()}
    with pytest.raises(ValueError, match=r"sha256 .*; expected 00"):
        npm.fetch_npm(Package("@a/c", "1.0.0", "00"), tmp_path / "cache")
    client.write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
    with pytest.raises(OSError, match=r"could not download @a/c@1.0.0 with npm: no such package"):
        npm.fetch_npm(Package("@a/c", "1.0.0", "00"), tmp_path / "cache")
    monkeypatch.setattr(npm.shutil, "which", lambda name: None)
    with pytest.raises(ImportError, match=r"install Node\.js"):
        npm.fetch_npm(Package("@a/c", "1.0.0", "00"), tmp_path / "cache")
    with pytest.raises(ImportError, match="icons and flags"):
        kinds.check_needs("flags")
