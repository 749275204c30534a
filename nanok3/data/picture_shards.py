"""The pictures of a prepared source on disk, beside its token shards.

    SOURCE-00000.pictures        PNG files end to end, without loss; the frames of a video chunk below each other
    SOURCE-00000.pictures.npy    one line a picture, int64: COLUMNS
    SOURCE-00000.told.npy        one line a run of ids that only the pictures tell, int64: document, begin, end

`document` counts inside the shard, `begin`, `end` and `token` inside the document: where the picture's block begins
and ends, and where its first `<|media_pad|>` stands, with one more for each further feature row behind it. `offset`
and `size` are bytes of the `.pictures` file; width and height are of one frame, before it is prepared (images.py).
Pictures with equal bytes are kept once in a shard. The shard's entry in the manifest counts pictures and patches and
holds a sha256 over the three files.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.data.files import replacing, write_file
from nanok3.data.images import RELEASE, ImageSize, pillow, plan_size, preprocess_image
from nanok3.data.picture_text import PlacedPicture
from nanok3.data.video import CHUNK

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

COLUMNS = ("document", "begin", "end", "token", "offset", "size", "frames", "width", "height")

PICTURE_SHARD = {"pictures": int, "patches": int, "pictures_sha256": str}
"""What a shard's manifest entry has in addition."""


