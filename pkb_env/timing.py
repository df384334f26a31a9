"""From paired times to a speed-up with an interval.  Arithmetic only: no process, no clock.

The value is the geometric mean of the ratios (reference / candidate) of a block of two adjacent pairs in opposite orders, in
which the cost of being first cancels; the statistic the median of the values; the interval lies between order statistics;
`faster` asks an exact one-sided sign test.  Calling the two sides by each other's names inverts a value, and which order comes
first in a block is a coin's choice, so under "no difference" each sign is that coin's, however the machine behaves.
What is paid for, the interval's lower end and `faster`, is measured against the bare reference, without the box's reading of
arguments and writing of outputs: a candidate could leave that out in its own process, and must not look faster for it.

Pairs are looked at several times, and timing stops when they say enough.  The sign test's level of 2 % is divided by the number
of possible looks (Bonferroni), so it holds for every rule of stopping.  The interval is one of 97 %, of which stopping when it
happens to be narrow leaves 95 %.  What differs from one start of the processes to the next no number of pairs of one group
shows: a narrow claim is repeated in fresh groups and pooled.
Not here: which pairs count (the first ones pay for page faults; whoever measures leaves them out), when to stop and the order
of pairs (`stopping`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

LEVEL = 0.02
"""How often `faster` may err."""
MIN_PAIRS = 5
"""Fewer pairs prove nothing."""
BLOCKS_FROM = 24
"""Fewer pairs make too few blocks: each is a value of its own."""
NARROW = 1.15
"""A claim below it is believed only when `GROUPS` fresh groups repeat it."""
GROUPS = 3
_CONFIDENCE = 0.97


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
    groups: int = 1
    """Fresh groups that the pairs come from."""


def summarise(pairs: Sequence[Pair], looks: int = 1) -> Speed | None:
    """Speed-up of the candidate over the reference in one group; see `pool`."""
    return pool([pairs], looks)


def pool(groups: Sequence[Sequence[Pair]], looks: int = 1) -> Speed | None:
    """Speed-up over the pairs of all groups, or None where a group has none.

    The interval holds every group's median; `faster` needs the pooled sign test, and each group's median above 1.  Where a group
    has fewer than `MIN_PAIRS` the interval is the range of the values, and nothing is faster.

    Args:
        groups: pairs of each fresh group.
        looks: at how many moments timing could have stopped.
    """
    if not groups or not all(groups):
        return None
    few = min(map(len, groups)) < MIN_PAIRS
    pairs = [pair for group in groups for pair in group]
    values = [ratios(group) for group in groups]
    whole, bare = np.concatenate(values, axis=1)
    medians, bare_medians = np.array([np.median(each, axis=1) for each in values]).T
    speedup = float(np.median(whole))
    return Speed(
        time_ms=float(np.median([p.candidate_ns for p in pairs])) / 1e6,
        reference_ms=float(np.median([p.reference_ns for p in pairs])) / 1e6,
        speedup=speedup,
        low=float(bare.min()) if few else min(interval(bare)[0], speedup, *bare_medians.tolist()),
        high=float(whole.max()) if few else max(interval(whole)[1], speedup, *medians.tolist()),
        faster=not few and sign_test(bare) <= LEVEL / looks and min(speedup, *bare_medians.tolist()) > 1,
        skew=float(np.median([p.skew_ns / p.candidate_ns for p in pairs])),
        pairs=len(pairs),
        groups=len(groups),
    )


def needs_repeat(speed: Speed) -> bool:
    """Whether a claim is so narrow that more fresh groups must repeat it."""
    return speed.faster and speed.speedup < NARROW and speed.groups < GROUPS


def ratios(pairs: Sequence[Pair]) -> np.ndarray:
    """Reference over candidate, and bare reference over candidate, of each block (2, blocks); an odd last pair is left out."""
    times = np.array([(p.reference_ns, p.bare_reference_ns, p.candidate_ns) for p in pairs], dtype=np.float64).T
    single: np.ndarray = times[:2] / times[2]
    if len(pairs) < BLOCKS_FROM:
        return single
    even = len(pairs) // 2 * 2
    blocks: np.ndarray = np.sqrt(single[:, :even:2] * single[:, 1:even:2])
    return blocks


def interval(values: np.ndarray) -> tuple[float, float]:
    """97 % interval of the median of at least two values > 0, between order statistics (Hettmansperger and Sheather 1986).

    Interpolated geometrically: the interval of the inverse values is the inverse interval.
    """
    ordered = np.sort(values)
    place, share = _place(len(ordered))
    (low, inner_low), (inner_high, high) = ordered[place - 1 : place + 1], ordered[-place - 1 :][:2]
    return float(low * (inner_low / low) ** share), float(high * (inner_high / high) ** share)


def sign_test(values: np.ndarray) -> float:
    """Exact chance of so many values above 1 among those that are not 1, were either side of 1 as likely as the other."""
    wins, losses = int((values > 1).sum()), int((values < 1).sum())
    return _below(wins + losses)[losses + 1]


@lru_cache(1024)
def _place(count: int) -> tuple[int, float]:
    """Which order statistic, from 1, the interval of `count` values begins at, and the share of the way to the next one."""
    below, tail = _below(count), (1 - _CONFIDENCE) / 2
    place = sum(chance <= tail for chance in below[1:])
    if place == 0:
        return 1, 0.0
    part = (tail - below[place]) / (below[place + 1] - below[place])
    return place, (count - place) * part / (place + (count - 2 * place) * part)


@lru_cache(1024)
def _below(tosses: int) -> tuple[float, ...]:
    """Chance of fewer than 0, 1, ..., `tosses` + 1 heads in `tosses` fair tosses."""
    ways = accumulate(range(tosses), lambda ways, heads: ways * (tosses - heads) // (heads + 1), initial=1)
    return tuple(fewer / 2**tosses for fewer in accumulate(ways, initial=0))
