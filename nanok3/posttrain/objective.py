r"""The objective: from sampled tokens and the rewards of their answers to a loss.

    A_j     = r_j - mean of r over the group                        plain mean, itself included; no division by a spread
    rho     = log pi(token) - log mu(token)                         mu: the policy that sampled it, as it said then
    token   = - 1/N sum { [low <= rho <= high] exp(rho) A  -  tau rho^2 }           N: tokens of the batch
    sequence = mean over answers of ( A_j - tau sum of rho )^2

The first is that of K2.5, on which K3 builds; the second that of K1.5 and K2. The window is a mask of the gradient and
not the minimum of PPO: a token outside has none, whichever sign its advantage has. The square is the pull back to the
policy that sampled: of a token outside the window it is all that remains, unless `mask_square` takes that away too.

What counts is decided once. A `Tokens` lists the sampled tokens of a batch, and only those: prompts, observations and
padding are not masked out, they never enter. `trained` leaves out single ones (too old, see rollout.py). The sum and
its divisor are taken from the same list.

A dense reward, one a token, goes the same way: `advantage` is an entry per token, and a group's advantage is the same
for all tokens of an answer.

Sources: K2.5 report Eq. 1, K2 report 3.2.3, K1.5. The formula of K2.5 bounds the ratio, its text the log-ratio: here it
is the log-ratio, `log_ratio_low` and `log_ratio_high`. Whether the square is masked is not said; the values are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanok3.posttrain.rl_settings import ObjectiveSettings


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of a batch, an entry each, answer by answer."""

    answer: Int[Tensor, " n"]
    """Which answer it belongs to, counted from 0."""
    logprob: Float[Tensor, " n"]
    """What the policy that sampled it gave it then."""
    trained: Bool[Tensor, " n"]
    """False for those that are withheld."""

    @classmethod
    def of(cls, answers: list[tuple[int, list[float], list[bool]]]) -> Tokens:
        """From (tokens, log-probabilities, trained) of each answer. ValueError where the lengths differ: a missing
        log-probability is never filled in."""
        for number, (count, logprobs, trained) in enumerate(answers):
            if not count == len(logprobs) == len(trained):
                lengths = f"{count} tokens, {len(logprobs)} log-probabilities and {len(trained)} marks"
                raise ValueError(f"answer {number} has {lengths}; the three must be equal")
        counts = torch.tensor([count for count, _, _ in answers], dtype=torch.int64)
        said = torch.tensor([value for _, values, _ in answers for value in values], dtype=torch.float32)
        marks = torch.tensor([mark for _, _, values in answers for mark in values], dtype=torch.bool)
        return cls(torch.arange(len(answers)).repeat_interleave(counts), said, marks)

    def to(self, device: torch.device) -> Tokens:
        return Tokens(self.answer.to(device), self.logprob.to(device), self.trained.to(device))

    @property
    def count(self) -> int:
        """N: how many are trained."""
        return int(self.trained.sum())


@dataclass(frozen=True)
class Masked:
    """What the objective did, in sums over the trained tokens."""

    tokens: int = 0
    outside: int = 0
    """Of them outside the window."""
    square: float = 0.0
    """Sum of rho^2."""
    ratio: float = 0.0
    """Sum of exp(rho)."""

    def __add__(self, other: Masked) -> Masked:
        square, ratio = self.square + other.square, self.ratio + other.ratio
        return Masked(self.tokens + other.tokens, self.outside + other.outside, square, ratio)


def group_advantages(rewards: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """r - mean, in float64: the residue of rounding must not look like a preference."""
    rewards = rewards.double()
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def dense_reward(teacher: Float[Tensor, " n"], student: Float[Tensor, " n"], bound: float) -> Float[Tensor, " n"]:
    """clip(log p_teacher - log p_student, -bound, bound) per token; no gradient through it (report 4, Eq. 15)."""
    return (teacher - student).detach().clamp(-bound, bound)


def objective(
    logprob: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    tokens: Tokens,
    settings: ObjectiveSettings,
    divisor: int,
) -> tuple[Float[Tensor, ""], Masked]:
    """A microbatch's share of the loss, and what was masked.

    logprob: of each token under the policy that is trained, with its gradient. divisor: of the whole batch, its trained
    tokens for the token form, its answers for the sequence form; a batch without any has loss 0.
    """
    tokens = tokens.to(logprob.device)
    rho = logprob - tokens.logprob.to(logprob)
    advantage = advantage.to(rho)
    seen = rho.detach()[tokens.trained]
    inside = (seen >= settings.log_ratio_low) & (seen <= settings.log_ratio_high)
    masked = Masked(seen.numel(), int((~inside).sum()), float((seen**2).sum()), float(seen.exp().sum()))
    if settings.form == "sequence":
        loss = _sequence(rho, advantage, tokens, settings.tau)
    else:
        loss = _token(rho[tokens.trained], advantage[tokens.trained], inside, settings)
    return loss / max(divisor, 1), masked


def _token(rho: Tensor, advantage: Tensor, inside: Tensor, settings: ObjectiveSettings) -> Tensor:
    # Masked before the exponential: outside it may overflow, and 0 times inf would be NaN.
    gain = torch.where(inside, rho, 0.0).exp() * advantage * inside
    square = rho**2 * inside if settings.mask_square else rho**2
    return (settings.tau * square - gain).sum()


def _sequence(rho: Tensor, advantage: Tensor, tokens: Tokens, tau: float) -> Tensor:
    """The advantage of an answer stands at each of its tokens; those without a trained token do not count."""
    answers = int(tokens.answer.max()) + 1 if len(tokens.answer) else 0
    kept = tokens.trained
    total = rho.new_zeros(answers).index_add(0, tokens.answer[kept], rho[kept])
    of_answer = rho.new_zeros(answers).index_copy(0, tokens.answer, advantage)
    present = torch.zeros_like(of_answer, dtype=torch.bool).index_fill(0, tokens.answer[kept].unique(), True)
    return ((of_answer - tau * total) ** 2)[present].sum()
