"""Kimi Delta Attention on a CPU: the torch face of `cpu/kda.cpp`, forward, backward and one decode step.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t

Inputs are finished tensors (q and k normalised, log_decay and beta activated), float32 or bf16 in any mix; sums
and the state are float32. Any log_decay <= 0 is taken: decays are products of the gates between two tokens, never
quotients, so neither K3's bound of -5 nor any other is needed. A log_decay above 0 is not checked for and wrong.

What the kernel cannot take (other types or devices, no compiler) returns NotImplemented, and the caller falls
back to its torch form. Both passes are torch custom operators (`nanok3::kda_fwd`, `nanok3::kda_bwd`), so that
torch.compile works around them. The backward pass keeps q, k, the gates, one state per 64 tokens and, in place of v,
every token's error v - S^T k.

Threads take sequences and heads; where those are too few, the value columns of a head are shared out too. Outputs and
states are the same bits for any number of threads; so are gradients as long as there is a head for every thread, and
otherwise those of q, k and the gates are sums of float32 parts, the same bits for one number of threads.
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
from nanok3.kernels.rows import readable, through_torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
TOKENS_PER_CHUNK, TOKENS_PER_STATE, COLUMNS_PER_PANEL = 16, 64, 32


class _Problem(ctypes.Structure):
    """`struct Problem` of cpu/kda.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "log_decay", "beta", "initial_state", "offsets")),
        *((name, ctypes.c_int64) for name in ("sequences", "tokens", "H", "HV", "K", "V", "parts", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("q_type", "k_type", "v_type", "log_decay_type", "beta_type")),
    ]


