"""The second home of prefixes: what the pool has no room for leaves it as a unit and comes back as a unit.

    leaving   a node with a snapshot is evicted  ->  latents of its spans, back to the last boundary that can be had
                                                     otherwise, and the state of all KDA groups at its own end
    restore   before a prompt is looked up       ->  the deepest unit of its keys, and those it builds on, into fresh
                                                     pages; registered as if it had been read just now

Report 5.4's third rule: a prefix leaves and returns whole. Pages are registered when all of them are written, and a
unit that is missing, cut off, damaged or another model's makes the look-up shorter, never wrong. Units are kept as rows
of tokens and states of layers, whatever the size of a page, so a server may start again with another one.

`save` and `load` do the same for one conversation and a file of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nanok3.data.files import write_file
from nanok3.serve.page_pool import Kind, PageLayout
from nanok3.serve.prefix_cache import Node, PrefixCache
from nanok3.serve.unit_store import Unit, UnitStore, chain, from_bytes, to_bytes

if TYPE_CHECKING:
    from nanok3.serve.arena import Arena
    from nanok3.serve.engine import Engine


@dataclass(frozen=True)
class Tier:
    """How much may be kept outside of the pool, and whose it is."""

    model: str
    """What the memory depends on besides tokens: `fingerprint(model)`."""
    memory: int = 1 << 30
    """Bytes in memory."""
    folder: Path | None = None
    """Where units go that have no room in memory; None for nowhere."""
    disk: int = 16 << 30
    """Bytes in the folder."""

    def __post_init__(self) -> None:
        for name in ("memory", "disk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 bytes")


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all weights with their names, types and shapes, and of the configuration."""
    digest = hashlib.sha256(repr(getattr(model, "cfg", None)).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@runtime_checkable
class PageBytes(Protocol):
    """The bytes behind page numbers, as rows of tokens and states of layers. `pages` are those of a sequence from its
    beginning on."""

    row_bytes: int
    """Of one token."""
    state_bytes: int
    """Of one sequence, all groups."""

    def copy(self, source: int, target: int) -> None: ...
    def rows(self, pages: Sequence[int], start: int, end: int) -> bytes: ...
    def write_rows(self, pages: Sequence[int], start: int, rows: bytes) -> None: ...
    def state(self, pages: Sequence[int]) -> bytes: ...
    def write_state(self, pages: Sequence[int], state: bytes) -> None: ...


class ArenaBytes:
    """The pages of a model's arena."""

    def __init__(self, arena: Arena) -> None:
        shapes, self._arena = arena.shapes, arena
        self.row_bytes = shapes.mla_layers * shapes.latent * shapes.latent_dtype.itemsize
        layer = shapes.state_size * shapes.state_dtype.itemsize
        self._groups = [layers * layer for layers in arena.layout.groups]
        self.state_bytes = sum(self._groups)

    def copy(self, source: int, target: int) -> None:
        self._arena.copy(source, target)

    def rows(self, pages: Sequence[int], start: int, end: int) -> bytes:
        """Token by token, all MLA layers."""
        size = self._arena.layout.page_tokens
        first = start // size
        wanted = list(pages[first : -(-end // size)])
        rows = self._arena.latents[wanted].transpose(1, 2).flatten(0, 1)[start - first * size : end - first * size]
        return _to_bytes(rows)

    def write_rows(self, pages: Sequence[int], start: int, rows: bytes) -> None:
        shapes, size = self._arena.shapes, self._arena.layout.page_tokens
        count = len(rows) // self.row_bytes
        numbers = torch.frombuffer(bytearray(rows), dtype=shapes.latent_dtype)
        numbers = numbers.view(count, shapes.mla_layers, shapes.latent).transpose(0, 1)
        done = 0
        while done < count:
            page, slot = divmod(start + done, size)
            piece = numbers[:, done : done + size - slot]
            self._arena.latents[pages[page], :, slot : slot + piece.shape[1]] = piece.to(self._arena.latents.device)
            done += piece.shape[1]

    def state(self, pages: Sequence[int]) -> bytes:
        return b"".join(_to_bytes(self._arena.bytes[page, :size]) for page, size in zip(pages, self._groups))

    def write_state(self, pages: Sequence[int], state: bytes) -> None:
        given = torch.frombuffer(bytearray(state), dtype=torch.uint8).to(self._arena.bytes.device)
        for page, part in zip(pages, given.split(self._groups), strict=True):
            self._arena.bytes[page, : len(part)] = part


def _to_bytes(numbers: Tensor) -> bytes:
    return numbers.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


class Offload:
    """Moves units between a prefix cache and a store. For the engine's thread."""

    def __init__(self, tier: Tier, cache: PrefixCache, layout: PageLayout, memory: PageBytes) -> None:
        self.cache, self.layout, self.memory = cache, layout, memory
        numbers = f"{cache.span} {memory.row_bytes} {memory.state_bytes}"
        self.identity = hashlib.sha256(f"{tier.model} {numbers}".encode()).hexdigest()
        self.store = UnitStore(self.identity, tier.memory, tier.folder, tier.disk)
        self.restored = self.restored_tokens = 0
        """Prefixes that came back, and their tokens."""
        self.on_restore: Callable[[float], None] = lambda seconds: None
        """Told how long it took to bring back one of them."""
        self._closed = False
        cache.leaving = self.leaving

    def leaving(self, node: Node) -> None:
        """A node with a snapshot is about to be evicted."""
        if self.store.place(node.key) is not None:
            self.store.touch(node.key)
        elif node.snapshot is not None:
            self.store.put(self._unit(node))

    def _unit(self, node: Node, whole: bool = False) -> Unit:
        """The node's memory from the last boundary on that can be had otherwise; from the beginning if `whole`."""
        assert node.snapshot is not None
        path = node.path
        start = len(path) - 1
        while start and (whole or not self._stays(path[start - 1])):
            start -= 1
        rows = self.memory.rows(self.cache.pages_of(node), start * self.cache.span, node.depth * self.cache.span)
        keys = tuple(span.key for span in path[start:])
        return Unit(start, path[start - 1].key if start else b"", keys, rows, self.memory.state(node.snapshot))

    def _stays(self, node: Node) -> bool:
        return node.snapshot is not None or self.store.place(node.key) is not None

    def close(self, keep: bool) -> None:
        """Nothing more will be read. keep: what is still cached goes to the folder, for the next server."""
        if not self._closed and keep and self.store.folder is not None:
            while self.cache.make_room(self.cache.pool.free + 1):
                self.store.settle()
        self._closed = True
        self.store.close()

    # ---------------------------------------------------------------- coming back

    def restore(self, keys: Sequence[bytes], tokens: int, spare: int = 0) -> None:
        """Bring back what makes the look-up of a prompt of so many tokens longer, if the prompt can be admitted then.
        spare: pages that have to stay free besides those of the prompt and its state."""
        keys = keys[: max(0, tokens - 1) // self.cache.span]
        if not len(self.store):
            return
        parent = self._deepest(keys)
        shared = parent.depth * self.cache.span // self.layout.page_tokens
        # Fresh pages for what returns, the page it ends in once more, and the prompt's own state beside the snapshot.
        wanted = self.layout.latent_pages(tokens) - shared + 1 + 2 * len(self.layout.groups) + spare
        began = time.perf_counter()
        self.cache.pin(parent)
        while (way := self._way(keys, parent)) and self.cache.make_room(wanted):
            units = [unit for key in way if (unit := self.store.get(key)) is not None]
            if len(units) == len(way):  # otherwise one was damaged, or made room itself: look again
                self._register(parent, units)
                self.on_restore(time.perf_counter() - began)
                break
        self.cache.unpin(parent)

    def _deepest(self, keys: Sequence[bytes]) -> Node:
        """The last node of the tree on the way of these keys."""
        node = self.cache.root
        for key in keys:
            if key not in node.children:
                break
            node = node.children[key]
        return node

    def _way(self, keys: Sequence[bytes], parent: Node) -> list[bytes]:
        """The units, first to last, that lead from a node of the tree to the last boundary they can; behind its
        boundaries that have their state, or none."""
        resumable = max((node.depth for node in parent.path if node.snapshot is not None), default=0)
        for end in range(len(keys), resumable, -1):
            if self.store.place(keys[end - 1]) is None:
                continue
            # Where the tree has the latents, the unit's state is enough.
            way = [keys[end - 1]] if end <= parent.depth else chain(self.store, keys, end, parent.depth)
            if way is not None:
                self.store.touch(keys[end - 1])
                return way
        return []

    def _fits(self, unit: Unit) -> bool:
        spans = len(unit.keys) * self.cache.span
        return (len(unit.latents), len(unit.state)) == (spans * self.memory.row_bytes, self.memory.state_bytes)

    def _register(self, parent: Node, units: list[Unit]) -> None:
        """Write units into fresh pages behind a node of the tree, then make them known. There is room."""
        assert all(self._fits(unit) for unit in units)
        end = units[-1].end
        state = self.cache.pool.take(Kind.SNAPSHOT, len(self.layout.groups))
        self.memory.write_state(state, units[-1].state)
        node = parent.path[end - 1] if end <= parent.depth else self._register_latents(parent, units)
        self.cache.keep_snapshot(node, state, turn_end=True)
        self.restored += 1
        self.restored_tokens += max(0, end - parent.depth) * self.cache.span

    def _register_latents(self, parent: Node, units: list[Unit]) -> Node:
        span, size = self.cache.span, self.layout.page_tokens
        begin, end = parent.depth * span, units[-1].end * span
        before = begin // size
        fresh = self.cache.pool.take(Kind.LATENT, self.layout.latent_pages(end) - before)
        if begin % size:  # the first page has rows of the span before, too
            self.memory.copy(parent.pages[-1], fresh[0])
        pages = [-1] * before + fresh
        for unit in units:
            here = max(unit.start * span, begin)
            self.memory.write_rows(pages, here, unit.latents[(here - unit.start * span) * self.memory.row_bytes :])
        node = parent
        for key in [key for unit in units for key in unit.keys][parent.depth - units[0].start :]:
            node = self.cache.insert(node, key, self.cache.span_pages(node.depth + 1, pages))
        self.cache.pool.release(fresh)  # the cache holds them now
        return node

    # ---------------------------------------------------------------- one conversation

    def unit_of(self, keys: Sequence[bytes], ids: Sequence[int]) -> Unit:
        """The longest prefix of these tokens that is cached, whole. ValueError if there is none."""
        self.restore(keys, len(ids) + 1)
        node = self.cache.match(keys, len(ids) + 1).node
        if node.snapshot is None:
            raise ValueError(f"ids: of {len(ids)} tokens nothing is cached; allowed: a conversation served here lately")
        return replace(self._unit(node, whole=True), ids=tuple(ids))

    def take_in(self, unit: Unit, keys: Sequence[bytes]) -> None:
        """Register a saved conversation. ValueError if it does not belong to these keys, or has no room."""
        if tuple(keys[: unit.end]) != unit.keys or not self._fits(unit):
            raise ValueError("the file's tokens and keys differ; allowed: the weights and the salt it was saved with")
        parent = self._deepest(unit.keys)
        self.cache.pin(parent)
        need = self.layout.latent_pages(unit.end * self.cache.span) + len(self.layout.groups)
        room = self.cache.make_room(need)
        if room:
            self._register(parent, [unit])
        self.cache.unpin(parent)
        if not room:
            raise ValueError(f"the conversation needs {need} pages, and the pool has no room for them")


def save_conversation(engine: Engine, ids: Sequence[int], path: Path, salt: tuple[bytes, ...] = ()) -> int:
    """Write what is cached of a conversation into a file; how many of its tokens that are. salt: that of its jobs.
    ValueError if it is none."""
    offload, keys = _offload(engine), engine.keys(ids, salt).keys
    unit = engine.ask(lambda: offload.unit_of(keys, ids))
    write_file(Path(path), to_bytes(unit, offload.identity))
    return unit.end * offload.cache.span


def load_conversation(engine: Engine, path: Path, salt: tuple[bytes, ...] = ()) -> list[int]:
    """Read such a file into the cache, under the salt it was saved with; the conversation's tokens. ValueError for a
    damaged file, or one of another model, other weights or another layout. The file is trusted as weights are."""
    offload = _offload(engine)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    unit = from_bytes(data, offload.identity, str(path))
    keys = engine.keys(unit.ids, salt).keys
    engine.ask(lambda: offload.take_in(unit, keys))
    return list(unit.ids)


def _offload(engine: Engine) -> Offload:
    if engine.offload is None:
        raise ValueError("the engine has no tier for prefixes; allowed: Settings(tier=...)")
    return engine.offload