class StoredPicture(NamedTuple):
    """One line of the index, and the shard it belongs to."""

    shard: int
    document: int
    begin: int
    end: int
    token: int
    offset: int
    size: int
    frames: int
    width: int
    height: int

    @property
    def prepared(self) -> ImageSize:
        """A frame's size after preparation."""
        return plan_size(self.width, self.height)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(t, h, w) in frames and patches."""
        _, h, w = self.prepared.grid
        return self.frames, h, w

    @property
    def patches(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def rows(self) -> int:
        """Feature rows, which is how many `<|media_pad|>` stand for it."""
        return self.prepared.tokens


def encode_frames(frames: Sequence[PILImage]) -> bytes:
    """Frames of one size as the PNG of a single picture, below each other."""
    width, height = frames[0].size
    whole = pillow().new("RGB", (width, height * len(frames)))
    for number, frame in enumerate(frames):
        whole.paste(frame.convert("RGB"), (0, number * height))
    file = io.BytesIO()
    whole.save(file, format="PNG", compress_level=4)
    return file.getvalue()


def files_of(shard: Path) -> tuple[Path, Path]:
    """Pictures and index of a shard, given its path without a suffix."""
    return shard.with_name(shard.name + ".pictures"), shard.with_name(shard.name + ".pictures.npy")


def told_of(shard: Path) -> Path:
    """The third file of a shard."""
    return shard.with_name(shard.name + ".told.npy")


class PictureWriter:
    """Collects the pictures of one shard, and writes them at its end."""

    def __init__(self) -> None:
        self.index: list[tuple[int, ...]] = []
        self.told: list[tuple[int, int, int]] = []
        self.places: dict[bytes, int] = {}
        self.bytes = self.patches = 0

    def add(self, document: int, placed: PlacedPicture) -> None:
        frames = placed.picture.frames
        content = encode_frames(frames)
        place = placed.begin, placed.end, placed.token
        offset = self.places.setdefault(content, self.bytes)
        if offset == self.bytes:
            self.bytes += len(content)
        stored = StoredPicture(0, document, *place, offset, len(content), len(frames), *placed.picture.size)
        self.index.append(stored[1:])
        self.patches += stored.patches

    def tell(self, document: int, told: Sequence[tuple[int, int]]) -> None:
        self.told += [(document, *bounds) for bounds in told]

    def flush(self, shard: Path) -> dict[str, Any]:
        """Write the files and return what the manifest says of them."""
        pack, index = files_of(shard)
        content = b"".join(self.places)
        write_file(pack, content)
        lines = np.array(self.index, np.int64).reshape(-1, len(COLUMNS))
        told = np.array(self.told, np.int64).reshape(-1, 3)
        for path, table in ((index, lines), (told_of(shard), told)):
            with replacing(path) as file:
                np.save(file, table)
        return {
            "pictures": len(self.index),
            "patches": self.patches,
            "pictures_sha256": _sha256(content, lines, told),
        }


def _sha256(content: bytes, lines: np.ndarray, told: np.ndarray) -> str:
    return hashlib.sha256(content + lines.astype("<i8").tobytes() + told.astype("<i8").tobytes()).hexdigest()


class PictureShards:
    """Reads the pictures of one source and split. The indexes are held in memory, the packs are mapped."""

    def __init__(self, shards: Sequence[Path], entries: Sequence[dict[str, Any]]) -> None:
        self._shards = list(shards)
        self._told: dict[int, np.ndarray] = {}
        self._packs = [files_of(shard)[0] for shard in shards]
        self._lines = [
            read_index(files_of(shard)[1], pack, entry)
            for shard, pack, entry in zip(shards, self._packs, entries, strict=True)
        ]
        self._maps: dict[int, np.ndarray] = {}

    def of(self, shard: int, document: int) -> list[StoredPicture]:
        """The pictures of one document in their order."""
        lines = self._lines[shard]
        first, last = np.searchsorted(lines[:, 0], [document, document + 1])
        return [StoredPicture(shard, *line) for line in lines[first:last].tolist()]

    def told(self, shard: int, document: int) -> list[tuple[int, int]]:
        """Bounds of the ids of one document that only its pictures tell."""
        if shard not in self._told:
            self._told[shard] = read_told(told_of(self._shards[shard]))
        lines = self._told[shard]
        first, last = np.searchsorted(lines[:, 0], [document, document + 1])
        return [(begin, end) for _, begin, end in lines[first:last].tolist()]

    def patches(self, shard: int, documents: int) -> np.ndarray:
        """Patches of every document of a shard, (documents,)."""
        lines = self._lines[shard]
        sizes, inverse = np.unique(lines[:, 6:], axis=0, return_inverse=True)
        each = np.array([StoredPicture(0, 0, 0, 0, 0, 0, 0, *size).patches for size in sizes.tolist()], np.int64)
        weights = each[inverse.reshape(-1)] if len(each) else np.zeros(0, np.int64)
        return np.bincount(lines[:, 0], weights, minlength=documents).astype(np.int64)

    def frames(self, picture: StoredPicture) -> list[PILImage]:
        """The frames as they were stored. Raises ValueError if they are damaged."""
        pack = self._packs[picture.shard]
        if picture.shard not in self._maps:
            self._maps[picture.shard] = np.memmap(pack, np.uint8, "r")
        content = self._maps[picture.shard][picture.offset : picture.offset + picture.size].tobytes()
        try:
            whole = pillow().open(io.BytesIO(content), formats=("PNG",))
            whole.load()
        except Exception as error:  # a decoder on damaged bytes may raise anything
            raise ValueError(f"{pack}: picture at byte {picture.offset} is damaged ({error})") from None
        if whole.size != (picture.width, picture.height * picture.frames):
            raise ValueError(f"{pack}: picture at byte {picture.offset} has another size than its index says")
        tops = range(0, whole.height, picture.height)
        return [whole.crop((0, top, whole.width, top + picture.height)) for top in tops]

    def pixel_values(self, picture: StoredPicture) -> Float[Tensor, "N 3 14 14"]:
        """The patches as the model takes them, N = t * h * w."""
        return torch.cat([preprocess_image(frame, RELEASE).pixel_values for frame in self.frames(picture)])


def read_array(path: Path) -> np.ndarray:
    """A `.npy` file of numbers; ValueError for anything else."""
    try:
        found = np.load(path)
    except Exception as error:  # a damaged header makes numpy raise anything: of tokens, of memory, of archives
        raise ValueError(f"{path}: unreadable ({error}); prepare the data again") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{path}: unreadable (an archive of arrays); prepare the data again")
    return found


def read_index(path: Path, pack: Path, entry: dict[str, Any]) -> np.ndarray:
    """The lines of an index; ValueError unless they fit the manifest and the size of the pack."""
    lines = read_array(path)
    if lines.dtype != np.int64 or lines.shape != (entry["pictures"], len(COLUMNS)):
        raise ValueError(f"{path}: {lines.dtype} {lines.shape}; expected {entry['pictures']} lines of {len(COLUMNS)}")
    if not pack.is_file():
        raise ValueError(f"{pack}: missing; prepare the data again")
    ends = lines[:, 4] + lines[:, 5]
    if (lines < 0).any() or (np.diff(lines[:, 0]) < 0).any() or ends.max(initial=0) != pack.stat().st_size:
        raise ValueError(f"{path}: its places do not fit {pack.name} ({pack.stat().st_size} bytes)")
    if (lines[:, 5:] < 1).any() or (lines[:, 6] > CHUNK).any() or (lines[:, 7:] > 1 << 16).any():
        raise ValueError(f"{path}: a picture of impossible size")
    if len(lines) and lines[-1, 0] >= entry["documents"]:
        raise ValueError(f"{path}: a picture of document {lines[-1, 0]}, but the shard has {entry['documents']}")
    return lines


def read_told(path: Path) -> np.ndarray:
    """The lines of the third file; ValueError for what cannot be such lines."""
    lines = read_array(path)
    if lines.dtype != np.int64 or lines.ndim != 2 or lines.shape[1] != 3:
        raise ValueError(f"{path}: {lines.dtype} {lines.shape}; expected lines of three")
    if (np.diff(lines[:, 0]) < 0).any() or (lines < 0).any() or (lines[:, 1] >= lines[:, 2]).any():
        raise ValueError(f"{path}: damaged, its bounds are none")
    return lines


def verify_pictures(shard: Path, entry: dict[str, Any], pads: np.ndarray, starts: np.ndarray) -> None:
    """ValueError unless the files are those of the manifest and the pads stand where the index says: `pads` are
    their places in the ids of the shard, `starts` where its documents begin."""
    pack, index = files_of(shard)
    lines = read_index(index, pack, entry)
    runs = [np.arange(p.rows) + starts[p.document] + p.token for p in (StoredPicture(0, *x) for x in lines.tolist())]
    if not np.array_equal(np.concatenate([*runs, np.zeros(0, np.int64)]), pads):
        raise ValueError(f"{index}: damaged, its pictures are not where the ids have placeholders")
    if _sha256(pack.read_bytes(), lines, read_told(told_of(shard))) != entry["pictures_sha256"]:
        raise ValueError(f"{pack}: damaged, its sha256 is not the one of the manifest; prepare the data again")
