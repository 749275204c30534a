"""Kimi Delta Attention: a fixed-size memory that is decayed, corrected and read at every token (report 2.1, eq. 1-5).

One head keeps a matrix S (K key channels, V value channels). With log decay g < 0 per key channel, write strength
b in (0, 1), unit keys and queries, each token does four things:

    retain   S <- Diag(e^g) S                 every key channel forgets at its own rate
    compare  e  = v - S^T k                   the error of what memory predicts for this key
    write    S <- S + b k e^T                 correct along this key only
    read     o  = s S^T q,   s = K^-1/2       after the write

`kda_reference` is these four lines in a loop. `kda_chunked` computes the same with matrix products, C = 16 tokens at a
time, and has a backward written by hand. `kda` picks the fastest form that fits the inputs.

    G_i = g_1 + ... + g_i inside the chunk          Khat = K e^G     Qhat = s Q e^G     Kend = K e^(G_C - G)
    N_ij = k_i . k_j e^(G_i - G_j), i > j           M_ij = s q_i . k_j e^(G_i - G_j), i >= j
    (I + Diag(b) N) X' = Diag(b) (V - Khat S0)      pseudo-values: what each token really writes
    O = Qhat S0 + M X'                              S_C = Diag(e^(G_C)) S0 + Kend^T X'

K3 bounds g below by -5, so that e^-G stays below e^80 in a 16-token tile and N, M are plain products of scaled rows;
the older softplus gate has no bound and takes exact pairwise differences instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import (
    Linear,
    at_least_float32,
    check_cu_seqlens,
    position_in_document,
    rms_normalize,
)
from nanok3.model.cache import KDAState, Projected
from nanok3.model.short_conv import ShortConv

CHUNK = 16
"""Tokens per chunk: the least arithmetic on a CPU, and the tile for which the bound -5 was chosen."""
LOWEST_BOUNDED_GATE = -5.0
Backend = Literal["auto", "reference", "torch", "cpu", "fla"]


# ---------------------------------------------------------------------- the slow reference


def kda_reference(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    initial_state: Float[Tensor, "n HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "n HV K V"] | None]:
    """Token by token, in at least float32; autograd supplies the gradients."""
    dtype = v.dtype
    q, k, v, log_decay, beta = (at_least_float32(x) for x in (q, k, v, log_decay, beta))
    q, k = _heads_of_values(q, v), _heads_of_values(k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs, states = [], []
    for n, (row, start, end) in enumerate(_sequences(v, cu_seqlens)):
        S = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state[n].to(v)
        for t in range(start, end):
            S = log_decay[row, t].exp().unsqueeze(-1) * S
            error = v[row, t] - torch.einsum("hkv,hk->hv", S, k[row, t])
            S = S + torch.einsum("h,hk,hv->hkv", beta[row, t], k[row, t], error)
            outputs.append(scale * torch.einsum("hkv,hk->hv", S, q[row, t]))
        states.append(S)
    o = torch.stack(outputs).reshape(v.shape) if outputs else torch.zeros_like(v)
    return o.to(dtype), torch.stack(states) if output_final_state else None


def _heads_of_values(x: Float[Tensor, "B T H K"], v: Float[Tensor, "B T HV V"]) -> Float[Tensor, "B T HV K"]:
    """Grouped value heads: consecutive value heads share one query and key head."""
    groups = v.shape[2] // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def _sequences(v: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(row, first token, one past the last token) of each sequence."""
    if cu_seqlens is None:
        return [(row, 0, v.shape[1]) for row in range(v.shape[0])]
    bounds = check_cu_seqlens(cu_seqlens, v.shape[0], v.shape[1])
    return [(0, start, end) for start, end in zip(bounds, bounds[1:])]


# ---------------------------------------------------------------------- which token sits in which chunk


@dataclass(frozen=True)
class _ChunkPlan:
    """Sequences of any length cut into chunks that never hold two of them. Chunks are ordered by step, and within a
    step by sequence, longest first: at every step the sequences still running are a prefix."""

    tokens: Int[Tensor, "M C"]  # position of each slot in the flattened row; 0 where the slot is padding
    padding: Tensor | None  # (M, C) bool, or None when every slot holds a token
    slots: Int[Tensor, " T"]  # position of each token in the flattened chunks
    steps: list[tuple[int, int]]  # [first chunk, one past the last chunk) of each step
    order: Int[Tensor, " n"]  # sequence at each place of the prefix order


