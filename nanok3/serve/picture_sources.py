"""The pictures of a request: from what a message says of them to pixels, within limits.

    data:image/png;base64,...      in the request itself
    ms://ID                        a file that the same client has uploaded (files_api.py)
    https://...                    only where the server allows it (fetch_picture.py)

Whatever is wrong with one is a `RequestError` that names its place in the request: no picture, cut short, empty,
announced as something else, an animation, more pixels than are decoded, more patches than a request may have. One is
decoded at a time, so that many clients need the memory of one; those seen last are kept decoded.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanok3.data.images import Image, ImageCache, ImageLimits, pillow
from nanok3.serve.chat_fields import WEB, image_source, place_of
from nanok3.serve.fetch_picture import fetch
from nanok3.serve.fields import RequestError
from nanok3.serve.file_store import Files, FilesLimits

SCHEME = "ms://"
STILL = ("MPO",)
"""Formats whose further frames are no animation: a camera's preview."""


@dataclass(frozen=True)
class PictureSettings:
    """What a server reads."""

    count: int = 10
    """Pictures of a request."""
    patches: int = 262_144
    """Of all of them together; one has at most 65,536 after it was shrunk."""
    from_web: bool = False
    """Whether http(s) addresses are fetched."""
    file_bytes: int = 32 << 20
    cache_bytes: int = 256 << 20
    """Of decoded pictures that are kept for the next request that shows them."""
    files: FilesLimits = field(default_factory=FilesLimits)


class PictureSources:
    """Opens the pictures of requests. From any thread."""

    def __init__(self, settings: PictureSettings) -> None:
        self.settings, self.files = settings, Files(settings.files)
        self._cache = ImageCache(settings.cache_bytes, ImageLimits(file_bytes=settings.file_bytes))
        self._one = threading.Lock()

    def open(self, parts: Iterable[tuple[Mapping[str, Any], str]], owner: int | None) -> list[Image]:
        """The pictures of some parts, each with its place in the request. owner: whose files may be named."""
        parts = list(parts)
        if len(parts) > self.settings.count:
            what = f"the request has {len(parts)} pictures; allowed: {self.settings.count}"
            raise RequestError(what, place_of(*parts[self.settings.count]))
        images: list[Image] = []
        patches = 0
        for part, where in parts:
            image = self.one(part, where, owner)
            patches += len(image.pixel_values)
            if patches > self.settings.patches:
                what = f"the pictures up to here have {patches} patches of 14 x 14 pixels"
                raise RequestError(
                    f"{place_of(part, where)}: {what}; allowed: {self.settings.patches}", place_of(part, where)
                )
            images.append(image)
        return images

    def one(self, part: Mapping[str, Any], where: str, owner: int | None) -> Image:
        """The picture of a part."""
        url, place = image_source(part, where, self.settings.from_web), place_of(part, where)
        try:
            if url.startswith(SCHEME):
                return self.decode(self.files.get(url.removeprefix(SCHEME), owner).content)
            if url.startswith(WEB):
                return self.decode(fetch(url, self.settings.file_bytes))
            return self.decode(url)
        except (ValueError, ImportError) as error:
            raise RequestError(f"{place}: {error}", place) from None
        except RequestError as error:
            raise RequestError(f"{place}: {error.message}", place) from None

    def decode(self, source: str | bytes) -> Image:
        """A file's bytes, or a data URL. ValueError for what is no still picture."""
        with self._one:
            image = self._cache(source)
            _check_still(source if isinstance(source, bytes) else base64.b64decode(source.partition(",")[2]))
        return image


def _check_still(data: bytes) -> None:
    """Of a file that could be decoded."""
    with pillow().open(io.BytesIO(data)) as opened:
        if getattr(opened, "is_animated", False) and opened.format not in STILL:
            raise ValueError(f"an animation of {opened.n_frames} frames; allowed: a still picture")
