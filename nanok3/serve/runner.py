"""What the scheduler decided, done by the model: pieces of sequences go in, logits come out.

Two ways of the same numbers. Pieces of a few tokens (decoding, the ends of prompts) go together, row by row, through
the native step, which reads pages where they lie. Longer pieces go through the model as the documents of one packed
row, so that each matrix is read once for all of them: KDA states and latents are copied out of the sequences' pages,
and back. Where the native step does not apply (another device, float64, no compiler) everything goes the second way.
A piece with a part of a picture has a row to itself.

    native     a token's numbers are the same bits, whoever else is read
    packed     equal to float32's rounding: a product of more rows may add up in another order

A piece with a draft behind it is read on trial: its latents lie where they would, but the KDA state stays as it was,
and what would move it on is kept (model/kda_replay.py) until `keep` says how many of the tokens were right.

A sequence that fails or gives NaN harms no other: logits are looked at sequence by sequence, and when a packed row
fails, its pieces are read again one by one.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.model.basics import at_least_float32
from nanok3.model.cache import KDAState, LatentCache, ModelState, PackedState, Projected
from nanok3.model.decoder import K3
from nanok3.model.kda import KDA
from nanok3.model.kda_replay import replay
from nanok3.model.mtp import Draft, tapped_layers, taps
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.arena import Arena, Shapes
from nanok3.serve.draft_model import DraftModel
from nanok3.serve.pictures import FEATURE_BYTES, eyes_of
from nanok3.serve.scheduler import Work
from nanok3.serve.sequence import Sequence

if TYPE_CHECKING:
    from nanok3.model.native_decode import SequenceMemory

log = logging.getLogger("nanok3")

TOGETHER = 16
"""Tokens of a piece that still goes row by row; more are faster as one matrix."""


@dataclass
class _Trial:
    """What a piece with a draft has left: the native step's tape, or each KDA layer's."""

    native: Float[Tensor, "layers rows width"] | None = None
    projected: list[list[Projected]] | None = None
    kept: int = 0


class Runner:
    """One model and the memory for its sequences: `memory` bytes in pages of `page_tokens` tokens (None: the smallest
    that hold a KDA layer's state). ValueError where that is not even one sequence. feature_bytes: what is kept of
    pictures that were looked at. draft: a trained one, which reads along; `drafter` guesses with it."""

    def __init__(
        self,
        model: K3,
        memory: int,
        page_tokens: int | None = None,
        feature_bytes: int = FEATURE_BYTES,
        draft: Draft | None = None,
    ) -> None:
        shapes = Shapes.of(model.cfg, model.compute_dtype or model.model.embed_tokens.weight.dtype)
        if draft is not None:
            shapes = replace(shapes, mla_layers=shapes.mla_layers + 1)
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
        self._trials: WeakKeyDictionary[Sequence, _Trial] = WeakKeyDictionary()
        self._tape = torch.empty(0, 0, 0)
        self.arena = Arena(shapes, self.layout, self.pages, model.lm_head.weight.device)
        self.drafter = None if draft is None else DraftModel(model, draft, self.arena)
        self._tapped = () if draft is None else tapped_layers(model.cfg)
        self.vocab_size, self.context = model.cfg.vocab_size, model.cfg.max_position_embeddings

    @torch.no_grad()
    def read(self, work: list[Work], all_logits: frozenset[str] = frozenset()) -> dict[str, Tensor | Exception]:
        """Read each piece. By sequence id: the logits (rows, vocab) after its last token where nothing remains to be
        read, after every token for the ids in `all_logits`, and after the last and each token of its draft where it has
        one; or the exception that ended it."""
        results: dict[str, Tensor | Exception] = {}
        together = [piece for piece in work if self._is_short(piece) and piece.sequence.id not in all_logits]
        if together:
            results.update(self._read_together(together))
        done = {piece.sequence.id for piece in together}
        rest = [piece for piece in work if piece.sequence.id not in done]
        packed = [piece for piece in rest if not piece.draft and not self._shows_picture(piece)]
        if len(packed) > 1:
            try:
                results.update(self._read_packed(packed, all_logits))
                done |= {piece.sequence.id for piece in packed}
            except Exception as error:  # one's own: nothing was written, and alone it shows whose
                log.warning("%d pieces are read one by one: %s", len(packed), error)
        for piece in rest:
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

    @torch.no_grad()
    def keep(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of its last piece with a draft were right: its state, after `computed` tokens, moves
        on by them."""
        trial = self._trials[sequence]
        start, end = trial.kept, trial.kept + count
        if self.drafter is not None:
            self.drafter.keep(sequence, start, count)
        if trial.native is not None:
            assert self.native is not None
            memory = self._memories[sequence][1]
            memory.tokens = sequence.computed
            memory.record_on(trial.native[:, start:])
            self.native.replay([memory], [count])
        else:
            assert trial.projected is not None
            modules = [layer.self_attn for layer in self.model.model.layers if isinstance(layer.self_attn, KDA)]
            for module, view, tape in zip(modules, self.arena.states(sequence.state), trial.projected, strict=True):
                state = KDAState(view.conv, view.recurrent)
                replay(module, state, tape, start, end)
                view.conv.copy_(state.conv)
                view.recurrent.copy_(state.recurrent)
        trial.kept = end

    def forget(self) -> None:
        """What pictures looked like."""
        if self.eyes is not None:
            self.eyes.forget()

    def _is_short(self, piece: Work) -> bool:
        return self.native is not None and piece.count <= TOGETHER and not self._shows_picture(piece)

    @staticmethod
    def _shows_picture(piece: Work) -> bool:
        return any(one.start < piece.end and piece.start < one.end for one in piece.sequence.pictures)

    def _read_together(self, work: list[Work]) -> dict[str, Tensor]:
        """All pieces in one native call."""
        assert self.native is not None
        ids = [token for piece in work for token in piece.ids]
        counts = [piece.count for piece in work]
        ends = list(itertools.accumulate(counts))
        last = [(piece, end) for piece, end in zip(work, ends) if piece.last]
        wanted = [row for piece, end in last for row in range(end - 1 - len(piece.draft), end)]
        memories = [self._memory(piece) for piece in work]
        self._record([(piece, memory) for piece, memory in zip(work, memories) if piece.draft])
        step = self.native.step(torch.tensor(ids), memories, counts, wanted, tapped=self._tapped)
        if self.drafter is not None and step.taps is not None:
            for piece, features in zip(work, step.taps.split(counts)):
                self.drafter.follow(piece, features)
        rows = step.logits.split([1 + len(piece.draft) for piece, _ in last])
        return {piece.sequence.id: logits for (piece, _), logits in zip(last, rows)}

    def _record(self, tried: list[tuple[Work, SequenceMemory]]) -> None:
        """A tape for each piece with a draft, cut from one that is kept."""
        if not tried:
            return
        assert self.native is not None
        ends = list(itertools.accumulate(piece.count for piece, _ in tried))
        if self._tape.shape[1] < ends[-1]:
            self._tape = self.native.tape(ends[-1])
        for (piece, memory), end in zip(tried, ends):
            tape = self._tape[:, end - piece.count : end]
            memory.record_on(tape)
            self._trials[piece.sequence] = _Trial(native=tape)

    def _memory(self, piece: Work) -> SequenceMemory:
        """The addresses of a sequence's memory. Those of its state are looked up once."""
        assert self.native is not None
        sequence = piece.sequence
        state, memory = self._memories.get(sequence, (None, None))
        if memory is None or state != sequence.state:
            kda = self.arena.states(sequence.state)
            pools = [self.arena.latents[:, layer] for layer in range(self.native.layout.mla_layers)]
            memory = self.native.memory([k.conv[0] for k in kda], [k.recurrent[0] for k in kda], pools)
            self._memories[sequence] = (list(sequence.state), memory)
        memory.pages, memory.tokens = sequence.pages, piece.start
        memory.record_on(None)
        return memory

    def _read_packed(self, work: list[Work], all_logits: frozenset[str]) -> dict[str, Tensor]:
        """All pieces as the documents of one row."""
        device = self.arena.bytes.device
        bounds = [0, *itertools.accumulate(piece.count for piece in work)]
        states = [self._state(piece.sequence, piece.start) for piece in work]
        packed = PackedState(states)
        ids = torch.tensor([[token for piece in work for token in piece.ids]], device=device)
        with taps(self.model, self._tapped) as found:
            final = self.model.hidden_states(ids, cu_seqlens=torch.tensor(bounds, device=device), state=packed)[0]
        packed.unpack()
        self._follow(work, found)
        for piece, state in zip(work, states):
            self._write_back(piece.sequence, piece.start, state)
        rows = {
            piece.sequence.id: part if piece.sequence.id in all_logits else part[-1:]
            for piece, part in zip(work, final.split([piece.count for piece in work]))
            if piece.last or piece.sequence.id in all_logits
        }
        return self._logits(rows)

    def _logits(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of all hidden rows at once."""
        if not rows:
            return {}
        logits = at_least_float32(self.model.lm_head(torch.cat(list(rows.values()))))
        return dict(zip(rows, logits.split([len(part) for part in rows.values()])))

    def _read_alone(self, piece: Work, every: bool) -> Float[Tensor, "rows vocab"] | None:
        """One piece through the model."""
        sequence = piece.sequence
        ids = torch.tensor([piece.ids], device=self.arena.bytes.device)
        state = self._state(sequence, piece.start)
        if piece.draft:
            return self._try_alone(piece, ids, state)
        with taps(self.model, self._tapped) as found:
            if self.eyes is None:
                final = self.model.hidden_states(ids, state=state)
            else:
                final = self.eyes.hidden_states(ids, sequence.pictures, state, sequence)
        self._follow([piece], found)
        self._write_back(sequence, piece.start, state)
        if not every and not piece.last:
            return None
        return at_least_float32(self.model.lm_head(final if every else final[:, -1:])[0])

    def _follow(self, work: list[Work], found: dict[int, Tensor]) -> None:
        """Of pieces that stand one after the other in a row."""
        if self.drafter is not None:
            features = torch.stack([found[layer][0] for layer in self._tapped], dim=1)
            for piece, part in zip(work, features.split([piece.count for piece in work])):
                self.drafter.follow(piece, part)

    def _try_alone(self, piece: Work, ids: Tensor, state: ModelState) -> Float[Tensor, "rows vocab"]:
        """One piece with a draft: its latents are written, its state is not."""
        sequence, tapes = piece.sequence, []
        for layer in state.layers:
            if isinstance(layer, KDAState):
                layer.tape = []
                tapes.append(layer.tape)
        with taps(self.model, self._tapped) as found:
            final = self.model.hidden_states(ids, state=state)
        self._follow([piece], found)
        for mla, cache in enumerate(layer for layer in state.layers if isinstance(layer, LatentCache)):
            self.arena.write_rows(sequence.pages, mla, piece.start, cache.latents[0, piece.start :])
        self._trials[sequence] = _Trial(projected=tapes)
        return at_least_float32(self.model.lm_head(final[:, -1 - len(piece.draft) :])[0])

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
