"""How to train: one flat record whose fields are the flags of `nanok3 pretrain`. Values that K3 did not publish are
ours."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TrainSettings:
    """One run's settings. Tokens of a step = batch_size * accumulate * seq_len."""

    steps: int | None = None
    """Optimizer steps of the whole schedule; give this or minutes."""
    minutes: float | None = None
    """Length of the schedule in minutes of training time, instead of steps."""
    batch_size: int = 16
    """Rows of a microbatch."""
    accumulate: int = 1
    """Microbatches of a step."""
    seq_len: int = 512
    """Tokens of a row; documents are packed into rows and never see each other."""
    optimizer: str = "muon"
    """The rule for matrices: muon (per head; AdamW for the rest), or adamw for everything."""
    lr: float = 1e-2
    """Peak learning rate (ours; short runs of small models like twice that)."""
    adam_lr_scale: float = 0.4
    """AdamW's learning rate relative to Muon's (ours)."""
    vision_lr_scale: float = 0.025
    """The vision tower's and projector's learning rate relative to the rest of AdamW's (ours)."""
    vision_optimizer: str = "adamw"
    """The rule for the matrices of the tower's blocks and of the projector: adamw, or muon at the rate of the text's
    matrices (ours)."""
    picture_text_weight: float = 0.02
    """What the text of picture documents weighs in the loss where it does not say what the picture shows (ours); 1 for
    all alike."""
    picture_lead: float = 0.0
    """Share of the schedule, at its beginning, in which 95 of 100 rows are pictures, where there are any (ours). Beside
    as much text a new tower takes several times as many to see anything; what it sees it keeps beside a lot of text."""
    warmup_fraction: float = 0.01
    """Linear warmup, as a share of the schedule (report 3)."""
    final_lr_fraction: float = 0.1
    """Where the cosine ends, relative to the peak (ours)."""
    weight_decay: float = 0.1
    """Of matrices only (report 3)."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    precision: str = "auto"
    """Of the forward and backward: float32, bfloat16, or auto (bfloat16 where its products are faster). Masters,
    gates, scores, norms and states stay float32."""
    qat: str = "off"
    """Quantization-aware training of the routed experts: off, w4a16 (weights in MXFP4), w4a8 (inputs in MXFP8 too)."""
    qat_scale_rule: str = "ceil"
    """How a block of 32 gets its power of two: ceil (nothing cut off), floor or even; of export and serving too."""
    mtp_weight: float = 0.0
    """Of the prediction layer's loss, which guesses the token after the next: 0 for no layer (ours; DeepSeek-V3 took
    0.3, at the end 0.1)."""
    balance: bool = True
    """Quantile Balancing of the experts (report 2.3)."""
    qk_clip_threshold: float = 100.0
    """Attention logits above it are scaled down at their weights."""
    qk_clip_every: int = 10
    """Steps between two looks at the attention logits; each look costs a second pass over the scores."""
    recompute: bool = False
    """Activation checkpointing: less memory, a third more work."""
    compile: bool = False
    """torch.compile the two halves of every layer; minutes of start-up."""
    seed: int = 0
    """Of the initial weights and the data order."""
    spike_nats: float = 3.0
    """Stop when the loss rises this far above the highest of the last 50 steps; 0 never stops."""
    log_seconds: float = 5.0
    """Seconds between two lines of progress."""
    eval_every: int = 100
    """Steps between validations; 0 for none."""
    sample_every: int = 200
    """Steps between samples; 0 for none."""
    loads_every: int = 10
    """Steps between records of every expert's load."""
    save_every: int = 200
    """Steps between checkpoints; 0 for none, not even at the end."""
    keep: int = 2
    """Checkpoints kept; 0 keeps all."""
    tensorboard: bool = False
    """Also write TensorBoard files (extra `track`)."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `track`)."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.minutes is not None:
            raise ValueError(f"give steps or minutes, not both; got steps={self.steps}, minutes={self.minutes}")
        least = {"steps": 1, "batch_size": 1, "accumulate": 1, "seq_len": 2, "qk_clip_every": 1, "loads_every": 1}
        least |= dict.fromkeys(
            ("eval_every", "sample_every", "save_every", "keep", "spike_nats", "weight_decay", "seed"), 0
        )
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and f.name in least and not least[f.name] <= value < 2**63:
                raise ValueError(f"{f.name} is {value}; it must be at least {least[f.name]} and below 2^63")
        for name in (
            "minutes",
            "lr",
            "adam_lr_scale",
            "vision_lr_scale",
            "grad_clip",
            "qk_clip_threshold",
            "log_seconds",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        for name in ("warmup_fraction", "final_lr_fraction", "picture_lead"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1]")
        if not 0 < self.picture_text_weight <= 1:
            raise ValueError(f"picture_text_weight is {self.picture_text_weight}; it must be above 0, at most 1")
        if not 0 <= self.mtp_weight < float("inf"):
            raise ValueError(f"mtp_weight is {self.mtp_weight}; it must be at least 0 and finite")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer is {self.optimizer!r}; allowed: 'muon', 'adamw'")
        if self.vision_optimizer not in ("adamw", "muon"):
            raise ValueError(f"vision_optimizer is {self.vision_optimizer!r}; allowed: 'adamw', 'muon'")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"precision is {self.precision!r}; allowed: 'auto', 'float32', 'bfloat16'")
        if self.qat not in ("off", "w4a16", "w4a8"):
            raise ValueError(f"qat is {self.qat!r}; allowed: 'off', 'w4a16', 'w4a8'")
        if self.qat_scale_rule not in ("ceil", "floor", "even"):
            raise ValueError(f"qat_scale_rule is {self.qat_scale_rule!r}; allowed: 'ceil', 'floor', 'even'")
