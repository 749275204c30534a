"""Hit rates by memory: cases counted by hand, the optimum never beaten, and LRU as streaming itself would have it."""

from __future__ import annotations

import itertools
import random

import pytest

from nanok3.serve.expert_budget import (
    Budget,
    lru_hits,
    optimal_hits,
    pinned_hits,
    recommend,
    sizes_to_try,
    try_budgets,
)


def visits(*texts):
    """'ab' -> layer 0 asks for experts 0 and 1."""
    return [[(0, ord(letter) - ord("a")) for letter in text] for text in texts]


def test_counted_by_hand():
    run = visits("a", "b", "c", "a", "b", "c", "a")
    assert lru_hits(run, 2) == 0  # in a circle the oldest is always the next
    assert pinned_hits(run, 2) == 3  # a twice, b once
    assert optimal_hits(run, 2) == 3  # c passes through twice
    assert lru_hits(run, 3) == pinned_hits(run, 3) == optimal_hits(run, 3) == 4


def test_experts_of_one_visit_are_there_together():
    run = visits("abc", "abd", "cd")
    assert lru_hits(run, 3) == 3  # ab; d drove out c, so only d
    assert optimal_hits(run, 3) == 4  # c and d stay
    assert optimal_hits(run, 4) == lru_hits(run, 4) == 4
    assert lru_hits(visits("ab", "bc"), 2) == 1  # b before it is driven out by c


def brute_force(run, places):
    """The most hits that any choice of what stays after each visit gives."""
    best = {frozenset(): 0}
    for visit in run:
        after = {}
        for held, hits in best.items():
            total, there = hits + len(held & set(visit)), held | set(visit)
            for kept in itertools.combinations(sorted(there), min(places, len(there))):
                after[frozenset(kept)] = max(total, after.get(frozenset(kept), 0))
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_one_and_is_never_beaten(seed):
    draw = random.Random(seed)
    run = [sorted((draw.randrange(2), e) for e in draw.sample(range(4), 2)) for _ in range(8)]
    for places in (1, 2, 3, 5):
        optimum = optimal_hits(run, places)
        assert optimum == brute_force(run, places)
        assert optimum >= max(lru_hits(run, places), pinned_hits(run, places))


def test_more_memory_and_the_recommendation():
    draw = random.Random(0)
    run = [[(layer, min(int(draw.expovariate(0.2)), 63))] for _ in range(300) for layer in range(2)]
    sizes = sizes_to_try(run, 1, 128)
    budgets = try_budgets(run, sizes)
    used = len({key for visit in run for key in visit})
    assert sizes[0] == 1 and sizes[-1] == used and sizes == sorted(set(sizes))
    for rule in ("LRU", "pinned", "optimal"):
        rates = [budget.hit_rates[rule] for budget in budgets]
        assert rates == sorted(rates) and rates[-1] == pytest.approx(1 - used / 600)
    assert sizes[0] < recommend(budgets).places < used


def test_the_recommendation_by_hand():
    found = [Budget(n, {"LRU": rate}) for n, rate in ((1, 0.1), (4, 0.8), (7, 0.85), (10, 0.9))]
    assert recommend(found).places == 4
    assert sizes_to_try(visits("ab"), 2, 100) == [2]
