"""From paired times to a speed-up with an interval.  Arithmetic only: no process, no clock.

The statistic is the median of pair ratios (reference / candidate) of adjacent calls in random order; the interval a
percentile bootstrap over pairs; `faster` asks a one-sided sign test for z > 2.05 (2 %).  What is paid for, the interval's
lower end and `faster`, is measured against the bare reference, without the box's reading of arguments and writing of
outputs: a candidate could leave that out in its own process, and must not look faster for it.
Not here: which pairs count (the first ones pay for page faults; whoever measures leaves them out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Z_FASTER = 2.05
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_LEAST_TAIL = 1e-15
MIN_PAIRS = 5
"""Fewer pairs give no speed-up."""


@dataclass(frozen=True)
class Pair:
    """One timed pair, slowest rank, in ns."""

    reference_ns: int
    candidate_ns: int
    skew_ns: int = 0
    """Candidate's last rank minus its first."""
    plumbing_ns: int = 0
    """Part of the reference's time that was not its own: reading arguments and writing outputs."""

    def __post_init__(self) -> None:
        if min(self.reference_ns, self.candidate_ns) <= 0 or min(self.skew_ns, self.plumbing_ns) < 0:
            raise ValueError(f"a call takes more than 0 ns and ranks end in some order; came {self}")

    @property
    def bare_reference_ns(self) -> int:
        """The reference's call alone."""
        return max(1, self.reference_ns - self.plumbing_ns)


@dataclass(frozen=True)
class Speed:
    """What the pairs say; the interval holds the speed-up."""

    time_ms: float
    reference_ms: float
    speedup: float
    low: float
    high: float
    faster: bool
    skew: float
    pairs: int


def summarise(pairs: Sequence[Pair], seed: int = 0) -> Speed | None:
    """Speed-up of the candidate over the reference, or None for fewer than `MIN_PAIRS` pairs."""
    if len(pairs) < MIN_PAIRS:
        return None
    candidate = np.array([p.candidate_ns for p in pairs], dtype=np.float64)
    ratios = np.array([p.reference_ns for p in pairs], dtype=np.float64) / candidate
    proven = np.array([p.bare_reference_ns for p in pairs], dtype=np.float64) / candidate
    median = float(np.median(ratios))
    low, high = bootstrap(proven, seed)[0], bootstrap(ratios, seed)[1]
    return Speed(
        time_ms=float(np.median(candidate)) / 1e6,
        reference_ms=float(np.median([p.reference_ns for p in pairs])) / 1e6,
        speedup=median,
        low=min(low, median),
        high=max(high, median),
        faster=sign_test(proven) > Z_FASTER and float(np.median(proven)) > 1.0 and median > 1.0,
        skew=float(np.median([p.skew_ns / p.candidate_ns for p in pairs])),
        pairs=len(pairs),
    )


def bootstrap(ratios: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the median, by resampling pairs (Efron 1979)."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(ratios, (_RESAMPLES, len(ratios))), axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return float(low), float(high)


def sign_test(ratios: np.ndarray) -> float:
    """Normal deviate z of the sign test against "not faster", ties left out: from the exact binomial tail.

    The usual approximation (wins - n/2) / sqrt(n/4) would let through 3 % at 5, 8 or 11 pairs where 2 % are promised.
    """
    wins, losses = int((ratios > 1).sum()), int((ratios < 1).sum())
    n = wins + losses
    if n == 0:
        return 0.0
    tail = sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n
    return -NormalDist().inv_cdf(min(max(tail, _LEAST_TAIL), 1 - _LEAST_TAIL))
