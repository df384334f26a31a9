"""What a long run of planted candidates says: wrong verdicts, what leaked, what drifts.  Arithmetic only.

Not here: the candidates (`soak_mix`), running them (`soak_run`), looking at the machine (`soak_watch`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rewards.verdict import Status

MOST_ORACLES = 4
"""Oracle groups that an evaluator keeps between evaluations."""
_TENTHS = 10
_PASSING = "box-"
"""Folders of boxes go with their boxes."""


@dataclass(frozen=True)
class Ended:
    """What came of one candidate."""

    number: int
    kind: str
    group: str
    problem: str
    expected: tuple[str, ...]
    status: str
    message: str
    seconds: float
    """From a free slot to the verdict; 0 when nothing ran."""

    @property
    def as_planted(self) -> bool:
        return self.status in self.expected


@dataclass(frozen=True)
class Footprint:
    """What there is at one moment."""

    at: float
    """Seconds of a clock."""
    names: tuple[str, ...]
    """Of the processes below this one."""
    strays: tuple[str, ...]
    """Processes of ours that are not below this one, as `name id`."""
    folders: tuple[str, ...]
    """In the evaluator's folder."""
    shared: tuple[str, ...]
    """Shared memory by name, POSIX and System V."""
    descriptors: int
    """Of this process, like the next one."""
    threads: int
    ports: tuple[int, ...]
    """That processes of ours listen on."""
    zygote: int = 0
    """Its process id; 0 when there is none."""
    resident_mib: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trend:
    """A figure in the first and in the last tenth, medians."""

    first: float
    last: float


@dataclass(frozen=True)
class Report:
    """A whole run."""

    candidates: int
    seconds: float
    per_minute: float
    statuses: dict[str, int]
    wrong: tuple[Ended, ...]
    """Verdicts that are not what was planted; INFRA, which is no verdict, is not among them."""
    infra: tuple[Ended, ...]
    orphans: tuple[str, ...]
    surplus: tuple[str, ...]
    """What stood around between evaluations though nothing needed it: processes by name, folders of boxes."""
    restarts: int
    """Of the zygote."""
    files: tuple[str, ...]
    descriptors: int
    """More of them at the end than before; threads too."""
    threads: int
    ports: tuple[int, ...]
    trends: dict[str, Trend]
    """Memory in MiB, and descriptors and threads of this process between evaluations."""
    drift: float
    """Last over first tenth: seconds of an evaluation, median over kinds; NaN when no kind is in both."""
    drifts: dict[str, Trend]
    """Seconds by kind."""
    rests: tuple[Footprint, ...]
    """The looks between evaluations, in their order."""

    @property
    def clean(self) -> bool:
        """Whether every verdict is right and nothing is left."""
        left = (self.wrong, self.infra, self.orphans, self.surplus, self.restarts, self.files, self.ports)
        return not any(left) and self.descriptors <= 0 and self.threads <= 0


def surplus(here: Footprint, world_size: int) -> list[str]:
    """What is here though no evaluation runs, as `name x count`: an oracle has ranks, and a box of the reference with ranks."""
    count = Counter(here.names)
    oracles = count["pkb-oracle"]
    usual = {
        "pkb-oracle": MOST_ORACLES, "pkb-box": oracles, "pkb-init": 2 * oracles, "pkb-rank": 2 * world_size * oracles,
        "pkb-compile": 0,
    }  # fmt: skip
    found = {name: count[name] - most for name, most in usual.items()}
    found["folder of a box"] = sum(name.startswith(_PASSING) for name in here.folders)
    return [f"{name} x {more}" for name, more in found.items() if more > 0]


def summarise(
    ended: Sequence[Ended], rests: Sequence[Footprint], before: Footprint, after: Footprint, seconds: float, world_size: int
) -> Report:
    """The report of a run.

    Args:
        ended: in the order in which they were evaluated.
        rests: looks between evaluations.
        before: a look before the evaluator lived.
        after: one when it was gone.
        seconds: from the first to the last verdict.
        world_size: ranks of each candidate.
    """
    odd = [each for each in ended if not each.as_planted]
    strays = {name for look in (*rests, after) for name in look.strays} | {f"{name} (below this process)" for name in after.names}
    drifts = drift_by_kind(ended)
    return Report(
        candidates=len(ended), seconds=seconds, per_minute=60 * len(ended) / seconds,
        statuses=dict(sorted(Counter(each.status for each in ended).items())),
        wrong=tuple(each for each in odd if each.status != Status.INFRA),
        infra=tuple(each for each in odd if each.status == Status.INFRA),
        orphans=tuple(sorted(strays)),
        surplus=tuple(dict.fromkeys(text for look in rests for text in surplus(look, world_size))),
        restarts=max(0, len({look.zygote for look in rests}) - 1),
        files=tuple(sorted({*after.folders, *(set(after.shared) - set(before.shared))})),
        descriptors=after.descriptors - before.descriptors, threads=after.threads - before.threads,
        ports=tuple(sorted(set(after.ports) - set(before.ports))), trends=_trends(rests),
        drift=ratio(drifts), drifts=drifts, rests=tuple(rests),
    )  # fmt: skip


def _trends(rests: Sequence[Footprint]) -> dict[str, Trend]:
    if not rests:
        return {}
    series = {f"MiB of {name}": [look.resident_mib[name] for look in rests] for name in rests[0].resident_mib}
    series |= {"descriptors": [look.descriptors for look in rests], "threads": [look.threads for look in rests]}
    return {name: trend(values) for name, values in series.items()}


def trend(values: Sequence[float]) -> Trend:
    """Medians of the first and the last tenth, of at least one value each."""
    part = max(1, len(values) // _TENTHS)
    return Trend(median(values[:part]), median(values[-part:]))


def drift_by_kind(ended: Sequence[Ended]) -> dict[str, Trend]:
    """Seconds of an evaluation for each kind that ran in the first tenth and in the last one, with the same problem."""
    part = max(1, len(ended) // _TENTHS)
    first, last = (_seconds(some) for some in (ended[:part], ended[-part:]))
    return {name: Trend(median(first[name]), median(last[name])) for name in first if name in last}


def _seconds(ended: Sequence[Ended]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in ended:
        if each.seconds > 0 and each.as_planted:
            found.setdefault(f"{each.kind}, {each.problem}", []).append(each.seconds)
    return found


def ratio(drifts: dict[str, Trend]) -> float:
    """Last over first, median over kinds."""
    return median(each.last / each.first for each in drifts.values()) if drifts else math.nan
