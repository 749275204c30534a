"""From logits to what readers are told: the second half of a step.

    logits -> scores of the prompt                     where they were asked for
           -> tokens of a draft, as long as they hold  one by one
           -> rows -> sampled as one matrix            everybody else
    token  -> counts, constraint, reader -> ends?      -> `ended`, for the engine to finish

What goes wrong with one job ends that job alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.serve.cache_check import CacheChecks
from nanok3.serve.job import Counters, Running, Token
from nanok3.serve.sampler import Row, Sampled, adjust, best, sample_rows, tempered
from nanok3.serve.scheduler import Reading, Scheduler, Work
from nanok3.serve.sequence import Status
from nanok3.serve.speculative import Guess, Speculation, settle

log = logging.getLogger("nanok3")


@dataclass(frozen=True)
class End:
    """Why a job is over."""

    running: Running
    reason: str
    error: str | None = None


@dataclass
class Saying:
    """Speaks for the jobs of one engine, in its thread."""

    runner: Reading
    scheduler: Scheduler
    checks: CacheChecks
    counters: Counters
    ends: set[int]
    """Ids that end an answer."""
    forbidden: Tensor
    """Ids that are never said."""
    speculation: Speculation | None = None
    ended: list[End] = field(default_factory=list)
    """Of this step; the engine takes them off."""

    def say(self, work: list[Work], results: Mapping[str, Tensor | Exception], jobs: Mapping[str, Running]) -> None:
        """Look at what the model said after each piece. Tokens of those with nothing left to read are sampled together,
        behind the others, whose drafts are looked at one by one."""
        due: list[tuple[Running, Row]] = []
        for piece in work:
            running, logits = jobs.get(piece.sequence.id), results.get(piece.sequence.id)
            if running is not None and isinstance(logits, Tensor) and piece.sequence.status is Status.RUNNING:
                with self._own_fault(running):
                    row = self._use(running, piece, logits)
                    due += [] if row is None else [(running, row)]
        for (running, _), found in zip(due, sample_rows([row for _, row in due], self.forbidden), strict=True):
            with self._own_fault(running):
                if isinstance(found, ValueError):
                    raise found
                self._end(running, self._say(running, found))

    @contextlib.contextmanager
    def _own_fault(self, running: Running) -> Iterator[None]:
        """What goes wrong here ends this job alone."""
        try:
            yield
        except Exception as error:
            log.warning("%s failed: %s", running.job.id, error)
            self.ended.append(End(running, "error", str(error)))

    def _use(self, running: Running, piece: Work, logits: Tensor) -> Row | None:
        """The scores of a prompt, the tokens of a draft; or what the next token is to be drawn from."""
        job = running.job
        if job.prompt_logprobs and len(running.scored) < len(job.prompt) - 1:
            running.scored += self._score(running, piece.start, logits)
        if piece.draft:
            self._verify(running, piece, logits.cpu())
        elif piece.last:
            self.checks.keep(running.sequence, logits[-1])
            return self._row(running, logits[-1])
        return None

    @staticmethod
    def _row(running: Running, logits: Float[Tensor, " vocab"]) -> Row:
        job = running.job
        allowed = None if job.constraint is None else job.constraint.allowed()
        return Row(logits, job.params, running.generator, running.counts, allowed, job.top_logprobs)

    def _score(self, running: Running, start: int, logits: Float[Tensor, "rows vocab"]) -> list[Token]:
        """What the model gave the prompt's tokens start + 1, ...; plain softmax; alternatives are sayable."""
        following = running.job.prompt[start + 1 : start + 1 + len(logits)]
        logp = logits[: len(following)].cpu().double().log_softmax(-1)
        wanted, sayable = running.job.top_logprobs, logp.index_fill(1, self.forbidden, -torch.inf)
        return [Token(t, float(row[t]), best(said, wanted)) for t, row, said in zip(following, logp, sayable)]

    def _verify(self, running: Running, piece: Work, logits: Float[Tensor, "rows vocab"]) -> None:
        """Say tokens as long as they are those of the draft, and one more; keep of the piece what was said before."""
        assert self.speculation is not None
        sequence, reason, read = running.sequence, None, 0
        guesses = self.speculation.guesses[sequence.id]
        for row, guess in zip(logits, [*guesses, None], strict=True):
            reason, read = self._say(running, self._settle(self._row(running, row), guess)), read + 1
            if reason is not None or guess is None or sequence.ids[-1] != guess.id:
                break
        while sequence.computed < piece.start + read:  # in parts: at a boundary the state may be wanted
            stop = min(piece.start + read, self.scheduler.next_stop(sequence))
            self.runner.keep(sequence, stop - sequence.computed)
            self.scheduler.commit(Work(sequence, sequence.computed, stop - sequence.computed))
        self.speculation.verified(piece, read - 1)
        self._end(running, reason)

    def _settle(self, row: Row, guess: Guess | None) -> Sampled:
        """One token, whatever was guessed."""
        if guess is None or guess.q is None:
            (found,) = sample_rows([row], self.forbidden)
            if isinstance(found, ValueError):
                raise found
            return found
        if bool(row.logits.isnan().any()):
            raise ValueError("a logit is NaN: the weights or the computation are broken")
        z = row.logits.index_fill(0, self.forbidden, -torch.inf)
        z = z if row.allowed is None else z.masked_fill(~row.allowed, -torch.inf)
        token, logprob = settle(z, guess, row.params, row.generator, row.counts)
        logp = tempered(adjust(z, row.params, row.counts), row.params.temperature)
        return Sampled(token, logprob, best(logp, row.top))

    def _end(self, running: Running, reason: str | None) -> None:
        if reason is not None:
            self.ended.append(End(running, reason))

    def _say(self, running: Running, found: Sampled) -> str | None:
        """One token more; why it is the last, if it is."""
        job, said = running.job, Token(found.token, found.logprob, found.top)
        self._record(running, said)
        enough = job.reader.push(said)
        ends = said.id in self.ends and not job.ignore_ends
        if enough or ends or said.id in job.params.stop_ids:
            return "stop"
        return "length" if len(running.sequence.said) >= running.limit else None

    def _record(self, running: Running, said: Token) -> None:
        running.sequence.say(said.id)
        if running.counts is not None:
            running.counts.add(said.id)
        if running.job.constraint is not None:
            running.job.constraint.advance(said.id)
        if running.first_token is None:
            running.first_token = time.monotonic()
        self.counters.said_tokens += 1
