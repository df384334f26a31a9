"""Seconds from source to verdict beside the public way.  Arithmetic only.

Cold is the first evaluation of a new evaluator with an empty build cache, warm one of a candidate never seen before, cached
one of the same candidate again without a store: its library is there, everything else is done anew.  Command is a fresh
`pkb eval` of that candidate, Python's imports included.
Not here: running either way (`latency_run`, `launches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

KINDS = ("cold", "warm", "cached", "command")
INSIDE = {"judge": "run, time"}
"""Stages that are part of others."""


@dataclass(frozen=True)
class Launch:
    """One step of the public way."""

    kind: str
    """`trial`, `timed` or `compare`."""
    side: str
    """`reference` or `candidate`."""
    seconds: float
    split_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds up to a rank's first line, importing torch, joining the group, running, ending; slowest rank."""
    mean_ms: float | None = None
    """Of one timed call, slowest rank."""
    other_load: float = 0.0
    """Cores busy with what others did meanwhile."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of ours."""

    backend: str
    kind: str
    seconds: float
    stage_s: Mapping[str, float]
    other_load: float = 0.0
    peak_memory_bytes: int = 0
    """Largest resident set of a rank."""


@dataclass(frozen=True)
class Baseline:
    """What the public way took."""

    launches: int
    launches_s: float
    """Of the launches for trials and the comparisons of their files."""
    timed_s: float
    """Of the timed launches."""
    split_s: Mapping[str, float]
    """Median of one launch for a trial."""
    other_load: float = 0.0
    """Median over the launches."""
    load_inline_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One kind of evaluation of one backend."""

    backend: str
    kind: str
    evaluations: int
    seconds: float
    """Median, as everything below."""
    least: float
    most: float
    stage_s: Mapping[str, float]
    ratio: float
    """Launches for trials over this."""
    ratio_timed: float
    """All launches over this."""
    ratio_compiled: float | None
    """All launches and one load_inline over this, where something native was built on both sides."""
    other_load: float = 0.0
    peak_memory_bytes: int = 0
    """Largest of all."""


def baseline(launches: Sequence[Launch], load_inline_s: float | None = None) -> Baseline:
    """Sums of the public way."""
    trials = [launch for launch in launches if launch.kind == "trial"]
    return Baseline(
        launches=len(trials),
        launches_s=sum(launch.seconds for launch in launches if launch.kind != "timed"),
        timed_s=sum(launch.seconds for launch in launches if launch.kind == "timed"),
        split_s={name: median(t.split_s[name] for t in trials) for name in (trials[0].split_s if trials else ())},
        other_load=_median([launch.other_load for launch in launches if launch.kind != "compare"]),
        load_inline_s=load_inline_s,
    )


def summarise(evaluations: Sequence[Evaluation], public: Baseline) -> list[Row]:
    """One row per backend and kind, in order of appearance."""
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for each in evaluations:
        groups.setdefault((each.backend, each.kind), []).append(each)
    return [_row(backend, kind, found, public) for (backend, kind), found in groups.items()]


def _row(backend: str, kind: str, found: list[Evaluation], public: Baseline) -> Row:
    seconds = [each.seconds for each in found]
    middle = median(seconds)
    names = list(dict.fromkeys(name for each in found for name in each.stage_s))
    whole = public.launches_s + public.timed_s
    built = public.load_inline_s if backend == "cpp" and kind in ("cold", "warm") else None
    return Row(
        backend=backend, kind=kind, evaluations=len(found), seconds=middle, least=min(seconds), most=max(seconds),
        stage_s={name: median(each.stage_s.get(name, 0.0) for each in found) for name in names},
        ratio=public.launches_s / middle, ratio_timed=whole / middle,
        ratio_compiled=None if built is None else (whole + built) / middle,
        other_load=_median([each.other_load for each in found]), peak_memory_bytes=max(each.peak_memory_bytes for each in found),
    )  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
