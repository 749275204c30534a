"""Pictures to pixels: the official processor's bytes, and what a stranger's file may not do."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from safetensors.numpy import load_file

from nanok3.data import images
from nanok3.data.images import ImageCache, ImageLimits, count_scans, normalize, plan_size, preprocess_image

FIXTURES = Path(__file__).parent.parent / "fixtures" / "images"
GOLDEN = json.loads((FIXTURES / "cases.json").read_text())
CASES = GOLDEN["cases"]
STORED = load_file(FIXTURES / "expected.safetensors")


def file_of(case):
    return FIXTURES / CASES[case]["file"]


def encoded(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def to_bytes(pixel_values, grid):
    """Undo patches and normalization: (H, W, 3) bytes."""
    _, h, w = grid.tolist()[0]
    tiles = pixel_values.numpy().reshape(h, w, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    return np.round((tiles.reshape(h * 14, w * 14, 3) / 2 + 0.5) * 255).astype(np.uint8)


# ------------------------------------------------------------------ equal to the official processor


@pytest.mark.parametrize("case", CASES)
def test_pixels_equal_the_official_ones_bit_for_bit(case):
    wanted = CASES[case]
    image = preprocess_image(file_of(case))
    assert image.pixel_values.dtype == torch.float32
    assert list(image.pixel_values.shape) == wanted["pixel_values_shape"]
    assert image.grid_thw.dtype == torch.int64 and image.grid_thw.tolist() == [wanted["grid_thw"]]
    assert image.size == (wanted["width"], wanted["height"])
    assert (image.tokens, image.prompt) == (wanted["num_tokens"], wanted["prompt"])
    picture = to_bytes(image.pixel_values, image.grid_thw)
    assert list(picture.shape) == wanted["u8_shape"]
    if wanted["stored"] == "full":
        np.testing.assert_array_equal(picture, STORED[f"{case}.rgb_u8"])
    else:
        index = STORED[f"{case}.sample_u8_index"]
        np.testing.assert_array_equal(picture.reshape(-1)[index], STORED[f"{case}.sample_u8"])
    assert hashlib.sha256(picture.tobytes()).hexdigest() == wanted["sha256_u8_hwc"]
    little_endian = np.ascontiguousarray(image.pixel_values.numpy(), dtype="<f4")
    assert hashlib.sha256(little_endian.tobytes()).hexdigest() == wanted["sha256_f32_le"]


def test_sizes_equal_the_official_ones():
    rows = GOLDEN["resize_config"]
    assert len(rows) == 174
    for width, height, *wanted in rows:
        size = plan_size(width, height)
        got = [size.width, size.height, size.pad_width, size.pad_height, size.tokens]
        assert got == wanted, (width, height)


def test_levels_equal_the_official_ones():
    levels = normalize(np.arange(256, dtype=np.uint8))
    assert levels.dtype == np.float32
    np.testing.assert_array_equal(levels, STORED["levels_f32"])


@given(st.integers(1, 200_000), st.integers(1, 200_000))
def test_every_size_fits_the_tower(width, height):
    size = plan_size(width, height)
    t, h, w = size.grid
    assert t == 1 and h % 2 == 0 and w % 2 == 0 and 2 <= h <= 512 and 2 <= w <= 512
    assert size.width <= width and size.height <= height
    assert size.tokens == h // 2 * (w // 2)
    assert size.tokens <= 1.03 * 16384  # the budget counts floors, so rounding and padding may add a little


def test_limits_of_ones_own_shrink_further():
    limits = ImageLimits(patches=64, patches_per_side=16)
    image = preprocess_image(Pillow.new("RGB", (1000, 100)), limits)
    assert image.size == (1000, 100)
    assert image.grid_thw.tolist() == [[1, 2, 16]]


# ------------------------------------------------------------------ ways to pass a picture


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("case", ["rgb_29x27", "rgba_60x44", "p_40x30_trns_index", "exif6_60x20"])
def test_every_kind_of_source_gives_the_same(case):
    path = file_of(case)
    kind = "image/jpeg" if path.suffix == ".jpg" else "image/png"
    first = preprocess_image(path)
    for source in (str(path), path.read_bytes(), Pillow.open(path), data_url(path.read_bytes(), kind)):
        other = preprocess_image(source)
        assert torch.equal(other.pixel_values, first.pixel_values)
        assert (other.size, other.tokens, other.prompt) == (first.size, first.tokens, first.prompt)


def test_an_open_picture_is_left_as_it_was():
    picture = Pillow.open(file_of("rgba_60x44"))
    preprocess_image(picture)
    assert (picture.mode, picture.size) == ("RGBA", (60, 44))
    assert picture.getpixel((0, 0)) == Pillow.open(file_of("rgba_60x44")).getpixel((0, 0))


@pytest.mark.parametrize("kind", ["image/jpeg", "image/jpg", "IMAGE/JPEG"])
def test_a_jpeg_goes_by_three_names(kind):
    assert preprocess_image(data_url(file_of("rgb_70x41").read_bytes(), kind)).size == (70, 41)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Pillow.new("RGB", (28, 28), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Pillow.open(io.BytesIO(data)).n_frames == 3
    assert torch.equal(preprocess_image(data).pixel_values, preprocess_image(frames[0]).pixel_values)


def test_a_cameras_jpeg_with_further_frames_counts_as_jpeg():
    frames = [Pillow.new("RGB", (28, 28), color) for color in ("red", "green")]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert Pillow.open(io.BytesIO(data)).format == "MPO"
    assert preprocess_image(data_url(data, "image/jpeg")).size == (28, 28)


# ------------------------------------------------------------------ transparency


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_full_transparency_becomes_a_chessboard_and_never_black(mode):
    picture = Pillow.new("RGBA", (28, 28), (0, 0, 0, 0))
    if mode in ("PA", "P"):
        picture = Pillow.new("P", (28, 28), 0)
        picture.info["transparency"] = 0
    picture = picture.convert(mode)
    image = preprocess_image(picture)
    levels = to_bytes(image.pixel_values, image.grid_thw)[..., 0]
    row, column = np.mgrid[:28, :28]
    np.testing.assert_array_equal(levels, np.where((row // 8 + column // 8) % 2 == 0, 255, 180))


def test_padding_is_black_and_never_chessboard():
    image = preprocess_image(Pillow.new("RGBA", (10, 12), (0, 0, 0, 0)))
    levels = to_bytes(image.pixel_values, image.grid_thw)
    assert levels[:12, :10].min() == 180
    assert levels[12:].max() == 0 and levels[:, 10:].max() == 0


def test_patches_run_row_by_row():
    levels = np.zeros((28, 56, 3), dtype=np.uint8)
    for patch in range(8):
        row, column = divmod(patch, 4)
        levels[14 * row : 14 * row + 14, 14 * column : 14 * column + 14] = 10 * patch
    image = preprocess_image(Pillow.fromarray(levels))
    assert image.grid_thw.tolist() == [[1, 2, 4]]
    assert torch.equal(image.pixel_values[:, 0, 0, 0], torch.from_numpy(normalize(levels[::14, ::14, 0].reshape(-1))))


# ------------------------------------------------------------------ files of strangers


def png(width, height, data):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [8193, 12_000, 60_000, 2**31 - 1])
def test_a_huge_size_in_the_header_is_refused_before_decoding(side):
    bomb = png(side, side, zlib.compress(bytes(3 * 10_000_000), 9))
    assert len(bomb) < 50_000
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"bytes: (\d+ x \d+ = \d+ pixels; at most 67108864|Image size \(\d+ pixels)"):
        preprocess_image(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_an_open_picture_of_a_huge_size_is_refused():
    limits = ImageLimits(pixels=100)
    with pytest.raises(ValueError, match="RGB picture: 11 x 10 = 110 pixels; at most 100 are decoded"):
        preprocess_image(Pillow.new("RGB", (11, 10)), limits)
    assert preprocess_image(Pillow.new("RGB", (10, 10)), limits).size == (10, 10)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_cut_short_is_refused(tmp_path, kind):
    noise = Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8))
    whole = encoded(noise, kind)
    assert preprocess_image(whole).size == (50, 60)
    for share in (0.01, 0.1, 0.5, 0.9):
        path = tmp_path / f"cut-{share}"
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=rf"cut-{share}: (cannot be decoded, damaged|damaged|not an image)"):
            preprocess_image(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_damaged_file_gives_pixels_or_a_value_error(kind):
    whole = encoded(Pillow.open(file_of("rgb_29x27")), kind)
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(100):
        damaged = np.frombuffer(whole, dtype=np.uint8).copy()
        where = generator.integers(0, min(len(whole), 200), 4)
        damaged[where] = generator.integers(0, 256, 4)
        try:
            preprocess_image(damaged.tobytes(), ImageLimits(pixels=2**20))
        except ValueError as error:
            assert str(error).startswith(f"image of {len(whole)} bytes: ")
            refused += 1
    assert refused > 0


def test_what_decodes_slowly_is_refused():
    """A scan of a flat picture takes fourteen bytes of the file, a line of run lengths four."""
    whole = encoded(Pillow.new("L", (64, 64), 90), "JPEG", progressive=True)
    scans = count_scans(whole)
    assert scans == whole.count(b"\xff\xda") > 3
    last = whole[whole.rindex(b"\xff\xda") : -2]
    for more, fits in ((100 - scans, True), (101 - scans, False), (9000, False)):
        many = whole[:-2] + more * last + b"\xff\xd9"
        if fits:
            assert preprocess_image(many).size == (64, 64)
        else:
            with pytest.raises(ValueError, match=f"a JPEG of {scans + more} scans; at most 100 are decoded"):
                preprocess_image(many)
    preview = b"\xff\xe1" + struct.pack(">H", 302) + 150 * b"\xff\xda"
    assert count_scans(whole[:2] + preview + whole[2:] + 900 * b"\xff\xda") == scans
    assert count_scans(b"\xff\xd8\xff\xda") == 1 and count_scans(b"") == 0
    assert preprocess_image(run_lengths(64)).size == (64, 64)
    with pytest.raises(ValueError, match="a run-length coded BMP of 64 x 64 = 4096 pixels; at most 4095 are decoded"):
        preprocess_image(run_lengths(64), ImageLimits(run_length_pixels=4095))
    with pytest.raises(ValueError, match=r"bytes: a run-length coded BMP of 5000 x 5000 = 25000000 pixels"):
        preprocess_image(run_lengths(5000))


def run_lengths(side):
    """A BMP whose lines are one pixel each, and nothing up to their ends."""
    lines = b"\x01\x00\x00\x00" * side + b"\x00\x01"
    start = 14 + 40 + 1024
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(lines), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(lines), 0, 0, start) + header + bytes(1024) + lines


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.png").touch()
    with pytest.raises(ValueError, match=r"empty\.png: empty, no image in it"):
        preprocess_image(tmp_path / "empty.png")
    with pytest.raises(ValueError, match="image of 0 bytes: empty"):
        preprocess_image(b"")
    with pytest.raises(ValueError, match=r"data URL \(image/png, 0 bytes\): empty"):
        preprocess_image("data:image/png;base64,")


def test_a_file_that_is_no_image_is_refused(tmp_path):
    (tmp_path / "note.png").write_text("not a picture at all")
    with pytest.raises(ValueError, match=r"note\.png: not an image.*PNG, JPEG, WEBP, GIF, BMP"):
        preprocess_image(str(tmp_path / "note.png"))


def test_formats_that_run_programs_or_are_rare_are_not_opened():
    with pytest.raises(ValueError, match="not an image"):
        preprocess_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    with pytest.raises(ValueError, match="not an image"):
        preprocess_image(encoded(Pillow.new("RGB", (8, 8)), "TIFF"))


def test_paths_that_are_no_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    cases = {
        tmp_path / "missing.png": r"missing\.png: cannot be read \(No such file",
        tmp_path: r"cannot be read \(Is a directory",
        tmp_path / "pipe": "pipe: not a regular file",
        "https://example.org/cat.png": "addresses are not fetched",
    }
    for source, message in cases.items():
        with pytest.raises(ValueError, match=message):
            preprocess_image(source)


def test_a_name_with_a_zero_byte_is_refused():
    with pytest.raises(ValueError, match=r"'a\\x00b.png': cannot be read \(a zero byte"):
        preprocess_image("a\0b.png")


def test_a_file_above_the_limit_is_refused(tmp_path):
    data = file_of("rgb_28x28").read_bytes()
    (tmp_path / "long.png").write_bytes(data)
    exact, below = ImageLimits(file_bytes=len(data)), ImageLimits(file_bytes=len(data) - 1)
    for source in (data, tmp_path / "long.png", data_url(data)):
        assert preprocess_image(source, exact).size == (28, 28)
        with pytest.raises(ValueError, match=f"at most {len(data) - 1}"):
            preprocess_image(source, below)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:text/plain;base64,aGk=", "data URL of type 'text/plain'; allowed: image/png"),
        ("data:image/svg+xml;base64,aGk=", r"data URL of type 'image/svg\+xml'"),
        ("data:;base64,aGk=", "data URL of type ''"),
        ("data:image/png,abc", "only base64 is read"),
        ("data:image/png;base64", "only base64 is read"),
        ("data:image/png;base64,a!b=", "not valid base64"),
        ("data:image/png;base64,abc", "not valid base64"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "not valid base64"),
        ("data:image/png;base64,aGVsbG8gd29ybGQ=", r"data URL \(image/png, 11 bytes\): not an image"),
    ],
)
def test_wrong_data_urls_are_refused(url, message):
    with pytest.raises(ValueError, match=message):
        preprocess_image(url)


def test_a_data_url_that_announces_another_type_is_refused():
    url = data_url(file_of("rgb_70x41").read_bytes(), "image/png")
    with pytest.raises(ValueError, match="announced as image/png, but its content is image/jpeg"):
        preprocess_image(url)


@pytest.mark.parametrize("source", [None, 3, ["a.png"], np.zeros((4, 4, 3))])
def test_other_types_are_refused(source):
    with pytest.raises(ValueError, match=f"cannot read an image from {type(source).__name__}"):
        preprocess_image(source)


def test_a_picture_without_pixels_is_refused():
    with pytest.raises(ValueError, match="0 x 5 pixels has no content"):
        preprocess_image(Pillow.new("RGB", (0, 5)))


def test_without_pillow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install nanok3\[vision\]"):
        preprocess_image(file_of("rgb_28x28"))


# ------------------------------------------------------------------ cache


def test_the_cache_returns_what_it_made_for_the_same_bytes(monkeypatch):
    cache = ImageCache(max_bytes=2**20)
    path = file_of("rgb_28x28")
    first = cache(path)
    monkeypatch.setattr(images, "_decode", None)
    assert cache(path.read_bytes()) is first
    assert cache(str(path)) is first
    assert (cache.hits, cache.misses) == (2, 1)
    assert cache.bytes == first.pixel_values.nbytes


def test_the_cache_follows_the_content_of_a_path(tmp_path):
    cache = ImageCache(max_bytes=2**20)
    path = tmp_path / "picture.png"
    path.write_bytes(file_of("rgb_28x28").read_bytes())
    before = cache(path)
    path.write_bytes(file_of("rgb_29x27").read_bytes())
    assert cache(path).size == (29, 27) != before.size


def test_the_cache_forgets_the_picture_used_longest_ago():
    one = preprocess_image(Pillow.new("RGB", (28, 28))).pixel_values.nbytes
    cache = ImageCache(max_bytes=2 * one)
    a, b, c = (encoded(Pillow.new("RGB", (28, 28), color)) for color in ("red", "green", "blue"))
    image_a = cache(a)
    cache(b)
    assert cache(a) is image_a
    cache(c)
    assert cache.bytes == 2 * one
    assert cache(a) is image_a
    misses = cache.misses
    cache(b)
    assert cache.misses == misses + 1


def test_the_cache_keeps_nothing_above_its_size_and_no_errors():
    cache = ImageCache(max_bytes=100)
    data = file_of("rgb_28x28").read_bytes()
    assert cache(data) is not cache(data)
    assert cache.bytes == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="not an image"):
            cache(b"nothing")
    with pytest.raises(ValueError, match="max_bytes is -1"):
        ImageCache(max_bytes=-1)


def test_the_cache_still_checks_what_a_data_url_announces():
    cache = ImageCache(max_bytes=2**20)
    data = file_of("rgb_70x41").read_bytes()
    cache(data_url(data, "image/jpeg"))
    with pytest.raises(ValueError, match="announced as image/png"):
        cache(data_url(data, "image/png"))


def test_an_open_picture_passes_the_cache_by():
    cache = ImageCache(max_bytes=2**20)
    assert cache(Pillow.new("RGB", (28, 28))).size == (28, 28)
    assert cache.bytes == 0
