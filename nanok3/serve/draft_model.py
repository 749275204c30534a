"""A trained draft beside the model it guesses for (posttrain/draft.py): its rows lie in the model's own pages.

    row t of the draft    from token t and the model's feature of token t - 1; it says token t + 1
    after a piece         the features of its tokens are kept; their rows are computed when a guess is wanted, or when
                          a multiple of 8 tokens has been read
    a proposal            the rows that are owed and that of the last token, of all sequences in one call; then one row
                          a guess and sequence, a call each, which go on with the draft's own h

The draft has no KDA layer, so all it remembers of a token is one latent row, and that lies in a page as one MLA layer
more. So it is shared, evicted, brought back and freed together with the model's. Rows of guesses are overwritten by
true ones. Ours: what goes on from the prefix cache begins with a feature of zero, as a document does, because the
feature of the token before is in no page; and up to seven rows that nobody waited for may be missing from a span whose
length is no multiple of 8. Both move guesses, never answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
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

ROWS = 16
"""Of a sequence in a native call; more at once go through torch."""
SEQUENCES = 32
"""In a native call."""
OWED = 8
"""Rows are computed at the latest when as many tokens have been read."""


@dataclass
class _Reading:
    """Of one sequence: how many rows are in its pages, and the features of the tokens from rows - 1 on."""

    rows: int
    features: list[Float[Tensor, "n 3 D"]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first token without a feature."""
        return self.rows - 1 + sum(map(len, self.features))


@dataclass(frozen=True)
class _Piece:
    """Rows to be computed: from `start` on, one for each of the ids, with the features before them, fused or h."""

    sequence: Sequence
    start: int
    ids: list[int]
    features: Float[Tensor, "rows D"]


