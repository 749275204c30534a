"""What the scheduler decided, done by the model: pieces of sequences go in, logits come out.

Two ways of the same numbers. Pieces of a few tokens (decoding, the ends of prompts) go together, row by row, through
the native step, which reads pages where they lie. Longer pieces of a prompt go one sequence at a time through the
model: its KDA states are views of the sequence's pages, its latents are copied out of them and the new ones back. Where
the native step does not apply (another device, float64, no compiler) everything goes the second way, and so do pieces
with a part of a picture.

A sequence that fails or gives NaN harms no other: logits are looked at sequence by sequence.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.model.basics import at_least_float32
from nanok3.model.cache import KDAState, LatentCache, ModelState
from nanok3.model.decoder import K3
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.arena import Arena, Shapes
from nanok3.serve.pictures import FEATURE_BYTES, eyes_of
from nanok3.serve.scheduler import Work
from nanok3.serve.sequence import Sequence

if TYPE_CHECKING:
    from nanok3.model.native_decode import SequenceMemory

TOGETHER = 16
"""Tokens of a piece that still goes row by row; more are faster as one matrix."""


class Runner:
    """One model and the memory for its sequences: `memory` bytes in pages of `page_tokens` tokens (None: the smallest
    that hold a KDA layer's state). ValueError where that is not even one sequence. feature_bytes: what is kept of
    pictures that were looked at."""

    def __init__(
        self, model: K3, memory: int, page_tokens: int | None = None, feature_bytes: int = FEATURE_BYTES
    ) -> None:
        shapes = Shapes.of(model.cfg, model.compute_dtype or model.model.embed_tokens.weight.dtype)
        self.layout = shapes.layout(page_tokens)
        self.pages = memory // self.layout.page_bytes
        if self.pages < len(self.layout.groups) + 2:
            least = (len(self.layout.groups) + 2) * self.layout.page_bytes
            raise ValueError(f"the memory for states is {memory} bytes; one short sequence needs {least}")
        self.model, self.eyes = model, eyes_of(model, feature_bytes)
        self.media_pad = None if self.eyes is None else self.eyes.pad
        native = NativeDecoder.of(model)
        self.native = None if isinstance(native, str) else native
        self.without_native = native if isinstance(native, str) else None
        """Why there is no native step, if there is none."""
        self._memories: WeakKeyDictionary[Sequence, tuple[list[int], SequenceMemory]] = WeakKeyDictionary()
        self.arena = Arena(shapes, self.layout, self.pages, model.lm_head.weight.device)
        self.vocab_size, self.context = model.cfg.vocab_size, model.cfg.max_position_embeddings

    @torch.no_grad()
    def read(self, work: list[Work], all_logits: frozenset[str] = frozenset()) -> dict[str, Tensor | Exception]:
        """Read each piece. By sequence id: the logits (rows, vocab) after its last token where nothing remains to be
        read, after every token for the ids in `all_logits`; or the exception that ended it."""
        results: dict[str, Tensor | Exception] = {}
        together = [piece for piece in work if self._is_short(piece) and piece.sequence.id not in all_logits]
        if together:
            results.update(self._read_together(together))
        done = {piece.sequence.id for piece in together}
        for piece in work:
            name = piece.sequence.id
            if name in done:
                continue
            try:
                logits = self._read_alone(piece, name in all_logits)
            except Exception as error:  # its own: the others are read all the same
                results[name] = error
            else:
                results.update({} if logits is None else {name: logits})
        return results

    def forget(self) -> None:
        """What pictures looked like."""
        if self.eyes is not None:
            self.eyes.forget()

    def _is_short(self, piece: Work) -> bool:
        if self.native is None or piece.count > TOGETHER:
            return False
        start, end = piece.start, piece.start + piece.count
        return not any(picture.start < end and start < picture.end for picture in piece.sequence.pictures)

    def _read_together(self, work: list[Work]) -> dict[str, Tensor]:
        """All pieces in one native call."""
        assert self.native is not None
        ids = [token for piece in work for token in piece.sequence.ids[piece.start : piece.start + piece.count]]
        counts = [piece.count for piece in work]
        ends = list(itertools.accumulate(counts))
        last = [(piece.sequence.id, end - 1) for piece, end in zip(work, ends) if piece.last]
        memories = [self._memory(piece) for piece in work]
        step = self.native.step(torch.tensor(ids), memories, counts, [row for _, row in last])
        return {name: logits[None] for (name, _), logits in zip(last, step.logits)}

    def _memory(self, piece: Work) -> SequenceMemory:
        """The addresses of a sequence's memory. Those of its state are looked up once."""
        assert self.native is not None
        sequence = piece.sequence
        state, memory = self._memories.get(sequence, (None, None))
        if memory is None or state != sequence.state:
            kda = self.arena.states(sequence.state)
            pools = [self.arena.latents[:, layer] for layer in range(self.arena.shapes.mla_layers)]
            memory = self.native.memory([k.conv[0] for k in kda], [k.recurrent[0] for k in kda], pools)
            self._memories[sequence] = (list(sequence.state), memory)
        memory.pages, memory.tokens = sequence.pages, piece.start
        return memory

    def _read_alone(self, piece: Work, every: bool) -> Float[Tensor, "rows vocab"] | None:
        """One piece through the model."""
        sequence = piece.sequence
        ids = torch.tensor([sequence.ids[piece.start : piece.start + piece.count]], device=self.arena.bytes.device)
        state = self._state(sequence, piece.start)
        if self.eyes is None:
            final = self.model.hidden_states(ids, state=state)
        else:
            final = self.eyes.hidden_states(ids, sequence.pictures, state, sequence)
        self._write_back(sequence, piece.start, state)
        if not every and not piece.last:
            return None
        return at_least_float32(self.model.lm_head(final if every else final[:, -1:])[0])

    def _state(self, sequence: Sequence, tokens: int) -> ModelState:
        kda, mla = iter(self.arena.states(sequence.state)), 0
        layers: list[KDAState | LatentCache] = []
        for kind in self.model.cfg.kinds:
            if kind == "kda":
                layers.append(next(kda))
                continue
            cache = LatentCache(1, self.arena.shapes.latent, self.arena.shapes.latent_dtype, self.arena.bytes.device)
            if tokens:
                cache.append(self.arena.rows(sequence.pages, mla, tokens)[None])
            layers.append(cache)
            mla += 1
        return ModelState(layers, tokens)

    def _write_back(self, sequence: Sequence, start: int, state: ModelState) -> None:
        """What the model put beside the pages, into them."""
        kept, mla = iter(self.arena.states(sequence.state)), 0
        for layer in state.layers:
            if isinstance(layer, KDAState):
                view = next(kept)
                view.conv.copy_(layer.conv)
                view.recurrent.copy_(layer.recurrent)
            else:
                self.arena.write_rows(sequence.pages, mla, start, layer.latents[0, start:])
                mla += 1
