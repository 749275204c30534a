"""Pictures that packages ship: handwritten digits, two photographs, icons, flags.

digits   scikit-learn (BSD): 1,797 of 8 x 8, one to three in a row; the key is each digit's pixels
photos   the same wheel (CC BY 2.0): crops of a Chinese pagoda and a dahlia; two are too few to hold one out
icons    fluent-emoji-flat (MIT), through npm: 1,578 pictures by name, drawn by resvg; the key is the name
flags    flag-icons (MIT) and world-countries (ODbL), through npm: country, capital, continent
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from zipfile import ZipFile

import numpy as np

from nanok3.data.images import pillow
from nanok3.data.npm import FLAG_ICONS, FLUENT_EMOJI, WORLD_COUNTRIES, fetch_npm, read_members
from nanok3.data.packages import SCIKIT_LEARN, fetch
from nanok3.data.pictures.code import render_svg, resvg
from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell

Maker = Callable[[Random], PictureDocument]

_SUBJECTS = {
    "china.jpg": ("a Chinese pagoda above a lake", "a pagoda", (64, 30, 352, 400)),
    "flower.jpg": ("an orange dahlia", "a flower", (170, 85, 445, 358)),
}
"""What the photographs show, in long and in short, and the box that a crop must hold."""


def digits_from(cache: Path | None) -> Maker:
    """One to three handwritten digits in a row."""
    with ZipFile(fetch(SCIKIT_LEARN, cache)) as wheel:
        table = gzip.decompress(wheel.read("sklearn/datasets/data/digits.csv.gz")).decode()
    rows = np.array([[float(cell) for cell in line.split(",")] for line in table.split()], dtype=np.uint8)
    levels, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]

    def digits(random: Random) -> PictureDocument:
        chosen = [random.randrange(len(rows)) for _ in range(random.choice((1, 1, 2, 3)))]
        strip = np.concatenate([levels[i] for i in chosen], axis=1).astype(np.uint8) * 15
        if random.random() < 0.5:
            strip = 255 - strip
        scale = random.choice((4, 5, 6))
        small = pillow().fromarray(strip)
        picture = small.resize((small.width * scale, small.height * scale), pillow().Resampling.BICUBIC).convert("RGB")
        number = "".join(str(labels[i]) for i in chosen)
        kind = "digit" if len(chosen) == 1 else "number"
        captions = (f"The handwritten {kind} {number}.", f"Handwritten: {number}", number)
        asks = [Ask("digits", (f"Which {kind} is written here?", f"Read the {kind}."), number)]
        keys = [f"digit {levels[i].tobytes().hex()}" for i in chosen]
        return tell(random, "digits", [Picture((picture,))], keys, captions, asks)

    return digits


def photos_from(cache: Path | None) -> Maker:
    """Crops of the two photographs."""
    with ZipFile(fetch(SCIKIT_LEARN, cache)) as wheel:
        contents = {name: wheel.read(f"sklearn/datasets/images/{name}") for name in _SUBJECTS}
    whole = {name: pillow().open(io.BytesIO(content)).convert("RGB") for name, content in contents.items()}

    def photos(random: Random) -> PictureDocument:
        name, photo = random.choice(list(whole.items()))
        long, short, (left, top, right, bottom) = _SUBJECTS[name]
        box = (
            random.randint(0, left),
            random.randint(0, top),
            random.randint(right, photo.width),
            random.randint(bottom, photo.height),
        )
        scale = random.choice((84, 98, 112)) / max(box[2] - box[0], box[3] - box[1])
        size = round((box[2] - box[0]) * scale), round((box[3] - box[1]) * scale)
        picture = photo.crop(box).resize(size, pillow().Resampling.BICUBIC)
        captions = (f"A photograph of {long}.", f"{long[0].upper()}{long[1:]}.", f"We see {long}.")
        asks = [
            Ask("subject", ("What does the photograph show?", "What is it?"), short),
            Ask("medium", ("Is it a drawing or a photograph?",), "a photograph"),
        ]
        return tell(random, "photos", [Picture((picture,))], [], captions, asks, (long, long.capitalize()))

    return photos


def icons_from(cache: Path | None) -> Maker:
    """Icons and their names."""
    renderer = resvg()
    (content,) = read_members(fetch_npm(FLUENT_EMOJI, cache), "package/icons.json", "").values()
    icons = json.loads(content)["icons"]
    names = sorted(name for name in icons if not re.search(r"-(light|medium|dark|medium-light|medium-dark)$", name))

    def icons_(random: Random) -> PictureDocument:
        name = random.choice(names)
        side = random.choice((56, 70))
        code = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{icons[name]["body"]}</svg>'
        picture = render_svg(renderer, code.replace("currentColor", "#222"), side, side)
        said = name.replace("-", " ")
        captions = (f"An icon: {said}.", f"The icon of {said}.", said)
        asks = [Ask("icon", ("What does the icon show?", "What is it?"), said)]
        return tell(random, "icons", [picture], [f"icon {name}"], captions, asks)

    return icons_


def flags_from(cache: Path | None) -> Maker:
    """Flags, their countries, capitals and continents."""
    renderer = resvg()
    (content,) = read_members(fetch_npm(WORLD_COUNTRIES, cache), "package/countries.json", "").values()
    drawn = read_members(fetch_npm(FLAG_ICONS, cache), "package/flags/4x3/", ".svg")
    known = {
        country["cca2"]: country
        for country in json.loads(content)
        if f"package/flags/4x3/{country['cca2'].lower()}.svg" in drawn and country["capital"]
    }
    codes = sorted(known)

    def flags(random: Random) -> PictureDocument:
        code = random.choice(codes)
        country = known[code]
        name, capital, region = country["name"]["common"], country["capital"][0], country["region"]
        svg = drawn[f"package/flags/4x3/{code.lower()}.svg"].decode()
        picture = render_svg(renderer, svg, 84, 63)
        captions = (f"The flag of {name}.", f"{name}: the capital is {capital}, the continent {region}.", name)
        asks = [
            Ask("country", ("Whose flag is it?", "Which country is it?"), name),
            Ask("capital", ("What is the capital of the country with this flag?",), capital),
            Ask("continent", ("On which continent is the country?",), region),
        ]
        return tell(random, "flags", [picture], [f"flag {code}"], captions, asks)

    return flags
