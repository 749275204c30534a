"""From an image file to what the tower reads: exactly the pixels the official processor makes of it.

    size      never enlarged; shrunk where floor(W/14) * floor(H/14) exceeds 65,536 or a side 512 patches
    resize    Pillow's bicubic on bytes, alpha kept (palette and 1-bit: nearest, Pillow's rule for them)
    alpha     then composited over a chessboard of 8-pixel squares, 255 and 180, starting with 255
    padding   black on the right and below, to multiples of 28 = two patches
    values    byte/255, minus 0.5, over 0.5, in float32
    patches   row-major [H/14, 14, W/14, 14, 3] -> [N, 3, 14, 14]

EXIF orientation is ignored, and an RGB picture with a colour key stays opaque: so it is in the official
processor. Of an animation the first frame is taken. Exact to the bit with Pillow 13, whose resizer and JPEG
decoder are meant.

Files are read from strangers, so before anything is decoded the header must name one of `FORMATS` and a size
within `ImageLimits.pixels`, and what decodes slowly is bounded: a few bytes are a whole scan of a progressive JPEG,
and Pillow reads run-length coded BMP in Python. What is refused raises ValueError with the source and the reason.

Source: the official kimi_k3_vision_processing.py (specification 3.8). The limits on files and the cache are
ours.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import os
import re
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

PATCH = 14
CELL = 28
"""Side of what becomes one feature row: 2 x 2 patches."""

SQUARE, WHITE, GRAY = 8, 255, 180
"""The chessboard under transparent pictures."""

FORMATS = {
    "PNG": ("image/png",),
    "JPEG": ("image/jpeg", "image/jpg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp",),
}
"""File formats that are read, by Pillow's name, and the types under which a data URL may announce them."""

JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])", re.DOTALL)
"""Of those that a length follows, and the start and the end of a picture."""

Source: TypeAlias = "str | os.PathLike[str] | bytes | PILImage"


@dataclass(frozen=True)
class ImageLimits:
    """What is shrunk (the first two, the release's values) and what is refused (the others)."""

    patches: int = 65536
    patches_per_side: int = 512
    pixels: int = 2**26
    """Width times height in the header. 67 million of them, with alpha, take 1 GB at the peak. Pillow has a limit
    of its own, 179 million, that stays."""
    file_bytes: int = 2**28
    scans: int = 100
    """Of a JPEG, each of which goes over the whole picture; encoders write about ten."""
    run_length_pixels: int = 2**22
    """Of a run-length coded BMP."""


RELEASE = ImageLimits()


