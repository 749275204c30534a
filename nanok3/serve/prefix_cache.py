"""The hybrid prefix cache: which tokens were read before, and from where reading can go on (report 5.4).

A prompt is cut into spans of `span` tokens. Every span has a key that names all that came before it:

    key_0 = SHA-256(salt)        key_i = SHA-256(key_{i-1}, tokens of span i, pictures in span i)

and the keys form a tree: requests with the same beginning share its nodes. A node holds the latent pages that its span
lies in and, at some spans, a snapshot: one page a KDA group, the state after exactly the tokens of its key. Latents are
wanted for every token before a boundary, a state only at the boundary itself, so a hit is

    m = spans that match from the left, at least one token of the prompt left over
    hit = the last of these m that has a snapshot

Snapshots are dear (one weighs as much as thousands of tokens of latents), so they are sparse: where a turn ended,
where two requests parted, and on a coarse grid. Evicting one of an inner node leaves its latents, which deeper
snapshots need; a leaf without a snapshot serves nobody and goes first. A snapshot's groups live and die together.

Numbers only: pages are counted here (page_pool.py), their bytes lie elsewhere. A node is registered after its pages
were written, so what matches is complete.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanok3.serve.page_pool import Kind, OutOfPages, PagePool


@dataclass(frozen=True)
class Picture:
    """Placeholder tokens [start, end) of a prompt that stand for the picture with this digest."""

    start: int
    end: int
    digest: bytes


class SpanKeys:
    """The keys of a growing sequence of tokens: `push` more, read `keys`."""

    def __init__(self, span: int, salt: Sequence[bytes] = (), pictures: Sequence[Picture] = ()) -> None:
        """salt: what else the memory depends on (weight version, adapter, a tenant's own word)."""
        self.span, self.pictures = span, tuple(pictures)
        self.keys: list[bytes] = []
        self._last = _digest(b"nanok3 prefix", *salt)
        self._open = array("q")

    def push(self, ids: Iterable[int]) -> None:
        self._open.extend(ids)
        while len(self._open) >= self.span:
            tokens, self._open = self._open[: self.span], self._open[self.span :]
            start = len(self.keys) * self.span
            self._last = _digest(self._last, tokens.tobytes(), *self._seen(start, start + self.span))
            self.keys.append(self._last)

    def _seen(self, start: int, end: int) -> Iterator[bytes]:
        """Each picture that reaches into the span, and which part of it."""
        for picture in self.pictures:
            if picture.start < end and start < picture.end:
                yield picture.digest + repr(start - picture.start).encode()


def _digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts and their lengths, so that no two lists of parts give the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@dataclass(eq=False)
class Node:
    """A span that was read after the spans of its parents."""

    key: bytes
    parent: Node | None
    depth: int
    """Spans from the beginning up to and with this one; 0 is the root."""
    pages: tuple[int, ...] = ()
    """Latent pages that the span's tokens lie in, in order; the first may begin with tokens of the span before."""
    snapshot: tuple[int, ...] | None = None
    turn_end: bool = False
    children: dict[bytes, Node] = field(default_factory=dict)
    pins: int = 0
    removed: bool = False
    touched: int = 0
    snapshot_touched: int = 0
    version: int = 0

    @property
    def path(self) -> list[Node]:
        """From the first span to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Match(NamedTuple):
    """What a look-up found. `tokens` can be taken over from `node`; `latent_tokens` had matching latents."""

    node: Node
    tokens: int
    latent_tokens: int
    prompt_tokens: int
    limit: str
    """Why it is not longer: 'prompt' (all but the last span's rest), 'latents' (nothing registered further on) or
    'snapshot' (latents go on, but no KDA state was kept there)."""


class Taken(NamedTuple):
    """Pages that a request now holds: its latent pages for the tokens of the hit, and the snapshot to copy from."""

    pages: list[int]
    snapshot: tuple[int, ...]


class PrefixCache:
    """The tree of spans over a page pool.

    span: tokens between two boundaries. page_tokens: tokens in a latent page; the two need not divide each other.
    groups: pages of one snapshot (0 for a model without KDA layers, where every boundary can be resumed).
    leaving: told each node with a snapshot before eviction takes it, while its pages still hold their bytes.
    """

    def __init__(
        self,
        pool: PagePool,
        span: int,
        page_tokens: int,
        groups: int,
        leaving: Callable[[Node], None] | None = None,
    ) -> None:
        if span < 1:
            raise ValueError(f"span is {span}; it must be at least 1 token")
        self.pool, self.span, self.page_tokens, self.groups = pool, span, page_tokens, groups
        self.leaving = leaving or (lambda node: None)
        self._clock = 0
        self._candidates: list[tuple[int, int, int, int, Node]] = []
        self.root = Node(b"", None, 0)
        self.spans = self.snapshots = 0

    # ---------------------------------------------------------------- look-up

    def match(self, keys: Sequence[bytes], prompt_tokens: int) -> Match:
        """The longest usable prefix of a prompt with these keys. Changes nothing."""
        usable = max(0, prompt_tokens - 1) // self.span
        node, best = self.root, self.root
        for key in keys[:usable]:
            child = node.children.get(key)
            if child is None:
                break
            node = child
            if self._resumable(node):
                best = node
        limit = "snapshot" if best is not node else "prompt" if node.depth == usable else "latents"
        return Match(best, best.depth * self.span, node.depth * self.span, prompt_tokens, limit)

    def _resumable(self, node: Node) -> bool:
        return self.groups == 0 or node.snapshot is not None

    def take(self, match: Match) -> Taken:
        """Make the caller a holder of all pages of the hit, before anything is allocated that could evict them, and
        pin the node; `unpin` it when the request ends."""
        pages = self.pages_of(match.node)
        snapshot = match.node.snapshot or ()
        self.pool.retain(pages)
        self.pool.retain(snapshot)
        self.pin(match.node)
        self._touch(match.node)
        return Taken(pages, snapshot)

    def pages_of(self, node: Node) -> list[int]:
        """The latent pages of all tokens up to the node's end: where two spans share a page, the later span's, which
        holds the tokens of both."""
        pages: list[int] = []
        for span in node.path:
            first = (span.depth - 1) * self.span // self.page_tokens
            pages[first:] = span.pages
        return pages

    # ---------------------------------------------------------------- what was read

    def insert(self, parent: Node, key: bytes, pages: Sequence[int], pin: bool = False) -> Node:
        """Register the span after `parent`, whose tokens lie in `pages`; the cache becomes a holder of them. A span
        that is there already keeps its own pages. `pages` are those of the span alone. pin: for the caller."""
        assert not parent.removed, "its parent has left the cache"
        node = parent.children.get(key)
        if node is None:
            node = Node(key, parent, parent.depth + 1, tuple(pages))
            assert len(node.pages) == self._pages_in_span(node.depth), "a span needs all its pages"
            self.pool.retain(node.pages)
            parent.children[key] = node
            self.spans += 1
            self._note(parent)
        node.pins += pin
        self._touch(node)
        return node

    def _pages_in_span(self, depth: int) -> int:
        first, end = (depth - 1) * self.span, depth * self.span
        return (end - 1) // self.page_tokens - first // self.page_tokens + 1

    def span_pages(self, depth: int, pages: Sequence[int]) -> Sequence[int]:
        """Of a sequence's pages those that its `depth`-th span lies in."""
        first = (depth - 1) * self.span // self.page_tokens
        return pages[first : first + self._pages_in_span(depth)]

    def keep_snapshot(self, node: Node, pages: Sequence[int], turn_end: bool) -> None:
        """Register the KDA state after the node's tokens; the caller's hold on `pages` passes to the cache. One that is
        there already stays."""
        assert len(pages) == self.groups, f"{len(pages)} pages for {self.groups} groups: a partial state is none"
        node.turn_end = node.turn_end or turn_end
        if node.snapshot is not None or node.removed:
            self.pool.release(pages)
        else:
            node.snapshot = tuple(pages)
            self.snapshots += 1
        self._clock += 1
        node.snapshot_touched = self._clock
        self._note(node)

    def drop_snapshot(self, node: Node) -> None:
        """Give up the state at a boundary, all groups at once; the latents stay."""
        if node.snapshot is not None:
            self.pool.release(node.snapshot)
            node.snapshot, node.turn_end = None, False
            self.snapshots -= 1
            if not node.removed:
                self._note(node)

    def pin(self, node: Node) -> None:
        """Keep the node and everything before it while a request is using it."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0, "unpinned more often than pinned"
        self._note(node)

    # ---------------------------------------------------------------- making room

    def make_room(self, pages: int) -> bool:
        """Evict what was used longest ago until that many pages are free; False if that is not to be had."""
        while self.pool.free < pages:
            victim = self._next_victim()
            if victim is None:
                return False
            if victim.children:
                self.leaving(victim)
                self.drop_snapshot(victim)
            else:
                self._remove(victim)
        return True

    def allocate(self, kind: Kind, pages: int) -> list[int]:
        """Pages from the pool, evicting as needed; OutOfPages when running requests hold the rest."""
        if not self.make_room(pages):
            raise OutOfPages(f"{pages} pages wanted, {self.pool.free} free and nothing left to evict")
        return self.pool.take(kind, pages)

    def clear(self) -> None:
        """Forget everything: new weights, or an administrator's wish. Running requests keep the pages they hold."""
        for node in list(self.nodes()):
            self.pool.release(node.pages)
            if node.snapshot is not None:
                self.pool.release(node.snapshot)
            node.removed, node.snapshot, node.children = True, None, {}
        self.root.removed = True
        self.root = Node(b"", None, 0)
        self._candidates = []
        self.spans = self.snapshots = 0

    def nodes(self) -> Iterator[Node]:
        """All spans, each after its parent."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def _remove(self, node: Node) -> None:
        assert not node.children and not node.pins and node.parent is not None
        if node.snapshot is not None:
            self.leaving(node)
        node.removed = True
        self.drop_snapshot(node)
        self.pool.release(node.pages)
        del node.parent.children[node.key]
        self.spans -= 1
        self._note(node.parent)

    def _touch(self, node: Node) -> None:
        """Used now, and with it everything it builds on; of the snapshots only its own."""
        self._clock += 1
        node.snapshot_touched = self._clock
        step: Node | None = node
        while step is not None:
            step.touched = self._clock
            step = step.parent
        self._note(node)

    def _standing(self, node: Node) -> tuple[int, int] | None:
        """(class, age) of a candidate for eviction, the lowest goes first; None for what must stay."""
        if node.parent is None or node.removed or (node.pins and not node.children):
            return None
        if not node.children:
            return (1 if self._resumable(node) else 0), node.touched
        return None if node.snapshot is None or node.pins else (1, node.snapshot_touched)

    def _note(self, node: Node) -> None:
        """The node changed: earlier entries among the candidates no longer count. One that is pinned has none that do,
        and is noted when that ends."""
        if node.pins or node.parent is None:
            return
        node.version += 1
        standing = self._standing(node)
        if standing is not None:
            heapq.heappush(self._candidates, (*standing, id(node), node.version, node))
        if len(self._candidates) > 64 + 4 * self.spans:
            current = [entry for entry in self._candidates if entry[4].version == entry[3] and not entry[4].removed]
            self._candidates = current
            heapq.heapify(self._candidates)

    def _next_victim(self) -> Node | None:
        while self._candidates:
            _, age, _, version, node = heapq.heappop(self._candidates)
            standing = self._standing(node)
            if version != node.version or standing is None:
                continue
            if standing[1] != age:  # a child was used since: it is younger than it looked
                self._note(node)
                continue
            return node
        return None

    def check(self) -> None:
        """Assert that the tree and the pool agree; for tests."""
        nodes = list(self.nodes())
        assert len(nodes) == self.spans
        assert sum(node.snapshot is not None for node in nodes) == self.snapshots
        for node in nodes:
            assert node.parent is not None and node.parent.children[node.key] is node and not node.removed
            assert node.depth == node.parent.depth + 1
            assert len(node.pages) == self._pages_in_span(node.depth)
            assert node.snapshot is None or len(node.snapshot) == self.groups
            assert all(self.pool.holders(page) > 0 for page in (*node.pages, *(node.snapshot or ())))
        self.pool.check()
