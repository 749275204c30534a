"""What the torch faces of the row kernels share: which tensors they take, and how autograd and C are reached.

`situ_cpu`, `attn_res_cpu`, `norms_cpu`, `short_conv_cpu` and `vision_cpu` compute in one pass over memory what torch
does in many. Each registers torch custom operators, so that autograd and torch.compile know them; where nothing is to
be differentiated or traced the C function is called at once, which is what decoding one token wants.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nanok3.kernels import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Storage types and their numbers in cpu/simd.h."""

_ARGUMENTS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "t": ctypes.c_int32, "f": ctypes.c_float}


def supported(library: str, first: Tensor, *others: Tensor) -> bool:
    """Whether all can be read and are of one type the kernels know, and the library could be built here."""
    known = first.dtype in DTYPES and all(x.dtype == first.dtype for x in others)
    return known and readable(first, *others) and _built(library)


def readable(*tensors: Tensor) -> bool:
    """Whether C may follow the addresses of these: ordinary tensors on the CPU. What only looks like a tensor
    (distributed, fake, wrapped by a user) has no memory of its own, and nothing more than memory is seen there: the
    batches of `torch.func` and the tangents of forward differentiation would be lost."""
    return all(type(x) in (Tensor, nn.Parameter) and x.is_cpu for x in tensors) and not _transformed()


def _transformed() -> bool:
    """Whether a transform of torch.func or a level of forward differentiation is open around the call."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


@native.constant_when_traced
def _built(library: str) -> bool:
    return native.available(library)


def through_torch(*inputs: Any) -> bool:
    """Whether the call must go through torch's dispatcher: to be traced or differentiated."""
    tracked = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return torch.compiler.is_compiling() or (tracked and torch.is_grad_enabled())


@functools.cache
def function(library: str, name: str, arguments: str) -> Callable[..., None]:
    """A C function without a result; `arguments` has a letter for each: pointer, number, type or float."""
    loaded = native.load(library)
    assert loaded is not None, "callers ask `supported` first"
    result = getattr(loaded, name)
    result.argtypes = [_ARGUMENTS[letter] for letter in arguments]
    result.restype = None
    return result


def operator(
    name: str,
    schema: str,
    forward: Callable[..., Tensor],
    backward: Callable[..., Sequence[Tensor]],
    gradients: int,
    fake: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Make an operator of one result that keeps nothing but its inputs for the backward pass.

    Registers `nanok3::<name>_fwd` with the arguments of `schema` (tensors first) and `nanok3::<name>_bwd` with the
    gradient of the result in front of them; backward returns the gradients of the first `gradients` arguments. `fake`
    gives an unwritten result. Returns the function that runs the operator, or `forward` itself where that is enough.
    """
    forward_op, backward_op = f"nanok3::{name}_fwd", f"nanok3::{name}_bwd"
    options: dict[str, Any] = {"mutates_args": (), "device_types": "cpu"}
    op = torch.library.custom_op(forward_op, forward, schema=f"({schema}) -> Tensor", **options)
    torch.library.custom_op(backward_op, backward, schema=f"(Tensor d_out, {schema}) -> Tensor[]", **options)
    torch.library.register_fake(forward_op, fake)
    torch.library.register_fake(backward_op, lambda _, *inputs: [x.new_empty(x.shape) for x in inputs[:gradients]])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensors = schema.count("Tensor")
        ctx.save_for_backward(*inputs[:tensors])
        ctx.settings = inputs[tensors:]

    def autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = (*ctx.saved_tensors, *ctx.settings)
        found = getattr(torch.ops.nanok3, f"{name}_bwd")(d_out, *inputs)
        return *found, *[None] * (len(inputs) - gradients)

    op.register_autograd(autograd, setup_context=keep)

    def run(*inputs: Any) -> Tensor:
        result: Tensor = (op if through_torch(*inputs) else forward)(*inputs)
        return result

    return run
