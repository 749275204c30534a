"""Triton's interpreter (TRITON_INTERPRET=1) as the tests need it: what it lacks is put right from outside.

Its product multiplies the bit patterns of bfloat16, which numpy does not know; and it runs fla-core's kernels only with
one configuration for each, with loop counters that know `.to`, and with a gather that it may patch.
"""

from __future__ import annotations

import builtins
import gc
import sys

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


class Counter(int):
    """A loop counter that can be used as a tensor."""

    def to(self, *_arguments, **_named):
        return self

    def __mul__(self, other):
        return Counter(int(self) * int(other)) if isinstance(other, int | tl.constexpr) else other * int(self)

    __rmul__ = __mul__


def _values(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _dot(self, a, b, d, _precision, _imprecise):
    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype) + d.data
    return interpreter.TensorHandle(product, d.dtype.scalar)


def multiply_bfloat16():
    interpreter.InterpreterBuilder.create_dot = _dot


def run_fla():
    """To be called after fla's modules are loaded."""
    multiply_bfloat16()
    for tuner in (o for o in gc.get_objects() if isinstance(o, Autotuner)):
        tuner.configs = tuner.configs[:1]
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla.ops"):
            continue
        module.range = lambda *a: (Counter(i) for i in builtins.range(*(int(x) for x in a)))
        if hasattr(module, "gather"):
            module.gather = lambda source, index, axis: tl.gather(source, index, axis)
        if hasattr(module, "SAFE_GATE_DOT_PRECISION"):
            module.SAFE_GATE_DOT_PRECISION = tl.constexpr("ieee")
