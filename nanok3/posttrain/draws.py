"""An engine that draws the next tokens of all sequences at once, for rollouts.

    z (n, vocab) -> log softmax(z / temperature) -> running sums -> the first above u_i, one number of each generator

The sampler of serving takes a token through filters that a rollout must not have, one sequence at a time: with a small
model that costs more than the model. Here plain sampling is done in four operations for all. What is said is the same:
the same numbers from the same generators. A sequence with anything but plain sampling goes the engine's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanok3.serve.engine import Engine, Job, Token
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Work


def is_plain(job: Job) -> bool:
    """Whether nothing but the temperature changes what is drawn, and nothing but the token is asked for."""
    p, rest = job.params, SamplingParams()
    fields = ("top_p", "top_k", "min_p", "stop_ids", "logit_bias")
    same = all(getattr(p, name) == getattr(rest, name) for name in fields)
    asked = job.top_logprobs or job.prompt_logprobs or job.constraint or job.ignore_ends
    return same and p.temperature > 0 and not p.counts_tokens and not asked


class RolloutEngine(Engine):
    """An `Engine` in all but how plain sequences are drawn."""

    _drawn: dict[str, Token]

    def _read(self, work: list[Work], scored: frozenset[str]) -> dict[str, Tensor | Exception]:
        results = super()._read(work, scored)
        self._drawn = {}
        rows: list[tuple[Any, Tensor]] = []
        for piece in work:
            running, logits = self._jobs[piece.sequence.id], results.get(piece.sequence.id)
            if piece.last and not piece.draft and isinstance(logits, Tensor) and is_plain(running.job):
                rows.append((running, logits[-1]))
        if rows:
            self._draw([running for running, _ in rows], torch.stack([logits for _, logits in rows]))
        return results

    def _draw(self, rows: list[Any], logits: Tensor) -> None:
        z = logits.to("cpu", torch.float64).index_fill(1, self.forbidden, -torch.inf)
        temperatures = torch.tensor([running.job.params.temperature for running in rows], dtype=torch.float64)
        logp = ((z - z.amax(1, keepdim=True)) / temperatures[:, None]).log_softmax(-1)
        sums = logp.exp().cumsum(1)
        u = torch.stack([torch.rand((), dtype=torch.float64, generator=running.generator) for running in rows])
        tokens = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True).clamp(max=z.shape[1] - 1)
        said = logp.gather(1, tokens)[:, 0].tolist()
        for running, token, logprob in zip(rows, tokens[:, 0].tolist(), said, strict=True):
            if logprob == logprob:  # NaN is the engine's to report
                self._drawn[running.job.id] = Token(token, logprob)

    def _say(self, running: Any, logits: Tensor, guess: Any = None) -> str | None:
        said = self._drawn.pop(running.job.id, None)
        if said is None:
            return super()._say(running, logits, guess)
        self._record(running, said)
        if running.job.reader.push(said) or said.id in self.ends:
            return "stop"
        return "length" if len(running.sequence.said) >= running.limit else None
