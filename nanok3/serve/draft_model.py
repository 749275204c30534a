"""A trained draft beside the model it guesses for (posttrain/draft.py): its rows lie in the model's own pages.

    row t of the draft    from token t and the model's feature of token t - 1; it says token t + 1
    after a piece         the features of its tokens are kept; their rows are computed when a guess is wanted, or when
                          a multiple of 8 tokens has been read
    a proposal            the rows that are owed and that of the last token, of all sequences; then one row a guess and
                          sequence, which go on with the draft's own h: all in one native call where the likeliest
                          are wanted, a call each where guesses are drawn

The draft has no KDA layer, so all it remembers of a token is one latent row, and that lies in a page as one MLA layer
more. So it is shared, evicted, brought back and freed together with the model's. Rows of guesses are overwritten by
true ones. Ours: what goes on from the prefix cache begins with a feature of zero, as a document does, because the
feature of the token before is in no page; and up to seven rows that nobody waited for may be missing from a span whose
length is no multiple of 8. Both move guesses, never answers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanok3.model.basics import at_least_float32
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, layer_config
from nanok3.model.native_decode import NativeDecoder, chain_record
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


class _Span(NamedTuple):
    """Rows to be computed: from `start` on, one for each of the ids."""

    sequence: Sequence
    start: int
    ids: list[int]


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
        self._rows = torch.arange(ROWS * SEQUENCES)
        norms = torch.stack((draft.layer.enorm.weight, draft.layer.hnorm.weight))[:, None]
        self._norms = at_least_float32(norms.detach())
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
            owed = self._owed(sequence, reading, reading.end)
            if owed is not None:
                self._compute([owed[0]], owed[1], say=False)

    def _reading(self, sequence: Sequence, start: int) -> _Reading:
        """That of a sequence of which the tokens before `start` are read; anew where others were."""
        reading = self._readings.get(sequence)
        if reading is None or reading.end != start:
            self._readings[sequence] = reading = _Reading(start, [self._nothing])
        return reading

    def _owed(self, sequence: Sequence, reading: _Reading, end: int) -> tuple[_Span, Float[Tensor, "rows D"]] | None:
        """The rows before `end` that are not computed yet, which count as computed from now on, and the fused features
        before them."""
        start, count = reading.rows, end - reading.rows
        if count < 1:
            return None
        known = torch.cat(reading.features)
        reading.rows, reading.features = end, [known[count:]]
        fused = self.draft.fuse(known[:count].to(self.draft.fusion.weight.dtype))
        return _Span(sequence, start, sequence.ids[start:end]), fused

    # ---------------------------------------------------------------- rows

    def _compute(
        self, spans: list[_Span], features: Float[Tensor, "rows D"], say: bool = True
    ) -> tuple[Float[Tensor, "said vocab"], Float[Tensor, "n D"]]:
        """Put rows into the pages, each with the feature before it: the logits and h of each span's last. Where nothing
        is to be said, the native call leaves out the head, and so there are no logits."""
        counts = [len(span.ids) for span in spans]
        fits = self._native is not None and max(counts) <= ROWS
        if fits and len(spans) <= SEQUENCES:
            return self._together(spans, counts, features, say)
        parts = zip(spans, counts, features.split(counts))
        found = [self._together([s], [n], x, say) if fits else self._alone(s, x) for s, n, x in parts]
        return torch.cat([logits for logits, _ in found]), torch.cat([h for _, h in found])

    def _together(self, spans: list[_Span], counts: list[int], features: Tensor, say: bool) -> tuple[Tensor, Tensor]:
        """In one native call. The block's input is made here in few operations: on small models it takes as long as
        the block."""
        assert self._native is not None
        rows, ids = len(features), torch.tensor([token for span in spans for token in span.ids])
        embedded = F.embedding(ids, self.model.model.embed_tokens.weight)
        x = at_least_float32(torch.stack((embedded, features.to(embedded.dtype))))
        x = x * (x.square().mean(-1, keepdim=True) + self.draft.cfg.rms_norm_eps).rsqrt() * self._norms
        self._inputs[:rows] = self.draft.layer.eh_proj(torch.cat((x[0], x[1]), dim=1).to(embedded.dtype))
        step = self._native.step(self._rows[:rows], self._at(spans), counts, None if say else (), tapped=[1])
        assert step.taps is not None
        h = step.taps[:, 0]
        return step.logits, h if rows == len(spans) else h[[end - 1 for end in itertools.accumulate(counts)]]

    def _alone(self, span: _Span, features: Tensor) -> tuple[Tensor, Tensor]:
        """Through torch."""
        sequence, start, shapes = span.sequence, span.start, self.arena.shapes
        cache = LatentCache(1, shapes.latent, shapes.latent_dtype, self.arena.bytes.device)
        if start:
            cache.append(self.arena.rows(sequence.pages, self.place, start)[None])
        embedded = self.model.model.embed_tokens(torch.tensor([span.ids], device=features.device))
        h = self.draft.layer(embedded, features[None].to(embedded.dtype), cache=cache)
        self.arena.write_rows(sequence.pages, self.place, start, cache.latents[0, start:])
        logits = self.model.lm_head(self.draft.layer.normed(h[:, -1:]))[0]
        return at_least_float32(logits).cpu(), h[0, -1:]

    # ---------------------------------------------------------------- guesses

    @torch.no_grad()
    def propose(self, wishes: list[Wish]) -> list[list[Guess]]:
        found: list[list[Guess]] = [[] for _ in wishes]
        going, spans, before = [], [], []
        for place in sorted(range(len(wishes)), key=lambda i: -wishes[i].count):
            sequence = wishes[place].sequence
            owed = self._owed(sequence, self._reading(sequence, sequence.computed), sequence.computed + 1)
            if owed is not None:
                going.append(place)
                spans.append(owed[0])
                before.append(owed[1])
        features = torch.cat(before) if going else torch.empty(0)
        fits = 0 < len(spans) <= SEQUENCES and max(len(span.ids) for span in spans) <= ROWS
        if self._native is not None and fits and not any(wishes[place].drawn for place in going):
            counts = [wishes[place].count for place in going]
            for place, ids in zip(going, self._chained(spans, features, counts)):
                found[place] = [Guess(token) for token in itertools.takewhile(lambda token: token >= 0, ids)]
            return found
        while going:
            logits, h = self._compute(spans, features)
            rows = self._guessed(logits, going, wishes, found)
            going = [going[row] for row in rows]
            spans = [_next(wishes[place], found[place]) for place in going]
            features = h if len(rows) == len(h) else h[rows]
        return found

    def _chained(self, spans: list[_Span], features: Float[Tensor, "rows D"], counts: list[int]) -> list[list[int]]:
        """The likeliest of all guesses in one native call; counts do not rise."""
        assert self._native is not None
        layer = self.draft.layer
        table = self.model.model.embed_tokens.weight.detach()
        chain = chain_record(table, layer.eh_proj.weight, layer.enorm.weight, layer.hnorm.weight)
        ids = [token for span in spans for token in span.ids]
        memories = self._at(spans)
        rows = [len(span.ids) for span in spans]
        return self._native.guess(chain, features.float().contiguous(), ids, memories, rows, counts)

    def _at(self, spans: list[_Span]) -> list[Any]:
        """The memories of a call, each where its span begins."""
        memories = self._memories[: len(spans)]
        for memory, span in zip(memories, spans):
            memory.pages, memory.tokens = span.sequence.pages, span.start
        return memories

    def _guessed(
        self, logits: Float[Tensor, "n vocab"], going: list[int], wishes: list[Wish], found: list[list[Guess]]
    ) -> list[int]:
        """Put a guess to each of those going, and say which rows go on. No guess is a reason to end an answer."""
        usable, likeliest = (~logits.isnan().any(1)).tolist(), logits.argmax(1).tolist()
        rows = []
        for row, place in enumerate(going):
            if usable[row]:
                wish, guesses = wishes[place], found[place]
                guesses.append(self._drawn(logits[row], wish) if wish.drawn else Guess(likeliest[row]))
                if len(guesses) < wish.count:
                    rows.append(row)
        return rows

    @staticmethod
    def _drawn(logits: Float[Tensor, " vocab"], wish: Wish) -> Guess:
        q = truncate(tempered(logits.double(), wish.params.temperature).exp(), wish.params)
        return Guess(draw(q, wish.generator), q)


def _next(wish: Wish, guesses: list[Guess]) -> _Span:
    """The row of the last guess."""
    return _Span(wish.sequence, wish.sequence.computed + len(guesses), [guesses[-1].id])
