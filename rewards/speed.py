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
    """The speed-up's point estimate itself, 0 below `low` and clipped at `high`; blind to noise; 0 for a failure.

    Raises:
        ValueError: not 0 <= low <= high.
    """

    kind: ClassVar[str] = "speedup"

    low: float = 0.0
    high: float = math.inf
    untimed: bool = False
    """Whether a correct answer without usable times earns 1, as at parity, instead of dropping out."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"wanted 0 <= low <= high; came low={self.low!r}, high={self.high!r}")

    def score(self, verdict: Verdict, history: History) -> float | None:  # noqa: ARG002
        """0, or a number from low to high; None for a correct answer without usable times, unless `untimed`."""
        if not verdict.correct:
            return 0.0
        found = verdict.speedup if verdict.comparable else None
        if found is None:
            return 1.0 if self.untimed else None
        return 0.0 if found < self.low else min(found, self.high)


@dataclass(frozen=True, slots=True)
class Faster:
    """1 for a correct answer whose proven speed-up is above `above`, else 0: fast_p as a term.

    Raises:
        ValueError: `above` is negative or not finite.
    """

    kind: ClassVar[str] = "faster"

    above: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.above < math.inf:
            raise ValueError(f"wanted a finite above >= 0; came above={self.above!r}")

    def score(self, verdict: Verdict, history: History) -> float | None:  # noqa: ARG002
        """0.0 or 1.0; None for a correct answer without usable times."""
        if not verdict.correct:
            return 0.0
        paid = proven_speedup(verdict)
        return None if paid is None else float(paid > self.above)


@dataclass(frozen=True, slots=True)
class Levels:
    """-1 for a failure, 1 for a correct answer, 2 if proven faster than the reference, 3 if than another implementation too.

    Raises:
        ValueError: a negative margin, or one that is not finite.
    """

    kind: ClassVar[str] = "levels"

    margin: float = 0.05
    """How much faster it must be."""
    other: str = "tuned"
    """Name among the verdict's `baselines`; where no such time was taken, 2 is the highest level."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"wanted a finite margin >= 0; came margin={self.margin!r}")

    def score(self, verdict: Verdict, history: History) -> float:  # noqa: ARG002
        """-1.0, 1.0, 2.0 or 3.0."""
        if not verdict.correct:
            return -1.0
        paid, needed = proven_speedup(verdict), 1 + self.margin
        if paid is None or paid <= needed:
            return 1.0
        other = verdict.baselines.get(self.other)
        return 3.0 if other is not None and paid * other / verdict.baselines["reference"] > needed else 2.0


@dataclass(frozen=True, slots=True)
class SpeedOfLight:
    """1 / (1 + (t - bound) / (reference - bound)) with t = reference / proven speed-up: 1/2 at parity, 1 at the roofline.

    t lies never below the bound, because proven speed-ups are cut off there; a bound that the reference itself beats is a
    wrong one.  0 for a failure.
    """

    kind: ClassVar[str] = "speed_of_light"

    def score(self, verdict: Verdict, history: History) -> float:  # noqa: ARG002
        """From 0 to 1; a correct answer without usable times, or without a bound, earns 1/2."""
        if not verdict.correct:
            return 0.0
        paid, bound, reference = proven_speedup(verdict), verdict.bound_ms, verdict.baselines.get("reference", 0.0)
        if paid is None or not bound or reference <= bound:
            return 0.5
        if paid <= 0:
            return 0.0
        return min(1.0, (reference - bound) / (reference / paid + reference - 2 * bound))


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