def _plan_chunks(lengths: list[int], device: torch.device) -> _ChunkPlan:
    lengths_t = torch.tensor(lengths, dtype=torch.int64)
    starts = lengths_t.cumsum(0) - lengths_t
    counts = (lengths_t + CHUNK - 1) // CHUNK
    order = torch.argsort(counts, descending=True, stable=True)
    running = [int((counts > s).sum()) for s in range(int(counts.max()) if len(lengths) else 0)]
    steps, first = [], 0
    for active in running:
        steps.append((first, first + active))
        first += active
    sequence = torch.cat([order[:active] for active in running]) if running else order[:0]
    step = torch.repeat_interleave(torch.arange(len(running)), torch.tensor(running, dtype=torch.int64))
    place = step[:, None] * CHUNK + torch.arange(CHUNK)
    valid = place < lengths_t[sequence][:, None]
    tokens = torch.where(valid, starts[sequence][:, None] + place, 0)
    slots = torch.empty(int(lengths_t.sum()), dtype=torch.int64)
    slots[tokens[valid]] = torch.arange(tokens.numel()).view_as(tokens)[valid]
    padding = None if bool(valid.all()) else (~valid).to(device)
    return _ChunkPlan(tokens.to(device), padding, slots.to(device), steps, order.to(device))


def _to_chunks(x: Float[Tensor, "T H D"], plan: _ChunkPlan) -> Float[Tensor, "M H C D"]:
    chunks = x.index_select(0, plan.tokens.flatten()).view(*plan.tokens.shape, *x.shape[1:])
    if plan.padding is not None:
        chunks = chunks.masked_fill(plan.padding[:, :, None, None], 0)
    return chunks.transpose(1, 2).contiguous()


def _from_chunks(chunks: Float[Tensor, "M H C D"], plan: _ChunkPlan) -> Float[Tensor, "T H D"]:
    flat = chunks.transpose(1, 2).reshape(-1, chunks.shape[1], chunks.shape[3])
    return flat.index_select(0, plan.slots)


# ---------------------------------------------------------------------- products of two tokens with decay between them


class _BoundedDecay:
    """x_i . y_j e^(G_i - G_j) as a product of scaled rows, legal while |G| <= 80. Both factors are moved by a constant
    power of two towards 1, which is exact and keeps clear of denormals; the reference point is the start of the tile,
    so nothing a later token does can change an earlier output."""

    def __init__(self, G: Float[Tensor, "M H C K"]) -> None:
        self.rows = G.exp() * 2.0**57
        self.columns = G.neg().exp() * 2.0**-57

    def pair(self, x: Tensor, y: Tensor) -> Float[Tensor, "M H C C"]:
        return (x * self.rows) @ (y * self.columns).mT

    def to_rows(self, w: Tensor, y: Tensor) -> Float[Tensor, "M H C K"]:
        """sum_j w_ij y_j e^(G_i - G_j)."""
        return self.rows * (w @ (y * self.columns))

    def to_columns(self, w: Tensor, x: Tensor) -> Float[Tensor, "M H C K"]:
        """sum_i w_ij x_i e^(G_i - G_j)."""
        return self.columns * (w.mT @ (x * self.rows))


class _ExactDecay:
    """The same for any g <= 0, from explicit differences (C, C, K): slower, and immune to overflow."""

    def __init__(self, G: Float[Tensor, "M H C K"]) -> None:
        causal = torch.ones(G.shape[2], G.shape[2], dtype=torch.bool, device=G.device).tril()
        difference = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(~causal[:, :, None], -torch.inf)
        self.decay = difference.exp()

    def pair(self, x: Tensor, y: Tensor) -> Float[Tensor, "M H C C"]:
        return torch.einsum("mhik,mhjk,mhijk->mhij", x, y, self.decay)

    def to_rows(self, w: Tensor, y: Tensor) -> Float[Tensor, "M H C K"]:
        return torch.einsum("mhij,mhjk,mhijk->mhik", w, y, self.decay)

    def to_columns(self, w: Tensor, x: Tensor) -> Float[Tensor, "M H C K"]:
        return torch.einsum("mhij,mhik,mhijk->mhjk", w, x, self.decay)


@dataclass(frozen=True)
class _Chunks:
    """Everything of the forward that does not depend on the incoming state; letters as in the docstring above."""

    q: Tensor  # already scaled by s
    k: Tensor
    v: Tensor
    b: Float[Tensor, "M H C 1"]
    decay: _BoundedDecay | _ExactDecay
    forget: Float[Tensor, "M H C K"]  # e^G
    keep: Float[Tensor, "M H C K"]  # e^(G_C - G)
    N: Tensor
    M: Tensor
    inverse: Tensor  # (I + Diag(b) N)^-1


