"""What a sequence leaves behind while it is read: the two kinds of memory that decoding carries from token to token.

    KDAState      fixed size: the last W-1 inputs of the short convolutions, and the matrix S (H, K, V) per sequence
    LatentCache   grows by 576 values a token: the normalised latent and the shared key part, never expanded
    ModelState    one of them per layer, and the number of tokens read
    PackedState   those of several sequences, for a packed row with a document of each

All sequences of a batch advance together; those of a packed row each by its own document. A forward call replaces the
tensors here; it never writes into a tensor that a clone or a snapshot could share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.config import K3Config


@dataclass(frozen=True)
class Projected:
    """What a KDA layer makes of its input before tokens meet: the convolutions' inputs, the gate's low-rank input, and
    the logits of beta."""

    inputs: tuple[Float[Tensor, "B T HK"], Float[Tensor, "B T HK"], Float[Tensor, "B T HK"]]
    gate: Float[Tensor, "B T R"]
    beta: Float[Tensor, "B T H"]


@dataclass
class KDAState:
    """conv (B, 3, W-1, H*K): last inputs of the q, k and v convolutions, oldest first; recurrent (B, H, K, V).
    Both at least float32: S is a sum over the whole past."""

    conv: Float[Tensor, "B 3 W HK"]
    recurrent: Float[Tensor, "B H K V"]
    tape: list[Projected] | None = None
    """Where each call leaves what it projected, for a replay (kda_replay.py)."""

    @property
    def layout(self) -> tuple[object, ...]:
        """What must agree with the model: kind, shapes without the batch, dtypes."""
        conv, recurrent = self.conv, self.recurrent
        return "kda", tuple(conv.shape[1:]), tuple(recurrent.shape[1:]), conv.dtype, recurrent.dtype

    def clone(self) -> KDAState:
        return KDAState(self.conv.clone(), self.recurrent.clone())

    def mark(self) -> Callable[[], None]:
        """A function that brings this moment back; no copy, because the tensors are replaced, never written into."""
        conv, recurrent = self.conv, self.recurrent

        def rollback() -> None:
            self.conv, self.recurrent = conv, recurrent

        return rollback

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + self.recurrent.nbytes


class LatentCache:
    """Rows of (latent | shared key) per sequence, in a buffer that doubles, so that appending a token costs O(1)."""

    def __init__(self, batch: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(batch, 0, width, dtype=dtype, device=device)
        self.tokens = 0

    @property
    def latents(self) -> Float[Tensor, "B T L"]:
        return self._buffer[:, : self.tokens]

    @property
    def layout(self) -> tuple[object, ...]:
        """What must agree with the model: kind, width, dtype."""
        return "mla", self._buffer.shape[2], self._buffer.dtype

    @property
    def nbytes(self) -> int:
        return self.latents.nbytes

    def append(self, rows: Float[Tensor, "B T L"]) -> Float[Tensor, "B T2 L"]:
        """Add the rows of new tokens and return all rows. Under autograd the rows are concatenated instead of written
        into the buffer, so that gradients reach them."""
        end = self.tokens + rows.shape[1]
        if torch.is_grad_enabled() and (rows.requires_grad or self._buffer.requires_grad):
            self._buffer = torch.cat((self.latents, rows.to(self._buffer.dtype)), dim=1)
        else:
            self._reserve(end)
            self._buffer[:, self.tokens : end] = rows
        self.tokens = end
        return self.latents

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._buffer.shape[1] and not self._buffer.requires_grad:
            return
        size = max(tokens, 2 * self._buffer.shape[1], 64)
        grown = self._buffer.new_empty(self._buffer.shape[0], size, self._buffer.shape[2])
        grown[:, : self.tokens] = self.latents.detach()
        self._buffer = grown

    def mark(self) -> Callable[[], None]:
        """A function that brings this moment back; no copy, because rows up to `tokens` are never written again."""
        buffer, tokens = self._buffer, self.tokens

        def rollback() -> None:
            self._buffer, self.tokens = buffer, tokens

        return rollback

    def clone(self) -> LatentCache:
        copy = LatentCache(0, self._buffer.shape[2], self._buffer.dtype, self._buffer.device)
        copy._buffer, copy.tokens = self.latents.clone(), self.tokens
        return copy


class PackedLatents:
    """The rows of several sequences, each with a cache of its own."""

    def __init__(self, each: list[LatentCache]) -> None:
        self.each = each

    @property
    def layout(self) -> tuple[object, ...]:
        """Of the first that differs, if one does."""
        layouts = [cache.layout for cache in self.each]
        return next((layout for layout in layouts if layout != layouts[0]), layouts[0])

    def mark(self) -> Callable[[], None]:
        """A function that brings this moment back."""
        marks = [cache.mark() for cache in self.each]

        def rollback() -> None:
            for back in marks:
                back()

        return rollback


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _State:
    """Memory by layer, as a forward call moves it on."""

    layers: Sequence[KDAState | LatentCache | PackedLatents]
    tokens: int

    def check(self, cfg: K3Config, dtype: torch.dtype) -> None:
        """ValueError unless this state belongs to a model of `cfg` that computes in `dtype`."""
        if len(self.layers) != cfg.num_hidden_layers:
            raise ValueError(f"the state has {len(self.layers)} layers, the model {cfg.num_hidden_layers}")
        wide, heads, dim = _wide(dtype), cfg.kda_num_heads, cfg.kda_head_dim
        conv = (3, cfg.short_conv_kernel_size - 1, heads * dim)
        fixed = ("kda", conv, (heads, dim, dim), wide, wide)
        growing = ("mla", cfg.latent_cache_size, dtype)
        for l, (layer, kind) in enumerate(zip(self.layers, cfg.kinds)):
            wanted = growing if kind == "mla" else fixed
            if layer.layout != wanted:
                raise ValueError(f"layer {l} of the state holds {layer.layout}, the model needs {wanted}")

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """A `with` block that advances this state wholly or, when it raises, not at all."""
        tokens, marks = self.tokens, [layer.mark() for layer in self.layers]
        try:
            yield
        except BaseException:
            self.tokens = tokens
            for rollback in marks:
                rollback()
            raise


class ModelState(_State):
    """The state of a batch of sequences after `tokens` tokens each.

    Contract: `forward` advances it in place and returns it, and leaves it as it was if it fails; `clone()` is
    independent of the original; `snapshot()` is read-only and may be restored any number of times.
    """

    def __init__(self, layers: list[KDAState | LatentCache], tokens: int = 0) -> None:
        self.layers: list[KDAState | LatentCache] = layers
        self.tokens = tokens

    @classmethod
    def empty(cls, cfg: K3Config, batch_size: int, dtype: torch.dtype, device: torch.device) -> ModelState:
        """Zero states for `batch_size` sequences; `dtype` is the model's compute dtype."""
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        wide = _wide(dtype)
        heads, dim, taps = cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size - 1

        def layer(kind: str) -> KDAState | LatentCache:
            if kind == "mla":
                return LatentCache(batch_size, cfg.latent_cache_size, dtype, device)
            conv = torch.zeros(batch_size, 3, taps, heads * dim, dtype=wide, device=device)
            return KDAState(conv, torch.zeros(batch_size, heads, dim, dim, dtype=wide, device=device))

        return cls([layer(kind) for kind in cfg.kinds])

    @property
    def batch_size(self) -> int:
        first = self.layers[0]
        return first.recurrent.shape[0] if isinstance(first, KDAState) else first.latents.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def clone(self) -> ModelState:
        """An independent copy: advancing one never changes the other."""
        return ModelState([layer.clone() for layer in self.layers], self.tokens)

    def snapshot(self) -> Snapshot:
        """A read-only copy of this moment; `snapshot().restore()` gives a fresh state to continue from."""
        return Snapshot(self.clone())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of everything the state holds, layer by layer."""
        for l, layer in enumerate(self.layers):
            if isinstance(layer, KDAState):
                yield f"layers.{l}.conv", layer.conv
                yield f"layers.{l}.recurrent", layer.recurrent
            else:
                yield f"layers.{l}.latents", layer.latents


class PackedState(_State):
    """The states of several sequences, whatever each has read, as one for documents of a packed row.

    packed = PackedState(states)            each has a batch of one
    model.hidden_states(ids, cu_seqlens=bounds, state=packed)
    packed.unpack()                         now `states` have read their documents

    KDA memories are copied side by side, and back; latents are appended where they are.
    """

    def __init__(self, states: Sequence[ModelState]) -> None:
        if not states or any(state.batch_size != 1 for state in states):
            raise ValueError(
                f"states of {[state.batch_size for state in states]} sequences; at least one, each of 1, can be packed"
            )
        self.states = states
        self.layers = [_side_by_side(layers) for layers in zip(*(state.layers for state in states), strict=True)]
        self.tokens = 0
        """Read since, by all together."""

    @property
    def batch_size(self) -> int:
        return len(self.states)

    def unpack(self) -> None:
        """Give every sequence its part."""
        for l, layer in enumerate(self.layers):
            if isinstance(layer, KDAState):
                for n, state in enumerate(self.states):
                    state.layers[l] = KDAState(layer.conv[n : n + 1], layer.recurrent[n : n + 1])


def _side_by_side(layers: Sequence[KDAState | LatentCache]) -> KDAState | PackedLatents:
    latents = [layer for layer in layers if isinstance(layer, LatentCache)]
    if latents:
        return PackedLatents(latents)
    kda = [layer for layer in layers if isinstance(layer, KDAState)]
    return KDAState(torch.cat([layer.conv for layer in kda]), torch.cat([layer.recurrent for layer in kda]))


class Snapshot:
    """A frozen ModelState: it can be restored, not advanced."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    @property
    def tokens(self) -> int:
        return self._state.tokens

    @property
    def nbytes(self) -> int:
        return self._state.nbytes

    def restore(self) -> ModelState:
        return self._state.clone()
