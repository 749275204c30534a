"""The property of the prefix cache, at random: see interleavings.py, which prints the counts of what happened."""

import pytest
from interleavings import interleave, small_model

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model():
    return small_model()


def test_warm_is_cold_in_a_few_interleavings(model):
    counts = interleave(model, seed=0, each=6)
    assert counts.hits and counts.evictions and counts.restores and counts.restarts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_warm_is_cold_in_2000_interleavings(model, seed):
    counts = interleave(model, seed, each=100)
    assert min(counts.hits, counts.evictions, counts.restores, counts.restarts) > 10
    assert counts.preemptions > 5, "few begin in one step, so memory runs out seldom"
    assert counts.ties <= counts.tokens // 1000
