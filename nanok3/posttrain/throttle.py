"""How many answers are asked for at once: as many as the engine has room for, found by trying.

    use > 0.9, or > 0.75 and somebody waits for pages  fewer: nine tenths of those that run
    all of them run and use < 0.75                     an eighth more

`use` is the share of the engine's pages that running answers hold. Past its room an engine takes pages back from those
that began last and reads them again later: the work of a rollout is done twice. Source: report 5.3 (active and queued
requests and cache use decide); the numbers are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL, ROOMY = 0.9, 0.75


@dataclass
class Throttle:
    """`most` answers at once, never above `top`."""

    top: int
    most: int = 0

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"in_flight is {self.top}; it must be at least 1")
        self.most = self.most or self.top

    def look(self, active: int, queued: int, use: float) -> int:
        """The new `most`, from what the engine says of itself."""
        if active and (use > FULL or (queued and use > ROOMY)):
            self.most = max(1, min(self.most, active * 9 // 10))
        elif active >= self.most and use < ROOMY:
            self.most = min(self.top, self.most + max(1, self.most // 8))
        return self.most
