"""The training loop: microbatches in, one optimizer step out, everything else around it.

    for each step
        pictures                   through the vision tower, where the data has any (train/sight.py)
        for each microbatch        forward under the observers; loss over the vocabulary in chunks, and that of the
                                   layer that guesses ahead, if there is one (train/mtp.py); backward
                                   (with `qat`, on the experts as they will be served)
        pictures                   backward through the tower
        gradient norm              finite? no spike? clip to 1
        Muon and AdamW             at the learning rate of this point of the schedule
        Quantile Balancing         router biases for the next step
        QK-Clip                    attention logits above 100 are scaled down at their weights
        every so often             a line of progress, validation, a sample, a checkpoint

The schedule runs over a fixed number of steps, and then a resumed run equals an uninterrupted one bit for bit; or over
a number of minutes (`minutes`), and then progress is measured time, so that the last step falls where the time ends.
Time is the wall clock's, or that of another `clock`: the process's CPU time makes runs on a busy machine comparable.

A baseline trains in the same loop, with the same optimizer, without experts to balance, logits to clip or checkpoints.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nanok3.baselines.frame import Baseline
from nanok3.data.packing import Batch
from nanok3.ledger import flops_per_token
from nanok3.model.decoder import K3
from nanok3.quant.qat import QAT
from nanok3.train.checkpoint import checkpoints, save_checkpoint
from nanok3.train.loss import count_targets, cross_entropy, step_loss, sum_of_weights, weighted_cross_entropy
from nanok3.train.machine import matmul_rate
from nanok3.train.mtp import Prediction
from nanok3.train.muon import K3Optimizer, OptimizerSettings
from nanok3.train.qk_clip import QKClip
from nanok3.train.quantile_balancing import QuantileBalancer
from nanok3.train.schedule import learning_rate
from nanok3.train.settings import TrainSettings
from nanok3.train.sight import Sight, check_sight, read
from nanok3.train.track import Tracker

SCHEDULE_TICKS = 1_000_000
"""Resolution of progress in a run over minutes."""


@runtime_checkable
class Batches(Protocol):
    """Endless batches at a position that can be saved: `data.loader.MixtureLoader`, or what has its interface."""

    @property
    def streams(self) -> Iterable[Any]: ...

    @property
    def stretch(self) -> int: ...

    def reached(self, share: float) -> None: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainingStopped(ValueError):
    """The run cannot go on: a loss or gradient that is not finite, or a spike."""


@dataclass
class Progress:
    """What a resumed run needs besides weights, optimizer and data position."""

    step: int = 0
    tokens: int = 0
    fraction: float = 0.0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step's numbers; loss in nats a token."""

    loss: float
    tokens: int
    bytes: int
    grad_norm: float
    vision_grad_norm: float | None
    max_logit: float | None  # of attention, on the steps that look
    loads: list[list[float]]
    ids: list[Any]
    pictures: int = 0
    patches: int = 0
    vision_seconds: float = 0.0  # tower and projector, forward and backward
    mtp_loss: float | None = None  # of the prediction layer, not weighted

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / math.log(2) / max(self.bytes, 1)


