"""Verdicts for tests: plain examples, and hypothesis strategies that draw any verdict that can exist.

Not here: verdicts of real evaluations.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rewards import Finding, RankReport, Status, Verdict

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Other work on the machine must not fail a property."""

FAILURES = tuple(s for s in Status if s not in (Status.CORRECT, Status.INFRA))
SCORED = (*FAILURES, Status.CORRECT)

texts = st.text(st.characters(), max_size=12)
"""Lone surrogates included: a policy's text may hold them."""
positive = st.floats(1e-3, 1e3)
times = st.floats(1e-6, 1e6)


def example(status: Status = Status.CORRECT, **changes: Any) -> Verdict:
    """A verdict without times of two ranks on CPU, with the given changes."""
    plain: dict[str, Any] = {
        "stage": "judge", "message": "", "problem": "allreduce", "problem_version": 1, "profile": "hardened", "size": "tiny",
        "world_size": 2, "backend": "torch", "topology": "cpu", "digest": "0" * 64, "passed": float(status is Status.CORRECT),
    }  # fmt: skip
    return Verdict(status=status, **plain | changes)


def timed(speedup: float, *, faster: bool | None = None, reference_ms: float = 10.0, **changes: Any) -> Verdict:
    """A correct, comparable verdict whose interval has no width; `faster` above 1 unless told otherwise."""
    measured: dict[str, Any] = {
        "comparable": True, "speedup": speedup, "speedup_low": speedup, "speedup_high": speedup, "time_ms": 10.0,
        "baselines": {"reference": reference_ms}, "faster": speedup > 1 if faster is None else faster,
    }  # fmt: skip
    return example(Status.CORRECT, **measured | changes)


@st.composite
def rank_reports(draw: st.DrawFn, rank: int) -> RankReport:
    """What a rank of that number may report, a NaN as largest error included."""
    return RankReport(
        rank,
        phase=draw(st.sampled_from(["", "load", "call", "returned", "raised"])),
        exit=draw(st.none() | texts),
        line=draw(st.none() | st.integers(1, 9999)),
        index=draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))),
        got=draw(st.none() | texts),
        max_error=draw(st.none() | st.floats()),
    )


@st.composite
def speeds(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a measurement: nothing, a time alone, or a speed-up with its interval."""
    how = draw(st.sampled_from(["nothing", "time", "speedup"]))
    if how == "nothing":
        return {}
    found: dict[str, Any] = {"time_ms": draw(times), "baselines": {"reference": draw(times)}}
    found["skew"] = draw(st.none() | st.floats(0, 1))
    if how == "speedup":
        low, point, high = sorted(draw(st.tuples(positive, positive, positive)))
        found |= {"speedup_low": low, "speedup": point, "speedup_high": high, "faster": point > 1 and draw(st.booleans())}
    return found


@st.composite
def shares(draw: st.DrawFn, status: Status) -> float:
    """A value of `passed` that goes with the status."""
    if status is Status.WRONG_RESULT:
        return draw(st.floats(0, 1, exclude_max=True))
    return float(status is Status.CORRECT)


@st.composite
def verdicts(draw: st.DrawFn, statuses: tuple[Status, ...] = tuple(Status)) -> Verdict:
    """Any verdict of one of the statuses."""
    status, world_size = draw(st.sampled_from(statuses)), draw(st.integers(1, 3))
    found = draw(speeds()) if status is Status.CORRECT else {}
    ranks = draw(st.lists(st.sampled_from(range(world_size)), unique=True))
    return example(
        status,
        message=draw(texts),
        world_size=world_size,
        comparable=draw(st.booleans()),
        ranks=tuple(draw(rank_reports(r)) for r in ranks),
        passed=draw(shares(status)),
        bound_ms=draw(st.none() | st.just(0.0) | times),
        first_call_ms=draw(st.none() | times),
        findings=tuple(draw(st.lists(st.builds(Finding, texts, st.integers(1, 99), st.just("warn"), texts), max_size=2))),
        notes=tuple(draw(st.lists(texts, max_size=2))),
        stage_s=draw(st.dictionaries(st.sampled_from(["compile", "run"]), times)),
        **found,
    )


@st.composite
def measured_verdicts(draw: st.DrawFn) -> Verdict:
    """A correct verdict with a speed-up on a machine on which times mean something."""
    found = draw(speeds().filter(lambda s: "speedup" in s))
    return example(Status.CORRECT, comparable=True, bound_ms=draw(st.none() | st.just(0.0) | times), **found)
