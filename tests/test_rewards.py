"""Rewards keep the outcomes in order, stay bounded where they promise it and leave INFRA unscored."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st
from verdicts import FAILURES, SCORED, example, measured_verdicts, positive, relaxed, timed, verdicts

import rewards
from rewards import KINDS, PRESETS, Score, Status, Term, Verdict

RANK = {
    Status.TAMPERED: 0,
    Status.INVALID: 1,
    Status.COMPILE_ERROR: 2,
    Status.LOAD_ERROR: 3,
    Status.RUNTIME_ERROR: 4,
    Status.DEADLOCK: 4,
    Status.TIMEOUT: 4,
    Status.OUT_OF_MEMORY: 4,
    Status.WRONG_RESULT: 5,
    Status.CORRECT: 6,
}
default, kevin = rewards.get("default"), rewards.get("kevin")
every_preset = pytest.mark.parametrize("name", PRESETS)


def quicker(verdict: Verdict, times: float) -> Verdict:
    """The same outcome of a candidate that takes 1 / times as long."""
    assert verdict.time_ms is not None
    speedups = {name: getattr(verdict, name) * times for name in ("speedup_low", "speedup", "speedup_high")}
    return verdict.but(time_ms=verdict.time_ms / times, **speedups)


def failing(holds: Callable[[rewards.Reward], bool]) -> list[str]:
    """Names of the presets for which something does not hold."""
    return [name for name, reward in PRESETS.items() if not holds(reward)]


# ---- order -----------------------------------------------------------------------------------------------------------


@relaxed
@given(verdicts(SCORED), verdicts(SCORED))
@case(timed(1e-9), example(Status.WRONG_RESULT, passed=math.nextafter(1, 0)))
def test_default_keeps_the_rank(one: Verdict, other: Verdict) -> None:
    better = RANK[one.status] - RANK[other.status]
    gap = default(one).total - default(other).total
    assert better * gap > 0 or (better == 0 and (gap == 0 or one.status in (Status.WRONG_RESULT, Status.CORRECT)))


def test_the_documentation_names_every_preset_and_every_kind() -> None:
    text = (Path(rewards.__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert [name for name in (*PRESETS, *KINDS, *rewards.ADVANTAGES) if f"`{name}`" not in text] == []


def test_every_status_but_infra_has_a_rank() -> None:
    assert set(RANK) == set(SCORED) == set(Status) - {Status.INFRA}


@relaxed
@given(cheat=verdicts((Status.TAMPERED,)), honest=verdicts(SCORED))
def test_cheating_never_beats_an_honest_failure(cheat: Verdict, honest: Verdict) -> None:
    assert failing(lambda reward: reward(cheat).total <= reward(honest).total) == []


@relaxed
@given(failure=verdicts(FAILURES), correct=verdicts((Status.CORRECT,)))
def test_no_kind_of_term_gives_a_failure_more_than_a_correct_answer(failure: Verdict, correct: Verdict) -> None:
    for kind, scorer in KINDS.items():
        low, high = scorer().score(failure, ()), scorer().score(correct, ())
        assert low is not None, kind
        assert math.isfinite(low), kind
        assert high is None or low <= high, kind


@relaxed
@given(failure=verdicts(FAILURES), correct=verdicts((Status.CORRECT,)))
def test_a_correct_answer_beats_every_failure(failure: Verdict, correct: Verdict) -> None:
    assert failing(lambda reward: reward(failure).total < reward(correct).total) == []


@relaxed
@given(verdict=measured_verdicts(), times=st.floats(1, 1e3))
def test_a_faster_candidate_never_earns_less(verdict: Verdict, times: float) -> None:
    faster = quicker(verdict, times)
    assert failing(lambda reward: reward(faster).total >= reward(verdict).total) == []
    if faster.speedup and faster.speedup > 1:
        assert failing(lambda reward: reward(faster.but(faster=True)).total >= reward(verdict).total) == []


@every_preset
@relaxed
@given(one=st.floats(0, 1, exclude_max=True), other=st.floats(0, 1, exclude_max=True))
def test_more_passed_never_earns_less(name: str, one: float, other: float) -> None:
    low, high = (PRESETS[name](example(Status.WRONG_RESULT, passed=p)).total for p in sorted((one, other)))
    assert low <= high


# ---- values ----------------------------------------------------------------------------------------------------------


@relaxed
@given(verdicts(SCORED))
@case(timed(1e300))
@case(timed(0.0))
def test_default_is_bounded(verdict: Verdict) -> None:
    assert -2.0 <= default(verdict).total <= 3.0
    assert verdict.correct == (default(verdict).total >= 0)


@relaxed
@given(measured_verdicts(), positive)
def test_default_pays_nothing_above_parity_that_is_not_proven(verdict: Verdict, bound_ms: float) -> None:
    assert default(verdict.but(faster=False)).total <= 1.0
    cap = max(1.0, verdict.baselines["reference"] / bound_ms)
    assert default(verdict.but(bound_ms=bound_ms)).total <= 1.0 + math.log2(cap)


@pytest.mark.parametrize(
    ("verdict", "floor", "speed"),
    [
        (timed(1.0), 1.0, 0.0),
        (timed(2.0), 1.0, 1.0),
        (timed(2.0, faster=False), 1.0, 0.0),
        (timed(0.5), 1.0, -1.0),
        (timed(0.001), 1.0, -1.0),
        (timed(1000.0), 1.0, 2.0),
        (timed(4.0, speedup_low=1.0, faster=True), 1.0, 0.0),
        (timed(2.0, speedup_low=0.5, faster=True), 1.0, -1.0),
        (timed(4.0, reference_ms=10.0, bound_ms=5.0), 1.0, 1.0),
        (timed(4.0, reference_ms=10.0, bound_ms=1.0), 1.0, 2.0),
        (timed(1.0, reference_ms=10.0, bound_ms=40.0), 1.0, 0.0),
        (timed(4.0, reference_ms=10.0, bound_ms=0.0), 1.0, 2.0),
        (timed(4.0, comparable=False), 1.0, None),
        (example(Status.CORRECT, comparable=True), 1.0, None),
        (example(Status.WRONG_RESULT), 0.2, -1.0),
        (example(Status.WRONG_RESULT, passed=0.5), 0.25, -1.0),
        (example(Status.TAMPERED), -1.0, -1.0),
    ],
)
def test_terms_of_default(verdict: Verdict, floor: float, speed: float | None) -> None:
    score = default(verdict)
    assert [t.name for t in score.terms] == ["status_floor", "log_speed"]
    assert [t.score for t in score.terms] == [pytest.approx(floor), speed]
    assert score.total == pytest.approx(floor + (speed or 0.0))


@pytest.mark.parametrize(
    ("verdict", "total"),
    [
        (timed(1.5), 1.8),
        (timed(1.5, faster=False), 1.8),
        (timed(4.0, speedup_low=1.0, faster=True), 4.3),
        (timed(1000.0), 1000.3),
        (timed(4.0, comparable=False), 0.3),
        (example(Status.CORRECT), 0.3),
        *((example(status), 0.0) for status in FAILURES),
    ],
)
def test_kevin_is_the_published_formula(verdict: Verdict, total: float) -> None:
    assert kevin(verdict).total == pytest.approx(total)


TWO = {"reference": 10.0, "tuned": 8.0}
"""Times of the reference and of a second baseline."""


@pytest.mark.parametrize(
    ("name", "verdict", "total"),
    [
        ("kernelgym", timed(1.5), 1.25),
        ("kernelgym", timed(1.5, own_kernel_share=0.5), 1.5),
        ("kernelgym", timed(40.0), 2.0),
        ("kernelgym", timed(4.0, comparable=False), 0.5),
        ("cuda_agent", timed(1.05), 1.0),
        ("cuda_agent", timed(1.06), 2.0),
        ("cuda_agent", timed(1.3, faster=False), 1.0),
        ("cuda_agent", timed(1.3, baselines=TWO), 2.0),
        ("cuda_agent", timed(1.4, baselines=TWO), 3.0),
        ("cuda_agent", example(Status.CORRECT), 1.0),
        ("cuda_agent", example(Status.WRONG_RESULT, passed=0.9), -1.0),
        ("cuda_l1", timed(18.0), 18.0),
        ("cuda_l1", timed(0.25), 0.25),
        ("cuda_l1", example(Status.CORRECT), 1.0),
        ("sol", timed(1.0, bound_ms=2.0), 0.5),
        ("sol", timed(5.0, bound_ms=2.0), 1.0),
        ("sol", timed(50.0, bound_ms=2.0), 1.0),
        ("sol", timed(2.0, bound_ms=2.0), 8 / 11),
        ("sol", timed(0.5, bound_ms=2.0), 8 / 26),
        ("sol", timed(2.0), 0.5),
        ("sol", timed(2.0, bound_ms=10.0), 0.5),
        ("sparse", timed(1.01), 2.0),
        ("sparse", timed(1.5, faster=False), 1.0),
        ("sparse", timed(0.1), 1.0),
        *((name, example(Status.WRONG_RESULT, passed=0.9), 0.0) for name in ("kernelgym", "cuda_l1", "sol", "sparse")),
    ],
)
def test_presets_pay_what_their_formula_says(name: str, verdict: Verdict, total: float) -> None:
    assert PRESETS[name](verdict).total == pytest.approx(total)


@relaxed
@given(verdicts(SCORED))
def test_speed_of_light_is_bounded(verdict: Verdict) -> None:
    assert 0.0 <= PRESETS["sol"](verdict).total <= 1.0


@relaxed
@given(verdict=verdicts())
def test_unscored_is_infra_and_nothing_else(verdict: Verdict) -> None:
    assert failing(lambda reward: reward(verdict).unscored == (verdict.status is Status.INFRA)) == []
    if verdict.status is Status.INFRA:
        assert failing(lambda reward: {t.score for t in reward(verdict).terms} == {None}) == []
        assert failing(lambda reward: reward(verdict).total == 0.0) == []


def test_a_term_without_score_drops_out_and_hands_no_weight_on() -> None:
    score = Score((Term("a", 1.0, 0.5), Term("b", None, 10.0), Term("c", -2.0, 0.25)))
    assert score.total == 0.0
    assert not score.unscored
    assert Score((Term("b", None),)).unscored
    assert Score(()).unscored


@pytest.mark.parametrize(("score", "weight"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -1.0)])
def test_a_term_refuses_numbers_that_would_poison_a_batch(score: float, weight: float) -> None:
    with pytest.raises(ValueError, match="term 'speed' has"):
        Term("speed", score, weight)
