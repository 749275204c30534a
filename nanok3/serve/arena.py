"""The bytes behind the page numbers: one tensor, cut into pages, each seen as latents or as states.

    latent page i    (MLA layers, P, L + R) in the model's compute type
    state page i     for each KDA layer of a group: conv (3, W - 1, H K), then recurrent (H, K, V), at least float32

A page is a row of bytes; the views below give the numbers in it. Nothing is moved when a page changes its purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.config import K3Config
from nanok3.model.cache import KDAState
from nanok3.serve.page_pool import PageLayout


@dataclass(frozen=True)
class Shapes:
    """What a model keeps of a token and of a sequence."""

    mla_layers: int
    latent: int
    latent_dtype: torch.dtype
    kda_layers: int
    conv: tuple[int, int, int]
    recurrent: tuple[int, int, int]
    state_dtype: torch.dtype

    @classmethod
    def of(cls, cfg: K3Config, compute: torch.dtype) -> Shapes:
        heads, dim = cfg.kda_num_heads, cfg.kda_head_dim
        wide = torch.float64 if compute == torch.float64 else torch.float32
        return cls(
            cfg.kinds.count("mla"),
            cfg.latent_cache_size,
            compute,
            cfg.kinds.count("kda"),
            (3, cfg.short_conv_kernel_size - 1, heads * dim),
            (heads, dim, dim),
            wide,
        )

    @property
    def conv_size(self) -> int:
        return self.conv[0] * self.conv[1] * self.conv[2]

    @property
    def state_size(self) -> int:
        """Numbers of one KDA layer of one sequence."""
        return self.conv_size + self.recurrent[0] * self.recurrent[1] * self.recurrent[2]

    def layout(self, page_tokens: int | None = None) -> PageLayout:
        state_bytes = self.state_size * self.state_dtype.itemsize
        return PageLayout.of(
            self.mla_layers, self.latent * self.latent_dtype.itemsize, self.kda_layers, state_bytes, page_tokens
        )


class Arena:
    """Memory for `pages` pages."""

    def __init__(self, shapes: Shapes, layout: PageLayout, pages: int, device: torch.device | str = "cpu") -> None:
        self.shapes, self.layout = shapes, layout
        # A page begins at a multiple of 64 bytes, so that either type can be read from it.
        stride = -(-layout.page_bytes // 64) * 64
        self.bytes = torch.zeros(pages, stride, dtype=torch.uint8, device=device)
        self._rows: Any = self.bytes.numpy() if self.bytes.device.type == "cpu" else self.bytes
        """The same bytes: on a CPU a page is moved ten times as fast by numpy, which looks for no kernel."""
        latents = self.bytes.view(shapes.latent_dtype)
        used = shapes.mla_layers * layout.page_tokens * shapes.latent
        self.latents = latents[:, :used].unflatten(1, (shapes.mla_layers, layout.page_tokens, shapes.latent))
        """(pages, MLA layers, P, L + R)"""
        self._numbers = self.bytes.view(shapes.state_dtype)

    def copy(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]

    def clear(self, page: int) -> None:
        self._rows[page] = 0

    def poison(self, page: int) -> None:
        """Fill a page with NaN, whatever it is read as."""
        self.bytes[page].fill_(0xFF)

    def states(self, pages: list[int]) -> list[KDAState]:
        """The KDA layers' states that a sequence's state pages hold, as views with a batch of one."""
        found = []
        for page, layers in zip(pages, self.layout.groups, strict=True):
            for start in range(0, layers * self.shapes.state_size, self.shapes.state_size):
                middle, end = start + self.shapes.conv_size, start + self.shapes.state_size
                conv = self._numbers[page, start:middle].view(1, *self.shapes.conv)
                found.append(KDAState(conv, self._numbers[page, middle:end].view(1, *self.shapes.recurrent)))
        return found

    def rows(self, pages: list[int], layer: int, tokens: int) -> Tensor:
        """(tokens, L + R): the first rows of the `layer`-th MLA layer of a sequence, copied out of its pages."""
        wanted = pages[: self.layout.latent_pages(tokens)]
        return self.latents[wanted, layer].flatten(0, 1)[:tokens]

    def write_rows(self, pages: list[int], layer: int, start: int, rows: Tensor) -> None:
        """Put rows of the tokens from `start` on into a sequence's pages."""
        size, position = self.layout.page_tokens, start
        for part in rows.split(_pieces(start, len(rows), size)):
            self.latents[pages[position // size], layer, position % size : position % size + len(part)] = part
            position += len(part)


def _pieces(start: int, count: int, size: int) -> list[int]:
    """`count` tokens from `start` on, cut where pages of `size` begin."""
    cuts = [start, *range((start // size + 1) * size, start + count, size), start + count]
    return [end - begin for begin, end in zip(cuts, cuts[1:])] if count else []
