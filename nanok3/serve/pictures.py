"""Pictures in a sequence of tokens: where they stand, what names them in the cache, what the model makes of them.

    a b <pad> c   with a picture of 3 rows   ->   a b <pad> <pad> <pad> c     Shown(start=2, end=5, digest, image)
    features      = projector(tower(image)), a row for each of its pads: computed once, kept by digest
    tokens [s, e) = their embeddings, with rows [s - start, e - start) of the features in the places of the pads

So a chunk of a prompt, or what a prefix hit leaves of one, may begin and end in the middle of a picture. A picture
that a chunk has cut stays at hand until its last row was read; others as long as there is room. The digest is of the
pixels the model sees: the same picture from another file is the same, and another picture under the same text is not.
A video is a row of such items, each a chunk of up to four frames (data/video.py); "picture" here is either.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanok3.data.images import Image
from nanok3.data.video import Chunk
from nanok3.model.cache import ModelState
from nanok3.model.decoder import K3
from nanok3.serve.prefix_cache import Picture

Item = Image | Chunk
"""What the tower looks at as one."""

FEATURE_BYTES = 256 << 20
"""Of features that are kept for the next who shows the same picture."""


@dataclass(frozen=True, eq=False)
class Shown(Picture):
    """The place of a picture, and its pixels."""

    image: Item


def digest_of(image: Item) -> bytes:
    """SHA-256 of what the tower reads."""
    digest = hashlib.sha256(repr(image.grid_thw.tolist()).encode())
    digest.update(image.pixel_values.contiguous().numpy().data)
    return digest.digest()


def show(ids: Sequence[int], images: Sequence[Item], pad: int, start: int = 0) -> tuple[list[int], tuple[Shown, ...]]:
    """Ids with one pad a row, and where the pictures stand; `ids` has one a picture or one a row. start: how many
    tokens stand before them. ValueError where pads and pictures do not belong together."""
    rows, count = [image.tokens for image in images], ids.count(pad)
    if count not in (len(rows), sum(rows)):
        raise ValueError(
            f"the prompt has {count} placeholders (id {pad}) for {len(rows)} pictures of {sum(rows)} rows; "
            "allowed: one for each picture, or one for each row"
        )
    width = [1] * len(rows) if count == len(rows) else rows
    found: list[int] = []
    shown: list[Shown] = []
    rest = list(ids)
    for image, taken in zip(images, width):
        at = rest.index(pad)
        if rest[at : at + taken] != [pad] * taken:
            raise ValueError(f"the {taken} placeholders of picture {len(shown) + 1} do not stand side by side")
        found += [*rest[:at], *[pad] * image.tokens]
        place = start + len(found)
        shown.append(Shown(place - image.tokens, place, digest_of(image), image))
        rest = rest[at + taken :]
    return found + rest, tuple(shown)


def check_pads(prompt: Sequence[int], pictures: Sequence[Picture], pad: int | None) -> None:
    """ValueError unless every pad of a prompt belongs to a picture, and every picture has its pads. pad: None for a
    model that does not see, whose prompts have no pictures."""
    if pad is None:
        if pictures:
            raise ValueError("the prompt has pictures; this model has no vision tower and reads text only")
        return
    end = 0
    for k, picture in enumerate(pictures):
        wanted = picture.image.tokens if isinstance(picture, Shown) else picture.end - picture.start
        if picture.start < end or picture.end - picture.start != wanted or wanted < 1:
            raise ValueError(
                f"picture {k + 1} of {wanted} rows is at {picture.start} to {picture.end}; rows and place differ"
            )
        end = picture.end
        if list(prompt[picture.start : end]) != [pad] * wanted:
            raise ValueError(
                f"picture {k + 1} needs {wanted} placeholders (id {pad}) at {picture.start}; they are not there"
            )
    pads, rows = prompt.count(pad), sum(picture.end - picture.start for picture in pictures)
    if pads != rows:
        raise ValueError(
            f"the prompt has {pads} placeholders (id {pad}), its pictures have {rows} rows; they must be equal"
        )


class Pixels:
    """Counts the bytes of pictures that somebody holds, each picture once. From any thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self._holders: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def has_room(self, pictures: Iterable[Picture], most: int) -> bool:
        """Whether these fit beside the others; alone they always do."""
        with self._lock:
            more = sum(size for digest, size in _sizes(pictures).items() if not self._holders[digest])
            return not more or not self.bytes or self.bytes + more <= most

    def hold(self, pictures: Iterable[Picture]) -> None:
        with self._lock:
            for digest, size in _sizes(pictures).items():
                self.bytes += 0 if self._holders[digest] else size
                self._holders[digest] += 1

    def release(self, pictures: Iterable[Picture]) -> None:
        with self._lock:
            for digest, size in _sizes(pictures).items():
                self._holders[digest] -= 1
                if not self._holders[digest]:
                    del self._holders[digest]
                    self.bytes -= size


