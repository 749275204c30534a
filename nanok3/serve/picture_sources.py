"""The pictures and videos of a request: from what a message says of them to pixels, within limits.

    data:image/png;base64,...      in the request itself; data:video/mp4;base64,...
    ms://ID                        a file that the same client has uploaded (files_api.py)
    https://...                    only where the server allows it (fetch_picture.py)

Whatever is wrong with one is a `RequestError` that names its place in the request: no picture, cut short, empty,
announced as something else, an animation, more pixels than are decoded, more patches than a request may have, a video
of more frames. One is decoded at a time, so that many clients need the memory of one; those seen last are kept decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanok3.data.images import Image, ImageCache, ImageLimits, pillow
from nanok3.data.messages import VIDEO_TYPE
from nanok3.data.video import FRAME, Chunk, Video, VideoLimits, read_video
from nanok3.serve.chat_fields import WEB, media_source, place_of
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
    videos: int = 2
    """Videos of a request, beside the pictures."""
    frames: int = 512
    """Of one video, at eight a second or what it has."""
    patches: int = 262_144
    """Of all of them together; a picture has at most 65,536 after it was shrunk, a frame 16,384."""
    from_web: bool = False
    """Whether http(s) addresses are fetched."""
    file_bytes: int = 32 << 20
    cache_bytes: int = 256 << 20
    """Of decoded pictures, and again of videos, that are kept for the next request that shows them."""
    files: FilesLimits = field(default_factory=FilesLimits)
    decoded: int = 1 << 34
    """Pixels of all frames of a video that are decoded, taken or not: two minutes of 1920 x 1080 at sixty a second."""


@dataclass(frozen=True)
class Seen:
    """What one part of a message shows: its words in the prompt, and what the tower looks at."""

    prompt: str
    items: tuple[Image | Chunk, ...]

    @property
    def patches(self) -> int:
        return sum(len(item.pixel_values) for item in self.items)

    @property
    def bytes(self) -> int:
        return sum(item.pixel_values.nbytes for item in self.items)


@dataclass
class MediaCounts:
    """What was opened since the start, for whoever watches."""

    pictures: int = 0
    videos: int = 0
    refused: int = 0


class PictureSources:
    """Opens the pictures and videos of requests. From any thread."""

    def __init__(self, settings: PictureSettings) -> None:
        self.settings, self.files, self.counts = settings, Files(settings.files), MediaCounts()
        self._cache = ImageCache(settings.cache_bytes, ImageLimits(file_bytes=settings.file_bytes))
        self._videos: OrderedDict[bytes, Seen] = OrderedDict()
        self._one = threading.Lock()

    def open(self, parts: Iterable[tuple[Mapping[str, Any], str]], owner: int | None) -> list[Seen]:
        """What some parts show, each with its place in the request. owner: whose files may be named."""
        parts = list(parts)
        try:
            return self._open(parts, owner)
        except RequestError:
            self.counts.refused += 1
            raise

    def _open(self, parts: list[tuple[Mapping[str, Any], str]], owner: int | None) -> list[Seen]:
        self._check_numbers(parts)
        found: list[Seen] = []
        patches = 0
        for part, where in parts:
            seen = self.one(part, where, owner)
            patches += seen.patches
            if patches > self.settings.patches:
                what = f"the pictures up to here have {patches} patches of 14 x 14 pixels"
                raise RequestError(
                    f"{place_of(part, where)}: {what}; allowed: {self.settings.patches}", place_of(part, where)
                )
            found.append(seen)
        videos = sum(part["type"] == VIDEO_TYPE for part, _ in parts)
        self.counts.pictures += len(parts) - videos
        self.counts.videos += videos
        return found

    def _check_numbers(self, parts: list[tuple[Mapping[str, Any], str]]) -> None:
        videos = [(part, where) for part, where in parts if part["type"] == VIDEO_TYPE]
        pictures = [(part, where) for part, where in parts if part["type"] != VIDEO_TYPE]
        for some, kind, most in ((pictures, "pictures", self.settings.count), (videos, "videos", self.settings.videos)):
            if len(some) > most:
                raise RequestError(f"the request has {len(some)} {kind}; allowed: {most}", place_of(*some[most]))

    def one(self, part: Mapping[str, Any], where: str, owner: int | None) -> Seen:
        """What a part shows."""
        url, place = media_source(part, where, self.settings.from_web), place_of(part, where)
        decode = self.decode_video if part["type"] == VIDEO_TYPE else self.decode
        try:
            if url.startswith(SCHEME):
                return decode(self.files.get(url.removeprefix(SCHEME), owner).content)
            if url.startswith(WEB):
                return decode(fetch(url, self.settings.file_bytes))
            return decode(url)
        except (ValueError, ImportError) as error:
            raise RequestError(f"{place}: {error}", place) from None
        except RequestError as error:
            raise RequestError(f"{place}: {error.message}", place) from None

    def decode(self, source: str | bytes) -> Seen:
        """A picture's bytes, or a data URL. ValueError for what is no still picture."""
        with self._one:
            image = self._cache(source)
            _check_still(source if isinstance(source, bytes) else base64.b64decode(source.partition(",")[2]))
        return Seen(image.prompt, (image,))

    def decode_video(self, source: str | bytes) -> Seen:
        """A video's bytes, or a data URL. ValueError for what is no whole video, or a long one."""
        data = source if isinstance(source, bytes) else _data_of(source)
        key = hashlib.sha256(data).digest()
        with self._one:
            seen = self._videos.pop(key, None)
            if seen is None:
                video = self._read(data)
                seen = Seen(video.prompt, tuple(video.chunks))
            self._videos[key] = seen
            while sum(other.bytes for other in self._videos.values()) > self.settings.cache_bytes:
                self._videos.popitem(last=False)
        return seen

    def _read(self, data: bytes) -> Video:
        most = self.settings.frames
        frame = ImageLimits(FRAME.patches, FRAME.patches_per_side, FRAME.pixels, self.settings.file_bytes)
        video = read_video(
            data,
            VideoLimits(frames=most + 1, patches=self.settings.patches, decoded=self.settings.decoded, image=frame),
        )
        frames = sum(int(chunk.grid_thw[0, 0]) for chunk in video.chunks)
        if frames > most:
            raise ValueError(
                f"video of {len(data)} bytes: more than {most} frames, at most 8 of a second; allowed: {most}"
            )
        if video.damage is not None:
            raise ValueError(f"video of {len(data)} bytes: damaged or cut short: {video.damage}")
        return video


def _data_of(url: str) -> bytes:
    header, _, body = url.partition(",")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"data URL ({header[5:40]}): not valid base64 ({error})") from None


def _check_still(data: bytes) -> None:
    """Of a file that could be decoded."""
    with pillow().open(io.BytesIO(data)) as opened:
        if getattr(opened, "is_animated", False) and opened.format not in STILL:
            raise ValueError(f"an animation of {opened.n_frames} frames; allowed: a still picture")
