"""The measured limits are limits: no ordinary product or copy passes them, and they are no absurd figures either."""

from __future__ import annotations

import time

import pytest
import torch

from nanok3.kernels import native, roofline

pytestmark = pytest.mark.skipif(not native.available("roofline"), reason="no C++ compiler builds the kernel here")


def test_peak_is_above_a_matrix_product() -> None:
    peak = roofline.peak_flops()
    a = torch.randn(256, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(10):
            start = time.thread_time()
            a @ a
            times.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert peak is not None
    assert 2 * 256**3 / min(times) < 1.1 * peak < 1e13


def test_reading_is_faster_than_copying() -> None:
    """A copy moves every byte twice."""
    rate = roofline.read_bandwidth(1, time.thread_time, rounds=3, nbytes=1 << 26)
    a, b, times = torch.zeros(1 << 24), torch.empty(1 << 24), []
    for _ in range(4):
        start = time.thread_time()
        b.copy_(a)
        times.append(time.thread_time() - start)
    assert rate is not None
    assert 0.9 * a.nbytes / min(times) < rate < 1e12