class _Gradients(ctypes.Structure):
    """`struct Gradients` of cpu/kda.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("d_o", "d_final", "dv", "dq", "dk", "dlog_decay", "dbeta", "d_initial")),
        *((name, ctypes.c_int32) for name in ("dq_type", "dk_type", "dlog_decay_type", "dbeta_type")),
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

    HV is a multiple of H; cu_seqlens (N + 1,) int packs N sequences into B = 1; scale defaults to K^-0.5. Returns
    o in v's type and the float32 state after each sequence (None unless asked for). Raises ValueError for shapes or
    boundaries that do not fit together.
    """
    inputs = (q, k, v, log_decay, beta)
    if not _supported(inputs, initial_state) or (cu_seqlens is not None and type(cu_seqlens) is not Tensor):
        return NotImplemented
    _check_shapes(*inputs, initial_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tracked = inputs if initial_state is None else (*inputs, initial_state)
    if through_torch(*tracked):
        save = torch.is_grad_enabled() and any(x.requires_grad for x in tracked)
        o, final_state, _, _ = torch.ops.nanok3.kda_fwd(*inputs, initial_state, cu_seqlens, scale, save)
    else:
        o, final_state, _, _ = forward(*inputs, initial_state, cu_seqlens, scale, False)
    return o, final_state if output_final_state else None


def step(
    q: Float[Tensor, "B 1 H K"],
    k: Float[Tensor, "B 1 H K"],
    v: Float[Tensor, "B 1 HV V"],
    log_decay: Float[Tensor, "B 1 HV K"],
    beta: Float[Tensor, "B 1 HV"],
    state: Float[Tensor, "B HV K V"],
    scale: float | None = None,
    after: Float[Tensor, "B HV K V"] | None = None,
) -> Float[Tensor, "B 1 HV V"] | NotImplementedType:
    """One decode token for every sequence: returns o in v's type and writes the new state into `after`, or over `state`
    when there is none (both float32, contiguous). No gradients. NotImplemented where the kernel does not apply, nothing
    written."""
    inputs, after = (q, k, v, log_decay, beta), state if after is None else after
    if q.shape[1:2] != (1,) or not all(_supported(inputs, x) and x.is_contiguous() for x in (state, after)):
        return NotImplemented
    for x in (state, after):
        _check_shapes(*inputs, x, None)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not through_torch(*inputs, state):
        return _step_into(*inputs, state, after, scale)
    if after is not state:
        after.copy_(state)
    o: Tensor = torch.ops.nanok3.kda_step(*inputs, after, scale)
    return o


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and the states and errors that `backward` wants (empty unless asked for). Shapes as in
    `kda`."""
    call = _Call((q, k, v, log_decay, beta), initial_state, cu_seqlens, scale)
    outputs = _empty_outputs(q, v, cu_seqlens, save_for_backward)
    o, final_state, states, errors = (x.data_ptr() for x in outputs)
    saved = (states, errors) if save_for_backward else (None, None)
    _library().kda_forward(call.address, o, final_state, *saved)
    return outputs


def backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    states: Tensor,
    errors: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, beta (in their types; v's is do's) and of the initial state (empty when there
    is none). v itself is not needed: `errors` carries what it gave."""
    call = _Call((q, k, do, log_decay, beta), initial_state, cu_seqlens, scale)
    do = call.kept[0][2]
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    H, HV, parts = q.shape[2], do.shape[2], call.problem.parts
    # Value heads that share a key, and parts of a head, each write their own gradient; the sums are taken below.
    shape, whole = (*beta.shape, parts), parts == 1
    dq, dk = (x.new_empty((*shape, q.shape[3]), dtype=x.dtype if whole and H == HV else torch.float32) for x in (q, k))
    dlog_decay = log_decay.new_empty((*shape, q.shape[3]), dtype=log_decay.dtype if whole else torch.float32)
    dbeta = beta.new_empty(shape, dtype=beta.dtype if whole else torch.float32)
    dv = do.new_empty(do.shape)
    dinitial = do.new_empty(0 if initial_state is None else initial_state.shape, dtype=torch.float32)
    gradients = _Gradients(
        do.data_ptr(),
        None if dfinal is None else dfinal.data_ptr(),
        *(x.data_ptr() for x in (dv, dq, dk, dlog_decay, dbeta)),
        None if initial_state is None else dinitial.data_ptr(),
        *(DTYPES[x.dtype] for x in (dq, dk, dlog_decay, dbeta)),
    )
    _library().kda_backward(call.address, ctypes.byref(gradients), states.data_ptr(), errors.data_ptr())
    dq, dk, dlog_decay, dbeta = (_added_up(d, x) for d, x in ((dq, q), (dk, k), (dlog_decay, log_decay), (dbeta, beta)))
    return dq, dk, dv, dlog_decay, dbeta, dinitial


def _added_up(parts: Float[Tensor, "B T HV parts *K"], x: Tensor) -> Tensor:
    """The gradient of x (B, T, heads, ...): parts, and heads of one group, summed."""
    if parts.numel() == x.numel():
        return parts.view(x.shape)
    return parts.unflatten(2, (x.shape[2], -1)).flatten(3, 4).sum(3).to(x.dtype)


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    return _step_into(q, k, v, log_decay, beta, state, state, scale)


def _step_into(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, after: Tensor, scale: float
) -> Tensor:
    call = _Call((q, k, v, log_decay, beta), None, None, scale)
    o = v.new_empty(v.shape)
    _library().kda_step(call.address, state.data_ptr(), after.data_ptr(), o.data_ptr())
    return o


@functools.cache
def _library() -> Any:
    library = native.load("kda")
    assert library is not None, "callers ask _supported first"
    for function, arguments in ((library.kda_forward, 5), (library.kda_backward, 4), (library.kda_step, 4)):
        function.argtypes = [ctypes.c_void_p] * arguments
        function.restype = None
    return library


def _supported(inputs: tuple[Tensor, ...], state: Tensor | None) -> bool:
    """Types and devices the kernel takes, and whether it could be built here."""
    if not readable(*inputs) or any(x.dtype not in DTYPES for x in inputs):
        return False
    if state is not None and (not readable(state) or state.dtype != torch.float32):
        return False
    return _built()


@native.constant_when_traced
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
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"kda: q has shape {tuple(q.shape)} and v {tuple(v.shape)}; they must be (B, T, heads, width)")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or not len(cu_seqlens)):
        raise ValueError(f"kda: cu_seqlens has shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, x, shape in (
        ("k", k, (B, T, H, K)),
        ("v", v, (B, T, HV, V)),
        ("log_decay", log_decay, (B, T, HV, K)),
        ("beta", beta, (B, T, HV)),
        ("state", state, (N, HV, K, V)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"kda: {name} has shape {tuple(x.shape)}, expected {shape} for q {tuple(q.shape)}")
    if HV % H if H else HV:
        raise ValueError(f"kda: {HV} value heads are no multiple of {H} key heads")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"kda: cu_seqlens packs sequences into a batch of 1, got a batch of {B}")


