"""The stopwatch counts each second once."""

import time

import pytest

from nanok3.serve.step_seconds import Stopwatch


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_calls_inside_each_other_count_once_and_a_failure_too():
    watch = Stopwatch()
    inner = watch.timed(lambda: spin(0.01))

    @watch.timed
    def outer():
        inner()
        spin(0.01)

    outer()
    assert 0.02 <= watch.cpu <= watch.seconds + 1e-3 and watch.cpu < 0.03
    watch.reset()
    with pytest.raises(ZeroDivisionError):
        watch.timed(lambda: 1 / 0)()
    inner()
    assert watch.cpu >= 0.01, "after a failure it runs on"