@dataclass(frozen=True)
class ImageSize:
    """Where a picture of some size ends up: resized to width x height, then padded on the right and below."""

    width: int
    height: int
    pad_width: int
    pad_height: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns in patches."""
        return 1, (self.height + self.pad_height) // PATCH, (self.width + self.pad_width) // PATCH

    @property
    def tokens(self) -> int:
        """Feature rows, the placeholders a picture takes in a prompt."""
        return (self.height + self.pad_height) // CELL * ((self.width + self.pad_width) // CELL)


@dataclass(frozen=True, eq=False)
class Image:
    """One picture, ready for `model(input_ids, pixel_values=image.pixel_values, grid_thw=image.grid_thw)`."""

    pixel_values: Float[Tensor, "N 3 14 14"]
    """float32 in [-1, 1], patches row-major."""
    grid_thw: Int[Tensor, "1 3"]
    """int64, the row (1, h, w) in patches; N = h * w."""
    size: tuple[int, int]
    """Width and height in pixels before any resize."""
    tokens: int
    """Feature rows the model makes of it: h/2 * w/2."""

    @property
    def prompt(self) -> str:
        """What stands for the picture in the text; the one `<|media_pad|>` becomes `tokens` rows in the
        model."""
        width, height = self.size
        return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


# ---------------------------------------------------------------------- arithmetic


def plan_size(width: int, height: int, limits: ImageLimits = RELEASE) -> ImageSize:
    """The size after shrinking and padding. Doubles and truncation as in the official code: the patch budget
    counts whole patches before padding, so a picture at the budget may end up slightly above it (below 3 percent)."""
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels has no content; each side must be at least 1")
    side = limits.patches_per_side * PATCH
    whole_patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(limits.patches / whole_patches), side / width, side / height)
    w, h = (min(max(1, int(length * scale)), side) for length in (width, height))
    return ImageSize(w, h, -w % CELL, -h % CELL)


def chessboard(height: int, width: int) -> Float[np.ndarray, "h w 1"]:
    """(height, width, 1) float32 of 255 and 180."""
    row, column = np.ogrid[:height, :width]
    squares = np.where((row // SQUARE + column // SQUARE) % 2 == 0, WHITE, GRAY)
    return squares[..., None].astype(np.float32)


def composite(rgba: UInt8[np.ndarray, "h w 4"]) -> UInt8[np.ndarray, "h w 3"]:
    """Over the chessboard: trunc(alpha rgb + (1 - alpha) board). In float32, whose rounding the official
    bytes show."""
    levels = rgba.astype(np.float32)
    alpha = levels[..., 3:] / np.float32(255)
    board = chessboard(*rgba.shape[:2])
    return (alpha * levels[..., :3] + (np.float32(1) - alpha) * board).astype(np.uint8)


def normalize(levels: UInt8[np.ndarray, " ..."]) -> Float[np.ndarray, " ..."]:
    """Bytes to [-1, 1]: (x/255 - 0.5) / 0.5, each step in float32; looked up, since there are only 256 of
    them."""
    table = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    return table[levels]


def patchify(rgb: UInt8[np.ndarray, "H W 3"]) -> Float[Tensor, "N 3 14 14"]:
    """Cut a padded picture into normalized patches, row by row."""
    height, width, _ = rgb.shape
    tiles = rgb.reshape(height // PATCH, PATCH, width // PATCH, PATCH, 3).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(normalize(tiles.reshape(-1, 3, PATCH, PATCH)))


# ---------------------------------------------------------------------- pictures


def pillow() -> Any:
    """The module PIL.Image; an error that names the extra where Pillow is missing."""
    try:
        from PIL import Image as module
    except ImportError:
        raise ImportError("reading images needs Pillow: pip install nanok3[vision]") from None
    return module


def has_alpha(picture: PILImage) -> bool:
    """Whether transparency is to be composited. A colour key counts for palette and gray pictures, not for
    RGB."""
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        return True
    return picture.mode in ("P", "L", "1") and "transparency" in picture.info


def render(picture: PILImage, size: ImageSize) -> UInt8[np.ndarray, "H W 3"]:
    """Resize, composite and pad: the opaque bytes that become patches."""
    picture = picture.resize((size.width, size.height), pillow().Resampling.BICUBIC)
    if has_alpha(picture):
        rgb = composite(np.asarray(picture.convert("RGBA")))
    else:
        rgb = np.asarray(picture.convert("RGB"))
    return np.pad(rgb, ((0, size.pad_height), (0, size.pad_width), (0, 0)))


def preprocess_image(source: Source, limits: ImageLimits = RELEASE) -> Image:
    """The official processor's pixels for a path, the bytes of a file, a base64 data URL
    (`data:image/png;base64,...`) or an open Pillow image.

    ValueError, naming the source and the reason: no such file, empty, too large, not one of `FORMATS`,
    announced as something else than it is, more than `limits.pixels`, or damaged. ImportError without the
    extra `vision`.
    """
    if isinstance(source, str | bytes | os.PathLike):
        data, name, announced = _read(source, limits)
        return _decode(data, name, announced, limits)
    if isinstance(source, pillow().Image):
        return _prepare(source, f"{source.mode} picture", limits)
    raise ValueError(
        f"cannot read an image from {type(source).__name__}; "
        "allowed: a path, bytes, a base64 data URL or a Pillow image"
    )


# ---------------------------------------------------------------------- files


def _read(source: str | os.PathLike[str] | bytes, limits: ImageLimits) -> tuple[bytes, str, str | None]:
    """The bytes of a source, what to call it in errors, and the type a data URL announces."""
    announced = None
    if isinstance(source, bytes):
        data, name = source, f"image of {len(source)} bytes"
    elif isinstance(source, str) and source.startswith("data:"):
        data, announced = _read_data_url(source, limits)
        name = f"data URL ({announced}, {len(data)} bytes)"
    else:
        data, name = read_file(source, limits), os.fspath(source)
    if not data:
        raise ValueError(f"{name}: empty, no image in it")
    if len(data) > limits.file_bytes:
        raise ValueError(f"{name}: {len(data)} bytes; at most {limits.file_bytes} are read")
    return data, name, announced


def read_file(path: str | os.PathLike[str], limits: ImageLimits) -> bytes:
    """The content of a file, and one byte more than `limits.file_bytes` of a longer one. ValueError for what is no
    readable regular file, and for addresses."""
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r}: cannot be read (a zero byte in its name)")
    if "://" in str(path):
        raise ValueError(f"{path}: addresses are not fetched; pass a path, bytes or a base64 data URL")
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path}: not a regular file")
            return file.read(limits.file_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _open_without_waiting(path: str, flags: int) -> int:
    """So that a pipe nobody writes to is found out instead of waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _read_data_url(url: str, limits: ImageLimits) -> tuple[bytes, str]:
    header, comma, body = url.partition(",")
    announced, *parameters = header.removeprefix("data:").lower().split(";")
    allowed = [kind for kinds in FORMATS.values() for kind in kinds]
    if announced not in allowed:
        raise ValueError(f"data URL of type {announced[:40]!r}; allowed: {', '.join(allowed)}")
    if not comma or "base64" not in parameters:
        raise ValueError(f"data URL ({announced}): only base64 is read, as in data:{announced};base64,...")
    if len(body) > (limits.file_bytes + 2) // 3 * 4:
        raise ValueError(f"data URL ({announced}): {len(body)} characters; at most {limits.file_bytes} bytes are read")
    try:
        return base64.b64decode(body, validate=True), announced
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"data URL ({announced}): not valid base64 ({error})") from None


