"""Videos made here by PyAV: sampling, chunks, times, turns, damage."""

from __future__ import annotations

import io
import re
import struct
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from nanok3.data.images import ImageLimits, preprocess_image
from nanok3.data.picture_text import block as block_of
from nanok3.data.pictures.document import Picture
from nanok3.data.video import CHUNK, VideoLimits, chunk_prompt, make_chunk, read_video, timestamp

WIDTH, HEIGHT = 64, 48


def film(
    times: list[float],
    kind: str = "matroska",
    path: Path | None = None,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    **options: str,
) -> bytes:
    """A video with a frame at each time (seconds), brighter and brighter, its left upper quarter white."""
    file = io.BytesIO()
    with av.open(path or file, "w", format=kind, options=options) as container:
        stream = container.add_stream("ffv1" if kind == "matroska" else "mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate(times):
            levels = np.full((size[1], size[0], 3), 20 + 100 * number // len(times), np.uint8)
            levels[: size[1] // 2, : size[0] // 2] = 255
            frame = av.VideoFrame.from_ndarray(levels)
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path.read_bytes() if path else file.getvalue()


def starts(data: bytes, **limits: float) -> list[float]:
    return [round(chunk.start, 3) for chunk in read_video(data, VideoLimits(**limits)).chunks]


def test_a_chunk_is_four_frames_under_its_time() -> None:
    video = read_video(film([i / 8 for i in range(10)]))
    assert video.damage is None
    assert [chunk.grid_thw.tolist() for chunk in video.chunks] == [[[4, 4, 6]], [[4, 4, 6]], [[2, 4, 6]]]
    assert [chunk.start for chunk in video.chunks] == [0.0, 0.5, 1.0]
    for chunk in video.chunks:
        t, h, w = chunk.grid_thw[0].tolist()
        assert chunk.pixel_values.shape == (t * h * w, 3, 14, 14) and chunk.tokens == h * w // 4
        assert chunk.size == (WIDTH, HEIGHT)
    means = torch.cat([c.pixel_values.view(len(c.pixel_values) // 24, -1).mean(1) for c in video.chunks])
    assert (means.diff() > 0).all()
    assert video.prompt.startswith(
        "00:00:00.000<|media_begin|>video 64x48<|media_content|><|media_pad|><|media_end|>00:"
    )


def test_frames_are_those_a_picture_would_be() -> None:
    frames = [Image.new("RGB", (50, 30), (40 * i, 10, 200)) for i in range(3)]
    chunk = make_chunk(frames, 2.5)
    assert torch.equal(chunk.pixel_values, torch.cat([preprocess_image(frame).pixel_values for frame in frames]))
    assert chunk.prompt == chunk_prompt(2.5, 50, 30) == block_of(Picture(tuple(frames), 2.5))


def test_at_most_eight_frames_a_second_are_taken() -> None:
    fast = [i / 40 for i in range(80)]
    assert starts(film(fast)) == [0.0, 0.5, 1.0, 1.5]
    assert starts(film(fast), rate=2) == [0.0]
    slow = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert starts(film(slow)) == [0.0, 4.0]
    assert sum(int(c.grid_thw[0, 0]) for c in read_video(film(fast), VideoLimits(frames=7)).chunks) == 7


def test_variable_rates_are_sampled_by_time() -> None:
    """A second of 40 frames, a gap, then one frame in each half second."""
    times = [*(i / 40 for i in range(40)), *(3 + i / 2 for i in range(5))]
    video = read_video(film(times))
    assert [round(chunk.start, 3) for chunk in video.chunks] == [0.0, 0.5, 3.0, 5.0]
    assert [int(chunk.grid_thw[0, 0]) for chunk in video.chunks] == [4, 4, 4, 1]


def test_times_count_from_the_first_frame() -> None:
    assert starts(film([5 + i / 4 for i in range(6)])) == [0.0, 1.0]


def turned(data: bytes, degrees: int) -> bytes:
    """An mp4 whose display matrix asks for a turn, clockwise."""
    at = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    a, b = {0: (one, 0), 90: (0, one), 180: (-one, 0), 270: (0, -one)}[degrees]
    matrix = struct.pack(">9i", a, b, 0, -b, a, 0, 0, 0, 1 << 30)
    assert data[at : at + 36] == struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    return data[:at] + matrix + data[at + 36 :]


@pytest.mark.parametrize(("degrees", "corner"), [(0, (0, 0)), (90, (0, 1)), (180, (1, 1)), (270, (1, 0))])
def test_frames_are_shown_upright(degrees: int, corner: tuple[int, int]) -> None:
    """The white quarter goes round clockwise."""
    (chunk,) = read_video(turned(film([0.0, 0.1], "mp4", size=(56, 84)), degrees)).chunks
    assert chunk.size == ((56, 84) if degrees % 180 == 0 else (84, 56))
    _, h, w = chunk.grid_thw[0].tolist()
    first = chunk.pixel_values[: h * w].mean(dim=(1, 2, 3)).view(h, w)
    quarters = first.view(2, h // 2, 2, w // 2).mean(dim=(1, 3))
    assert divmod(int(quarters.argmax()), 2) == corner


def test_a_file_cut_short_gives_what_is_whole_and_says_so(tmp_path: Path) -> None:
    data = film([i / 8 for i in range(48)])
    assert read_video(data).damage is None
    video = read_video(data[: len(data) // 2])
    assert 3 <= len(video.chunks) < 12 and video.chunks[0].start == 0
    assert video.damage is not None and re.fullmatch(r"it ends after [123]\.\d of 5\.9 s", video.damage)
    mp4 = film([i / 8 for i in range(48)], "mp4", tmp_path / "whole.mp4", movflags="faststart")
    cut = read_video(mp4[: int(len(mp4) * 0.6)])
    assert cut.damage is not None and 1 <= len(cut.chunks) < 12
    broken = bytearray(data)
    broken[len(data) // 2 : len(data) // 2 + 4000] = bytes(4000)
    assert 1 <= len(read_video(bytes(broken)).chunks) <= 12


@pytest.mark.parametrize("kind", ["matroska", "mp4", "avi"])
def test_a_last_frame_that_stays_is_no_damage(kind: str) -> None:
    """Two seconds of a picture at the end of three are the file's own; so are frames at any distance."""
    assert read_video(film([0.0, 0.1, 1.0], kind)).damage is None
    assert read_video(film([0.0, 0.3, 0.31, 2.9, 3.0], kind)).damage is None


def test_lost_packets_of_a_stream_are_told() -> None:
    """A transport stream goes on behind a hole; whoever counts its packets knows."""
    data = film([i / 25 for i in range(75)], "mpegts")
    assert read_video(data).damage is None
    middle = len(data) // 376 * 188
    damage = read_video(data[:middle] + data[middle + 5 * 188 :]).damage
    assert damage is not None and damage.startswith("its bytes are damaged at ")


def test_a_frame_keeps_to_its_patches() -> None:
    (chunk,) = read_video(film([0.0], size=(280, 140)), VideoLimits(image=ImageLimits(patches=50))).chunks
    assert chunk.size == (280, 140) and chunk.grid_thw.tolist() == [[1, 6, 10]] and chunk.tokens == 15


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "empty, no video in it"),
        (b"this is no video" * 9, "no video of mov,mp4"),
        (film([0.0, 0.5])[:40], "no video of mov,mp4"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n", "no video of mov,mp4"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"video of {len(data)} bytes: {wrong}" if data else wrong):
        read_video(data)


def test_what_is_too_large_or_missing_is_refused(tmp_path: Path) -> None:
    data = film([0.0])
    with pytest.raises(ValueError, match="frames of 64 x 48 pixels; at most 3000 are decoded"):
        read_video(data, VideoLimits(image=ImageLimits(pixels=3000)))
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_video(data, VideoLimits(image=ImageLimits(file_bytes=100)))
    with pytest.raises(ValueError, match=r"none\.mp4: cannot be read"):
        read_video(tmp_path / "none.mp4")
    with pytest.raises(ValueError, match="addresses are not fetched"):
        read_video("http://localhost/a.mp4")
    (tmp_path / "a.mkv").write_bytes(data)
    assert len(read_video(tmp_path / "a.mkv").chunks) == 1


def test_frames_that_are_not_taken_count_as_decoded() -> None:
    data = film([k / 1000 for k in range(60)])
    assert len(read_video(data, VideoLimits(decoded=60 << 16)).chunks) == 1
    with pytest.raises(ValueError, match=r"pixels in the frames up to 0\.05\d* s; at most 3276800 are decoded"):
        read_video(data, VideoLimits(decoded=50 << 16))


def test_a_frame_that_grows_on_the_way_is_not_decoded() -> None:
    """A transport stream may change its size anywhere."""
    small, large = film([0.0, 0.1], "mpegts"), film([1.0, 1.1], "mpegts", size=(640, 480))
    whole = read_video(small + large)
    assert [chunk.size for chunk in whole.chunks][-1] == (640, 480), "the file does change its size"
    video = read_video(small + large, VideoLimits(image=ImageLimits(pixels=100_000)))
    assert {chunk.size for chunk in video.chunks} == {(64, 48)} and video.damage


def test_a_picture_is_no_video_and_sound_alone_has_none() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(ValueError, match="no video stream in it"):
        read_video(file.getvalue())


def test_timestamps() -> None:
    assert [timestamp(t) for t in (0, 1.5, 59.9996, 3723.25)] == [
        *("00:00:00.000", "00:00:01.500", "00:01:00.000", "01:02:03.250")
    ]
    assert CHUNK == 4


def test_missing_pyav_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'nanok3\[video\]'"):
        read_video(b"x")