def _boundaries(cu_seqlens: Tensor, T: int) -> Tensor:
    """Boundaries as the kernel reads them. Raises ValueError, since it trusts them."""
    offsets = cu_seqlens.to("cpu", torch.int64).contiguous()
    if offsets[0] != 0 or offsets[-1] != T or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"kda: cu_seqlens must rise from 0 to {T} tokens, got {offsets.tolist()}")
    return offsets


class _Call:
    """The C record of a call, at `address`, and the tensors it points to."""

    def __init__(
        self,
        inputs: tuple[Tensor, ...],
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
    ):
        inputs = tuple(x.contiguous() for x in inputs)
        q, _, v, _, _ = inputs
        state = None if initial_state is None else initial_state.contiguous()
        offsets = None if cu_seqlens is None else _boundaries(cu_seqlens, q.shape[1])
        self.kept = (inputs, state, offsets)
        sequences, threads = q.shape[0] if offsets is None else offsets.shape[0] - 1, torch.get_num_threads()
        self.problem = _Problem(
            *(x.data_ptr() for x in inputs),
            None if state is None else state.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            sequences,
            q.shape[1],
            q.shape[2],
            v.shape[2],
            q.shape[3],
            v.shape[3],
            _parts(sequences * v.shape[2], v.shape[3], threads),
            threads,
            scale,
            *(DTYPES[x.dtype] for x in inputs),
        )
        self.address = ctypes.byref(self.problem)


def _parts(heads: int, V: int, threads: int) -> int:
    """Parts the value columns of each head are shared out in, so that no thread is idle: whole panels."""
    panels = (V + COLUMNS_PER_PANEL - 1) // COLUMNS_PER_PANEL
    return 1 if heads == 0 else max(1, min(panels, threads // heads))


def _empty_outputs(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, save_for_backward: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unwritten o, final state, and slots for states and errors: a sequence starting at token a owns the slots from
    a // 64 and from a // 16 + (its number) on."""
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_slots, error_slots = (
        (B * T // TOKENS_PER_STATE, B * T // TOKENS_PER_CHUNK + N) if save_for_backward else (0, 0)
    )
    K_padded, V_padded = (K + 15) // 16 * 16, (V + 31) // 32 * 32
    final_state = v.new_empty((N, HV, K, V), dtype=torch.float32)
    states = v.new_empty((state_slots, HV, K_padded * V_padded), dtype=torch.float32)
    errors = v.new_empty((error_slots, HV, TOKENS_PER_CHUNK * V_padded), dtype=torch.float32)
    return v.new_empty(v.shape), final_state, states, errors


_SCHEMA_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta"

_forward_op = torch.library.custom_op(
    "nanok3::kda_fwd",
    forward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({_SCHEMA_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool save_for_backward)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "nanok3::kda_bwd",
    backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor do, Tensor? dfinal, Tensor q, Tensor k, Tensor log_decay, Tensor beta, Tensor? initial_state,"
    " Tensor states, Tensor errors, Tensor? cu_seqlens, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(q, v, cu_seqlens, save_for_backward)


@_backward_op.register_fake
def _backward_fake(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    states: Tensor,
    errors: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dinitial = do.new_empty(0 if initial_state is None else initial_state.shape, dtype=torch.float32)
    dq, dk, dv, dlog_decay, dbeta = (x.new_empty(x.shape) for x in (q, k, do, log_decay, beta))
    return dq, dk, dv, dlog_decay, dbeta, dinitial


@_step_op.register_fake
def _step_fake(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    return v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, log_decay, beta, initial_state, cu_seqlens, scale, _ = inputs
    _, _, states, errors = output
    ctx.save_for_backward(q, k, log_decay, beta, initial_state, states, errors, cu_seqlens)
    ctx.scale, ctx.value_shape, ctx.value_dtype = scale, v.shape, v.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(states, errors)


def _autograd(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    do = saved[0].new_zeros(ctx.value_shape, dtype=ctx.value_dtype) if do is None else do
    *gradients, dinitial = torch.ops.nanok3.kda_bwd(do, dfinal, *saved, ctx.scale)
    return *gradients, (dinitial if ctx.needs_input_grad[5] else None), None, None, None


_forward_op.register_autograd(_autograd, setup_context=_keep_for_backward)
