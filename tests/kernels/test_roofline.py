"""The measured peak is a peak: no ordinary matrix product passes it, and it is no absurd figure either."""

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
