"""From paired times to a speed-up with an interval.  Arithmetic only: no process, no clock.

The statistic is the median of pair ratios (reference / candidate) of adjacent calls in random order; the interval a
percentile bootstrap over pairs; `faster` asks a one-sided sign test for z > 2.05 (2 %).  The first pair is left out: it
pays for page faults of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_FASTER = 2.05
_RESAMPLES = 2000
_CONFIDENCE = 0.95
MIN_PAIRS = 5
"""Fewer pairs give no speed-up."""


@dataclass(frozen=True)
class Pair:
    """One timed pair, slowest rank, in ns."""

    reference_ns: int
    candidate_ns: int
    skew_ns: int = 0
    """Candidate's last rank minus its first."""


@dataclass(frozen=True)
class Speed:
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
    median = float(np.median(ratios))
    low, high = bootstrap(ratios, seed)
    return Speed(
        time_ms=float(np.median(candidate)) / 1e6,
        reference_ms=float(np.median([p.reference_ns for p in pairs])) / 1e6,
        speedup=median,
        low=min(low, median),
        high=max(high, median),
        faster=sign_test(ratios) > Z_FASTER and median > 1.0,
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
    """z of the share of pairs in which the candidate was faster, ties left out."""
    wins, losses = int((ratios > 1).sum()), int((ratios < 1).sum())
    n = wins + losses
    return 0.0 if n == 0 else (wins - n / 2) / math.sqrt(n / 4)
