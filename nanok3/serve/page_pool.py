"""One pool of pages of the same size for both kinds of memory (report 5.4): counted, shared, never written by two.

    latent page      P tokens of every MLA layer: (MLA layers, P, latent | shared key)
    snapshot page    the KDA states of one group of layers after some number of tokens: (layers of the group, state)

A page size serves both: P is the smallest multiple of 16 tokens whose latents take at least the bytes of one KDA
layer's state, and KDA layers are put into groups of as many as fit. With equal pages any freed page serves any
purpose, and no share of the memory has to be reserved for either kind.

Here are numbers only: who holds which page. The bytes lie in an arena elsewhere (runner). A page is held by whoever
counted it (`take`, `retain`); the last `release` frees it. Only the request that took a page writes it, and never rows
that a registered span covers: who goes on from the middle of a shared page copies it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

GRAIN = 16
"""Tokens a latent page is a multiple of."""


class Kind(Enum):
    LATENT = "latent"
    SNAPSHOT = "snapshot"

    __hash__ = object.__hash__
    """That of an Enum takes a call in Python each time."""


@dataclass(frozen=True)
class PageLayout:
    """How a page is cut. latent_bytes: one token in one MLA layer; state_bytes: one sequence in one KDA layer,
    convolution taps included."""

    page_tokens: int
    page_bytes: int
    groups: tuple[int, ...]
    """KDA layers in each group, in order; a snapshot is one page a group."""

    @classmethod
    def of(
        cls, mla_layers: int, latent_bytes: int, kda_layers: int, state_bytes: int, page_tokens: int | None = None
    ) -> PageLayout:
        """The layout for a model's numbers; ValueError when `page_tokens` is too small to hold one layer's state."""
        token_bytes = mla_layers * latent_bytes
        needed = state_bytes if kda_layers else 0
        if page_tokens is None:
            page_tokens = max(GRAIN, _round_up(-(-needed // token_bytes), GRAIN)) if token_bytes else GRAIN
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}; it must be at least 1")
        page_bytes = page_tokens * token_bytes if token_bytes else needed
        if page_bytes < needed:
            least = -(-needed // token_bytes)
            raise ValueError(
                f"page_tokens is {page_tokens}; a page must hold the state of one KDA layer, so at least {least}"
            )
        together = page_bytes // state_bytes if kda_layers else 1
        starts = range(0, kda_layers, together)
        return cls(page_tokens, page_bytes, tuple(min(together, kda_layers - start) for start in starts))

    def latent_pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence lie in."""
        return -(-tokens // self.page_tokens)


def _round_up(n: int, grain: int) -> int:
    return -(-n // grain) * grain


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for. Nothing was taken."""


class PagePool:
    """`pages` pages and their holders. `freed` is told every page that becomes free (tests poison it there)."""

    def __init__(self, pages: int, freed: Callable[[int], None] | None = None) -> None:
        if pages < 1:
            raise ValueError(f"the pool has {pages} pages; it needs at least 1")
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._kind: list[Kind | None] = [None] * pages
        self._used = dict.fromkeys(Kind, 0)
        self._freed = freed

    @property
    def pages(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return len(self._free)

    def used(self, kind: Kind) -> int:
        """Pages of that kind that somebody holds."""
        return self._used[kind]

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, kind: Kind, count: int) -> list[int]:
        """`count` pages with one holder each, or OutOfPages and none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.pages} are free")
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        for page in taken:
            self._holders[page], self._kind[page] = 1, kind
        self._used[kind] += count
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder of each."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each; a page without holders is free again."""
        holders = self._holders
        for page in pages:
            left = holders[page] - 1
            assert left >= 0, f"page {page} was released more often than taken"
            holders[page] = left
            if not left:
                kind = self._kind[page]
                assert kind is not None
                self._kind[page] = None
                self._used[kind] -= 1
                self._free.append(page)
                if self._freed is not None:
                    self._freed(page)

    def check(self) -> None:
        """Assert what must hold at any time: a page is free or held, never both, and the counts add up."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all((page in free) == (held == 0) for page, held in enumerate(self._holders))
        assert all((self._kind[page] is None) == (page in free) for page in range(self.pages))
        assert len(free) + sum(self._used.values()) == self.pages
