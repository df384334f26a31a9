"""The statistic against hand-computed cases, its laws, and how often it lies when there is nothing to find."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env.timing import MIN_PAIRS, Z_FASTER, Pair, Speed, bootstrap, sign_test, summarise

TIMES = st.integers(1_000, 10**9)
PAIRS = st.lists(st.builds(Pair, TIMES, TIMES, st.integers(0, 1000)), min_size=MIN_PAIRS, max_size=40)


def speed(pairs: list[Pair]) -> Speed:
    found = summarise(pairs)
    assert found is not None
    return found


def paired(reference: list[int], candidate: list[int]) -> list[Pair]:
    return [Pair(r, c) for r, c in zip(reference, candidate, strict=True)]


@pytest.mark.parametrize(("wins", "losses", "tail"), [
    (5, 0, 1 / 32), (6, 0, 1 / 64), (7, 1, 9 / 256), (9, 2, 67 / 2048), (10, 2, 79 / 4096), (3, 3, 42 / 64), (0, 4, 1.0),
])  # fmt: skip
def test_sign_test_is_the_binomial_tail(wins: int, losses: int, tail: float) -> None:
    z = sign_test(np.array([2.0] * wins + [0.5] * losses + [1.0] * 3))
    assert 0.5 * math.erfc(z / math.sqrt(2)) == pytest.approx(tail, rel=1e-6)
    assert (z > Z_FASTER) == (tail < 0.0202)


def test_ties_say_nothing() -> None:
    assert sign_test(np.ones(30)) == 0.0


@pytest.mark.parametrize("pairs", range(1, 60))
def test_no_number_of_fair_coins_passes_more_often_than_promised(pairs: int) -> None:
    least = next((w for w in range(pairs + 1) if sign_test(np.array([2.0] * w + [0.5] * (pairs - w))) > Z_FASTER), None)
    if least is not None:
        assert sum(math.comb(pairs, k) for k in range(least, pairs + 1)) / 2**pairs <= 0.0202


def test_a_hand_computed_case() -> None:
    found = speed([Pair(20, 10, 1), Pair(30, 10, 2), Pair(40, 10, 3), Pair(30, 20, 10), Pair(10, 10, 0)])
    assert (found.time_ms, found.reference_ms, found.speedup) == (10e-6, 30e-6, 2.0)
    assert found.skew == 0.2
    assert (found.low, found.high) == (1.0, 4.0)
    assert not found.faster
    assert found.pairs == 5


def test_bootstrap_of_two_values() -> None:
    """Of 5 draws from {1 twice, 2 three times} the median is 1 in 31.7 % of all resamples: both tails are wider than 2.5 %."""
    assert bootstrap(np.array([1.0, 1.0, 2.0, 2.0, 2.0])) == (1.0, 2.0)
    assert bootstrap(np.full(9, 3.0)) == (3.0, 3.0)


def test_bootstrap_agrees_with_order_statistics() -> None:
    """The exact percentile interval of a median of n = 25 lies between the order statistics whose binomial tails are 2.5 %."""
    values = np.arange(25.0) + 1
    low, high = bootstrap(values)
    assert 7 <= low <= 9
    assert 17 <= high <= 19


def test_equal_times_are_one_and_not_faster() -> None:
    found = speed(paired([500] * 20, [500] * 20))
    assert (found.speedup, found.low, found.high, found.faster) == (1.0, 1.0, 1.0, False)


@pytest.mark.parametrize("count", range(MIN_PAIRS))
def test_few_pairs_give_nothing(count: int) -> None:
    assert summarise([Pair(200, 100)] * count) is None


def test_five_wins_of_five_prove_too_little_and_six_of_six_enough() -> None:
    assert not speed([Pair(200, 100)] * 5).faster
    assert speed([Pair(200, 100)] * 6).faster


@pytest.mark.parametrize(("reference", "candidate"), [(1, 10**15), (10**15, 1), (1, 1), (2**62, 2**62)])
def test_extremes_stay_finite(reference: int, candidate: int) -> None:
    found = speed([Pair(reference, candidate)] * 8)
    numbers = (found.time_ms, found.reference_ms, found.speedup, found.low, found.high, found.skew)
    assert all(math.isfinite(x) and x >= 0 for x in numbers)
    assert found.faster == (reference > candidate)


@pytest.mark.parametrize("times", [(0, 5, 0), (5, 0, 0), (-1, 5, 0), (5, 5, -1)])
def test_impossible_times_are_refused(times: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="takes more than 0 ns"):
        Pair(*times)


@given(PAIRS)
@settings(max_examples=60, deadline=None)
def test_interval_holds_the_point(pairs: list[Pair]) -> None:
    found = speed(pairs)
    assert found.low <= found.speedup <= found.high
    ratios = [p.reference_ns / p.candidate_ns for p in pairs]
    assert min(ratios) <= found.low
    assert found.high <= max(ratios)
    if found.faster:
        assert found.speedup > 1


@given(PAIRS, st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_faster_clock_changes_nothing(pairs: list[Pair], shift: int) -> None:
    scaled = [Pair(p.reference_ns << shift, p.candidate_ns << shift, p.skew_ns << shift) for p in pairs]
    a, b = speed(pairs), speed(scaled)
    assert (a.speedup, a.low, a.high, a.faster, a.skew) == (b.speedup, b.low, b.high, b.faster, b.skew)
    assert b.time_ms == pytest.approx(a.time_ms * 2**shift)


@given(PAIRS, st.floats(1.0, 8.0))
@settings(max_examples=60, deadline=None)
def test_a_slower_reference_never_lowers_the_speedup(pairs: list[Pair], factor: float) -> None:
    a, b = speed(pairs), speed([Pair(math.ceil(p.reference_ns * factor), p.candidate_ns, p.skew_ns) for p in pairs])
    assert b.speedup >= a.speedup
    assert b.low >= a.low
    assert b.high >= a.high
    assert b.faster >= a.faster


@given(PAIRS)
@settings(max_examples=30, deadline=None)
def test_the_same_pairs_give_the_same_words(pairs: list[Pair]) -> None:
    assert summarise(pairs) == summarise(list(pairs))


def _trace(rng: np.random.Generator, pairs: int, factor: float) -> list[Pair]:
    """Times on a busy machine: common drift, heavy tails, now and then a stall of one side; the first call of a pair pays 3 %."""
    drift = np.exp(np.cumsum(rng.normal(0, 0.1, pairs)))
    sides = 1e6 * drift * np.exp(rng.normal(0, 0.08, (2, pairs))) * np.where(rng.random((2, pairs)) < 0.05, 3.0, 1.0)
    sides *= 1 + 0.03 * (rng.permuted(np.tile([[0], [1]], (1, pairs)), axis=0))
    return [Pair(int(r * factor), int(c)) for r, c in sides.T]


@pytest.mark.parametrize("pairs", [8, 11, 30])
def test_nothing_to_find_is_rarely_faster(pairs: int) -> None:
    rng = np.random.default_rng(0)
    found = [speed(_trace(rng, pairs, 1.0)) for _ in range(300)]
    assert sum(s.faster for s in found) / len(found) < 0.045  # 2 % promised, 3 standard errors of 300 traces
    assert np.median([s.speedup for s in found]) == pytest.approx(1.0, abs=0.01)
    assert np.mean([s.low <= 1.0 <= s.high for s in found]) > 0.85


def test_what_is_there_is_found() -> None:
    rng = np.random.default_rng(1)
    found = [speed(_trace(rng, 30, 1.25)) for _ in range(60)]
    assert np.mean([s.faster for s in found]) > 0.9
    assert np.median([s.speedup for s in found]) == pytest.approx(1.25, abs=0.03)
