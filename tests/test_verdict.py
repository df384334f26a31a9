"""A verdict is plain frozen data that cannot contradict itself."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from verdicts import FAILURES, example, relaxed, timed, verdicts

from rewards import Finding, RankReport, Status, Verdict


@relaxed
@given(verdicts())
def test_json_gives_an_equal_verdict_back(verdict: Verdict) -> None:
    text = verdict.to_json()
    assert "\n" not in text
    assert Verdict.from_json(text) == verdict


@relaxed
@given(verdicts())
def test_pickle_gives_an_equal_verdict_back(verdict: Verdict) -> None:
    assert pickle.loads(pickle.dumps(verdict)) == verdict  # noqa: S301


@pytest.mark.parametrize("status", [*FAILURES, Status.INFRA])
@pytest.mark.parametrize(
    "changes",
    [
        {"time_ms": 1.0, "baselines": {"reference": 1.0}},
        {"speedup": 2.0, "speedup_low": 2.0, "speedup_high": 2.0, "time_ms": 1.0, "baselines": {"reference": 2.0}},
        {"faster": True},
        {"skew": 0.1},
        {"passed": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_failure_has_no_speed_and_no_full_marks(status: Status, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"verdict {status} of allreduce"):
        example(status, **changes)


@pytest.mark.parametrize("status", [s for s in FAILURES if s is not Status.WRONG_RESULT])
def test_only_judged_outputs_have_a_share(status: Status) -> None:
    assert example(Status.WRONG_RESULT, passed=0.5).passed == 0.5
    with pytest.raises(ValueError, match="needs outputs that were judged"):
        example(status, passed=0.5)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"passed": 0.99}, "contradicts the status"),
        ({"passed": 1.5}, "no share"),
        ({"passed": math.nan}, "no share"),
        ({"speedup": 3.0}, r"outside its interval \[2.0, 2.0\]"),
        ({"speedup_low": None}, "needs its interval"),
        ({"speedup": None, "speedup_low": None, "speedup_high": None}, "`faster` needs both"),
        ({"speedup": 0.5, "speedup_low": 0.5}, "faster=True with speed-up 0.5"),
        ({"time_ms": None}, "needs time_ms"),
        ({"time_ms": math.nan}, "time_ms=nan is not a finite number"),
        ({"time_ms": -1.0}, "time_ms=-1.0"),
        ({"speedup_high": math.inf}, "speedup_high=inf"),
        ({"bound_ms": -1.0}, "bound_ms"),
        ({"own_kernel_share": math.nan}, "own_kernel_share"),
        ({"baselines": {}}, r"needs baselines\['reference'\]"),
        ({"baselines": {"reference": math.inf}}, r"baselines\['reference'\]=inf"),
        ({"stage_s": {"run": math.nan}}, r"stage_s\['run'\]=nan"),
        ({"ranks": (RankReport(2),)}, r"ranks \[2\] do not go with world size 2"),
        ({"ranks": (RankReport(0), RankReport(0))}, r"ranks \[0, 0\]"),
        ({"status": "FINE"}, "FINE"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        timed(2.0).but(**changes)


def test_every_contradiction_is_named() -> None:
    with pytest.raises(ValueError, match=r"passed=2.0 is no share.*bound_ms=-1.0"):
        example(Status.CORRECT, passed=2.0, bound_ms=-1.0)


def test_an_error_that_is_not_finite_becomes_none() -> None:
    report = RankReport(0, got="nan", max_error=math.nan)
    assert report.max_error is None
    assert Verdict.from_json(example(Status.WRONG_RESULT, ranks=(report,)).to_json()).ranks == (report,)


def test_a_verdict_does_not_change_after_the_fact() -> None:
    stages = {"run": 1.0}
    verdict = example(stage_s=stages, notes=["few pairs"], ranks=[RankReport(0, index=[1, 2])])  # type: ignore[arg-type]
    stages["run"] = 9.0
    assert verdict.stage_s == {"run": 1.0}
    assert verdict == example(stage_s={"run": 1.0}, notes=("few pairs",), ranks=(RankReport(0, index=(1, 2)),))
    with pytest.raises(FrozenInstanceError):
        verdict.passed = 0.0  # type: ignore[misc]


def _edited(**changes: Any) -> str:
    return json.dumps(json.loads(timed(2.0, findings=(Finding("r", 1, "warn", "m"),)).to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "not JSON"),
        ("{'status': 1}", "not JSON"),
        ("[]", "schema 'list', wanted 1"),
        ("{}", "schema None, wanted 1"),
        (_edited(schema=2), "schema 2, wanted 1"),
        ('{"schema": 1}', "missing or malformed fields: .*'status'"),
        (_edited(score=1), r"unknown fields \['score'\]"),
        (_edited(ranks=[{"rank": 0, "mood": "good"}]), "malformed fields: .*mood"),
        (_edited(ranks=7), "malformed fields"),
        (_edited(findings=[{"rule": "r"}]), "malformed fields: .*line"),
        (_edited(speedup="2.0"), "malformed fields"),
        (_edited(status="WRONG_RESULT"), "verdict WRONG_RESULT of allreduce: .*needs CORRECT"),
        (_edited(time_ms=-1), "time_ms=-1"),
    ],
)
def test_a_stored_text_that_is_no_verdict_is_refused(text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        Verdict.from_json(text)
