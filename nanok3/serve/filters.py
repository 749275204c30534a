"""Which ids may be drawn: the top_k most probable, of these the fewest that reach top_p, of these none below min_p.

    k best of p -> falling p_1 >= p_2 >= ...     of equals the lower id first
    p_i stays if p_1 + ... + p_{i-1} < top_p (p_1 + ... + p_k)   and   p_i >= min_p p_1

Sorting 163,840 ids for each token takes longer than all the rest of sampling, so only those are sorted that can stay.
Ours: the tolerance, without which ten equal probabilities reach top_p = 0.7 after seven or after eight, as rounding
falls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-6
"""Relative slack of the top_p and min_p borders; float32 logits are no more exact."""
LIKELY = 1e-3, 1e-4
"""At most a thousand ids are as probable as the first, and they mostly reach top_p."""


def keep_probable(p: NDArray[np.float64], top_k: int | None, top_p: float, min_p: float) -> None:
    """Zeros for all that are left out, in place."""
    least = min_p * float(p.max()) * (1 - TOLERANCE)
    if top_k is None and top_p == 1:
        p[p < least] = 0
        return
    total = float(p.sum())
    ids = _most_probable(p, top_k) if top_k is not None else _reaching(p, top_p, total)
    found = p[ids]
    falling = np.sort(found)[::-1][:top_k]
    stays = falling >= least
    if top_p < 1:
        total = total if top_k is None else float(falling.sum())
        stays &= falling.cumsum() - falling < top_p * total * (1 - TOLERANCE)
    chosen = _first_of_equals(found, falling, int(np.count_nonzero(stays)))
    p[:] = 0
    p[ids[chosen]] = found[chosen]


def _first_of_equals(found: NDArray[np.float64], falling: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The `count` largest, of equals those that stand first. falling: the same, sorted."""
    chosen = found > falling[count - 1]
    equals = np.flatnonzero(found == falling[count - 1])
    chosen[equals[: count - np.count_nonzero(chosen)]] = True
    return chosen


def _most_probable(p: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """The k best and their equals, ascending."""
    last = max(0, len(p) - k)
    return np.flatnonzero(p >= np.partition(p, last)[last])


def _reaching(p: NDArray[np.float64], top_p: float, total: float) -> NDArray[np.intp]:
    """Ids, the most probable among them, that together reach top_p, ascending. Of V tokens those below (1 - top_p) / V
    sum to less than 1 - top_p: the others reach it without them, and mostly far fewer do."""
    for floor in LIKELY:
        likely = np.flatnonzero(p >= floor)
        if float(p[likely].sum()) >= top_p * total:
            return likely
    return np.flatnonzero(p >= (1 - top_p) / len(p))
