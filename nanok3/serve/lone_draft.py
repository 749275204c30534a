"""Speculative decoding of one sequence without an engine, for `nanok3 generate`: speculative.py on a `ModelState`.

guesses = draft.guesses(ids, room)
logits  = draft.read([x, *guesses], state)       a row after each; the state stays
draft.keep(n)                                    the first n were right: the state has read them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.model.basics import at_least_float32
from nanok3.model.cache import ModelState
from nanok3.model.decoder import K3
from nanok3.model.kda_replay import Trial
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.prefix_cache import SpanKeys
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.sequence import Sequence as Tokens
from nanok3.serve.speculative import DRAFT_TOKENS, Drafted, Drafter, Gauge, Guess, Wish


class LoneDraft:
    """Drafts for the answer to `prompt`."""

    def __init__(
        self,
        model: K3,
        prompt: Sequence[int],
        drafter: Drafter,
        params: SamplingParams,
        generator: torch.Generator,
        tokens: int = DRAFT_TOKENS,
    ) -> None:
        self.model, self.drafter, self.params, self.generator, self.tokens = model, drafter, params, generator, tokens
        native = NativeDecoder.of(model)
        self._native = native if isinstance(native, NativeDecoder) else None
        self._sequence = Tokens("", list(prompt), len(prompt), SpanKeys(1 << 62))
        self._gauge, self.drafted = Gauge(), Drafted()
        self._keep: Callable[[int], None] = lambda count: None
        self._began = time.perf_counter()
        self._count = 0

    def guesses(self, said: Sequence[int], room: int) -> list[Guess]:
        """What may follow the prompt and what was said, at most `room` tokens."""
        self._began = time.perf_counter()
        self._sequence.ids += said[len(self._sequence.said) :]
        count = min(self.tokens, room)
        if count < 1 or not (self._gauge.measured(1) and self._gauge.wants(self._sequence, 1)):
            return []
        return self.drafter.propose([Wish(self._sequence, count, self.params, self.generator)])[0][:count]

    @torch.no_grad()
    def read(self, ids: list[int], state: ModelState) -> Float[Tensor, "rows vocab"]:
        """Logits after each of the ids, read on trial."""
        tokens, self._count = torch.tensor([ids], device=self.model.lm_head.weight.device), len(ids)
        if self._native is not None:
            logits, self._keep = self._native.try_state(tokens, state)
            return logits
        trial = Trial(self.model.model.layers, state)
        final = self.model.hidden_states(tokens, state=state)
        self._keep = trial.keep
        return at_least_float32(self.model.lm_head(final)[0]).cpu()

    def keep(self, count: int) -> None:
        """So many of the last ids were right."""
        self._keep(count)
        self.drafted.drafts += 1
        self.drafted.tokens += self._count - 1
        self.drafted.accepted += count - 1
        self._gauge.accepted(self._sequence, count - 1, 1)
        self._gauge.took(1, True, time.perf_counter() - self._began)

    def plain(self) -> None:
        """A token was read and said without a draft."""
        self._gauge.took(1, False, time.perf_counter() - self._began)
