from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanok3.train.schedule import learning_rate, warmup_stable_decay


def test_warmup_is_linear_over_one_percent_of_the_steps():
    rates = [learning_rate(step, 1000, 2.0) for step in range(1000)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == 2.0
    assert rates[10] < 2.0


def test_cosine_reaches_the_floor_at_the_last_step_and_stays():
    assert learning_rate(999, 1000, 2.0) == pytest.approx(0.2)
    assert learning_rate(5000, 1000, 2.0) == pytest.approx(0.2)
    assert learning_rate(999, 1000, 2.0, final_fraction=0.0) == pytest.approx(0.0, abs=1e-12)


def test_cosine_is_half_way_in_the_middle():
    # 10 warmup steps, 990 after them: step 504 ends the 495th of these.
    assert learning_rate(504, 1000, 1.0, final_fraction=0.0) == pytest.approx(0.5)
    quarter = (1 + math.cos(math.pi / 3)) / 2
    assert learning_rate(339, 1000, 1.0, final_fraction=0.0) == pytest.approx(quarter)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 49, 50, 151])
@pytest.mark.parametrize("schedule", [learning_rate, warmup_stable_decay])
def test_short_runs_have_at_least_one_warmup_step_and_never_a_zero_rate(schedule, total):
    rates = [schedule(step, total, 1.0) for step in range(total)]
    assert all(0 < rate <= 1.0 for rate in rates)
    assert max(rates) == 1.0
    assert total == 1 or rates[-1] == pytest.approx(0.1)


@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1))
def test_after_the_warmup_no_schedule_rises(total, warmup, final):
    for schedule in (learning_rate, warmup_stable_decay):
        rates = [schedule(step, total, 1.0, warmup, final) for step in range(total)]
        begin = max(1, round(total * warmup))
        assert all(a < b for a, b in pairwise(rates[:begin]))
        assert all(a >= b - 1e-12 for a, b in pairwise(rates[begin - 1 :]))


def test_warmup_stable_decay_holds_the_peak_then_falls_linearly():
    rates = [warmup_stable_decay(step, 100, 1.0, final_fraction=0.0) for step in range(100)]
    assert rates[:80] == [1.0] * 80
    assert rates[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10, 1.0), "step is -1"),
        ((0, 0, 1.0), "total_steps is 0"),
        ((0, 10, 1.0, 1.5), "warmup_fraction is 1.5"),
        ((0, 10, 1.0, 0.01, -0.1), "final_fraction is -0.1"),
    ],
)
@pytest.mark.parametrize("schedule", [learning_rate, warmup_stable_decay])
def test_wrong_numbers_are_named(schedule, arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)