class DraftModel:
    """A drafter (speculative.Drafter) over the last MLA layer of an arena."""

    def __init__(self, model: K3, draft: Draft, arena: Arena) -> None:
        self.model, self.draft, self.arena = model, draft, arena
        self.place = arena.shapes.mla_layers - 1
        table = model.model.embed_tokens.weight
        self._inputs = torch.zeros(ROWS * SEQUENCES, model.cfg.hidden_size, dtype=table.dtype)
        native = NativeDecoder.of(self._as_model())
        self._native = None if isinstance(native, str) else native
        if self._native is not None:
            pools = [arena.latents[:, self.place]]
            self._memories = [self._native.memory([], [], pools) for _ in range(SEQUENCES)]
        self._nothing = torch.zeros(1, 3, model.cfg.hidden_size, dtype=table.dtype, device=arena.bytes.device)
        self._readings: WeakKeyDictionary[Sequence, _Reading] = WeakKeyDictionary()
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
        if piece.draft:
            self._tried[piece.sequence] = features
        else:
            self._extend(piece.sequence, piece.start, features)

    def keep(self, sequence: Sequence, done: int, count: int) -> None:
        """Of the last piece on trial `count` tokens more were right, after `done` that were kept before."""
        self._extend(sequence, sequence.computed, self._tried[sequence][done : done + count])

    def _extend(self, sequence: Sequence, start: int, features: Float[Tensor, "rows 3 D"]) -> None:
        """The model has read tokens from `start` on."""
        reading = self._reading(sequence, start)
        reading.features.append(features)
        if reading.end // OWED > start // OWED:
            piece = self._owed(sequence, reading, reading.end)
            if piece is not None:
                self._compute([piece])

    def _reading(self, sequence: Sequence, start: int) -> _Reading:
        """That of a sequence of which the tokens before `start` are read; anew where others were."""
        reading = self._readings.get(sequence)
        if reading is None or reading.end != start:
            self._readings[sequence] = reading = _Reading(start, [self._nothing])
        return reading

    def _owed(self, sequence: Sequence, reading: _Reading, end: int) -> _Piece | None:
        """The rows before `end` that are not computed yet, which count as computed from now on."""
        start, count = reading.rows, end - reading.rows
        if count < 1:
            return None
        known = torch.cat(reading.features)
        reading.rows, reading.features = end, [known[count:]]
        fused = self.draft.fuse(known[:count].to(self.draft.fusion.weight.dtype))
        return _Piece(sequence, start, sequence.ids[start:end], fused)

    # ---------------------------------------------------------------- rows

    def _compute(self, pieces: list[_Piece]) -> tuple[Float[Tensor, "n vocab"], Float[Tensor, "n D"]]:
        """Put rows into the pages: the logits and h of each piece's last."""
        if self._native is None or any(len(piece.ids) > ROWS for piece in pieces):
            found = [self._alone(piece) for piece in pieces]
        else:
            found = [self._together(some) for some in _parts(pieces, SEQUENCES)]
        return torch.cat([logits for logits, _ in found]), torch.cat([h for _, h in found])

    def _joined(self, ids: list[int], features: Float[Tensor, "rows D"]) -> Float[Tensor, "1 rows D"]:
        """What the block reads."""
        embedded = self.model.model.embed_tokens(torch.tensor([ids], device=features.device))
        return self.draft.layer.combine(embedded, features[None].to(embedded.dtype))

    def _together(self, pieces: list[_Piece]) -> tuple[Tensor, Tensor]:
        """In one native call."""
        assert self._native is not None
        counts = [len(piece.ids) for piece in pieces]
        features = pieces[0].features if len(pieces) == 1 else torch.cat([piece.features for piece in pieces])
        rows = len(features)
        self._inputs[:rows] = self._joined([token for piece in pieces for token in piece.ids], features)[0]
        memories = self._memories[: len(pieces)]
        for memory, piece in zip(memories, pieces):
            memory.pages, memory.tokens = piece.sequence.pages, piece.start
        step = self._native.step(torch.arange(rows), memories, counts, tapped=[1])
        assert step.taps is not None
        last = [end - 1 for end in itertools.accumulate(counts)]
        return step.logits, step.taps[last, 0]

    def _alone(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """Through torch."""
        sequence, start, shapes = piece.sequence, piece.start, self.arena.shapes
        cache = LatentCache(1, shapes.latent, shapes.latent_dtype, self.arena.bytes.device)
        if start:
            cache.append(self.arena.rows(sequence.pages, self.place, start)[None])
        depth = self.draft.layer.run(self._joined(piece.ids, piece.features), cache=cache)
        self.arena.write_rows(sequence.pages, self.place, start, cache.latents[0, start:])
        logits = self.model.lm_head(self.draft.layer.normed(depth[:, -1:]))[0]
        return at_least_float32(logits).cpu(), depth[0, -1:]

    # ---------------------------------------------------------------- guesses

    @torch.no_grad()
    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        found: list[list[Guess]] = [[] for _ in wishes]
        going, pieces = [], []
        for place, wish in enumerate(wishes):
            sequence = wish.sequence
            piece = self._owed(sequence, self._reading(sequence, sequence.computed), sequence.computed + 1)
            if piece is not None:
                going.append(place)
                pieces.append(piece)
        while going:
            logits, h = self._compute(pieces)
            usable = (~logits.isnan().any(1)).tolist()  # no guess is a reason to end an answer
            likeliest = logits.argmax(1).tolist()
            rows, going, pieces = list(enumerate(going)), [], []
            for row, place in rows:
                if not usable[row]:
                    continue
                wish = wishes[place]
                guess = self._drawn(logits[row], wish) if wish.drawn else Guess(likeliest[row])
                found[place].append(guess)
                if len(found[place]) < wish.count:
                    start = wish.sequence.computed + len(found[place])
                    going.append(place)
                    pieces.append(_Piece(wish.sequence, start, [guess.id], h[row : row + 1]))
        return found

    @staticmethod
    def _drawn(logits: Float[Tensor, " vocab"], wish: Wish) -> Guess:
        q = truncate(tempered(logits.double(), wish.params.temperature).exp(), wish.params)
        return Guess(draw(q, wish.generator), q)


def _parts(pieces: list[_Piece], size: int) -> Iterator[list[_Piece]]:
    for begin in range(0, len(pieces), size):
        yield pieces[begin : begin + size]
