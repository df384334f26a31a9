"""From paired times to a speed-up with an interval.  Arithmetic only: no process, no clock.

The value is the geometric mean of the ratios (reference / candidate) of a block of two adjacent pairs in opposite orders, in
which the cost of being first cancels; the statistic the median of the values; the interval lies between order statistics;
`faster` asks an exact one-sided sign test.  Calling the two sides by each other's names inverts a value, and which order comes
first in a block is a coin's choice, so under "no difference" each sign is that coin's, however the machine behaves.

Both sides are compared by `solution` alone, from the last rank's beginning to the last one's return.  For the candidate that is
its own process's word, which the outside clock checks: what of its calls it does not call `solution`, beyond what it is for the
reference, is charged to it, as far as that is more than chance; and of no call is more taken off than is usual for the reference,
or a word that swings from call to call would hide behind its own medians.  What is paid for, the interval's lower end and
`faster`, does not believe it at all: there the candidate's time is the outside clock's, less what waking ranks and seeing them
done takes at the very least, as measured on the reference.

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
_LEAST = 0.05
"""Quantile of the reference's calls that stands for the least that waking and seeing take."""


@dataclass(frozen=True)
class Pair:
    """One timed pair, slowest rank, in ns."""

    reference_ns: int
    """Its `solution` alone."""
    candidate_ns: int
    """By the outside clock: reading arguments and writing outputs too."""
    skew_ns: int = 0
    """Candidate's last rank minus its first."""
    plumbing_ns: int = 0
    """Of the candidate's time, what its own process says was not `solution`."""
    reference_plumbing_ns: int = 0
    """What the outside clock saw of the reference beyond `reference_ns`."""
    outer_ns: int = 0
    """Of that, waking the ranks and seeing that they are done, which nothing that runs in a rank can save."""

    def __post_init__(self) -> None:
        least = min(self.reference_ns, self.candidate_ns - self.plumbing_ns)
        if least <= 0 or min(self.skew_ns, self.plumbing_ns, self.reference_plumbing_ns, self.outer_ns) < 0:
            raise ValueError(f"a call takes more than 0 ns and ranks end in some order; came {self}")


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
        time_ms=float(np.median(np.concatenate([times(group)[1] for group in groups]))) / 1e6,
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


def times(pairs: Sequence[Pair]) -> np.ndarray:
    """In ns (3, pairs): the reference's `solution`, the candidate's, and the candidate's as far as its word is not believed."""
    table = np.array([list(vars(pair).values()) for pair in pairs], dtype=np.float64).T
    reference, candidate, _, told, usual, outer = table
    plumbing = np.minimum(told, _fence(usual))
    charge = max(0.0, float(np.median(plumbing) - np.median(usual)) - _doubt(plumbing) - _doubt(usual))
    said = np.minimum(candidate - plumbing + charge, candidate)
    least = float(np.quantile(outer, _LEAST, method="lower"))
    return np.stack([reference, said, np.maximum(candidate - least, said)])


def _fence(values: np.ndarray) -> float:
    """What is more is far out among them (Tukey 1977)."""
    lower, upper = np.quantile(values, (0.25, 0.75))
    return float(upper + 1.5 * (upper - lower))


def _doubt(values: np.ndarray) -> float:
    """Half of the notch of a median (McGill, Tukey and Larsen 1978): medians farther apart than two of them differ."""
    lower, upper = np.quantile(values, (0.25, 0.75))
    return float(1.57 * (upper - lower) / len(values) ** 0.5)


def ratios(pairs: Sequence[Pair]) -> np.ndarray:
    """Reference over candidate, as it says and as is paid for, of each block (2, blocks); an odd last pair is left out."""
    reference, said, paid = times(pairs)
    single: np.ndarray = np.stack([reference / said, reference / paid])
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
