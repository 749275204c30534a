"""The one door to Triton: `tl` and `jit`, so that files with kernels can be imported where it is missing.

Kernels are plain: fixed tiles, no autotuning, every load and store masked, loops over the inner dimension. That is
what Triton's interpreter (TRITON_INTERPRET=1 before the first import) runs on a CPU, and how the tests check them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def jit(kernel: Callable[..., None]) -> Any:
    """`triton.jit`, or the function as it is where it can only be read."""
    return kernel if triton is None else triton.jit(kernel)


def available() -> bool:
    """Whether kernels can be launched."""
    return triton is not None
