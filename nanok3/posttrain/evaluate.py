"""How good a policy is at a domain and effort: held-out tasks, played without budgets, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from nanok3.data.chat import OURS, Sentences
from nanok3.data.tokenizer import Tokenizer
from nanok3.envs.environment import Task
from nanok3.posttrain.rl_settings import RolloutSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.sample import Domain, Group, Problem, Sample
from nanok3.posttrain.speaker import Speaker


@dataclass(frozen=True)
class Scores:
    """Over `count` answers; tokens are means."""

    accuracy: float
    thinking: float
    output: float
    truncated: float
    count: int

    @property
    def error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(max(self.accuracy * (1 - self.accuracy), 1e-9) / max(self.count, 1))

    def __str__(self) -> str:
        tokens = f"{self.thinking:.1f} thinking tokens, {self.output:.1f} in all"
        return f"{self.accuracy:.3f} ± {self.error:.3f} right, {tokens}"


def scores(samples: Sequence[Sample]) -> Scores:
    """Of samples that have ended; those whose environment failed are left out."""
    valid = [sample for sample in samples if sample.outcome == "done"]
    n = max(len(valid), 1)
    return Scores(
        sum(sample.reward or 0.0 for sample in valid) / n,
        sum(sample.thinking for sample in valid) / n,
        sum(sample.output for sample in valid) / n,
        sum(sample.finish == "length" for sample in valid) / n,
        len(valid),
    )


def play(
    speaker: Speaker,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    settings: RolloutSettings,
    sentences: Sentences = OURS,
) -> list[Group]:
    """Each problem with `settings.samples` samples, to the end, in the order of the problems."""
    whole = replace(settings, prompts=max(1, len(problems)), pause=1.0)
    rollouts = Rollouts(
        speaker, tokenizer, lambda n: problems[n] if n < len(problems) else None, whole, sentences=sentences
    )
    groups = rollouts.collect()
    rollouts.release(groups)
    rollouts.close()
    assert len(groups) == len(problems)
    return groups


def first_tasks(domain: Domain, count: int, split: str, seed: int) -> list[Task]:
    """The first `count` tasks of the stream, or all there are."""
    found = list(islice(domain.tasks(split, seed), count))
    if not found:
        raise ValueError(f"domain {domain.name!r} has no tasks of split {split!r}")
    return found


def evaluate(
    speaker: Speaker,
    tokenizer: Tokenizer,
    domain: Domain,
    effort: str,
    count: int = 200,
    settings: RolloutSettings | None = None,
    split: str = "held-out",
    seed: int = 0,
    sentences: Sentences = OURS,
) -> Scores:
    """`count` answers to held-out tasks, sampled at temperature 1 as in training; a short stream is asked again."""
    tasks = first_tasks(domain, count, split, seed)
    problems = [Problem(n, domain, effort, tasks[n % len(tasks)]) for n in range(count)]
    settings = replace(settings or RolloutSettings(), samples=1, seed=seed + 1)
    groups = play(speaker, tokenizer, problems, settings, sentences)
    return scores([sample for group in groups for sample in group.samples])