class Trainer:
    """Owns the run: model, optimizer, observers, data position, progress and the run folder.

    `validation` maps a slice's name to its batches; `sample` lets the model continue a few prompts for the log;
    `bytes_of` gives the bytes of each token id, for bits per byte.
    """

    def __init__(
        self,
        model: K3 | Baseline,
        loader: Batches,
        settings: TrainSettings,
        run: Path,
        bytes_of: Tensor,
        validation: dict[str, list[Batch]] | None = None,
        sample: Callable[[Any], list[tuple[str, str]]] | None = None,
        report: Callable[[str], None] = print,
        config: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.save_every and isinstance(model, Baseline):
            raise ValueError(f"save_every is {settings.save_every}; a baseline keeps no checkpoints, it must be 0")
        check_sight(model, [stream.source.name for stream in loader.streams if stream.source.pictures])
        self.clock = clock
        self.sight = Sight(model, clock)
        self.mtp = Prediction(model, settings.mtp_weight)
        self.model, self.loader, self.settings, self.run = model, loader, settings, run
        self.validation, self.sample, self.say = validation or {}, sample, report
        s = settings
        rules = OptimizerSettings(
            matrices="adamw" if s.optimizer == "adamw" else "muon",
            lr=s.lr,
            weight_decay=s.weight_decay,
            adam_lr_scale=s.adam_lr_scale,
            vision_lr_scale=s.vision_lr_scale,
            vision_matrices="muon" if s.vision_optimizer == "muon" else "adamw",
        )
        self.optimizer = K3Optimizer(model, rules)
        self.balancer = QuantileBalancer(model, update_bias=s.balance)
        self.clip = QKClip(model, threshold=s.qk_clip_threshold, every=s.qk_clip_every)
        self.qat = QAT(model, s.qat, s.qat_scale_rule)
        self.progress = Progress()
        self.track = Tracker(run, s.tensorboard, s.wandb, config)
        self.batches = iter(loader)
        self.interrupted = False
        model.compute_dtype = {"float32": None, "bfloat16": torch.bfloat16}[s.precision]
        self.device = model.lm_head.weight.device
        self.bytes_of = bytes_of.to(self.device)
        self.peak_flops = matmul_rate(model.compute_dtype or torch.float32, self.device)
        if isinstance(model, K3):
            self.flops_per_token = flops_per_token(model.cfg, s.seq_len, training=True) + self.mtp.flops(s.seq_len)
        else:
            self.flops_per_token = model.flops_per_token(s.seq_len, training=True)

    # ------------------------------------------------------------------ one step

    def train_step(self) -> StepResult:
        """Forward, backward and update for `accumulate` microbatches; TrainingStopped on NaN or a spike, before the
        weights are touched."""
        self.model.train()
        stretch = self.loader.stretch
        self.loader.reached(self.share_done)
        batches = [next(self.batches).to(self.device) for _ in range(self.settings.accumulate)]
        if self.loader.stretch != stretch:
            self.progress.losses = []
        tokens = sum(count_targets(b.targets) for b in batches)
        weight = sum(sum_of_weights(b.targets, b.weights) for b in batches)
        self.mtp.begin(batches)
        with self.qat.projected():
            self.sight.look(batches)
            loss = sum(self._backward(batch, weight) for batch in batches) / max(tokens, 1)
            self.sight.learn()
        vision = self._vision_grad_norm()
        grad_norm = float(nn.utils.clip_grad_norm_(self._parameters(), self.settings.grad_clip, foreach=True))
        ids = [i for b in batches for i in b.ids]
        self._check(loss, grad_norm, ids)
        self.optimizer.lr = self.learning_rate()
        self.optimizer.step()
        self.qat.stepped()
        self.optimizer.zero_grad()
        loads = self.balancer.step()
        logits = self.clip.step()
        byte_count = sum(int(self.bytes_of[b.targets.clamp(min=0)][b.targets >= 0].sum()) for b in batches)
        fractions = [(load.loads / max(float(load.loads.sum()), 1.0)).tolist() for load in loads]
        seen = (self.sight.pictures, self.sight.patches, self.sight.seconds)
        largest = _largest(logits)
        return StepResult(loss, tokens, byte_count, grad_norm, vision, largest, fractions, ids, *seen, self.mtp.mean)

    def _backward(self, batch: Batch, weight_of_step: float) -> float:
        targets = batch.targets.view(1, -1)
        # Padding must not count as load; pictures, which predict nothing either, are work for the experts.
        with self.balancer.observe(batch.filled), self.clip.observe(), self.mtp.watch():
            hidden = self.sight.hidden(batch)
            ahead = self.mtp.hidden(batch)
        weights = None if batch.weights is None else batch.weights.view(1, -1)
        loss_sum, plain = weighted_cross_entropy(hidden, self.model.lm_head.weight, targets, weights)
        loss, second = step_loss(loss_sum, weight_of_step), self.mtp.loss(ahead, batch)
        (loss if second is None else loss + second).backward()
        return float(plain)

    def learning_rate(self) -> float:
        """At this point of the schedule."""
        s = self.settings
        if s.minutes is None:
            assert s.steps is not None
            step, total = self.progress.step, s.steps
        else:
            step, total = int(self.progress.fraction * SCHEDULE_TICKS), SCHEDULE_TICKS
        return learning_rate(step, total, s.lr, s.warmup_fraction, s.final_lr_fraction)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (p for p in self.model.parameters() if p.grad is not None)

    def _vision_grad_norm(self) -> float | None:
        """The report judges multimodal training by the tower's gradient norm."""
        if not isinstance(self.model, K3) or not self.model.cfg.has_vision:
            return None
        grads = [p.grad for p in self.model.vision_tower.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else 0.0

    def _check(self, loss: float, grad_norm: float, ids: list[Any]) -> None:
        recent = self.progress.losses
        bound = self.settings.spike_nats
        # Above the highest, not the mean: a step may hold few words of pictures or many of a text.
        spike = bound > 0 and len(recent) >= 20 and loss > max(recent) + bound
        if math.isfinite(loss) and math.isfinite(grad_norm) and not spike:
            self.progress.losses = [*recent, loss][-50:]
            return
        what = f"loss {loss:.4g}, gradient norm {grad_norm:.4g}"
        why = f"a spike of more than {bound:g} nats above the last steps" if spike else "not finite"
        good = checkpoints(self.run)
        last = f"last good checkpoint: {good[-1]}" if good else "no checkpoint was written yet"
        message = f"step {self.progress.step + 1} stopped: {what} ({why}); {last}; documents of the batch: {ids}"
        self.track.write("event", self.progress.step + 1, message=message)
        raise TrainingStopped(message)

    # ------------------------------------------------------------------ the run

    @property
    def share_done(self) -> float:
        """Of the schedule."""
        p, s = self.progress, self.settings
        return p.fraction if s.minutes is not None else p.step / max(s.steps or 1, 1)

    @property
    def done(self) -> bool:
        if self.settings.minutes is not None:
            return self.progress.fraction >= 1.0
        return self.progress.step >= (self.settings.steps or 0)

    def fit(self) -> bool:
        """Train to the end of the schedule; False when it was interrupted (a checkpoint was saved then)."""
        with _Interrupts(self):
            spoken = -math.inf
            while not self.done and not self.interrupted:
                began = self.clock()
                result = self.train_step()
                now = self.clock()
                self._advance(result, now - began)
                if self.done or now - spoken >= self.settings.log_seconds:
                    self.say(self._line(result, now - began))
                    spoken = now
                self._every_so_often()
                self._pass(self.clock() - began)
            if not self.interrupted:
                self._finish()
        keeps_checkpoints = isinstance(self.model, K3)
        if keeps_checkpoints and (self.interrupted or self.settings.save_every):
            self.save()
        if self.interrupted:
            saved = f"saved. Go on with: {self.how_to_resume()}" if keeps_checkpoints else "nothing was saved"
            self.say(f"interrupted after step {self.progress.step}; {saved}")
        return not self.interrupted

    def _finish(self) -> None:
        """The last point of the curves, where the last step did not just make it."""
        p, s = self.progress, self.settings
        if self.validation and (not s.eval_every or p.step % s.eval_every):
            self._validate()
        if s.sample_every and p.step % s.sample_every:
            self._sample()

    def how_to_resume(self) -> str:
        return f"nanok3 pretrain --out {self.run} --resume"

    def _advance(self, result: StepResult, seconds: float) -> None:
        p = self.progress
        rate = result.tokens / max(seconds, 1e-9)
        lr = self.learning_rate()
        p.step += 1
        p.tokens += result.tokens
        self.track.write(
            "train",
            p.step,
            tokens=p.tokens,
            loss=result.loss,
            bits_per_byte=result.bits_per_byte,
            lr=lr,
            grad_norm=result.grad_norm,
            vision_grad_norm=result.vision_grad_norm,
            tokens_per_second=rate,
            flop_utilisation=self.utilisation(rate),
            load_max_over_mean=_worst(result.loads),
            dead_experts=_dead(result.loads),
            **({} if result.max_logit is None else {"max_logit": result.max_logit}),
            **({} if result.mtp_loss is None else {"mtp_loss": result.mtp_loss}),
            **_sight_fields(result, seconds),
            seconds=p.seconds,
        )
        if p.step % self.settings.loads_every == 0 and result.loads:
            assert isinstance(self.model, K3)
            layers = [_number(name, self.model.cfg.num_hidden_layers) for name in self.balancer.layers]
            self.track.write("loads", p.step, layers=layers, loads=result.loads)

    def _pass(self, seconds: float) -> None:
        """Time spent, validation and saving included: a schedule in minutes counts all of it."""
        self.progress.seconds += seconds
        if self.settings.minutes is not None:
            self.progress.fraction += seconds / (60 * self.settings.minutes)

    def utilisation(self, tokens_per_second: float) -> float:
        """Model FLOPs done per second over the matmul rate measured at the start:
        tokens/s x flops_per_token (ledger.py) / peak. Recomputed activations are not counted."""
        return tokens_per_second * self.flops_per_token / self.peak_flops

    def _line(self, result: StepResult, seconds: float) -> str:
        p = self.progress
        rate = result.tokens / max(seconds, 1e-9)
        share = self.share_done
        left = p.seconds * (1 - share) / max(share, 1e-9)
        parts = [
            f"step {p.step:5d}",
            f"{min(share, 1):4.0%}",
            f"loss {result.loss:.3f}",
            *([] if result.mtp_loss is None else [f"ahead {result.mtp_loss:.3f}"]),
            f"{result.bits_per_byte:.3f} bits/byte",
            f"{rate / 1000:.1f}k tok/s",
            f"{self.utilisation(rate):.0%} of peak",
            f"load {_worst(result.loads):.1f}x, {_dead(result.loads)} dead",
            f"|g| {result.grad_norm:.2f}",
            *([f"tower {result.vision_seconds / max(seconds, 1e-9):.0%}"] if result.pictures else []),
            f"{_clock(max(left, 0))} left",
        ]
        return " · ".join(parts)

    def _every_so_often(self) -> None:
        p, s = self.progress, self.settings
        if s.eval_every and p.step % s.eval_every == 0:
            self._validate()
        if s.sample_every and p.step % s.sample_every == 0:
            self._sample()
        if s.save_every and p.step % s.save_every == 0:
            self.save()

    def _validate(self) -> None:
        slices = self.evaluate()
        self.track.write("eval", self.progress.step, slices=slices)
        shown = ", ".join(f"{name} {v['bits_per_byte']:.3f}" for name, v in slices.items())
        self.say(f"           validation bits/byte: {shown}")

    def _sample(self) -> None:
        if self.sample is not None:
            with self.qat.projected():
                said = self.sample(self.model)
            for prompt, text in said:
                self.track.write("sample", self.progress.step, prompt=prompt, text=text)

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Mean loss and bits per byte of each validation slice, without touching the observers; with `qat` those of the
        model as it will be served."""
        self.model.eval()
        with self.qat.projected():
            slices = {name: self._score(batches) for name, batches in self.validation.items()}
        self.model.train()
        return slices

    def _score(self, batches: list[Batch]) -> dict[str, float]:
        nats, tokens, size, ahead, guesses = 0.0, 0, 0, 0.0, 0
        for batch in (b.to(self.device) for b in batches):
            with self.mtp.watch():
                hidden = read(self.model, batch)
            more, count = self.mtp.score(batch)
            ahead, guesses = ahead + more, guesses + count
            loss_sum, n = cross_entropy(hidden, self.model.lm_head.weight, batch.targets.view(1, -1))
            nats, tokens = nats + float(loss_sum), tokens + n
            size += int(self.bytes_of[batch.targets.clamp(min=0)][batch.targets >= 0].sum())
        bits = nats / math.log(2)
        return {
            "loss": nats / max(tokens, 1),
            "bits_per_byte": bits / max(size, 1),
            "tokens": tokens,
            "bytes": size,
            **({"mtp_loss": ahead / guesses} if guesses else {}),
        }

    # ------------------------------------------------------------------ state

    def save(self) -> Path:
        assert isinstance(self.model, K3)
        return save_checkpoint(self.run, self.progress.step, self.model, self.state_dict(), self.settings.keep)

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the weights; tensors and plain values only."""
        return {
            "progress": vars(self.progress),
            "optimizer": self.optimizer.state_dict(),
            "balancer": self.balancer.state_dict(),
            "clip": self.clip.state_dict(),
            "loader": self.loader.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress = Progress(**state["progress"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.balancer.load_state_dict(state["balancer"])
        self.clip.load_state_dict(state["clip"])
        self.loader.load_state_dict(state["loader"])
        self.batches = iter(self.loader)
        torch.set_rng_state(state["random"])


class _Interrupts:
    """Ctrl-C and SIGTERM let the step finish; a second Ctrl-C stops at once."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: nothing to catch there
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.trainer.interrupted:
            raise KeyboardInterrupt
        self.trainer.interrupted = True
        self.trainer.say("finishing this step, then saving (Ctrl-C again stops at once)")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def _number(router: str, layers: int) -> int:
    """The layer of `model.layers.3.block_sparse_moe.gate`; the prediction layer comes after the last."""
    found = re.match(r"model\.layers\.(\d+)\.", router)
    return int(found[1]) if found else layers


def _worst(loads: list[list[float]]) -> float:
    """Largest load over the mean load, in the layer where that is worst."""
    return max((max(layer) * len(layer) for layer in loads), default=1.0)


def _dead(loads: list[list[float]]) -> int:
    return sum(share == 0 for layer in loads for share in layer)


def _sight_fields(result: StepResult, seconds: float) -> dict[str, float]:
    """Pictures and patches of a step, and the tower's share of its time; nothing for a model that reads text only."""
    if result.vision_grad_norm is None:
        return {}
    share = result.vision_seconds / max(seconds, 1e-9)
    return {"pictures": result.pictures, "patches": result.patches, "vision_share": share}


def _largest(logits: dict[str, Tensor]) -> float | None:
    seen = [float(t.max()) for t in logits.values() if t.numel()]
    return max(seen) if seen else None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
