"""Rows sorted by expert, dealt out to programs: the device decides which expert a program works for, the host does not.

Expert e owns counts[e] rows. A tile is a run of at most `height` rows of one expert; there are ceil(counts[e] / height)
of them, a number that only the device knows. The host launches the most there can be,

    sum_e ceil(c_e / height)  <=  rows // height + min(E, rows),

and spare programs leave at once. So nothing is copied to the host, and a captured graph stays valid for other counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What one program computes: rows x columns of the result, `inner` terms of the sum at a time."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class RowTiles:
    """expert: whose tile it is, E for a spare one; start: its first row; ends: one past the last row of each expert."""

    expert: Int[Tensor, " n"]
    start: Int[Tensor, " n"]
    ends: Int[Tensor, " E"]


def row_tiles(counts: Int[Tensor, " E"], rows: int, height: int) -> RowTiles:
    """The tiles of `rows` rows, sorted by expert."""
    experts = counts.shape[0]
    counts = counts.to(torch.int64)
    ends = counts.cumsum(0)
    tiles = (counts + height - 1) // height
    last = tiles.cumsum(0)
    tile = torch.arange(rows // height + min(experts, rows), device=counts.device)
    expert = torch.searchsorted(last, tile, right=True)
    owner = expert.clamp(max=experts - 1)
    start = (ends - counts)[owner] + (tile - (last - tiles)[owner]) * height
    return RowTiles(expert, start, ends)


def power_of_two(n: int, least: int, most: int) -> int:
    """The smallest power of two that is at least n, kept between two others."""
    return max(least, min(most, 1 << max(n - 1, 0).bit_length()))


def choose(rows: int, experts: int, columns: int, inner: int, element_size: int, widest: int = 128) -> Tile:
    """A tile as high as the mean expert has rows, and within the 96 KiB of shared memory that most GPUs have."""
    height = power_of_two(rows // max(experts, 1), 16, widest)
    width = power_of_two(columns, 16, widest)
    depth = power_of_two(inner, 16, 128 // element_size)
    return Tile(height, width, depth, warps=8 if height * width > 64 * 128 else 4)
