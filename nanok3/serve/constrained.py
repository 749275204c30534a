"""What one answer may say next: a thought is free, and what follows it is led by a grammar (grammar.py).

    thought: any text, until the first marker  |  grammar: one bit an id, at least one of them set

The marker that ends the thought is the grammar's first id, so the two meet without a gap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True)
class Thought:
    """What may be said in `think`: ids below `texts`, and the markers of its end."""

    texts: int
    allowed: Bool[Tensor, " vocab"]

    @classmethod
    def of(cls, vocab_size: int, texts: int, markers: list[int]) -> Thought:
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[:texts] = True
        allowed[markers] = True
        return cls(texts, allowed)


class Constrained:
    """The constraint of one answer (engine.Constraint). `clone` it to try a draft."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, thought: Thought | None) -> None:
        """thought: None for an answer that does not begin in `think`."""
        self._matcher, self._vocab_size, self._thought = matcher, vocab_size, thought

    def clone(self) -> Constrained:
        """One with the same past and a future of its own."""
        return Constrained(self._matcher.deep_copy(), self._vocab_size, self._thought)

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """True for the ids that may come next, of which there is at least one. ValueError if the matcher gave up."""
        if self._thought is not None:
            return self._thought.allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not mask.any():
            raise ValueError(f"the grammar has no way on: {reason(self._matcher) or 'it allows nothing'}")
        return torch.from_numpy(mask)

    def advance(self, token: int) -> None:
        """This id was said. ValueError if the grammar does not allow it."""
        if self._thought is not None and token < self._thought.texts:
            return
        self._thought = None
        if not self._matcher.consume_token(token):
            raise ValueError(f"the grammar does not allow id {token} here: {reason(self._matcher)}")


def reason(matcher: LLMatcher) -> str:
    """What went wrong in a matcher, without its dumps of states and stacks; empty if nothing did."""
    said = " ".join(re.split(r"<state>|<non-verbose/>|<backtrace>", matcher.get_error())[0].split())[:300]
    return "no text can ever fit" if said == "NoExtensionBias" else said