def _decode(data: bytes, name: str, announced: str | None, limits: ImageLimits) -> Image:
    """Open a file in memory: format and announced type are checked on the header, the rest by `_prepare`."""
    module = pillow()
    try:
        picture = module.open(io.BytesIO(data), formats=tuple(FORMATS))
    except module.UnidentifiedImageError:
        raise ValueError(f"{name}: not an image, or damaged at its start; read are {', '.join(FORMATS)}") from None
    except module.DecompressionBombError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:  # a decoder on a stranger's bytes may raise anything
        raise ValueError(f"{name}: damaged at its start ({error})") from error
    kind = "JPEG" if picture.format == "MPO" else picture.format  # a camera's JPEG with further frames
    if announced is not None and announced not in FORMATS[kind]:
        raise ValueError(f"{name}: announced as {announced}, but its content is {FORMATS[kind][0]}")
    if kind == "JPEG" and count_scans(data) > limits.scans:
        raise ValueError(f"{name}: a JPEG of {count_scans(data)} scans; at most {limits.scans} are decoded")
    width, height = picture.size
    if picture.tile and picture.tile[0][0] == "bmp_rle" and width * height > limits.run_length_pixels:
        what = f"a run-length coded BMP of {width} x {height} = {width * height} pixels"
        raise ValueError(f"{name}: {what}; at most {limits.run_length_pixels} are decoded")
    return _prepare(picture, name, limits)


def count_scans(data: bytes) -> int:
    """The scans of a JPEG, up to the end of the picture: what follows it, and the previews in its segments, is not
    decoded."""
    found, at = 0, 2
    while (marker := JPEG_MARKER.search(data, at)) and marker[1] != b"\xd9":
        found += marker[1] == b"\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return found


def _prepare(picture: PILImage, name: str, limits: ImageLimits) -> Image:
    width, height = picture.size
    if width * height > limits.pixels:
        raise ValueError(f"{name}: {width} x {height} = {width * height} pixels; at most {limits.pixels} are decoded")
    size = plan_size(width, height, limits)
    try:
        picture.load()
        rgb = render(picture, size)
    except Exception as error:  # as above; Pillow decodes only now
        raise ValueError(f"{name}: cannot be decoded, damaged or cut short ({error})") from error
    grid = torch.tensor([size.grid], dtype=torch.int64)
    return Image(patchify(rgb), grid, (width, height), size.tokens)


class ImageCache:
    """`preprocess_image` that remembers: the pictures used last, by the hash of their bytes, up to a size in
    bytes of pixel values. One cache may serve several threads. Open Pillow images have no bytes to hash and
    pass through; what it returns is shared, so do not write into it."""

    def __init__(self, max_bytes: int, limits: ImageLimits = RELEASE) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 0")
        self.max_bytes = max_bytes
        self.limits = limits
        self.bytes = self.hits = self.misses = 0
        self._images: OrderedDict[bytes, Image] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, source: Source) -> Image:
        """As `preprocess_image`, with the same errors."""
        if not isinstance(source, str | bytes | os.PathLike):
            return preprocess_image(source, self.limits)
        data, name, announced = _read(source, self.limits)
        key = hashlib.sha256(data).digest() + (announced or "").encode()
        with self._lock:
            if found := self._images.get(key):
                self._images.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
        image = _decode(data, name, announced, self.limits)
        with self._lock:
            self._remember(key, image)
        return image

    def _remember(self, key: bytes, image: Image) -> None:
        size = image.pixel_values.nbytes
        if size > self.max_bytes or key in self._images:
            return
        self._images[key] = image
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, oldest = self._images.popitem(last=False)
            self.bytes -= oldest.pixel_values.nbytes
