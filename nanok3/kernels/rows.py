"""What the torch faces of the row kernels share: which tensors they take, and how they reach C.

`situ_cpu`, `attn_res_cpu`, `norms_cpu` and `short_conv_cpu` compute in one pass over memory what torch does in many.
Each registers torch custom operators, so that autograd and torch.compile know them; where nothing is to be
differentiated or traced the C function is called at once, which is what decoding one token wants.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanok3.kernels import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Storage types and their numbers in cpu/simd.h."""

_ARGUMENTS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "t": ctypes.c_int32, "f": ctypes.c_float}


def supported(library: str, first: Tensor, *others: Tensor) -> bool:
    """Whether all are on the CPU, of one type the kernels know, and the library could be built here."""
    return (
        first.dtype in DTYPES
        and first.device.type == "cpu"
        and all(x.dtype == first.dtype and x.device == first.device for x in others)
        and _built(library)
    )


def through_torch(*inputs: Tensor) -> bool:
    """Whether the call must go through torch's dispatcher: to be differentiated, traced, or run without data."""
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
        or any(type(x) not in (Tensor, nn.Parameter) for x in inputs)
    )


@functools.cache
def function(library: str, name: str, arguments: str) -> Callable[..., None]:
    """A C function without a result; `arguments` has a letter for each: pointer, number, type or float."""
    loaded = native.load(library)
    assert loaded is not None, "callers ask `supported` first"
    result = getattr(loaded, name)
    result.argtypes = [_ARGUMENTS[letter] for letter in arguments]
    result.restype = None
    return result


@torch.compiler.assume_constant_result  # the build is no part of a traced graph
def _built(library: str) -> bool:
    return native.available(library)
