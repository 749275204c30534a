"""A video as the tower reads it: chunks of up to four frames, each under its time.

    sampling   frame k is the first whose time reaches k / rate, at most 8 a second; no frame is taken twice
    chunk      four sampled frames in a row, one media item of grid (t, h, w), t <= 4; the last may be shorter
    frame      prepared as a picture is (images.py), within 16,384 patches
    text       00:00:01.500<|media_begin|>video 320x240<|media_content|><|media_pad|><|media_end|>

Rate, chunk and patches are the release's preprocessor values. Its processor takes no video, and the prompt of a
chunk is not published: `chunk_prompt` is ours, and the only place that knows it.

Times are the frames' own, so variable rates need no care. A file that breaks off gives the chunks before the damage
and says so in `damage`. FFmpeg, through PyAV, opens only containers of `CONTAINERS`, from memory: no address and no
second file is ever followed.

Source: specification 1.7 and 3.9. The limits on files are ours.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanok3.data.images import ImageLimits, pillow, preprocess_image, read_file

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

CHUNK = 4
"""Frames of a media item."""

CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts"
"""What is opened, by FFmpeg's names."""

LEAST_PIXELS = 1 << 16
"""What a frame counts at least where pixels are counted: a small one has its price, too."""

FRAME = ImageLimits(patches=16384, pixels=2**24)
"""Limits of a frame, and of the file."""


@dataclass(frozen=True)
class VideoLimits:
    """How a video is sampled, and what is refused (`patches`, `image.pixels`, `image.file_bytes`)."""

    rate: float = 8.0
    """Most frames taken of a second."""
    frames: int = 2048
    """Most frames taken in all; the rest of a longer video is left."""
    patches: int | None = None
    """Most patches of all frames together; a video of more is refused. None for any number."""
    decoded: int | None = None
    """Most pixels of all frames that are decoded, whether taken or not, each LEAST_PIXELS or more; a video of more is
    refused. A frame in which nothing moves takes a few bytes of the file, and as much time as any other."""
    image: ImageLimits = FRAME


RELEASE_VIDEO = VideoLimits()


@dataclass(frozen=True, eq=False)
class Chunk:
    """One media item: up to four frames and the time of the first."""

    pixel_values: Float[Tensor, "N 3 14 14"]
    grid_thw: Int[Tensor, "1 3"]
    """(t, h, w) in frames and patches; N = t * h * w."""
    size: tuple[int, int]
    """Width and height of a frame as it is shown, before any resize."""
    start: float
    """Seconds from the first frame of the video."""
    tokens: int
    """Feature rows: h/2 * w/2, however many frames."""

    @property
    def prompt(self) -> str:
        """What stands for the chunk in the text."""
        return chunk_prompt(self.start, *self.size)


@dataclass(frozen=True)
class Video:
    """All chunks in order. `damage` tells why a file was not read to its end, None if it was."""

    chunks: list[Chunk]
    damage: str | None

    @property
    def prompt(self) -> str:
        """The prompts of all chunks, end to end."""
        return "".join(chunk.prompt for chunk in self.chunks)


def timestamp(seconds: float) -> str:
    """`00:01:02.500`"""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}.{rest % 1000:03}"


def chunk_prompt(start: float, width: int, height: int) -> str:
    """The time and media block of one chunk. Ours: K3's own video prompt is not published."""
    block = f"<|media_begin|>video {width}x{height}<|media_content|><|media_pad|><|media_end|>"
    return timestamp(start) + block


def make_chunk(frames: list[PILImage], start: float, limits: ImageLimits = FRAME) -> Chunk:
    """A chunk of one to four frames of one size."""
    assert 0 < len(frames) <= CHUNK and len({frame.size for frame in frames}) == 1
    images = [preprocess_image(frame, limits) for frame in frames]
    _, h, w = images[0].grid_thw[0].tolist()
    grid = torch.tensor([[len(images), h, w]])
    return Chunk(torch.cat([image.pixel_values for image in images]), grid, images[0].size, start, images[0].tokens)


def read_video(source: str | os.PathLike[str] | bytes, limits: VideoLimits = RELEASE_VIDEO) -> Video:
    """The chunks of a path or the bytes of a file. ValueError, naming source and reason, for what is missing, empty,
    too large, no video of `CONTAINERS`, or damaged before its first frame. ImportError without the extra `video`."""
    name = f"video of {len(source)} bytes" if isinstance(source, bytes) else os.fspath(source)
    data = source if isinstance(source, bytes) else read_file(source, limits.image)
    if not data:
        raise ValueError(f"{name}: empty, no video in it")
    if len(data) > limits.image.file_bytes:
        raise ValueError(f"{name}: more than {limits.image.file_bytes} bytes")
    sampled = _Sampled(data, name, limits)
    chunks: list[Chunk] = []
    patches = 0
    for frames, start in _chunks(iter(sampled)):
        chunks.append(make_chunk(frames, start, limits.image))
        patches += len(chunks[-1].pixel_values)
        if limits.patches is not None and patches > limits.patches:
            what = f"{patches} patches of 14 x 14 pixels in the frames up to {start:.1f} s"
            raise ValueError(f"{name}: {what}; at most {limits.patches} are read")
    if not chunks:
        raise ValueError(f"{name}: no frame could be decoded ({sampled.damage or 'it has none'})")
    return Video(chunks, sampled.damage)


