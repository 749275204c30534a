"""How experts and their student are trained: the flags of `nanok3 rl` and `nanok3 distill`. K3 published none of the
values; all are ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from nanok3.posttrain.effort import EffortSettings


@dataclass(frozen=True)
class ObjectiveSettings:
    """The switches; all values are ours."""

    form: str = "token"
    """token (K2.5, K3) or sequence (K1.5, K2)."""
    log_ratio_low: float = math.log(0.7)
    """Tokens below get no policy gradient."""
    log_ratio_high: float = math.log(1.4)
    """Tokens above get no policy gradient."""
    tau: float = 0.02
    """Weight of the squared log-ratio; of the sequence form, the temperature of the regulariser."""
    mask_square: bool = False
    """Whether the window masks the squared log-ratio, too."""
    ptx_weight: float = 0.0
    """Weight of the plain loss on hand-picked conversations (K2); 0 for none."""

    def __post_init__(self) -> None:
        if self.form not in ("token", "sequence"):
            raise ValueError(f"form is {self.form!r}; allowed: 'token', 'sequence'")
        if not self.log_ratio_low < 0 < self.log_ratio_high:
            window = f"{self.log_ratio_low:g} to {self.log_ratio_high:g}"
            raise ValueError(f"log_ratio_low to log_ratio_high is {window}; 0, the unchanged policy, must lie inside")
        for name in ("tau", "ptx_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and finite")
        if self.form == "sequence" and self.tau == 0:
            raise ValueError("tau is 0; the sequence form has no gradient without it, it must be above 0")


@dataclass(frozen=True)
class RolloutSettings:
    """How prompts are played; all values are ours."""

    prompts: int = 16
    """N: prompts at work at a time."""
    samples: int = 8
    """K: samples of each."""
    pause: float = 0.9
    """lambda: share of N K samples after which what still runs is paused; 1 waits for all."""
    max_tokens: int = 128
    """Tokens of one turn."""
    temperature: float = 1.0
    """Of the sampler, and of the log-probabilities in training."""
    top_p: float = 1.0
    """Has to be 1: a sampler that leaves tokens out is another policy than the trainer's."""
    top_k: int | None = None
    """Has to be left out, for the same reason."""
    max_versions: int | None = 4
    """Updates after which a token is withheld from training; None for never."""
    in_flight: int = 64
    """Answers the engine works at, at most."""
    env_workers: int = 0
    """Threads for environments that are slow; 0 plays them between two steps of the engine."""
    seed: int = 0
    """Of the samples' random numbers."""

    def __post_init__(self) -> None:
        least = {"prompts": 1, "samples": 1, "max_tokens": 1, "in_flight": 1, "env_workers": 0, "seed": 0}
        for name, low in least.items():
            if not low <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0 < self.pause <= 1:
            raise ValueError(f"pause is {self.pause}; it is a share above 0, at most 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0: a policy that explores is sampled"
            )
        if self.top_p != 1 or self.top_k is not None:
            raise ValueError(f"top_p is {self.top_p}, top_k is {self.top_k}; allowed: 1 and none, nothing is left out")
        if self.max_versions is not None and self.max_versions < 0:
            raise ValueError(f"max_versions is {self.max_versions}; it must be at least 0, or left out")


@dataclass(frozen=True)
class EngineSettings:
    """Memory of the engine that plays: nothing that is learned depends on it, so a resumed run may change it."""

    memory_mib: int = 256
    """For states and latents of samples at work and their prefixes."""
    pool_mib: int = 256
    """For prefixes of samples that wait, once the other memory has no room for them (write-back); 0 for none."""

    def __post_init__(self) -> None:
        for name, low in {"memory_mib": 1, "pool_mib": 0}.items():
            if not low <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")


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
        if self.qat not in ("off", "w4a16", "w4a8"):
            raise ValueError(f"qat is {self.qat!r}; allowed: 'off', 'w4a16', 'w4a8'")


MINUTES = 4.0
"""A run's length where none is given."""


@dataclass(frozen=True)
class RLSettings:
    """One expert."""

    iterations: int | None = None
    """Rollouts with their training steps."""
    minutes: float | None = None
    """Length of the run instead; 4 where neither is given."""
    problems: int = 256
    """Tasks of the training split that are used, again and again."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """How prompts are played."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """What plays them."""
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
        if self.iterations is not None and self.minutes is not None:
            raise ValueError(f"iterations is {self.iterations} and minutes {self.minutes}; give one of them")
        if self.iterations is None and self.minutes is None:
            object.__setattr__(self, "minutes", MINUTES)
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


@dataclass(frozen=True)
class MopdSettings:
    """The flags of `nanok3 distill`; all values are ours."""

    iterations: int | None = None
    """Rollouts with their training steps."""
    minutes: float | None = None
    """Length of the run instead; 4 where neither is given."""
    problems: int = 256
    """Tasks of each domain's training split that are used, again and again."""
    r_max: float = 2.0
    """R: bound of a token's reward, in nats."""
    teacher_reads_effort: bool = True
    """Whether a teacher sees the effort in the prompt, as it did in its own training."""
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(prompts=72, samples=1))
    """How prompts are played; the pairs of domain and effort take turns."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """What plays them."""
    objective: ObjectiveSettings = field(default_factory=lambda: ObjectiveSettings(tau=0.0))
    """What is learned from them."""
    learner: LearnerSettings = field(default_factory=lambda: LearnerSettings(final_lr_fraction=0.1))
    """The optimizer."""
    eval_count: int = 200
    """Held-out answers for each row of the table; 0 for no table."""
    save_every: int = 10
    """Iterations between checkpoints; 0 for none."""
    keep: int = 2
    """Checkpoints kept."""

    def __post_init__(self) -> None:
        if self.iterations is not None and self.minutes is not None:
            raise ValueError(f"iterations is {self.iterations} and minutes {self.minutes}; give one of them")
        if self.iterations is None and self.minutes is None:
            object.__setattr__(self, "minutes", MINUTES)
        for name in ("minutes", "r_max"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        for name, low in {"iterations": 1, "problems": 1, "eval_count": 0, "save_every": 0, "keep": 1}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < 2**31:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if self.objective.form != "token":
            raise ValueError(f"form is {self.objective.form!r}; a reward per token needs 'token'")
