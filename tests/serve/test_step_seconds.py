"""Stopwatch and clock count each second once."""

import time

import pytest

from nanok3.serve.step_seconds import Phase, StepClock, Stopwatch


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
    watch.take()
    with pytest.raises(ZeroDivisionError):
        watch.timed(lambda: 1 / 0)()
    inner()
    assert watch.cpu >= 0.01, "after a failure it runs on"


def test_phases_that_come_again_add_up_and_moves_are_taken_off():
    clock = StepClock()
    for _ in range(2):  # the second step knows nothing of the first
        clock.begin()
        spin(0.01)
        clock.moving.timed(lambda: spin(0.02))()
        assert 0.01 <= clock.deciding_cpu() < 0.02, "so far, without the moves"
        clock.turn_to(Phase.READING)
        spin(0.03)
        clock.turn_to(Phase.DECIDING)
        spin(0.01)
        clock.turn_to(Phase.ANSWERING)
        spin(0.01)
        seconds = clock.end()
    assert 0.02 <= seconds.deciding_cpu < 0.03 and 0.02 <= seconds.moving_cpu < 0.03
    assert seconds.deciding >= 0.0199 and seconds.reading >= 0.03 and seconds.answering >= 0.01