def _sizes(pictures: Iterable[Picture]) -> dict[bytes, int]:
    return {one.digest: one.image.pixel_values.nbytes for one in pictures if isinstance(one, Shown)}


class Eyes:
    """Reads tokens and pictures with one model. Not for two threads at once, but that another may look ahead."""

    def __init__(self, model: K3, max_bytes: int = FEATURE_BYTES) -> None:
        if not model.cfg.has_vision:
            raise ValueError("this model has no vision tower and reads text only; allowed: a model that has one")
        assert model.cfg.media_placeholder_token_id is not None
        self.model, self.max_bytes, self.pad = model, max_bytes, model.cfg.media_placeholder_token_id
        self.bytes = self.looked = 0
        """Bytes of features that are kept, and how often the tower has run."""
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._shelf, self._forgotten = threading.Lock(), 0
        self._cut: WeakKeyDictionary[object, tuple[bytes, Tensor]] = WeakKeyDictionary()

    def features(self, picture: Picture) -> Float[Tensor, "rows D"]:
        """From the shelf, or from the tower."""
        with self._shelf:
            found, forgotten = self._kept.get(picture.digest), self._forgotten
            if found is not None:
                self._kept.move_to_end(picture.digest)
                return found
        found = self._look(picture)
        with self._shelf:
            if forgotten == self._forgotten:  # else the weights have changed since
                self._keep(picture.digest, found)
        return found

    def unseen(self, pictures: Iterable[Picture]) -> bool:
        """Whether the tower has to run for one of them. From any thread."""
        with self._shelf:
            return any(picture.digest not in self._kept for picture in pictures)

    @torch.no_grad()
    def look_ahead(self, pictures: Iterable[Picture]) -> None:
        """Look at pictures before they are read, so that reading finds them on the shelf: as many as that holds. From
        one other thread."""
        room = self.max_bytes
        for picture in pictures:
            room -= 4 * (picture.end - picture.start) * self.model.cfg.hidden_size
            if room < 0:
                return
            self.features(picture)

    @torch.no_grad()
    def hidden_states(
        self, ids: Int[Tensor, "1 T"], pictures: Sequence[Picture], state: ModelState, reader: object
    ) -> Float[Tensor, "1 T D"]:
        """As `K3.hidden_states`, the state having read `state.tokens`. `pictures` have their places in the whole
        sequence; reader: who reads it, piece by piece."""
        start, end = state.tokens, state.tokens + ids.shape[1]
        here = [picture for picture in pictures if picture.start < end and start < picture.end]
        if not here:
            return self.model.hidden_states(ids, state=state)
        embedded = self.model.model.embed_tokens(ids)
        embedded = embedded.to(self.model.compute_dtype or embedded.dtype)
        for picture in here:
            low, high = max(start, picture.start), min(end, picture.end)
            rows = self._rows(picture, high < picture.end, reader)
            embedded[0, low - start : high - start] = rows[low - picture.start : high - picture.start]
        with state.unless_it_fails():
            final: Tensor = self.model.model(embedded, None, state)
            state.tokens = end
        return final

    def _rows(self, picture: Picture, goes_on: bool, reader: object) -> Tensor:
        digest, rows = self._cut.pop(reader, (b"", None))
        if rows is None or digest != picture.digest:
            rows = self.features(picture)
        if goes_on:
            self._cut[reader] = picture.digest, rows
        return rows

    def _look(self, picture: Picture) -> Tensor:
        assert isinstance(picture, Shown), "whoever shows a picture to a model has its pixels"
        self.looked += 1
        device = self.model.lm_head.weight.device
        return self.model.vision(picture.image.pixel_values.to(device), picture.image.grid_thw.to(device))

    def forget(self) -> None:
        """The weights have changed."""
        with self._shelf:
            self._kept.clear()
            self.bytes, self._forgotten = 0, self._forgotten + 1
        self._cut.clear()

    def _keep(self, digest: bytes, features: Tensor) -> None:
        if features.nbytes > self.max_bytes or digest in self._kept:
            return
        self._kept[digest] = features
        self.bytes += features.nbytes
        while self.bytes > self.max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes


def eyes_of(model: K3, max_bytes: int = FEATURE_BYTES) -> Eyes | None:
    """None for a model that does not see."""
    return Eyes(model, max_bytes) if model.cfg.has_vision else None
