"""Kimi Delta Attention on a CPU: the torch face of `cpu/kda.cpp`, forward, backward and one decode step.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t

Inputs are finished tensors (q and k normalised, log_decay and beta activated), float32 or bf16 in any mix; sums
and the state are float32. **log_decay must lie in [-5, 0]**: the kernel divides by a 16-token product of decays,
which is exact to rounding for e^-80 and overflows further down. Gates without that bound (softplus gates) must
not come here; the values are not checked, the caller knows them from its configuration.

What the kernel cannot take (other types or devices, no compiler) returns NotImplemented, and the caller falls
back to its torch form. Both passes are torch custom operators (`nanok3::kda_fwd`, `nanok3::kda_bwd`), so that
torch.compile works around them; the backward pass keeps the inputs and one state per 64 tokens.
"""

from __future__ import annotations

import ctypes
import functools
from types import NotImplementedType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanok3.kernels import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
TOKENS_PER_CHECKPOINT = 64


class _Problem(ctypes.Structure):
    """`struct Problem` of cpu/kda.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "log_decay", "beta", "initial_state", "offsets")),
        *((name, ctypes.c_int64) for name in ("sequences", "H", "HV", "K", "V", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("q_type", "k_type", "v_type", "log_decay_type", "beta_type")),
    ]


class _Gradients(ctypes.Structure):
    """`struct Gradients` of cpu/kda.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("d_o", "d_final", "dq", "dk", "dv", "dlog_decay", "dbeta", "d_initial")),
        *((name, ctypes.c_int32) for name in ("dq_type", "dk_type")),
    ]


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " boundaries"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None] | NotImplementedType:
    """KDA over whole sequences, differentiable in every tensor; NotImplemented where the kernel does not apply.

    HV is a multiple of H; cu_seqlens (N + 1,) int packs N sequences into B = 1; scale defaults to K^-0.5. Returns o
    in v's type and the float32 state after each sequence (None unless asked for).
    """
    inputs = (q, k, v, log_decay, beta)
    if not _supported(inputs, initial_state):
        return NotImplemented
    _check_shapes(*inputs, initial_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tracked = (*inputs, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tracked)
    o, final_state, _ = torch.ops.nanok3.kda_fwd(*inputs, initial_state, cu_seqlens, scale, save)
    return o, final_state if output_final_state else None


def step(
    q: Float[Tensor, "B 1 H K"],
    k: Float[Tensor, "B 1 H K"],
    v: Float[Tensor, "B 1 HV V"],
    log_decay: Float[Tensor, "B 1 HV K"],
    beta: Float[Tensor, "B 1 HV"],
    state: Float[Tensor, "B HV K V"],
    scale: float | None = None,
) -> Float[Tensor, "B 1 HV V"] | NotImplementedType:
    """One decode token for every sequence: returns o and moves `state` (float32, contiguous) on in place."""
    inputs = (q, k, v, log_decay, beta)
    if not _supported(inputs, state) or not state.is_contiguous() or q.shape[1] != 1:
        return NotImplemented
    _check_shapes(*inputs, state, None)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if torch.compiler.is_compiling():
        return torch.ops.nanok3.kda_step(*inputs, state, scale)
    return _step(*inputs, state, scale)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    save_for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state and the states saved for `backward` (none unless asked for). Shapes as in `kda`."""
    inputs = _contiguous(q, k, v, log_decay, beta)
    o, final_state, checkpoints = _empty_outputs(q, v, cu_seqlens, save_for_backward)
    kept: list[Tensor] = []
    problem = _problem(inputs, initial_state, cu_seqlens, scale, kept)
    saved = checkpoints.data_ptr() if save_for_backward else None
    _library().kda_forward(ctypes.byref(problem), o.data_ptr(), final_state.data_ptr(), saved)
    return o, final_state, checkpoints


def backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    checkpoints: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, beta (in their types) and of the initial state (empty when there is none)."""
    inputs = _contiguous(q, k, v, log_decay, beta)
    q, k, v, log_decay, beta = inputs
    kept = [do.to(v.dtype).contiguous()]
    problem = _problem(inputs, initial_state, cu_seqlens, scale, kept)
    H, HV = q.shape[2], v.shape[2]
    # Value heads that share a key each write their own gradient; the sum over the group is taken below.
    dq, dk = (x.new_empty(log_decay.shape, dtype=x.dtype if H == HV else torch.float32) for x in (q, k))
    dv, dlog_decay, dbeta = (torch.empty_like(x) for x in (v, log_decay, beta))
    dinitial = torch.empty_like(initial_state) if initial_state is not None else v.new_empty(0, dtype=torch.float32)
    if dfinal is not None:
        kept.append(dfinal.float().contiguous())
    gradients = _Gradients(
        kept[0].data_ptr(),
        kept[-1].data_ptr() if dfinal is not None else None,
        *(x.data_ptr() for x in (dq, dk, dv, dlog_decay, dbeta)),
        dinitial.data_ptr() if initial_state is not None else None,
        DTYPES[dq.dtype],
        DTYPES[dk.dtype],
    )
    _library().kda_backward(ctypes.byref(problem), ctypes.byref(gradients), checkpoints.data_ptr())
    if H != HV:
        dq, dk = (d.unflatten(2, (H, HV // H)).sum(3).to(x.dtype) for d, x in ((dq, q), (dk, k)))
    return dq, dk, dv, dlog_decay, dbeta, dinitial


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    inputs = _contiguous(q, k, v, log_decay, beta)
    o = torch.empty_like(inputs[2])
    problem = _problem(inputs, None, None, scale, [])
    _library().kda_step(ctypes.byref(problem), state.data_ptr(), o.data_ptr())
    return o


@functools.cache
def _library() -> Any:
    library = native.load("kda")
    assert library is not None, "callers ask _supported first"
    for function, arguments in ((library.kda_forward, 4), (library.kda_backward, 3), (library.kda_step, 3)):
        function.argtypes = [ctypes.c_void_p] * arguments
        function.restype = None
    return library


def _contiguous(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in inputs)


def _supported(inputs: tuple[Tensor, ...], state: Tensor | None) -> bool:
    """Types and devices the kernel takes, and whether it could be built here."""
    states = () if state is None else (state,)
    return (
        all(x.device.type == "cpu" for x in (*inputs, *states))
        and all(x.dtype in DTYPES for x in inputs)
        and all(x.dtype == torch.float32 for x in states)
        and _built()
    )


@torch.compiler.assume_constant_result  # the build is no part of a traced graph
def _built() -> bool:
    return native.available("kda")


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """The kernel reads raw memory, so every shape is checked here. Raises ValueError."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = {"k": (k, (B, T, H, K)), "v": (v, (B, T, HV, V)), "beta": (beta, (B, T, HV))}
    wanted["log_decay"] = (log_decay, (B, T, HV, K))
    if state is not None:
        wanted["state"] = (state, (N, HV, K, V))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"kda: {name} has shape {tuple(tensor.shape)}, expected {shape} for q {tuple(q.shape)}")
    if HV % H:
        raise ValueError(f"kda: {HV} value heads are no multiple of {H} key heads")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"kda: cu_seqlens packs sequences into a batch of 1, got a batch of {B}")


def _offsets(q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Where each sequence starts in the flattened tokens: a batch is B packed sequences of T. Raises ValueError."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return torch.arange(0, B + 1) * T
    offsets = cu_seqlens.to("cpu", torch.int64).contiguous()
    if offsets[0] != 0 or offsets[-1] != T or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"kda: cu_seqlens must rise from 0 to {T} tokens, got {offsets.tolist()}")
    return offsets


def _problem(
    inputs: tuple[Tensor, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    kept: list[Tensor],
) -> _Problem:
    """The C record of a call; tensors made here go into `kept` so that they outlive it."""
    q, _, v, _, _ = inputs
    offsets = _offsets(q, cu_seqlens)
    state = None if initial_state is None else initial_state.contiguous()
    kept += [offsets] if state is None else [offsets, state]
    return _Problem(
        *(x.data_ptr() for x in inputs),
        None if state is None else state.data_ptr(),
        offsets.data_ptr(),
        offsets.shape[0] - 1,
        q.shape[2],
        v.shape[2],
        q.shape[3],
        v.shape[3],
        torch.get_num_threads(),
        scale,
        *(DTYPES[x.dtype] for x in inputs),
    )


def _empty_outputs(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, save_for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten o, final state and checkpoints: a sequence starting at token a owns the slots from a // 64 on."""
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    final_state = v.new_empty((N, HV, K, V), dtype=torch.float32)
    slots = B * T // TOKENS_PER_CHECKPOINT if save_for_backward else 0
    padded = (K + 15) // 16 * 16 * ((V + 31) // 32 * 32)
    return o, final_state, v.new_empty((slots, HV, padded), dtype=torch.float32)


_SCHEMA_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta"

_forward_op = torch.library.custom_op(
    "nanok3::kda_fwd",
    forward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({_SCHEMA_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool save_for_backward)"
    " -> (Tensor, Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "nanok3::kda_bwd",
    backward,
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor do, Tensor? dfinal, {_SCHEMA_INPUTS}, Tensor? initial_state, Tensor checkpoints,"
    " Tensor? cu_seqlens, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_step_op = torch.library.custom_op(
    "nanok3::kda_step",
    _step,
    mutates_args=("state",),
    device_types="cpu",
    schema=f"({_SCHEMA_INPUTS}, Tensor(a!) state, float scale) -> Tensor",
)


@_forward_op.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    save_for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_outputs(q, v, cu_seqlens, save_for_backward)


@_backward_op.register_fake
def _backward_fake(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    checkpoints: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dinitial = v.new_empty(0 if initial_state is None else initial_state.shape, dtype=torch.float32)
    dq, dk, dv, dlog_decay, dbeta = (x.new_empty(x.shape) for x in (q, k, v, log_decay, beta))
    return dq, dk, dv, dlog_decay, dbeta, dinitial


@_step_op.register_fake
def _step_fake(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    return v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, scale, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.scale = scale
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _autograd(ctx: Any, do: Tensor | None, dfinal: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, beta, initial_state, cu_seqlens, checkpoints = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    *gradients, dinitial = torch.ops.nanok3.kda_bwd(
        do, dfinal, q, k, v, log_decay, beta, initial_state, checkpoints, cu_seqlens, ctx.scale
    )
    return *gradients, (None if initial_state is None else dinitial), None, None, None


_forward_op.register_autograd(_autograd, setup_context=_keep_for_backward)
