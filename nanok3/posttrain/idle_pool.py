"""The second memory of rollouts: prefixes of samples that wait, for which the engine has no room.

    a sample says nothing while its environment acts, while others have the places, or when its pages were taken
    evicted     wanted by a sample that is not over?  yes: written back (serve/offload.py)    no: gone
    next turn   what was written back is copied into fresh pages, instead of being read again
    over        the sample's keys are wanted no more, and what was kept for them is dropped
    new weights everything is dropped; keys name the version of the weights, so nothing old could be found anyway

An answer that has ended leaves the longest prefixes, and nobody asks for them again: without the question they would be
most of what is written. Writing happens on eviction alone, and a prefix leaves and returns with the states of its KDA
layers, as a unit. Source: report 5.3 (an external pool, write-back only on eviction, KDA states with their MLA blocks);
asking who wants a prefix is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanok3.serve.engine import Engine
from nanok3.serve.prefix_cache import Node
from nanok3.serve.sequence import Sequence


@dataclass
class IdlePool:
    """Over an engine with a tier; does nothing over one without. Samples have any numbers that are theirs alone."""

    engine: Engine
    left_out: int = 0
    """Evicted prefixes that nobody wanted."""
    _keys: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    _wanted: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._write_back = self.engine.cache.leaving
        if self.engine.offload is not None:
            self.engine.cache.leaving = self._leaving

    def want(self, sample: int, ids: Iterable[int]) -> None:
        """What was computed of these ids is wanted again, until `forget` or new weights."""
        if self.engine.offload is None:
            return
        keys = tuple(self.engine.keys(ids).keys)
        self._wanted.update(keys)
        self._drop(self._keys.pop(sample, ()))
        if keys:
            self._keys[sample] = keys

    def forget(self, sample: int) -> None:
        """The sample is over."""
        self._drop(self._keys.pop(sample, ()))

    def clear(self) -> None:
        """New weights; the engine's own `flush` empties what it keeps."""
        self._keys.clear()
        self._wanted.clear()

    def _drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                if self.engine.offload is not None:
                    self.engine.offload.store.discard(key)

    def _leaving(self, node: Node) -> None:
        if node.key in self._wanted or any(_leads_to(node, one) for one in self.engine.scheduler.waiting):
            self._write_back(node)
        else:
            self.left_out += 1

    def counts(self) -> dict[str, float]:
        """Since the engine began: units written back, prefixes and tokens that came back, units dropped again, and
        evictions that nobody wanted; `pool_bytes` is what is kept now."""
        offload = self.engine.offload
        if offload is None:
            return {}
        store = offload.store
        return {
            "pool_written": store.counts.stored,
            "pool_returned": offload.restored,
            "pool_tokens": offload.restored_tokens,
            "pool_dropped": store.counts.dropped + store.counts.refused,
            "pool_left_out": self.left_out,
            "pool_bytes": sum(store.bytes_kept.values()),
        }


def _leads_to(node: Node, waiting: Sequence) -> bool:
    """Whether a sequence whose pages were taken goes on behind this node, in what it had said by then."""
    keys = waiting.keys.keys
    return waiting.preemptions > 0 and len(keys) >= node.depth and keys[node.depth - 1] == node.key
