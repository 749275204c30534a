"""How a draft is trained: the flags of `nanok3 draft`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class DraftSettings:
    """How a draft is trained; all of it ours but the number of guesses."""

    steps: int = 300
    """Optimizer steps."""
    rows: int = 4
    """Rows of text a step; each is read by itself."""
    seq_len: int = 256
    """Tokens of a row."""
    lr: float = 2e-3
    """Peak rate of AdamW; rises over the first 2 % of the steps, then falls along a cosine to a tenth."""
    unroll: int = 7
    """Guesses in a row that are trained."""
    seed: int = 0
    """Of the first weights and of the order of the text."""
    qat: Literal["auto", "off", "w4a16", "w4a8"] = "auto"
    """Whether its experts are trained for MXFP4, with w4a8 on inputs in MXFP8, as the model's then are, too; auto: as
    the model was trained."""
    qat_scale_rule: Literal["auto", "ceil", "floor", "even"] = "auto"
    """How a block of 32 gets its power of two; auto: as the model was trained, else ceil."""
    eval_every: int = 100
    """Steps between two looks at held-out text."""
    save_every: int = 50
    """Steps between two savings."""

    def of_model(self, trained: dict[str, Any]) -> DraftSettings:
        """What `auto` stands for beside a model that was trained with these settings."""
        qat = trained.get("qat", "off") if self.qat == "auto" else self.qat
        rule = trained.get("qat_scale_rule", "ceil") if self.qat_scale_rule == "auto" else self.qat_scale_rule
        return replace(self, qat=qat, qat_scale_rule=rule)

    def __post_init__(self) -> None:
        least = {"steps": 1, "rows": 1, "seq_len": 2, "unroll": 1, "seed": 0, "eval_every": 1, "save_every": 1}
        for name, low in least.items():
            if not low <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr is {self.lr}; it must be above 0 and finite")
