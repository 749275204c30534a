"""How an expert is trained: the flags of `nanok3 rl`. K3 published none of the values; all are ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from nanok3.posttrain.effort import EffortSettings
from nanok3.posttrain.objective import ObjectiveSettings
from nanok3.posttrain.rollout import RolloutSettings
from nanok3.quant.qat import check


@dataclass(frozen=True)
class LearnerSettings:
    """The optimizer's side of an iteration."""

    lr: float = 6e-4
    """Of Muon. Its steps are as large whatever the gradient, so what is too high drifts on noise."""
    final_lr_fraction: float = 1.0
    """Where lr ends, relative to where it begins; it falls along a line over the run."""
    adam_lr_scale: float = 0.2
    """AdamW's learning rate relative to Muon's."""
    weight_decay: float = 0.1
    """Of matrices."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    epochs: int = 1
    """Times an iteration's samples are learned from."""
    minibatches: int = 4
    """Optimizer steps of an epoch."""
    micro_tokens: int = 8192
    """Tokens of a packed row."""
    qk_clip_every: int = 10
    """Iterations between two looks at the attention logits (MuonClip); 0 never looks."""
    balance: bool = False
    """Set the router's biases anew after an iteration; never between its rollouts and its training steps."""
    replay: bool = False
    """Record which experts the sampler chose, and train through the same ones. Rollouts go without the native step and
    the prefix cache, so they are slower."""
    qat: str = "off"
    """Experts in four bits, in rollouts and training alike: off, w4a16, w4a8."""
    seed: int = 0
    """Of the order of samples."""

    def __post_init__(self) -> None:
        for name in ("lr", "adam_lr_scale", "grad_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        if not 0 < self.final_lr_fraction <= 1:
            raise ValueError(f"final_lr_fraction is {self.final_lr_fraction}; it is a share above 0, at most 1")
        least = {"epochs": 1, "minibatches": 1, "micro_tokens": 1, "qk_clip_every": 0, "weight_decay": 0, "seed": 0}
        for name, low in least.items():
            if not low <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        check(self.qat, "ceil")


@dataclass(frozen=True)
class RLSettings:
    """One expert."""

    iterations: int | None = None
    """Rollouts with their training steps; give this or minutes."""
    minutes: float | None = None
    """Length of the run instead."""
    problems: int = 256
    """Tasks of the training split that are used, again and again."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """How prompts are played."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """What is learned from them."""
    effort: EffortSettings = field(default_factory=EffortSettings)
    """What an answer may cost."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    """The optimizer."""
    budget_samples: int = 3
    """Answers of the cold start to each problem and effort from which its budget is measured."""
    eval_every: int = 0
    """Iterations between two looks at held-out tasks; 0 looks at the beginning and the end alone."""
    eval_count: int = 200
    """Held-out answers of a look; 0 for no looks."""
    save_every: int = 10
    """Iterations between checkpoints; 0 for none."""
    keep: int = 2
    """Checkpoints kept."""
    alarm: float = 0.9
    """Share of answers cut off by max_tokens that is an alarm after three iterations."""

    def __post_init__(self) -> None:
        if (self.iterations is None) == (self.minutes is None):
            raise ValueError(f"give iterations or minutes; got iterations={self.iterations}, minutes={self.minutes}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes is {self.minutes}; it must be above 0 and finite")
        least = {"problems": 1, "budget_samples": 1, "eval_every": 0, "eval_count": 0, "save_every": 0, "keep": 1}
        for name, low in {"iterations": 1, **least}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < 2**31:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if not 0 < self.alarm <= 1:
            raise ValueError(f"alarm is {self.alarm}; it is a share above 0, at most 1")
        if self.rollout.samples < 2:
            raise ValueError(f"samples is {self.rollout.samples}; a group needs at least 2 to compare")

    def with_effort(self, **changes: object) -> RLSettings:
        """The same run with another budget."""
        return replace(self, effort=replace(self.effort, **changes))  # type: ignore[arg-type]
