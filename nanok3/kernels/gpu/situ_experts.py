"""The routed experts in two launches: both upward products with SiTU-GLU behind them, then the downward product.

    h_r = SiTU(w1[e] z_r, w3[e] z_r)         y_r = w2[e] h_r         e = e(r), rows sorted by expert
    SiTU(g, u) = [b1 tanh(g / b1) sigmoid(g)] * [b2 tanh(u / b2)]    without b1 or b2 that factor is g sigmoid(g) or u

Both products share the reads of z, and g and u go from the sums to the activation without being rounded or stored. Only
where a gradient will be asked for are they kept, in z's dtype; the backward computes h from them again, then

    dh = w2^T dy;   (dg, du) = SiTU'(g, u) dh;   dz = w1^T dg + w3^T du;   dw1 = dg z^T, dw3 = du z^T, dw2 = dy h^T

Reference: the torch form of model/latent_moe.py.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanok3.kernels.gpu.grouped import check, outer, precision, product
from nanok3.kernels.gpu.language import jit, tl
from nanok3.kernels.gpu.tiles import RowTiles, Tile, choose, row_tiles

AT_ONCE = 1024
"""Elements that a program of the element-wise backward takes."""


# ---------------------------------------------------------------------- SiTU, inside a kernel


@jit
def tanh(x):
    """By exponentials where they lose nothing, by the series to x^9 near zero; 3e-7 relative everywhere."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


@jit
def situ(g, u, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    if BETA is not None:
        capped = BETA * tanh(g / BETA)
    else:
        capped = g
    if LINEAR_BETA is not None:
        linear = LINEAR_BETA * tanh(u / LINEAR_BETA)
    else:
        linear = u
    return capped * tl.sigmoid(g) * linear


@jit
def situ_backward_kernel(
    gate, up, d_hidden, hidden, d_gate, d_up, n,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """hidden again, and the gradients of gate and up."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    d = tl.load(d_hidden + at, mask=at < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    if BETA is not None:
        t = tanh(g / BETA)
        a = BETA * t * s
        da = s * (1 - t * t + BETA * t * (1 - s))
    else:
        a = g * s
        da = s * (1 + g * (1 - s))
    if LINEAR_BETA is not None:
        t = tanh(u / LINEAR_BETA)
        b = LINEAR_BETA * t
        db = 1 - t * t
    else:
        b = u
        db = u * 0 + 1
    tl.store(hidden + at, (a * b).to(hidden.dtype.element_ty), mask=at < n)
    tl.store(d_gate + at, (d * b * da).to(d_gate.dtype.element_ty), mask=at < n)
    tl.store(d_up + at, (d * a * db).to(d_up.dtype.element_ty), mask=at < n)


# ---------------------------------------------------------------------- the upward products


@jit
def up_kernel(
    z, w1, w3, hidden, gate, up, tile_expert, tile_start, ends, E, O, I,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of hidden (m, O), and of gate and up if KEEP. Everything is contiguous."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert >= E:
        return
    row = tl.load(tile_start + tl.program_id(0)) + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mine = row < tl.load(ends + expert)
    weight_row = (expert * O + column[None, :]) * I
    g = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    u = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, I, INNER):
        i = first + tl.arange(0, INNER)
        inside = (column < O)[None, :] & (i < I)[:, None]
        a = tl.load(z + row[:, None] * I + i[None, :], mask=mine[:, None] & (i < I)[None, :], other=0.0)
        b1 = tl.load(w1 + weight_row + i[:, None], mask=inside, other=0.0)
        b3 = tl.load(w3 + weight_row + i[:, None], mask=inside, other=0.0)
        g = tl.dot(a, b1, g, input_precision=PRECISION)
        u = tl.dot(a, b3, u, input_precision=PRECISION)
    place = row[:, None] * O + column[None, :]
    whole = mine[:, None] & (column < O)[None, :]
    tl.store(hidden + place, situ(g, u, BETA, LINEAR_BETA).to(hidden.dtype.element_ty), mask=whole)
    if KEEP:
        tl.store(gate + place, g.to(gate.dtype.element_ty), mask=whole)
        tl.store(up + place, u.to(up.dtype.element_ty), mask=whole)


def upward(
    z: Tensor, w1: Tensor, w3: Tensor, tiles: RowTiles, tile: Tile, betas: tuple[float | None, float | None], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, gate, up); the last two are empty unless they are to be kept."""
    z, (E, O, I) = z.contiguous(), w1.shape
    hidden = z.new_empty(z.shape[0], O)
    gate, up = (torch.empty_like(hidden) if keep else z.new_empty(1) for _ in range(2))
    grid = (tiles.expert.shape[0], -(-O // tile.columns))
    up_kernel[grid](
        z, w1.contiguous(), w3.contiguous(), hidden, gate, up, tiles.expert, tiles.start, tiles.ends, E, O, I,
        *betas, keep, tile.rows, tile.columns, tile.inner, precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return hidden, gate, up


def situ_backward(
    gate: Tensor, up: Tensor, d_hidden: Tensor, betas: tuple[float | None, float | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, d_gate, d_up)."""
    results = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    situ_backward_kernel[(-(-n // AT_ONCE),)](gate, up, d_hidden.contiguous(), *results, n, *betas, AT_ONCE)
    return results


# ---------------------------------------------------------------------- the experts


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts: Tensor,
        betas: tuple[float | None, float | None], keep: bool,
    ) -> Tensor:  # fmt: skip
        m, E, (O, I) = z.shape[0], w1.shape[0], w1.shape[1:]
        tile = choose(m, E, O, I, z.element_size(), widest=64)  # two sums in registers
        tiles = row_tiles(counts, m, tile.rows)
        hidden, gate, up = upward(z, w1, w3, tiles, tile, betas, keep)
        ctx.save_for_backward(z, w1, w2, w3, counts, gate, up)
        ctx.tiles, ctx.tile, ctx.betas = tiles, tile, betas
        return product(hidden, w2, tiles, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, w1, w2, w3, counts, gate, up = ctx.saved_tensors
        tiles, tile = ctx.tiles, ctx.tile
        dy = grads[0].contiguous()
        hidden, d_gate, d_up = situ_backward(gate, up, product(dy, w2.mT, tiles, tile), ctx.betas)
        dz = product(d_gate, w1.mT, tiles, tile) + product(d_up, w3.mT, tiles, tile)
        weights = outer(d_gate, z, counts), outer(dy, hidden, counts), outer(d_up, z, counts)
        return dz, *weights, None, None, None


def expert_mlp(
    z: Float[Tensor, "m L"],
    w1: Float[Tensor, "E F L"],
    w2: Float[Tensor, "E L F"],
    w3: Float[Tensor, "E F L"],
    counts: Int[Tensor, " E"],
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
) -> Float[Tensor, "m L"]:
    """w2 SiTU(w1 z, w3 z) for rows sorted by expert; beta None for both is SwiGLU."""
    check(z, counts, w1=w1, w2=w2, w3=w3)
    if z.shape[0] == 0:
        return z + 0 * (w1.sum() + w2.sum() + w3.sum())
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (z, w1, w2, w3))
    result: Tensor = _Experts.apply(z, w1, w2, w3, counts, (beta, linear_beta), keep)
    return result
