"""Which experts are in memory: a fixed number of places, and the least recently used gives way.

    slot = slots.find(key)              a hit: the key is now the newest
    slot = slots.take(key, busy)        else a free place, or that of the oldest that is not busy

Keys and numbers only: no weights, no files. The streaming of experts and the simulation of it share this one rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

Key = tuple[int, int]
"""Layer, and expert in it."""


class Slots:
    """`size` places, numbered from 0."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; there must be at least one place")
        self.size = size
        self._place: OrderedDict[Key, int] = OrderedDict()  # oldest first
        self._free = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._place)

    def find(self, key: Key) -> int | None:
        """The place of a key, which becomes the newest; None where it has none."""
        if key not in self._place:
            return None
        self._place.move_to_end(key)
        return self._place[key]

    def take(self, key: Key, busy: Container[Key] = ()) -> int | None:
        """A place for a key that has none; None where all are busy."""
        assert key not in self._place
        if not self._free:
            oldest = next((other for other in self._place if other not in busy), None)
            if oldest is None:
                return None
            self.drop(oldest)
        self._place[key] = self._free.pop()
        return self._place[key]

    def drop(self, key: Key) -> None:
        """The key's place is free again."""
        self._free.append(self._place.pop(key))
