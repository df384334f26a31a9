"""Metrics of a policy, worked out by hand.

Not here: where samples come from (`test_policies`), a whole evaluation (`test_policy_evaluation`).
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import example, relaxed, timed, verdicts

from pkb_env.metrics import THRESHOLDS, Asked, Sample, best_of_turns, curve, pass_at_k, summarise, wilson
from rewards.verdict import Status, Verdict

SET = (Asked("a", "Tensor", "train"), Asked("b", "Tensor", "test"), Asked("c", "Context", "test"))


def right(problem: str, sample: int, paid: float | None = 0.9, turn: int = 0) -> Sample:
    return Sample(problem, sample, Status.CORRECT, paid, turn=turn)


def wrong(problem: str, sample: int, status: Status = Status.WRONG_RESULT, turn: int = 0) -> Sample:
    return Sample(problem, sample, status, turn=turn)


@pytest.mark.parametrize(("n", "c", "k", "expected"), [
    (1, 0, 1, 0.0), (1, 1, 1, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 1 - 1 / 6), (5, 3, 3, 1.0),
    (10, 3, 5, 1 - 21 / 252),
])  # fmt: skip
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_good_one(drawn: tuple[int, int, int]) -> None:
    n, c, k = drawn
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"came n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("share", "trials", "low", "high"), [
    (0.5, 10, 0.2366, 0.7634), (0.0, 8, 0.0, 0.3244), (1.0, 8, 0.6756, 1.0),
])  # fmt: skip
def test_the_interval_of_a_share(share: float, trials: int, low: float, high: float) -> None:
    assert wilson(share, trials) == pytest.approx((low, high), abs=1e-4)


def test_an_interval_needs_a_trial() -> None:
    with pytest.raises(ValueError, match="came 0"):
        wilson(0.5, 0)


@pytest.mark.parametrize(("verdict", "reached"), [
    (example(Status.WRONG_RESULT), []),
    (example(), [0.0]),  # correct, no times
    (timed(4.0, comparable=False), [0.0]),
    (timed(1.3), [0.0, 0.5, 1.0, 1.2]),
    (timed(1.3, faster=False), [0.0, 0.5]),  # not proven: 1 is paid, and 1 is not above 1
    (timed(1.3).but(speedup_low=0.9), [0.0, 0.5]),
    (timed(5.0, reference_ms=10.0, bound_ms=6.0), [0.0, 0.5, 1.0, 1.2]),  # nothing beyond the roofline is paid
    (timed(1.2), [0.0, 0.5, 1.0]),  # above p, not at it
])  # fmt: skip
def test_what_a_verdict_reaches(verdict: Verdict, reached: list[float]) -> None:
    assert [p for p in THRESHOLDS if Sample.of(verdict, 0).reaches(p)] == reached


def test_a_summary_by_hand() -> None:
    samples = [
        right("a", 0, 2.5), wrong("a", 1), wrong("a", 2, Status.DEADLOCK), right("a", 3, 0.7),  # n=4, c=2, one above 1
        wrong("b", 0, Status.COMPILE_ERROR), wrong("b", 1), right("b", 2, 1.1), wrong("b", 3),  # n=4, c=1, one above 1
        wrong("c", 0), right("c", 1, None), wrong("c", 2, Status.INFRA),  # n=2, c=1, without times
    ]  # fmt: skip
    whole = summarise(SET, samples, [1, 3])["all"]["all"]
    assert (whole.problems, whole.missing, whole.samples, whole.infra, whole.untimed) == (3, (), 10, 1, 1)
    assert whole.statuses == {"COMPILE_ERROR": 1, "CORRECT": 4, "DEADLOCK": 1, "WRONG_RESULT": 4}
    first = whole.rate(0, 1)
    assert first.share == pytest.approx((1 / 2 + 1 / 4 + 1 / 2) / 3)
    assert (first.low, first.high) == pytest.approx(wilson((1 / 2 + 1 / 4 + 1 / 2) / 3, 3))
    assert (first.reached, first.problems, first.too_few) == (1, 3, 0)  # only a's first sample is right
    third = whole.rate(0, 3)
    assert third.share == pytest.approx((1.0 + 3 / 4) / 2)  # c has two counted samples and is left out
    assert (third.reached, third.problems, third.too_few) == (2, 2, 1)
    fast = whole.rate(1.0, 1)
    assert fast.share == pytest.approx((1 / 4 + 1 / 4 + 0) / 3)
    assert (fast.reached, whole.rate(1.2, 3).reached, whole.rate(3.0, 3).reached) == (1, 1, 0)


def test_groups_by_family_and_split() -> None:
    found = summarise(SET, [right("a", 0), wrong("b", 0), right("c", 0)], [1])
    assert list(found["family"]) == ["Tensor", "Context"]
    assert [found["family"][name].rate(0, 1).share for name in ("Tensor", "Context")] == [0.5, 1.0]
    assert {name: group.rate(0, 1).reached for name, group in found["split"].items()} == {"train": 1, "test": 1}


def test_infra_makes_n_smaller_and_is_no_failure() -> None:
    samples = [wrong("a", 0, Status.INFRA), right("a", 1), wrong("b", 0, Status.INFRA)]
    found = summarise(SET[:2], samples, [1])["all"]["all"]
    assert (found.rate(0, 1).share, found.rate(0, 1).reached, found.rate(0, 1).problems) == (1.0, 1, 1)
    assert (found.infra, found.samples, found.missing) == (2, 1, ("b",))
    assert "INFRA" not in found.statuses


def test_a_group_without_samples_has_no_share() -> None:
    found = summarise(SET, [right("a", 0)], [1])
    context = found["family"]["Context"]
    assert (context.missing, context.rate(0, 1).share, context.rate(0, 1).reached) == (("c",), None, None)


def test_without_any_times_nothing_is_said_about_speed() -> None:
    found = summarise(SET, [right("a", 0, None), wrong("b", 0)], [1])["all"]["all"]
    assert (found.rate(0, 1).share, found.rate(0.5, 1).share, found.rate(1.0, 1).reached) == (0.5, None, None)
    nothing_right = summarise(SET, [wrong("a", 0)], [1])["all"]["all"]
    assert nothing_right.rate(1.0, 1).share == 0.0


def test_the_first_counted_samples_are_those_of_the_public_form() -> None:
    samples = [right("a", 2), wrong("a", 1), wrong("a", 0, Status.INFRA)]  # in whatever order they come
    found = summarise(SET[:1], samples, [1, 2])["all"]["all"]
    assert (found.rate(0, 1).reached, found.rate(0, 2).reached) == (0, 1)


def test_mechanisms_are_counted_once_a_sample() -> None:
    samples = [Sample("a", 0, Status.CORRECT, 1.0, ("p2p", "p2p")), Sample("a", 1, Status.DEADLOCK, None, ("p2p", "multicast"))]
    found = summarise(SET, samples, [1])["all"]["all"].mechanisms
    assert found == {"multicast": {"samples": 1, "correct": 0}, "p2p": {"samples": 2, "correct": 1}}


def test_the_best_of_turns() -> None:
    samples = [
        wrong("a", 0), right("a", 0, 0.5, turn=1), right("a", 0, 1.5, turn=2),
        wrong("a", 1), wrong("a", 1, Status.INFRA, turn=1),
        right("b", 0, 1.0), wrong("b", 0, turn=1),
    ]  # fmt: skip
    told = {turns: {(s.problem, s.sample): (s.status, s.paid) for s in best_of_turns(samples, turns)} for turns in (1, 2, 3)}
    refused = (Status.WRONG_RESULT, None)
    assert told[1] == {("a", 0): refused, ("a", 1): refused, ("b", 0): (Status.CORRECT, 1.0)}
    assert told[2] == {**told[1], ("a", 0): (Status.CORRECT, 0.5)}
    assert told[3] == {**told[1], ("a", 0): (Status.CORRECT, 1.5)}


@settings(relaxed, max_examples=30)
@given(st.lists(verdicts(), max_size=6))
def test_what_holds_for_any_samples(drawn: list[Verdict]) -> None:
    samples = [Sample.of(verdict, number) for number, verdict in enumerate(drawn)]
    asked = [Asked("allreduce", "Collective", "train")]
    found = summarise(asked, samples, [1, 2])["all"]["all"]
    assert found.samples + found.infra == len(samples)
    assert sum(found.statuses.values()) == found.samples
    for k in (1, 2):
        shares = [share for share in curve(asked, samples, k, THRESHOLDS) if share is not None]
        assert shares == sorted(shares, reverse=True)
    for rate in found.rates:
        if rate.share is not None and rate.low is not None and rate.high is not None:
            assert 0 <= rate.low <= rate.share <= rate.high <= 1