def _inside_chunks(inputs: list[Tensor], scale: float, bounded: bool) -> _Chunks:
    q, k, v, g, b = inputs
    G = g.cumsum(2)
    decay = _BoundedDecay(G) if bounded else _ExactDecay(G)
    q = q * scale
    N = decay.pair(k, k).tril(-1)
    eye = torch.eye(CHUNK, dtype=v.dtype, device=v.device)
    # Substitution, never a power series: with repeated keys and b near 1 the series loses every digit.
    inverse = torch.linalg.solve_triangular(eye + b * N, eye, upper=False, unitriangular=True)
    return _Chunks(q, k, v, b, decay, G.exp(), (G[:, :, -1:] - G).exp(), N, decay.pair(q, k).tril(), inverse)


class _ChunkedKDA(torch.autograd.Function):
    """Forward and backward over flattened sequences. The only sequential work is one pass over the chunks: two matrix
    products a step forward, two backward; all else is batched over chunks and heads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        b: Tensor,
        S0: Tensor,
        lengths: list[int],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        plan = _plan_chunks(lengths, v.device)
        bounded = not bool((g < LOWEST_BOUNDED_GATE).any())
        c = _inside_chunks(_chunk_inputs((q, k, v, g, b), plan), scale, bounded)
        U = c.inverse @ (c.b * c.v)
        W = c.inverse @ (c.b * c.k * c.forget)
        kend, last = c.k * c.keep, c.forget[:, :, -1].unsqueeze(-1)
        starts = U.new_empty(*U.shape[:2], c.k.shape[-1], U.shape[-1])  # S0 of every chunk
        S = S0.index_select(0, plan.order)
        for first, end in plan.steps:
            active = S[: end - first]
            starts[first:end] = active
            pseudo = U[first:end].sub_(W[first:end] @ active)  # U becomes X', the pseudo-values
            S[: end - first] = last[first:end] * active + kend[first:end].mT @ pseudo
        o = (c.q * c.forget) @ starts + c.M @ U
        final = torch.empty_like(S).index_copy_(0, plan.order, S)
        ctx.save_for_backward(q, k, v, g, b, starts, U)
        ctx.plan, ctx.scale, ctx.bounded = plan, scale, bounded
        return _from_chunks(o, plan), final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, g, b, starts, X = ctx.saved_tensors
        plan: _ChunkPlan = ctx.plan
        c = _inside_chunks(_chunk_inputs((q, k, v, g, b), plan), ctx.scale, ctx.bounded)
        dO = _to_chunks(grads[0], plan)
        qhat, khat, kend = c.q * c.forget, c.k * c.forget, c.k * c.keep
        last = c.forget[:, :, -1].unsqueeze(-1)

        # The state's gradient, from the last chunk to the first.
        dX = c.M.mT @ dO  # gradient of the pseudo-values, completed in the loop
        W = c.inverse @ (c.b * khat)
        dstarts_local = qhat.mT @ dO
        dends = torch.empty_like(starts)  # gradient of the state after each chunk
        dS = grads[1].index_select(0, plan.order)
        for first, end in reversed(plan.steps):
            active = dS[: end - first]
            dends[first:end] = active
            dX[first:end] += kend[first:end] @ active
            dS[: end - first] = last[first:end] * active + dstarts_local[first:end] - W[first:end].mT @ dX[first:end]
        dS0 = torch.empty_like(dS).index_copy_(0, plan.order, dS)

        # Through the triangular system.
        dY = c.inverse.mT @ dX
        dL = -(dY @ X.mT).tril(-1)
        dM = (dO @ X.mT).tril()
        db = (dY * (c.v - khat @ starts)).sum(-1) + (dL * c.N).sum(-1)
        dN, dV = c.b * dL, c.b * dY

        # Through the pair products. The diagonal of M has no decay in it: leaving it out of the products keeps dg
        # from being a difference of two large equal numbers.
        diagonal, dM = dM.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), dM.tril(-1)
        rows_q = c.decay.to_rows(dM, c.k) + c.forget * (dO @ starts.mT)
        rows_k = c.decay.to_rows(dN, c.k) - c.forget * (dV @ starts.mT)
        columns = c.decay.to_columns(dM, c.q) + c.decay.to_columns(dN, c.k)
        dkend = X @ dends.mT
        dq = ctx.scale * (rows_q + diagonal * c.k)
        dk = rows_k + columns + c.keep * dkend + diagonal * c.q

        # Gates: G_i collects all later g's; the terms of Kend are sums over earlier tokens, so they are added up from
        # the front, without the token itself: subtracting it afterwards would cancel.
        dG = c.q * rows_q + c.k * (rows_k - columns)
        dg = dG.flip(2).cumsum(2).flip(2)
        dg[:, :, 1:] += (kend * dkend)[:, :, :-1].cumsum(2)
        dg = dg + (last * starts * dends).sum(-1).unsqueeze(2)
        dq, dk, dV, dg, db = (_from_chunks(x, plan) for x in (dq, dk, dV, dg, db.unsqueeze(-1)))
        return dq, dk, dV, dg, db.squeeze(-1), dS0, None, None


def _chunk_inputs(inputs: tuple[Tensor, ...], plan: _ChunkPlan) -> list[Tensor]:
    return [_to_chunks(x if x.dim() == 3 else x.unsqueeze(-1), plan) for x in inputs]


def kda_chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    initial_state: Float[Tensor, "n HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "n HV K V"] | None]:
    """`kda_reference` in chunks of 16 tokens: any device, any dtype, no compiler."""
    dtype, shape = v.dtype, v.shape
    q, k, v, log_decay, beta = (at_least_float32(x) for x in (q, k, v, log_decay, beta))
    wide = torch.promote_types(v.dtype, log_decay.dtype)
    q, k = _heads_of_values(q, v), _heads_of_values(k, v)
    lengths = [end - start for _, start, end in _sequences(v, cu_seqlens)]
    if initial_state is None:
        initial_state = v.new_zeros(len(lengths), shape[2], k.shape[-1], shape[3], dtype=wide)
    if v.numel() == 0:
        return v.to(dtype), initial_state.to(wide) if output_final_state else None
    log_decay = log_decay.clamp(min=math.log(torch.finfo(wide).smallest_normal))  # forgets all; sums of it stay finite
    flat = [x.to(wide).flatten(0, 1) for x in (q, k, v, log_decay, beta)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, final = _ChunkedKDA.apply(*flat, initial_state.to(wide), lengths, scale)
    return o.view(shape).to(dtype), final if output_final_state else None


# ---------------------------------------------------------------------- the operator


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    initial_state: Float[Tensor, "n HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "n HV K V"] | None]:
    """The delta rule with a decay per key channel; returns (output, final state or None).

    q, k: finished (normalised) queries and keys; v: values, HV a multiple of H; log_decay: natural log, <= 0;
    beta: write strength in (0, 1). initial_state: float32, one per sequence. cu_seqlens (n + 1): boundaries of the
    sequences packed into one row (B = 1); without it each row is a sequence. scale: K^-1/2 unless given.
    backend: 'reference' (loop), 'torch' (chunks), 'cpu' (C++), 'fla' (CUDA) or 'auto', the fastest that fits; a named
    backend that cannot take the inputs raises ValueError.
    """
    _check(q, k, v, log_decay, beta, initial_state, cu_seqlens)
    arguments = (q, k, v, log_decay, beta, initial_state, output_final_state, cu_seqlens, scale)
    if backend == "reference":
        return kda_reference(*arguments)
    if backend == "torch":
        return kda_chunked(*arguments)
    if backend not in ("auto", "cpu", "fla"):
        raise ValueError(f"backend is {backend!r}; allowed: 'auto', 'reference', 'torch', 'cpu', 'fla'")
    if v.is_cuda if backend == "auto" else backend == "fla":
        result = _kda_fla(*arguments, named=backend == "fla")
    else:
        result = _kda_cpu(*arguments)
    if result is not None:
        return result
    if backend != "auto":
        raise ValueError(f"backend {backend!r} is not available for {v.dtype} inputs on {v.device}, K={q.shape[-1]}")
    return kda_chunked(*arguments)


def _kda_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor | None] | None:
    """The C++ form, or None where it does not apply: no compiler, float64, another device."""
    if v.device.type != "cpu" or v.dtype == torch.float64:
        return None
    from nanok3.kernels import kda_cpu

    inputs = (q, k, v, log_decay, beta)
    if v.shape[1] == 1 and cu_seqlens is None and initial_state is not None and not torch.is_grad_enabled():
        after = torch.empty_like(initial_state)  # the state given may be someone's: it is read, never written
        o = kda_cpu.step(*inputs, initial_state, scale, after)
        if o is not NotImplemented:
            return o, after if output_final_state else None
    result = kda_cpu.kda(*inputs, initial_state, output_final_state, cu_seqlens, scale)
    return None if result is NotImplemented else result


def _kda_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    scale: float | None,
    named: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """fla-core's kernels on CUDA, or None where they do not apply: float64, no fla-core, float32 unless TF32 is allowed
    or the backend was named."""
    if not v.is_cuda:
        return None
    from nanok3.kernels.gpu import fla

    inputs = (q, k, v, log_decay, beta)
    result = fla.kda(*inputs, initial_state, output_final_state, cu_seqlens, scale, tf32=named)
    return None if result is NotImplemented else result


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    for name, tensor, sizes in (("q", q, (H, K)), ("v", v, (HV, V))):
        if 0 in sizes:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; heads and their width must be at least 1")
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {"k": (k, (B, T, H, K)), "v": (v, (B, T, HV, V))}
    wanted |= {"log_decay": (log_decay, (B, T, HV, K)), "beta": (beta, (B, T, HV))}
    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    if state is not None:
        wanted["initial_state"] = (state, (sequences, HV, K, V))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with q {tuple(q.shape)} it must be {shape}")
    if HV % H:
        raise ValueError(f"v has {HV} heads; that must be a multiple of the {H} heads of q and k")
    if state is not None and state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"initial_state is {state.dtype}; it must be float32 or float64")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)


# ---------------------------------------------------------------------- from a layer's input to the operator's


def _norms_cpu(name: str, *arguments: Any) -> Tensor | None:
    """What `name` computes, in one pass, or None where that does not apply: another device, float64, no compiler."""
    from nanok3.kernels import norms_cpu

    result = getattr(norms_cpu, name)(*arguments)
    return None if result is NotImplemented else result


def l2_normalize(x: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """x / sqrt(sum x^2 + 1e-6): the epsilon is added to the sum, not to the mean."""
    normed = _norms_cpu("l2_normalize", x)
    if normed is not None:
        return normed
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def log_decay(
    z: Float[Tensor, "B T H K"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " HK"],
    lower_bound: float | None,
) -> Float[Tensor, "B T H K"]:
    """The gate g < 0 in at least float32. K3 (eq. 5): g = lower_bound * sigmoid(e^A (z + dt_bias)), A one number a
    head; without a bound the older form g = -e^A softplus(z + dt_bias)."""
    gate = None if lower_bound is None else _norms_cpu("log_decay", z, A_log, dt_bias, lower_bound)
    if gate is not None:
        return gate
    # e^80 is far past saturation; clamping keeps a huge A_log from giving 0 * inf in the backward.
    rate = at_least_float32(A_log).clamp(max=80.0).exp()[:, None]
    shifted = at_least_float32(z) + at_least_float32(dt_bias).view(z.shape[-2:])
    if lower_bound is None:
        return -rate * F.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def _last_inputs(before: Float[Tensor, "B 3 W HK"], raw: tuple[Tensor, Tensor, Tensor]) -> Float[Tensor, "B 3 W HK"]:
    """The W last inputs of the three convolutions, in memory of their own: a view would keep the whole call alive."""
    taps = before.shape[2]
    if taps == 0:
        return before
    latest = torch.stack([u[:, -taps:] for u in raw], dim=1).to(before.dtype)
    return torch.cat((before, latest), dim=2)[:, :, -taps:].clone()


class KDA(nn.Module):
    """One KDA layer: projections, short convolutions, gates, the operator, and the gated output norm (architecture
    3.2). kimi_linear checkpoints have the low-rank output gate (g_a_proj, g_b_proj) and the unbounded decay."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.heads, self.dim = cfg.kda_num_heads, cfg.kda_head_dim
        inner, width = self.heads * self.dim, cfg.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(inner, cfg.short_conv_kernel_size) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Linear(width, self.dim), Linear(self.dim, inner)
        self.b_proj = Linear(width, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        if cfg.use_full_rank_gate:
            self.g_proj = Linear(width, inner)
        else:
            self.g_a_proj, self.g_b_proj = Linear(width, self.dim), Linear(self.dim, inner)
        self.o_norm = OutputNorm(self.dim, cfg.rms_norm_eps)
        self.o_proj = Linear(inner, width)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        cu_seqlens: Int[Tensor, " n1"] | None = None,
        cache: KDAState | None = None,
    ) -> Float[Tensor, "B T D"]:
        """x: the normed layer input. A cache is advanced by x's tokens; with cu_seqlens it has a memory for each
        document, from which that goes on."""
        projected = self.project(x)
        o = self.remember(projected, cu_seqlens, cache)
        if cache is not None and cache.tape is not None:
            cache.tape.append(projected)
        return self.o_proj(self.o_norm(o, self._split(self._output_gate(x))).flatten(2))

    def project(self, x: Float[Tensor, "B T D"]) -> Projected:
        """Token by token; all that the memory will know of them."""
        return Projected((self.q_proj(x), self.k_proj(x), self.v_proj(x)), self.f_a_proj(x), self.b_proj(x))

    def remember(
        self, projected: Projected, cu_seqlens: Int[Tensor, " n1"] | None = None, cache: KDAState | None = None
    ) -> Float[Tensor, "B T H V"]:
        """What the tokens read from a memory, which moves on by them."""
        q, k, v = self._convolved(projected.inputs, cu_seqlens, cache)
        g = log_decay(self._split(self.f_b_proj(projected.gate)), self.A_log, self.dt_bias, self.cfg.gate_lower_bound)
        beta = torch.sigmoid(at_least_float32(projected.beta))
        state = None if cache is None else cache.recurrent
        o, final = kda(l2_normalize(q), l2_normalize(k), v, g, beta, state, cache is not None, cu_seqlens)
        if cache is not None:
            assert final is not None
            cache.recurrent = final
        return o

    def _convolved(
        self, raw: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor | None, cache: KDAState | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if cu_seqlens is not None and cache is not None:
            return self._convolved_documents(raw, cu_seqlens, cache)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        position = None if cu_seqlens is None else position_in_document(cu_seqlens, raw[0].shape[1])
        history = (None, None, None) if cache is None else cache.conv.unbind(1)
        q, k, v = (self._split(conv(u, h, position)) for conv, u, h in zip(convs, raw, history))
        if cache is not None:
            cache.conv = _last_inputs(cache.conv, raw)
        return q, k, v

    def _convolved_documents(
        self, raw: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, cache: KDAState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each document stands behind the inputs before it, as a row without documents would have it; what comes out
        at their places is dropped."""
        taps, bounds = cache.conv.shape[2], check_cu_seqlens(cu_seqlens, raw[0].shape[0], raw[0].shape[1])
        lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        shift = taps * torch.arange(1, len(bounds), device=cu_seqlens.device)
        own = torch.arange(bounds[-1], device=shift.device) + shift.repeat_interleave(cu_seqlens.diff())
        last = (cu_seqlens[1:] + shift - taps)[:, None] + torch.arange(taps, device=shift.device)
        found, latest = [], []
        for conv, u, before in zip((self.q_conv1d, self.k_conv1d, self.v_conv1d), raw, cache.conv.unbind(1)):
            pairs = zip(before.to(u.dtype), u[0].split(lengths), strict=True)
            row = torch.cat([part for pair in pairs for part in pair])
            found.append(self._split(conv(row[None], None, None).index_select(1, own)))
            latest.append(row[last])
        cache.conv = torch.stack(latest, dim=1).to(cache.conv.dtype)
        return found[0], found[1], found[2]

    def _output_gate(self, x: Tensor) -> Tensor:
        gate: Tensor = self.g_proj(x) if self.cfg.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return gate

    def _split(self, x: Float[Tensor, "B T HK"]) -> Float[Tensor, "B T H K"]:
        return x.unflatten(-1, (self.heads, self.dim))

    @torch.no_grad()
    def reset_gates(self) -> None:
        """A_log = 0 with the bounded gate (report 2.1), log of U(1, 16) with the older one; dt_bias the inverse
        softplus of a step drawn log-uniformly from [0.001, 0.1], as in Mamba-2."""
        if self.cfg.gate_lower_bound is None:
            self.A_log.uniform_(1, 16).log_()
        else:
            self.A_log.zero_()
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))


class OutputNorm(nn.Module):
    """RMSNorm over each head's values, weight shared by the heads, then the sigmoid gate; all in at least float32,
    rounded once."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, o: Float[Tensor, "B T H V"], gate: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T H V"]:
        gated = _norms_cpu("gated_norm", o, gate, self.weight, self.eps)
        if gated is not None:
            return gated
        normed = rms_normalize(o, self.eps) * at_least_float32(self.weight)
        return (normed * torch.sigmoid(at_least_float32(gate))).to(gate.dtype)

    def reset_parameters(self, std: float) -> None:
        nn.init.ones_(self.weight)
