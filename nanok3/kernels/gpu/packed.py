"""Products with packed MXFP4 weights: the nibbles are decoded between memory and the multiplication (W4A16).

A byte holds two codes, the even column in its low half; 32 columns share a scale byte s that stands for 2^(s - 127):

    code = sign e1 e0 m     value = (m or (2 + m) 2^(e - 1)) / 2     y_r = sum_c W[e(r), :, c] x_r[c]

Even and odd columns are multiplied apart, so that a byte's two values never have to be laid side by side: the sum runs
over half the columns, twice. A weight costs 0.53 bytes of traffic and is exact in bfloat16 and float32. Experts
nobody chose are not read. For inference: there is no backward. Reference: model/mxfp4.py.
"""

from __future__ import annotations

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from nanok3.kernels.gpu.grouped import check, precision
from nanok3.kernels.gpu.language import jit, tl
from nanok3.kernels.gpu.situ_experts import situ
from nanok3.kernels.gpu.tiles import RowTiles, Tile, choose, row_tiles

BLOCK = 32


@jit
def decoded(code):
    """Codes 0..15 as float32."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    halves = tl.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    value = halves.to(tl.float32) * 0.5
    return tl.where(code & 8 != 0, -value, value)


@jit
def power(scale):
    """2^(scale - 127) from its bits; a byte of 0 is the one denormal."""
    bits = scale.to(tl.int32)
    return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)


@jit
def add_block(total, even, odd, packed, scale, weight_row, column_inside, j, I, PRECISION: tl.constexpr):
    """total plus the product of one step: `even` and `odd` are (ROWS, INNER) columns of x, j counts bytes."""
    inside = column_inside[None, :] & (j < I // 2)[:, None]
    byte = tl.load(packed + weight_row * (I // 2) + j[:, None], mask=inside, other=0).to(tl.int32)
    factor = power(tl.load(scale + weight_row * (I // 32) + (j // 16)[:, None], mask=inside, other=127))
    low = (decoded(byte & 15) * factor).to(even.dtype)
    high = (decoded(byte >> 4) * factor).to(even.dtype)
    total = tl.dot(even, low, total, input_precision=PRECISION)
    return tl.dot(odd, high, total, input_precision=PRECISION)


@jit
def product_kernel(
    x, packed, scale, y, tile_expert, tile_start, ends, E, O, I,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of y (m, O); everything is contiguous, I a multiple of 32."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert >= E:
        return
    row = tl.load(tile_start + tl.program_id(0)) + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mine = row < tl.load(ends + expert)
    weight_row = expert * O + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, I // 2, INNER):
        j = first + tl.arange(0, INNER)
        at, here = x + row[:, None] * I + 2 * j[None, :], mine[:, None] & (j < I // 2)[None, :]
        even = tl.load(at, mask=here, other=0.0)
        odd = tl.load(at + 1, mask=here, other=0.0)
        total = add_block(total, even, odd, packed, scale, weight_row, column < O, j, I, PRECISION)
    place = y + row[:, None] * O + column[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=mine[:, None] & (column < O)[None, :])


@jit
def up_kernel(
    z, packed1, scale1, packed3, scale3, hidden, tile_expert, tile_start, ends, E, O, I,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of SiTU(w1 z, w3 z), as in `situ_experts`."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert >= E:
        return
    row = tl.load(tile_start + tl.program_id(0)) + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mine = row < tl.load(ends + expert)
    weight_row = expert * O + column[None, :]
    g = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    u = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, I // 2, INNER):
        j = first + tl.arange(0, INNER)
        at, here = z + row[:, None] * I + 2 * j[None, :], mine[:, None] & (j < I // 2)[None, :]
        even = tl.load(at, mask=here, other=0.0)
        odd = tl.load(at + 1, mask=here, other=0.0)
        g = add_block(g, even, odd, packed1, scale1, weight_row, column < O, j, I, PRECISION)
        u = add_block(u, even, odd, packed3, scale3, weight_row, column < O, j, I, PRECISION)
    place = hidden + row[:, None] * O + column[None, :]
    value = situ(g, u, BETA, LINEAR_BETA).to(hidden.dtype.element_ty)
    tl.store(place, value, mask=mine[:, None] & (column < O)[None, :])


# ---------------------------------------------------------------------- their torch face


def packed_linear(
    x: Float[Tensor, "m I"],
    packed: UInt8[Tensor, "E O half"],
    scale: UInt8[Tensor, "E O blocks"],
    counts: Int[Tensor, " E"],
) -> Float[Tensor, "m O"]:
    """Rows of expert e times its decoded matrix; rows are sorted by expert. One expert with counts [m] is a plain
    product."""
    _check(x, counts, packed, scale)
    y = x.new_empty(x.shape[0], packed.shape[1])
    if x.shape[0]:
        tile = _tile(x, packed)
        _product(x.contiguous(), packed, scale, y, row_tiles(counts, x.shape[0], tile.rows), tile)
    return y


def packed_expert_mlp(
    z: Float[Tensor, "m L"],
    w1: tuple[UInt8[Tensor, "E F half"], UInt8[Tensor, "E F blocks"]],
    w2: tuple[UInt8[Tensor, "E L half2"], UInt8[Tensor, "E L blocks2"]],
    w3: tuple[UInt8[Tensor, "E F half"], UInt8[Tensor, "E F blocks"]],
    counts: Int[Tensor, " E"],
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
) -> Float[Tensor, "m L"]:
    """`situ_experts.expert_mlp` on (packed, scale) pairs."""
    for inputs, (packed, scale) in ((z, w1), (z, w3)):
        _check(inputs, counts, packed, scale)
    z, (E, F) = z.contiguous(), w1[0].shape[:2]
    hidden, y = z.new_empty(z.shape[0], F), z.new_empty(z.shape[0], w2[0].shape[1])
    _check(hidden, counts, *w2)
    if z.shape[0] == 0:
        return y
    tile = _tile(z, w1[0])
    tiles = row_tiles(counts, z.shape[0], tile.rows)
    grid = (tiles.expert.shape[0], -(-F // tile.columns))
    up_kernel[grid](
        z, *_whole(*w1), *_whole(*w3), hidden, tiles.expert, tiles.start, tiles.ends, E, F, z.shape[1],
        beta, linear_beta, *_sizes(tile), precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _product(hidden, *w2, y, tiles, tile)
    return y


def _product(x: Tensor, packed: Tensor, scale: Tensor, y: Tensor, tiles: RowTiles, tile: Tile) -> None:
    E, O = packed.shape[:2]
    product_kernel[(tiles.expert.shape[0], -(-O // tile.columns))](
        x, *_whole(packed, scale), y, tiles.expert, tiles.start, tiles.ends, E, O, x.shape[1],
        *_sizes(tile), precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tile(x: Tensor, packed: Tensor) -> Tile:
    return choose(x.shape[0], packed.shape[0], packed.shape[1], packed.shape[2], x.element_size(), widest=64)


def _sizes(tile: Tile) -> tuple[int, int, int]:
    return tile.rows, tile.columns, tile.inner


def _whole(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return packed.contiguous(), scale.contiguous()


def _check(x: Tensor, counts: Tensor, packed: Tensor, scale: Tensor) -> None:
    check(x, counts)
    E, O, half = packed.shape
    if half * 2 != x.shape[1] or half * 2 % BLOCK:
        raise ValueError(
            f"packed has {half} bytes a row for {x.shape[1]} columns; it needs half as many, and whole 32s"
        )
    if tuple(scale.shape) != (E, O, half * 2 // BLOCK) or counts.shape[0] != E:
        wanted = (counts.shape[0], O, half * 2 // BLOCK)
        raise ValueError(f"scale has shape {tuple(scale.shape)} and packed {E} experts; allowed is {wanted}")
