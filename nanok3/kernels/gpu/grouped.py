"""Grouped products: rows sorted by expert times that expert's matrix, in one launch and in any size.

    product     y_r = W[e(r)] x_r         and with W transposed, which is its gradient for x
    outer       D[e] = sum_{r of e} dy_r x_r^T          its gradient for W; zero for an expert without rows

torch's F.grouped_mm does the same where rows are a multiple of 16 bytes; these take every width, float32 in full
precision, and let `situ_experts` and `packed` build on them. Sums are float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanok3.kernels.gpu.language import jit, tl
from nanok3.kernels.gpu.tiles import RowTiles, Tile, choose, row_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def product_kernel(
    x, w, y, tile_expert, tile_start, ends, E, O, I, w_expert, w_out, w_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of y. x (m, I) and y (m, O) are contiguous, w goes by its three strides."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert >= E:
        return
    row = tl.load(tile_start + tl.program_id(0)) + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mine = row < tl.load(ends + expert)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, I, INNER):
        i = first + tl.arange(0, INNER)
        a = tl.load(x + row[:, None] * I + i[None, :], mask=mine[:, None] & (i < I)[None, :], other=0.0)
        b_at = w + expert * w_expert + column[None, :].to(tl.int64) * w_out + i[:, None].to(tl.int64) * w_in
        b = tl.load(b_at, mask=(column < O)[None, :] & (i < I)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = y + row[:, None] * O + column[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=mine[:, None] & (column < O)[None, :])


@jit
def outer_kernel(
    dy, x, d, ends, counts, O, I,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of D[e] (O, I): the rows of expert e are the inner dimension."""
    expert = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(ends + expert)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(end - tl.load(counts + expert), end, INNER):
        row = first + tl.arange(0, INNER)
        mine = row < end
        a = tl.load(dy + row[None, :] * O + o[:, None], mask=mine[None, :] & (o < O)[:, None], other=0.0)
        b = tl.load(x + row[:, None] * I + i[None, :], mask=mine[:, None] & (i < I)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = d + expert * O * I + o[:, None] * I + i[None, :]
    tl.store(place, total.to(d.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])


def precision() -> str:
    """How float32 is multiplied: as the user told torch."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


def product(x: Float[Tensor, "m I"], w: Float[Tensor, "E O I"], tiles: RowTiles, tile: Tile) -> Float[Tensor, "m O"]:
    """Rows of expert e times w[e]^T. w may be any view, so `w.mT` gives the transposed product."""
    x, (E, O, I) = x.contiguous(), w.shape
    y = x.new_empty(x.shape[0], O)
    grid = (tiles.expert.shape[0], -(-O // tile.columns))
    product_kernel[grid](
        x, w, y, tiles.expert, tiles.start, tiles.ends, E, O, I, *w.stride(),
        tile.rows, tile.columns, tile.inner, precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def outer(dy: Float[Tensor, "m O"], x: Float[Tensor, "m I"], counts: Int[Tensor, " E"]) -> Float[Tensor, "E O I"]:
    """sum over the rows of each expert of dy x^T, in x's dtype."""
    (O, I), E = (dy.shape[1], x.shape[1]), counts.shape[0]
    d = x.new_empty(E, O, I)
    tile = choose(O, 1, I, max(x.shape[0] // E, 1), x.element_size())
    grid = (-(-O // tile.rows), -(-I // tile.columns), E)
    outer_kernel[grid](
        dy.contiguous(), x.contiguous(), d, counts.cumsum(0), counts, O, I,
        tile.rows, tile.columns, tile.inner, precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return d


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        E, O, I = weight.shape
        tile = choose(x.shape[0], E, O, I, x.element_size())
        tiles = row_tiles(counts, x.shape[0], tile.rows)
        ctx.save_for_backward(x, weight, counts)
        ctx.tiles, ctx.tile = tiles, tile
        return product(x, weight, tiles, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, counts = ctx.saved_tensors
        dx = product(grads[0], weight.mT, ctx.tiles, ctx.tile) if ctx.needs_input_grad[0] else None
        return dx, outer(grads[0], x, counts) if ctx.needs_input_grad[1] else None, None


def grouped_linear(
    x: Float[Tensor, "m I"], weight: Float[Tensor, "E O I"], counts: Int[Tensor, " E"]
) -> Float[Tensor, "m O"]:
    """Rows of expert e times weight[e]^T; rows are sorted by expert, counts[e] of them for each."""
    check(x, counts, weight=weight)
    if x.shape[0] == 0:
        return x.new_zeros(0, weight.shape[1]) + 0 * (x.sum() + weight.sum())
    result: Tensor = _GroupedLinear.apply(x, weight, counts)
    return result


def check(x: Tensor, counts: Tensor, **weights: Tensor) -> None:
    """ValueError on what the kernels would read wrongly."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; these kernels take float32, bfloat16 and float16")
    for name, weight in weights.items():
        if weight.dtype != x.dtype:
            raise ValueError(f"{name} is {weight.dtype}, x is {x.dtype}; they must agree")
        if weight.shape[0] != counts.shape[0]:
            raise ValueError(f"{name} holds {weight.shape[0]} experts, counts {counts.shape[0]}; they must agree")
