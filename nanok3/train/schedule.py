"""The learning rate of a step: a short linear warmup, then a cosine down to a floor.

    warmup    lr = peak (step + 1) / w                        over the first w = 1 % of the steps (at least 1)
    cosine    lr = peak (f + (1 - f) (1 + cos(pi t)) / 2)     t from 0 (end of warmup) to 1 (last step)

Report 3: warmup over 1 % of the steps, and cosine beat warmup-stable-decay when each had its own search at
the same minimum learning rate. The report gives neither the peak nor the floor: f = 0.1 is ours.
`warmup_stable_decay` stands here for that comparison; its linear decay over the last fifth is ours too.
"""

from __future__ import annotations

import math


def learning_rate(
    step: int, total_steps: int, peak: float, warmup_fraction: float = 0.01, final_fraction: float = 0.1
) -> float:
    """Learning rate of the 0-based `step`: `peak` at the end of the warmup, `final_fraction * peak` at the
    last step and after it. ValueError for a negative step, fewer than one step, or a fraction outside [0,
    1]."""
    _check(step, total_steps, warmup_fraction=warmup_fraction, final_fraction=final_fraction)
    warmup = _warmup_steps(total_steps, warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / warmup
    cosine = (1 + math.cos(math.pi * _progress(step, warmup, total_steps))) / 2
    return peak * (final_fraction + (1 - final_fraction) * cosine)


def warmup_stable_decay(
    step: int,
    total_steps: int,
    peak: float,
    warmup_fraction: float = 0.01,
    final_fraction: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """The rival: after the same warmup `peak` is held, then falls linearly to the floor over the last
    `decay_fraction` of the steps."""
    _check(
        step,
        total_steps,
        warmup_fraction=warmup_fraction,
        final_fraction=final_fraction,
        decay_fraction=decay_fraction,
    )
    warmup = _warmup_steps(total_steps, warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / warmup
    decay_from = max(warmup, total_steps - max(1, round(total_steps * decay_fraction)))
    if step < decay_from:
        return peak
    return peak * (1 - (1 - final_fraction) * _progress(step, decay_from, total_steps))


def _warmup_steps(total_steps: int, fraction: float) -> int:
    return max(1, round(total_steps * fraction))


def _progress(step: int, begin: int, end: int) -> float:
    """How much of steps begin..end-1 is done after `step`, in (0, 1]."""
    return min(1.0, (step + 1 - begin) / max(1, end - begin))


def _check(step: int, total_steps: int, **fractions: float) -> None:
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}; it must be at least 1")
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must lie in [0, 1]")
