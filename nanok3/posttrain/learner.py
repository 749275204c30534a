"""From samples and what each of their tokens is worth to new weights: the part that RL and distillation share.

    for each epoch, for each minibatch
        for each packed row      log-probabilities -> advantage of each token -> objective -> backward
        gradient norm            finite? clip
        Muon and AdamW
    and after all of them        QK-Clip, router biases where asked for

Nothing that changes how a token is routed is touched between rollouts and the last of their training steps: a bias that
moved in between would send tokens to experts that the sampler never asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from nanok3.data.packing import Batch
from nanok3.model.decoder import K3
from nanok3.posttrain.objective import Masked, objective
from nanok3.posttrain.rl_settings import LearnerSettings, ObjectiveSettings
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.score import Packed, logprobs, packed
from nanok3.quant.qat import QAT
from nanok3.train.loss import cross_entropy
from nanok3.train.muon import K3Optimizer, OptimizerSettings
from nanok3.train.qk_clip import QKClip
from nanok3.train.quantile_balancing import QuantileBalancer

Advantage = Callable[[Packed, Tensor], Tensor]
"""A packed row and the log-probabilities of its tokens now (no gradient) -> what each token is worth."""
Routes = Callable[[Packed], AbstractContextManager[None]]
"""A packed row -> a context in which its forward pass is routed as it was in the rollout."""


@dataclass(frozen=True)
class Learned:
    """What one iteration did."""

    loss: float
    grad_norm: float
    masked: Masked
    steps: int

    def record(self) -> dict[str, float]:
        n = max(self.masked.tokens, 1)
        shares = {"masked": self.masked.outside / n, "ratio": self.masked.ratio / n, "square": self.masked.square / n}
        return {"loss": self.loss, "grad_norm": self.grad_norm, "trained_tokens": self.masked.tokens, **shares}


class Learner:
    """Model, optimizer and what goes with them."""

    def __init__(
        self,
        model: K3,
        settings: LearnerSettings,
        objective_settings: ObjectiveSettings,
        forbidden: Sequence[int],
        temperature: float,
        ptx: Iterator[Batch] | None = None,
    ) -> None:
        if objective_settings.ptx_weight and ptx is None:
            raise ValueError(f"ptx_weight is {objective_settings.ptx_weight}, but there are no conversations for it")
        self.model, self.settings, self.objective = model, settings, objective_settings
        self.forbidden, self.temperature, self.ptx = torch.tensor(list(forbidden)), temperature, ptx
        decay, scale = settings.weight_decay, settings.adam_lr_scale
        self.optimizer = K3Optimizer(model, OptimizerSettings(lr=settings.lr, weight_decay=decay, adam_lr_scale=scale))
        self.qat = QAT(model, settings.qat)
        self.clip = QKClip(model, every=max(1, settings.qk_clip_every))
        self.balancer = QuantileBalancer(model, update_bias=settings.balance)

    def learn(
        self,
        samples: Sequence[Sample],
        trained: Sequence[list[bool]],
        advantage: Advantage,
        version: int,
        routes: Routes = lambda row: nullcontext(),
    ) -> Learned:
        """All epochs over the samples. trained: marks of each sample's tokens."""
        self.model.train()
        order, total, masked, norms, losses = list(range(len(samples))), 0, Masked(), [0.0], [0.0]
        random = Random(f"order {self.settings.seed} {version}")
        for _ in range(self.settings.epochs):
            random.shuffle(order)
            for chosen in _parts(order, self.settings.minibatches):
                rows = [samples[i] for i in chosen], [trained[i] for i in chosen]
                if not any(map(any, rows[1])):
                    continue  # nothing to learn from: the optimizer's own decay would be all that acts
                loss, seen = self._backward(*rows, advantage, routes)
                norms.append(self._update())
                losses.append(loss)
                masked, total = masked + seen, total + 1
        if self.settings.qk_clip_every:
            self.clip.step()
        self.balancer.step()
        self.model.eval()
        return Learned(sum(losses) / max(total, 1), max(norms), masked, total)

    def set_progress(self, progress: float) -> None:
        """The learning rate of this point of the run, from 0 to 1."""
        fallen = (1 - self.settings.final_lr_fraction) * progress
        self.optimizer.lr = self.settings.lr * (1 - fallen)

    def _backward(
        self, samples: list[Sample], trained: list[list[bool]], advantage: Advantage, routes: Routes
    ) -> tuple[float, Masked]:
        """Gradients of one minibatch; its loss."""
        by_answer = self.objective.form == "sequence"
        divisor = sum(map(any, trained)) if by_answer else sum(map(sum, trained))
        total, masked = 0.0, Masked()
        looks = self.clip.observe() if self.settings.qk_clip_every else nullcontext()
        with self.qat.projected(), self.balancer.observe(), looks:
            for row in packed(samples, trained, self.settings.micro_tokens):
                with routes(row):
                    logprob = logprobs(self.model, row, self.forbidden, self.temperature)
                worth = advantage(row, logprob.detach())
                loss, seen = objective(logprob, worth, row.tokens, self.objective, divisor)
                loss.backward()
                total, masked = total + float(loss.detach()), masked + seen
            if self.ptx is not None and self.objective.ptx_weight:
                total += self._plain_loss(next(self.ptx))
        return total, masked

    def _plain_loss(self, batch: Batch) -> float:
        """Conversations that were picked by hand, as in SFT."""
        batch = batch.to(self.model.lm_head.weight.device)
        hidden = self.model.hidden_states(batch.input_ids.view(1, -1), cu_seqlens=batch.cu_seqlens)
        total, count = cross_entropy(hidden, self.model.lm_head.weight, batch.targets.view(1, -1))
        loss = self.objective.ptx_weight * total / max(count, 1)
        loss.backward()
        return float(loss.detach())

    def _update(self) -> float:
        gradients = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(gradients, self.settings.grad_clip))
        if not math.isfinite(norm):
            raise ValueError(f"the gradient norm is {norm}; the run stops before the weights are touched")
        self.optimizer.step()
        self.qat.stepped()
        self.optimizer.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "clip": self.clip.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.clip.load_state_dict(state["clip"])


def _parts(order: list[int], count: int) -> list[list[int]]:
    """`count` parts of nearly equal size, none empty."""
    count = min(count, len(order))
    return [order[len(order) * i // count : len(order) * (i + 1) // count] for i in range(count)]
