"""Terms that pay for speed.  Speed is speed over the reference, from paired calls.

A correct answer without usable times (none measured, or a machine on which times mean nothing) has no speed: None.

Not here: how times are taken and when `faster` is proven (`pkb_env`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rewards.score import History
from rewards.verdict import Verdict


@dataclass(frozen=True, slots=True)
class LogSpeed:
    """log2 of the speed-up that is proven, clipped to [low, high].

    A doubling is worth one, wherever it happens; the clip keeps one outlier from ruling a batch.  A failure earns `low`.

    Raises:
        ValueError: not low <= 0 <= high.
    """

    kind: ClassVar[str] = "log_speed"

    low: float = -1.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= 0 <= self.high):
            raise ValueError(f"wanted finite low <= 0 <= high; came low={self.low!r}, high={self.high!r}")

    def score(self, verdict: Verdict, history: History) -> float | None:  # noqa: ARG002
        """Between low and high; None for a correct answer without usable times."""
        if not verdict.correct:
            return self.low
        paid = proven_speedup(verdict)
        if paid is None:
            return None
        return min(max(math.log2(paid), self.low), self.high) if paid > 0 else self.low


@dataclass(frozen=True, slots=True)
class Speedup:
    """The speed-up's point estimate itself: unbounded, and blind to noise; 0 for a failure."""

    kind: ClassVar[str] = "speedup"

    def score(self, verdict: Verdict, history: History) -> float | None:  # noqa: ARG002
        """A number >= 0; None for a correct answer without usable times."""
        if not verdict.correct:
            return 0.0
        return verdict.speedup if verdict.comparable else None


def proven_speedup(verdict: Verdict) -> float | None:
    """The speed-up that may be paid, or None without usable times.

    It is the lower end of the interval; nothing above 1 unless `faster`; nothing above reference time / `bound_ms`.
    A roofline that the reference itself beats is a wrong roofline: it caps at 1 and takes nothing from parity.
    """
    if not verdict.comparable or verdict.speedup_low is None:
        return None
    cap = math.inf if verdict.faster else 1.0
    if verdict.bound_ms:
        cap = min(cap, max(1.0, verdict.baselines["reference"] / verdict.bound_ms))
    return min(verdict.speedup_low, cap)