def _chunks(frames: Iterator[tuple[float, PILImage]]) -> Iterator[tuple[list[PILImage], float]]:
    """Fours of neighbours; a new one begins where the size changes, too."""
    held: list[PILImage] = []
    start = 0.0
    for time, frame in frames:
        if held and (len(held) == CHUNK or held[0].size != frame.size):
            yield held, start
            held = []
        if not held:
            start = time
        held.append(frame)
    if held:
        yield held, start


class _Sampled:
    """Iterates over (seconds, picture) of the sampled frames, upright; `damage` is known afterwards."""

    def __init__(self, data: bytes, name: str, limits: VideoLimits) -> None:
        self.data, self.name, self.limits = data, name, limits
        self.damage: str | None = None

    def __iter__(self) -> Iterator[tuple[float, PILImage]]:
        av = _av()
        try:
            container = av.open(io.BytesIO(self.data), options={"format_whitelist": CONTAINERS})
        except Exception as error:  # a decoder on a stranger's bytes may raise anything
            raise ValueError(f"{self.name}: no video of {CONTAINERS}, or damaged at its start ({error})") from None
        with container:
            if not container.streams.video:
                raise ValueError(f"{self.name}: no video stream in it")
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            if width * height > self.limits.image.pixels:
                raise ValueError(
                    f"{self.name}: frames of {width} x {height} pixels; at most {self.limits.image.pixels} are decoded"
                )
            stream.codec_context.options = {"max_pixels": str(self.limits.image.pixels)}  # of a frame further on
            yield from self._sample(container, stream)

    def _sample(self, container: Any, stream: Any) -> Iterator[tuple[float, PILImage]]:
        first, last, taken = None, 0.0, 0
        due = 0  # the number of the next frame in multiples of 1 / rate
        end = 0.0
        for number, frame in enumerate(self._decoded(container, stream)):
            time = frame.time if frame.time is not None else number / float(stream.average_rate or 25)
            first = time if first is None else first
            last = time - first
            end = max(end, last + float((frame.duration or 0) * (frame.time_base or 0)))
            if last < due / self.limits.rate - 1e-3:
                continue
            due = int((last + 1e-3) * self.limits.rate) + 1
            yield last, _upright(frame)
            taken += 1
            if taken == self.limits.frames:
                return
        self._note_the_end(_promised(container, stream), end)

    def _decoded(self, container: Any, stream: Any) -> Iterator[Any]:
        """Frames up to the end or the first error."""
        pixels = 0
        for frame in self._whole(container, stream):
            pixels += max(frame.width * frame.height, LEAST_PIXELS)
            if self.limits.decoded is not None and pixels > self.limits.decoded:
                what = f"{pixels} pixels in the frames up to {frame.time} s"
                raise ValueError(f"{self.name}: {what}; at most {self.limits.decoded} are decoded")
            if frame.is_corrupt:
                self.damage = f"a damaged frame at {frame.time} s was left out"
            else:
                yield frame

    def _whole(self, container: Any, stream: Any) -> Iterator[Any]:
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    self.damage = f"its bytes are damaged at {_seconds(packet.pts, packet.time_base)}"
                yield from packet.decode()
        except Exception as error:  # as above
            self.damage = f"it cannot be decoded to its end ({error})"

    def _note_the_end(self, promised: float | None, end: float) -> None:
        """A file cut short often ends without an error, but before its time. A quarter of a second and a tenth may be
        missing, since headers are not that exact."""
        if promised is not None and self.damage is None and end < 0.9 * promised - 0.25:
            self.damage = f"it ends after {end:.1f} of {promised:.1f} s"


def _promised(container: Any, stream: Any) -> float | None:
    """How long the pictures are by the header; None where that says nothing of them. Matroska has it as a tag of the
    stream, or of all streams together, of which sound may be longer."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    tag = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if tag:
        return 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    if container.duration is not None and len(container.streams) == 1:
        return float(container.duration / 1_000_000)
    return None


def _seconds(pts: int | None, base: Any) -> str:
    return "an unknown time" if pts is None or base is None else f"{float(pts * base):.3f} s"


def _upright(frame: Any) -> PILImage:
    """A frame as a picture, turned as the file says it is to be shown."""
    picture: PILImage = frame.to_image()
    turns = round(frame.rotation / 90) % 4
    if not turns:
        return picture
    turn = pillow().Transpose
    turned: PILImage = picture.transpose((turn.ROTATE_90, turn.ROTATE_180, turn.ROTATE_270)[turns - 1])
    return turned


def _av() -> Any:
    """PyAV; an error that names the extra where it is missing."""
    try:
        import av
    except ImportError:
        raise ImportError("reading videos needs PyAV: pip install 'nanok3[video]'") from None
    av.logging.set_level(av.logging.PANIC)
    return av
