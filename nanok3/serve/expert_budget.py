"""How often would an expert have been in memory, with so many places for them: three rules on a recorded run.

    LRU        the least recently used gives way: what streaming does (model/expert_slots.py)
    pinned     the experts asked for most often in the whole run stay; all others pass through
    optimal    the one that is needed again last gives way (Belady), which no rule without foresight can beat

A visit is what one layer asks for to read one chunk, each expert once; a hit is one that is in memory when its visit
begins. Every expert's first reading counts, pinned ones too. The two others know the run beforehand: they show what a
better rule could gain. Ids and numbers only.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanok3.model.expert_slots import Key, Slots

Visits = Sequence[Sequence[Key]]


def lru_hits(visits: Visits, places: int) -> int:
    """Hits first, then the others in their order, as they are read."""
    slots, hits = Slots(places), 0
    for visit in visits:
        missing = [key for key in visit if slots.find(key) is None]
        hits += len(visit) - len(missing)
        for key in missing:
            slots.take(key)
    return hits


def pinned_hits(visits: Visits, places: int) -> int:
    """All but the first of the visits of those asked for most often."""
    counts = Counter(key for visit in visits for key in visit)
    return sum(count - 1 for _, count in counts.most_common(places))


def optimal_hits(visits: Visits, places: int) -> int:
    """After each visit, of all that was in memory or passed through it, those stay that are needed again first."""
    following = _next_visits(visits)
    held: dict[Key, int] = {}
    queue: list[tuple[int, Key]] = []  # the last needed first; entries that no longer hold are skipped
    hits = 0
    for visit, nexts in zip(visits, following):
        hits += sum(key in held for key in visit)
        for key, when in zip(visit, nexts):
            held[key] = when
            heapq.heappush(queue, (-when, key))
        while len(held) > places:
            when, key = heapq.heappop(queue)
            if held.get(key) == -when:
                del held[key]
    return hits


def _next_visits(visits: Visits) -> list[list[int]]:
    """For every key of every visit the number of the next visit that asks for it; after the last for none."""
    following: list[list[int]] = []
    seen: dict[Key, int] = {}
    for number in range(len(visits) - 1, -1, -1):
        following.append([seen.get(key, len(visits)) for key in visits[number]])
        seen.update(dict.fromkeys(visits[number], number))
    return following[::-1]


RULES = {"LRU": lru_hits, "pinned": pinned_hits, "optimal": optimal_hits}


@dataclass(frozen=True)
class Budget:
    """places: experts in memory; hit_rates: of each rule."""

    places: int
    hit_rates: dict[str, float]


def try_budgets(visits: Visits, sizes: Iterable[int]) -> list[Budget]:
    """Each size in turn. ValueError for a size below 1."""
    asked = max(1, sum(map(len, visits)))
    return [Budget(size, {name: rule(visits, size) / asked for name, rule in RULES.items()}) for size in sizes]


def sizes_to_try(visits: Visits, least: int, most: int, steps: int = 12) -> list[int]:
    """From `least` to all experts that the run asked for, or `most`, each the same factor above the last."""
    used = min(most, len({key for visit in visits for key in visit}))
    if used <= least:
        return [max(1, used)]
    return sorted({round(least * (used / least) ** (i / (steps - 1))) for i in range(steps)})


def recommend(budgets: Sequence[Budget]) -> Budget:
    """Where the hit rate of LRU leads the share of the memory by most: beyond, the next byte gives less than the
    average one did. The largest stands for all of the memory."""
    most = budgets[-1]
    best = max(most.hit_rates["LRU"], 1e-9)
    return max(budgets, key=lambda b: b.hit_rates["LRU"] / best - b.places / most.places)
