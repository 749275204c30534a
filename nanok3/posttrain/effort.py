"""Reasoning effort: what an answer may cost, and what happens to the reward when it costs more.

    b0(x)  = mean of T(y) over answers of the cold-start model to problem x            measured once, kept in a file
    T(y)   = thinking tokens (general tasks) | all sampled tokens of the trajectory (agents)
    reward = -1 if T(y) > tau b0(x), else what was earned                   exactly at the budget is allowed

A budget is frozen: were b0 measured anew with the policy that is trained, shorter answers would bring smaller budgets,
and these shorter answers. Observations are not sampled, so they do not count. The override comes before the mean of the
group, and wins over a right answer; a group with all answers over the budget has no advantage, and is counted.

Effort max is trained first, with a large tau and a cap in tokens; high and low branch off from it, and tau falls along
a geometric path from that of max to their own.

Source: report 4.1.2. How b0 is estimated is not said (here the mean over the three efforts), nor are the values of tau.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanok3.data.chat import EFFORTS
from nanok3.data.files import write_file

OVER_BUDGET = -1.0
"""The reward above the budget."""

TAUS: dict[str, dict[str, float]] = {
    "general": {"low": 0.75, "high": 2.8, "max": 6.0},
    "agent": {"low": 0.975, "high": 1.05, "max": 2.0},
    "coding": {"low": 0.85, "high": 1.2, "max": 2.0},
}
"""tau by domain and effort, set by hand for our small domains."""


@dataclass(frozen=True)
class EffortSettings:
    """The budget of one expert."""

    effort: str = "max"
    """low, high or max: what the prompt says."""
    tau: float = 2.0
    """Budget as a multiple of b0, at the end of the anneal."""
    tau_start: float | None = None
    """Where tau begins; None for tau itself."""
    anneal: float = 0.5
    """Share of the run over which tau falls (or rises) to its end."""
    cap: int | None = None
    """Tokens an answer may cost in any case; None for no cap beside tau."""

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS:
            raise ValueError(f"effort is {self.effort!r}; allowed: {', '.join(map(repr, EFFORTS))}")
        for name in ("tau", "tau_start"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        if not 0 <= self.anneal <= 1:
            raise ValueError(f"anneal is {self.anneal}; it must lie in [0, 1]")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"cap is {self.cap}; it must be at least 1 token, or left out")

    def tau_at(self, progress: float) -> float:
        """tau when so much of the run, from 0 to 1, is over."""
        if self.tau_start is None:
            return self.tau
        share = 1.0 if progress >= self.anneal else progress / self.anneal
        return self.tau_start * (self.tau / self.tau_start) ** share

    def limit(self, b0: float, progress: float) -> int:
        """The most tokens that are allowed."""
        most = math.floor(self.tau_at(progress) * b0 + 1e-9)
        return max(1, most if self.cap is None else min(most, self.cap))


def budgeted(reward: float, spent: int, limit: int | None) -> float:
    """The reward under a budget; None is no budget."""
    return OVER_BUDGET if limit is not None and spent > limit else reward


@dataclass(frozen=True)
class Budgets:
    """b0 by the name of the problem, and which model they were measured with."""

    tokens: Mapping[str, float] = field(default_factory=dict)
    model: str = ""

    def of(self, problem: str) -> float:
        if problem not in self.tokens:
            raise ValueError(f"there is no budget for problem {problem!r}; it must be measured with the cold start")
        return self.tokens[problem]

    def save(self, path: Path) -> None:
        write_file(path, json.dumps({"model": self.model, "tokens": dict(self.tokens)}, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> Budgets:
        """ValueError for a file that has no budgets."""
        try:
            read = json.loads(path.read_text("utf-8"))
            tokens = {str(name): float(value) for name, value in read["tokens"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"budgets: {path} cannot be read ({error})") from None
        return cls(tokens, str(read.get("model", "")))


def means(spent: Mapping[str, list[int]]) -> dict[str, float]:
    """b0 from T(y) of the cold start's answers; at least one token."""
    return {name: max(1.0, sum(counts) / len(counts)) for name, counts in spent.items() if counts}
