"""What readings of a reference against itself say about the noise of a measurement.  Arithmetic only.

The truth is 1.0x and never faster; what else is read is the machine's noise, so readings are grouped by what others did on it.
Not here: how a reading is taken (`null_run`), the statistic inside one reading (`timing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

GROUPS = (("< 0.1", 0.1), ("0.1 - 0.5", 0.5), (">= 0.5", math.inf))
"""Names and upper ends of the groups, in cores busy with what others do."""
EVERY = "any"
BEYOND = 1.05
"""A false claim above this would be paid noticeably."""
_CONFIDENCE = 0.95
_HALVINGS = 60


@dataclass(frozen=True)
class Reading:
    """One evaluation of a problem's reference as a candidate."""

    problem: str
    status: str
    speedup: float | None
    low: float | None
    high: float | None
    faster: bool
    time_ms: float | None
    reference_ms: float | None
    seconds: float
    """From source to verdict."""
    other_load: float
    """Cores busy with what others did meanwhile."""
    digest: str
    """Of the source, which is never the same twice."""
    at: str
    """When it was begun, UTC."""
    message: str = ""
    stage_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def waited_s(self) -> float:
        """Seconds of it that were spent waiting for other evaluations on this machine."""
        return self.stage_s.get("slot", 0.0) + self.stage_s.get("queue", 0.0)


@dataclass(frozen=True)
class Summary:
    """The readings of one problem, or of all, in one group of load."""

    problem: str
    load: str
    readings: int
    """With a speed-up."""
    failed: int
    """Without one."""
    median: float
    band_low: float
    """2.5 % of the speed-ups lie below; 2.5 % above `band_high`."""
    band_high: float
    least: float
    most: float
    low_median: float
    """Median of the intervals' lower ends, which are what is paid."""
    false_faster: float
    """Share of readings that claim to be faster."""
    false_faster_at_most: float
    """What that share is below, at 95 % confidence, given so few readings."""
    false_beyond: float
    """Share of readings that claim to be faster, and by more than 1.05x."""
    beyond: float
    """Share of readings above 1.05x, claimed or not."""
    seconds: float
    """Median seconds of one reading."""
    waited_s: float
    """Median seconds of it that were spent waiting for other evaluations."""
    load_median: float


def group(other_load: float) -> str:
    """Name of the group that a load belongs to."""
    return next(name for name, end in GROUPS if other_load < end)


def summarise(readings: Sequence[Reading]) -> list[Summary]:
    """All problems together if there are several, then each one; each at any load and in every group that has readings."""
    problems = list(dict.fromkeys(r.problem for r in readings))
    wanted: list[tuple[str, Callable[[Reading], bool]]] = [("all", lambda _: True)] if len(problems) > 1 else []
    wanted += [(name, lambda r, name=name: r.problem == name) for name in problems]  # type: ignore[misc]
    found = []
    for name, belongs in wanted:
        of_problem = [r for r in readings if belongs(r)]
        found += [_summary(name, EVERY, of_problem)]
        found += [_summary(name, load, [r for r in of_problem if group(r.other_load) == load]) for load, _ in GROUPS]
    return [summary for summary in found if summary.readings or summary.failed]


def _summary(problem: str, load: str, readings: Sequence[Reading]) -> Summary:
    timed = [r for r in readings if r.speedup is not None]
    speedups = np.array([r.speedup for r in timed], dtype=np.float64)
    count = len(timed)
    low, middle, high = np.quantile(speedups, (0.025, 0.5, 0.975)) if count else (math.nan,) * 3
    claims = sum(r.faster for r in timed)
    return Summary(
        problem=problem, load=load, readings=count, failed=len(readings) - count, median=float(middle), band_low=float(low),
        band_high=float(high), least=float(speedups.min(initial=math.inf)), most=float(speedups.max(initial=-math.inf)),
        low_median=_median([r.low for r in timed if r.low is not None]), false_faster=_share(claims, count),
        false_faster_at_most=at_most(claims, count), beyond=_share(int((speedups > BEYOND).sum()), count),
        false_beyond=_share(sum(r.faster and (r.speedup or 0.0) > BEYOND for r in timed), count),
        seconds=_median([r.seconds for r in timed]), waited_s=_median([r.waited_s for r in timed]),
        load_median=_median([r.other_load for r in readings]),
    )  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _share(part: int, count: int) -> float:
    return part / count if count else math.nan


def at_most(part: int, count: int) -> float:
    """Upper end of the one-sided 95 % interval of a share (Clopper and Pearson 1934), by bisection; 1.0 without observations."""
    if part >= count:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        seldom = sum(math.comb(count, k) * middle**k * (1 - middle) ** (count - k) for k in range(part + 1))
        low, high = (middle, high) if seldom > 1 - _CONFIDENCE else (low, middle)
    return high
