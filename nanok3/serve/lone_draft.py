"""Speculative decoding of one sequence without an engine, for `nanok3 generate`: speculative.py on a `ModelState`.

guesses = draft.guesses(ids, room)
logits  = draft.read([x, *guesses], state)       a row after each; the state stays
draft.keep(n)                                    the first n were right: the state has read them
draft.heard(features)                            what was read without a draft, for one that was trained

A trained draft has a pool of its own for its rows, with room for the prompt and the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.model.basics import at_least_float32
from nanok3.model.cache import ModelState
from nanok3.model.decoder import K3
from nanok3.model.kda_replay import Trial
from nanok3.model.mtp import Draft, tapped_layers, taps
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.arena import Arena, Shapes
from nanok3.serve.draft_model import DraftModel
from nanok3.serve.prefix_cache import SpanKeys
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Work
from nanok3.serve.sequence import Sequence as Tokens
from nanok3.serve.speculative import DRAFT_TOKENS, Drafted, Drafter, Gauge, Guess, Wish

PAGE = 256
"""Rows of a trained draft that lie together."""


def alone(model: K3, draft: Draft, room: int) -> tuple[DraftModel, list[int]]:
    """A trained draft for one sequence of so many tokens, and the pages that are its own."""
    shapes = Shapes.of(model.cfg, model.compute_dtype or model.model.embed_tokens.weight.dtype)
    shapes = replace(shapes, mla_layers=1, kda_layers=0)
    pages = -(-room // PAGE)
    arena = Arena(shapes, shapes.layout(PAGE), pages, model.lm_head.weight.device)
    return DraftModel(model, draft, arena), list(range(pages))


class LoneDraft:
    """Drafts for the answer to `prompt`, of `limit` tokens at most; by a drafter or a trained draft."""

    def __init__(
        self,
        model: K3,
        prompt: Sequence[int],
        drafter: Drafter | Draft,
        params: SamplingParams,
        generator: torch.Generator,
        tokens: int = DRAFT_TOKENS,
        limit: int = 0,
    ) -> None:
        self.model, self.params, self.generator, self.tokens = model, params, generator, tokens
        native = NativeDecoder.of(model)
        self._native = native if isinstance(native, NativeDecoder) else None
        self._sequence = Tokens("", list(prompt), len(prompt), SpanKeys(1 << 62))
        self._trained: DraftModel | None = None
        self.tapped: tuple[int, ...] = ()
        """Layers whose input `heard` is to be told of."""
        if isinstance(drafter, Draft):
            self._trained, self._sequence.pages = alone(model, drafter, len(prompt) + limit + tokens)
            self.drafter: Drafter = self._trained
            self.tapped = tapped_layers(model.cfg)
        else:
            self.drafter = drafter
        self._gauge, self.drafted = Gauge(), Drafted()
        self._keep: Callable[[int], None] = lambda count: None
        self._began = time.perf_counter()
        self._ids: list[int] = []

    def guesses(self, said: Sequence[int], room: int) -> list[Guess]:
        """What may follow the prompt and what was said, at most `room` tokens."""
        self._began = time.perf_counter()
        self._sequence.ids += said[len(self._sequence.said) :]
        count = min(self.tokens, room)
        if count < 1 or not (self._gauge.measured(1) and self._gauge.wants(self._sequence, 1)):
            return []
        return self.drafter.propose([Wish(self._sequence, count, self.params, self.generator)])[0][:count]

    @torch.no_grad()
    def heard(self, features: Float[Tensor, "rows layers D"]) -> None:
        """What the tapped layers saw of the next tokens, which were read without a draft."""
        if self._trained is not None:
            start, count = self._sequence.computed, len(features)
            self._trained.follow(Work(self._sequence, start, count), features)
        self._sequence.computed += len(features)

    @torch.no_grad()
    def read(self, ids: list[int], state: ModelState) -> Float[Tensor, "rows vocab"]:
        """Logits after each of the ids, read on trial."""
        tokens, self._ids = torch.tensor([ids], device=self.model.lm_head.weight.device), ids
        if self._native is not None:
            step, self._keep = self._native.try_state(tokens, state, self.tapped)
            self._try(step.taps)
            return step.logits
        trial = Trial(self.model.model.layers, state)
        with taps(self.model, self.tapped) as found:
            final = self.model.hidden_states(tokens, state=state)
        self._keep = trial.keep
        self._try(torch.stack([found[layer][0] for layer in self.tapped], dim=1) if found else None)
        return at_least_float32(self.model.lm_head(final)[0]).cpu()

    def _try(self, features: Float[Tensor, "rows layers D"] | None) -> None:
        if self._trained is not None and features is not None:
            start, count = self._sequence.computed, len(self._ids)
            self._trained.follow(Work(self._sequence, start, count, tuple(self._ids[1:])), features)

    @torch.no_grad()
    def keep(self, count: int) -> None:
        """So many of the last ids were right."""
        self._keep(count)
        self._sequence.ids += self._ids[1:count]
        if self._trained is not None:
            self._trained.keep(self._sequence, 0, count)
        self._sequence.computed += count
        self.drafted.drafts += 1
        self.drafted.tokens += len(self._ids) - 1
        self.drafted.accepted += count - 1
        self._gauge.accepted(self._sequence, count - 1, 1)
        self._gauge.took(1, True, time.perf_counter() - self._began)

    def plain(self) -> None:
        """A token was read and said without a draft."""
        self._gauge.took(1, False, time.perf_counter() - self._began)
