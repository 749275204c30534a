"""The places of experts in memory: the least recently used gives way, a busy one never."""

from __future__ import annotations

import pytest

from nanok3.model.expert_slots import Slots


def test_the_least_recently_used_gives_way():
    slots = Slots(2)
    assert slots.find((1, 0)) is None
    first, second = slots.take((1, 0)), slots.take((1, 1))
    assert {first, second} == {0, 1} and len(slots) == 2
    assert slots.find((1, 0)) == first  # now (1, 1) is the oldest
    assert slots.take((2, 5)) == second
    assert slots.find((1, 1)) is None and slots.find((1, 0)) == first


def test_a_busy_one_stays():
    slots = Slots(2)
    slots.take((0, 0)), slots.take((0, 1))
    assert slots.take((0, 2), busy={(0, 0), (0, 1)}) is None
    assert slots.take((0, 2), busy={(0, 0)}) is not None
    assert slots.find((0, 0)) is not None and slots.find((0, 1)) is None


def test_a_dropped_place_is_taken_again():
    slots = Slots(1)
    place = slots.take((0, 0))
    slots.drop((0, 0))
    assert slots.find((0, 0)) is None and slots.take((0, 1), busy={(0, 0)}) == place


def test_no_place_is_refused():
    with pytest.raises(ValueError, match="size is 0"):
        Slots(0)
