"""A trained draft beside the model it guesses for (posttrain/draft.py): its rows lie in the model's own pages.

    row t of the draft    from token t and the model's feature of token t - 1; it says token t + 1
    after a piece         rows of its tokens, each with its true feature
    a proposal            row of the last token, then one row a guess, which go on with the draft's own h

The draft has no KDA layer, so all it remembers of a token is one latent row, and that lies in a page as one MLA layer
more. So it is shared, evicted, brought back and freed together with the model's. Rows of guesses are overwritten by
true ones. Ours: what goes on from the prefix cache begins with a feature of zero, as a document does, because the
feature of the token before is in no page. That moves guesses, never answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanok3.model.basics import at_least_float32
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, layer_config
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.arena import Arena
from nanok3.serve.sampler import draw, tempered, truncate
from nanok3.serve.scheduler import Work
from nanok3.serve.sequence import Sequence
from nanok3.serve.speculative import Guess, Wish

if TYPE_CHECKING:
    from nanok3.model.native_decode import SequenceMemory

ROWS = 16
"""Of a native call; more at once go through torch."""


class DraftModel:
    """A drafter (speculative.Drafter) over the last MLA layer of an arena."""

    def __init__(self, model: K3, draft: Draft, arena: Arena) -> None:
        self.model, self.draft, self.arena = model, draft, arena
        self.place = arena.shapes.mla_layers - 1
        self._inputs = torch.zeros(ROWS, model.cfg.hidden_size, dtype=model.model.embed_tokens.weight.dtype)
        native = NativeDecoder.of(self._as_model())
        self._native = None if isinstance(native, str) else native
        self._memory: SequenceMemory | None = None
        if self._native is not None:
            self._memory = self._native.memory([], [], [arena.latents[:, self.place]])
        self._before: WeakKeyDictionary[Sequence, tuple[int, Tensor]] = WeakKeyDictionary()
        self._tried: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()

    def _as_model(self) -> K3:
        """The block as a model of one layer, whose embedding is what the block is to read."""
        with torch.device("meta"):
            whole = K3(layer_config(self.model.cfg))
        layer = self.draft.layer
        whole.model.embed_tokens.weight = nn.Parameter(self._inputs, requires_grad=False)
        whole.model.layers[0] = layer.mtp_block
        whole.model.norm.weight = layer.normed_weight
        whole.lm_head = self.model.lm_head
        return whole.eval()

    # ---------------------------------------------------------------- what the model has read

    def follow(self, piece: Work, features: Float[Tensor, "rows 3 D"]) -> None:
        """The model has read a piece, on trial if it has a draft."""
        fused = self.draft.fuse(features.to(self.draft.fusion.weight.dtype))
        if piece.draft:
            self._tried[piece.sequence] = fused
        else:
            self._extend(piece.sequence, piece.start, fused)

    def keep(self, sequence: Sequence, done: int, count: int) -> None:
        """Of the last piece on trial `count` tokens more were right, after `done` that were kept before."""
        self._extend(sequence, sequence.computed, self._tried[sequence][done : done + count])

    def _extend(self, sequence: Sequence, start: int, fused: Float[Tensor, "rows D"]) -> None:
        """The true rows of tokens that the model has read."""
        before = torch.cat((self._feature(sequence, start)[None].to(fused), fused[:-1]))
        self._rows(sequence, start, sequence.ids[start : start + len(fused)], before)
        self._before[sequence] = start + len(fused), fused[-1]

    def _feature(self, sequence: Sequence, start: int) -> Float[Tensor, " D"]:
        """That of the token before `start`."""
        end, feature = self._before.get(sequence, (-1, None))
        if end == start and feature is not None:
            return feature
        return torch.zeros(self.model.cfg.hidden_size, device=self.arena.bytes.device)

    # ---------------------------------------------------------------- rows

    def _rows(
        self, sequence: Sequence, start: int, ids: list[int], features: Float[Tensor, "rows D"]
    ) -> tuple[Float[Tensor, " vocab"], Float[Tensor, " D"]]:
        """Compute rows from `start` on into the pages: the last one's logits and h."""
        tokens = torch.tensor(ids, device=self.arena.bytes.device)
        embedded = self.model.model.embed_tokens(tokens[None])
        features = features[None].to(embedded.dtype)
        if self._native is not None and self._memory is not None and len(ids) <= ROWS:
            self._inputs[: len(ids)] = self.draft.layer.combine(embedded, features)[0]
            self._memory.pages, self._memory.tokens = sequence.pages, start
            step = self._native.step(torch.arange(len(ids)), [self._memory], [len(ids)], tapped=[1])
            assert step.taps is not None
            return step.logits[0], step.taps[-1, 0]
        cache = LatentCache(1, self.arena.shapes.latent, self.arena.shapes.latent_dtype, self.arena.bytes.device)
        if start:
            cache.append(self.arena.rows(sequence.pages, self.place, start)[None])
        h = self.draft.layer(embedded, features, cache=cache)
        self.arena.write_rows(sequence.pages, self.place, start, cache.latents[0, start:])
        logits = self.model.lm_head(self.draft.layer.normed(h[:, -1:]))[0, 0]
        return at_least_float32(logits), h[0, -1]

    # ---------------------------------------------------------------- guesses

    @torch.no_grad()
    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        return [self._guesses(wish) for wish in wishes]

    def _guesses(self, wish: Wish) -> list[Guess]:
        sequence, found = wish.sequence, []
        token, feature = sequence.ids[-1], self._feature(sequence, sequence.computed)
        for row in range(sequence.computed, sequence.computed + wish.count):
            logits, feature = self._rows(sequence, row, [token], feature[None])
            logits = logits.cpu()
            if bool(logits.isnan().any()):  # no guess is a reason to end an answer
                break
            found.append(self._guess(logits, wish))
            token = found[-1].id
        return found

    @staticmethod
    def _guess(logits: Float[Tensor, " vocab"], wish: Wish) -> Guess:
        if not wish.drawn:
            return Guess(int(logits.argmax()))
        q = truncate(tempered(logits.double(), wish.params.temperature).exp(), wish.params)
        return Guess(draw(q, wish.generator), q)
