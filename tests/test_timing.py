"""The statistic against hand-computed cases, its laws, and how often it lies when there is nothing to find."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env import timing
from pkb_env.timing import BLOCKS_FROM, GROUPS, LEVEL, MIN_PAIRS, Pair, Speed, interval, needs_repeat, pool, sign_test, summarise

TIMES = st.integers(1_000, 10**9)
PAIRS = st.lists(st.builds(Pair, TIMES, TIMES, st.integers(0, 1000)), min_size=MIN_PAIRS, max_size=40)


def speed(pairs: list[Pair], looks: int = 1) -> Speed:
    found = summarise(pairs, looks)
    assert found is not None
    return found


def pooled(groups: list[list[Pair]], looks: int = 1) -> Speed:
    found = pool(groups, looks)
    assert found is not None
    return found


def coins(wins: int, losses: int) -> list[Pair]:
    return [Pair(200, 100)] * wins + [Pair(100, 200)] * losses


def paired(reference: list[int], candidate: list[int]) -> list[Pair]:
    return [Pair(r, c) for r, c in zip(reference, candidate, strict=True)]


@pytest.mark.parametrize(("wins", "losses", "tail"), [
    (5, 0, 1 / 32), (6, 0, 1 / 64), (7, 1, 9 / 256), (9, 2, 67 / 2048), (10, 2, 79 / 4096), (3, 3, 42 / 64), (0, 4, 1.0),
])  # fmt: skip
def test_sign_test_is_the_binomial_tail(wins: int, losses: int, tail: float) -> None:
    assert sign_test(np.array([2.0] * wins + [0.5] * losses + [1.0] * 3)) == tail


@pytest.mark.parametrize(("wins", "losses"), [(0, 384), (384, 0), (1152, 0), (192, 192), (600, 552)])
def test_sign_test_of_many_pairs_is_finite_and_exact(wins: int, losses: int) -> None:
    exact = Fraction(sum(math.comb(wins + losses, k) for k in range(wins, wins + losses + 1)), 2 ** (wins + losses))
    assert sign_test(np.array([2.0] * wins + [0.5] * losses)) == pytest.approx(float(exact), rel=1e-12)


def test_ties_say_nothing() -> None:
    assert sign_test(np.ones(30)) == 1.0


@pytest.mark.parametrize("looks", [1, 2, 5])
@pytest.mark.parametrize("pairs", [*range(MIN_PAIRS, BLOCKS_FROM), *range(BLOCKS_FROM, 97, 8), 384])
def test_fair_coins_pass_no_more_often_than_promised(pairs: int, looks: int) -> None:
    """A look may pass by chance with the level over the number of looks, so all of them together with the level."""
    size = 1 if pairs < BLOCKS_FROM else 2
    tosses = pairs // size
    least = next((w for w in range(tosses + 1) if speed(coins(w * size, (tosses - w) * size), looks).faster), tosses + 1)
    chance = Fraction(sum(math.comb(tosses, k) for k in range(least, tosses + 1)), 2**tosses)
    assert chance * looks <= LEVEL
    assert least <= tosses or Fraction(looks, 2**tosses) > LEVEL


def test_being_first_costs_nothing_inside_a_block() -> None:
    blocks = [Pair(120, 100), Pair(100, 120)] * 12, [Pair(132, 100), Pair(110, 120)] * 12
    assert [(s.speedup, s.low, s.high) for s in map(speed, blocks)] == [(1, 1, 1), pytest.approx((1.1, 1.1, 1.1))]
    assert [s.faster for s in map(speed, blocks)] == [False, True]


@pytest.mark.parametrize("every", [2, 3])
def test_a_word_that_swings_hides_nothing_behind_its_medians(every: int) -> None:
    """Who calls nearly all of some calls plumbing is no faster than the reference, whose plumbing bounds what is believed."""
    told = [1045 if i % every == 0 else 40 for i in range(48)]
    found = speed([Pair(1000, 1100, 0, plumbing, 90 + i % 7, 60) for i, plumbing in enumerate(told)])
    assert found.speedup < 1.05
    assert found.high < 1.05
    assert not found.faster


def test_an_odd_last_pair_is_left_out_of_the_ratios() -> None:
    even = [Pair(200, 100)] * BLOCKS_FROM
    found = speed([*even, Pair(1, 100)])
    assert (found.speedup, found.low, found.pairs) == (2.0, 2.0, BLOCKS_FROM + 1)


def test_a_hand_computed_case() -> None:
    found = speed([Pair(20, 10, 1), Pair(30, 10, 2), Pair(40, 10, 3), Pair(30, 20, 10), Pair(10, 10, 0)])
    assert (found.time_ms, found.reference_ms, found.speedup) == (10e-6, 30e-6, 2.0)
    assert found.skew == 0.2
    assert (found.low, found.high) == (1.0, 4.0)
    assert not found.faster
    assert (found.pairs, found.groups) == (5, 1)


def test_interval_of_few_values_is_their_range() -> None:
    assert interval(np.array([3.0, 1.0, 2.0, 5.0, 4.0])) == (1.0, 5.0)
    assert interval(np.full(9, 3.0)) == (3.0, 3.0)


@pytest.mark.parametrize(("count", "outer"), [(7, 1), (24, 7), (25, 7), (96, 37), (384, 171)])
def test_interval_lies_between_the_order_statistics_around_its_level(count: int, outer: int) -> None:
    """Order statistics `outer` hold the median with more than 97 %, the next ones inside with less."""
    below = [sum(math.comb(count, k) for k in range(rank)) / 2**count for rank in (outer, outer + 1)]
    assert 1 - 2 * below[0] > 0.97 > 1 - 2 * below[1]
    low, high = interval(np.arange(1.0, count + 1))
    assert outer <= low < outer + 1
    assert count - outer < high <= count + 1 - outer


@given(st.lists(st.floats(1e-3, 1e3), min_size=MIN_PAIRS, max_size=60))
@settings(max_examples=60, deadline=None)
def test_interval_of_inverse_values_is_the_inverse_interval(values: list[float]) -> None:
    low, high = interval(np.array(values))
    assert interval(1 / np.array(values)) == pytest.approx((1 / high, 1 / low))


@pytest.mark.parametrize("count", [6, 11, 24, 97])
def test_interval_holds_the_truth_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(count)
    draws = np.exp(rng.standard_t(2, (2000, count)) * 0.1)
    share = np.mean([low <= 1 <= high for low, high in map(interval, draws)])
    assert share == pytest.approx(0.97, abs=0.012)  # 3 standard errors of 2000 draws


def test_equal_times_are_one_and_not_faster() -> None:
    found = speed(paired([500] * 20, [500] * 20))
    assert (found.speedup, found.low, found.high, found.faster) == (1.0, 1.0, 1.0, False)


@pytest.mark.parametrize("count", range(1, MIN_PAIRS))
def test_few_pairs_give_their_range_and_prove_nothing(count: int) -> None:
    found = speed([Pair(150 + 100 * i, 100, 0, 25, 25) for i in range(count)])
    assert (found.low, found.high, found.faster) == pytest.approx((1.5, 2.0 + (count - 1) * 4 / 3, False))
    assert found.low <= found.speedup <= found.high


def test_five_wins_of_five_prove_too_little_and_six_of_six_enough() -> None:
    assert not speed(coins(5, 0)).faster
    assert speed(coins(6, 0)).faster


def test_more_looks_need_more_wins() -> None:
    assert not speed(coins(6, 0), looks=2).faster
    assert speed(coins(7, 0), looks=2).faster
    assert not speed(coins(16, 7)).faster  # 4.7 %
    assert [speed(coins(17, 6), looks).faster for looks in (1, 2)] == [True, False]  # 1.7 %


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
    assert min(ratios) * (1 - 1e-12) <= found.low
    assert found.high <= max(ratios) * (1 + 1e-12)
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
    found = [speed(_trace(rng, pairs, 1.0)) for _ in range(1000)]
    assert np.mean([s.faster for s in found]) < 0.033  # 2 % promised, 3 standard errors of 1000 traces
    assert np.median([s.speedup for s in found]) == pytest.approx(1.0, abs=0.01)
    assert np.mean([s.low <= 1.0 <= s.high for s in found]) > 0.954  # 97 % meant, 3 standard errors


def test_what_is_there_is_found() -> None:
    rng = np.random.default_rng(1)
    found = [speed(_trace(rng, 30, 1.25)) for _ in range(60)]
    assert np.mean([s.faster for s in found]) > 0.9
    assert np.median([s.speedup for s in found]) == pytest.approx(1.25, abs=0.03)


PARTS = st.just(0), st.integers(0, 99), st.integers(0, 500), st.integers(0, 99)
GROUP = st.lists(st.builds(Pair, TIMES, TIMES, *PARTS), min_size=MIN_PAIRS, max_size=12)
PLACED = st.lists(GROUP, min_size=1, max_size=4)


@given(PLACED)
@settings(max_examples=60, deadline=None)
def test_pooling_believes_no_more_than_the_worst_group(groups: list[list[Pair]]) -> None:
    found, alone = pooled(groups), [speed(group) for group in groups]
    bare = [np.median(timing.ratios(group)[1]) for group in groups]
    assert found.low <= min(found.speedup, *bare)
    assert found.high >= max(found.speedup, *(each.speedup for each in alone))
    assert (found.pairs, found.groups) == (sum(map(len, groups)), len(groups))
    if found.faster:
        assert min(found.speedup, *bare) > 1


@given(PLACED, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_pooling_knows_no_order(groups: list[list[Pair]], rng: random.Random) -> None:
    shuffled = [rng.sample(group, len(group)) for group in rng.sample(groups, len(groups))]
    assert pooled(shuffled) == pooled(groups)


def test_one_slow_group_takes_a_claim_back() -> None:
    quick, slow = [Pair(110, 100)] * 40, [Pair(99, 100)] * 10
    assert pooled([quick, quick, quick]).faster
    found = pooled([quick, quick, slow])
    assert not found.faster
    assert (found.speedup, found.low, found.high) == pytest.approx((1.1, 0.99, 1.1))


def test_every_group_has_to_win_against_the_bare_reference() -> None:
    whole, bare = [Pair(110, 100)] * 40, [Pair(99, 100, 0, 10, 10)] * 10
    assert pooled([whole, whole, bare]).speedup == pytest.approx(1.1)
    assert not pooled([whole, whole, bare]).faster


@pytest.mark.parametrize("groups", [[], [[]], [[Pair(200, 100)] * 40, []]])
def test_groups_without_pairs_give_nothing(groups: list[list[Pair]]) -> None:
    assert pool(groups) is None


def test_a_group_too_short_proves_nothing() -> None:
    found = pool([[Pair(200, 100)] * 40, [Pair(200, 100)] * (MIN_PAIRS - 1)])
    assert found is not None
    assert not found.faster


def test_only_narrow_claims_are_repeated_and_only_until_there_are_enough_groups() -> None:
    narrow, wide, none = [Pair(110, 100)] * 40, [Pair(120, 100)] * 40, [Pair(100, 100)] * 40
    assert needs_repeat(speed(narrow))
    assert needs_repeat(pooled([narrow] * (GROUPS - 1)))
    assert not needs_repeat(pooled([narrow] * GROUPS))
    assert not needs_repeat(speed(wide))
    assert not needs_repeat(speed(none))


def test_repeating_removes_claims_that_are_the_placement_of_one_start() -> None:
    """Starts differ by 4 % for as long as a group lives: the truth is 1, and many pairs only make sure of something else."""
    rng = np.random.default_rng(3)
    trials = [[_trace(rng, 96, float(np.exp(rng.normal(0, 0.04)))) for _ in range(GROUPS)] for _ in range(150)]
    first = np.mean([speed(groups[0]).faster for groups in trials])
    repeated = np.mean([speed(groups[0]).faster and pooled(groups).faster for groups in trials])
    print(f"false claims: {first:.3f} of one group, {repeated:.3f} of {GROUPS}")
    assert first > 0.1
    assert repeated < first / 2


def _called(rng: np.random.Generator, pairs: int, own: float, claimed: float) -> list[Pair]:
    """`solution` takes 400 ns in the reference and `own` in the candidate, which says `claimed`; the rest is noisy."""
    wake, rest = 40 + rng.exponential(30, (2, pairs)), 100 + rng.exponential(20, (2, pairs))
    outside = wake + rest
    return [
        Pair(400, int(own + outside[1, i]), 0, int(own - claimed + outside[1, i]), int(outside[0, i]), int(wake[0, i]))
        for i in range(pairs)
    ]


def test_solution_alone_is_compared_and_the_least_of_waking_is_taken_off_what_is_paid() -> None:
    found = speed(_called(np.random.default_rng(0), 200, 200, 200))
    assert found.speedup == pytest.approx(2.0, rel=0.02)
    assert found.low == pytest.approx(400 / (200 + 180 - 41), rel=0.06)
    assert found.faster
    assert found.time_ms == pytest.approx(200e-6, rel=0.02)


@pytest.mark.parametrize("claimed", [1, 100, 300])
def test_whoever_says_less_than_it_takes_is_charged_the_rest(claimed: int) -> None:
    found = speed(_called(np.random.default_rng(1), 400, 400, claimed))
    assert found.speedup == pytest.approx(1.0, abs=0.04)
    assert found.low < 0.85
    assert not found.faster


def test_chance_is_charged_to_nobody() -> None:
    found = [speed(_called(np.random.default_rng(seed), 48, 400, 400)) for seed in range(100)]
    assert np.mean([s.speedup == 1.0 for s in found]) > 0.95
    assert not any(s.faster for s in found)


def test_a_claim_of_more_than_the_outside_clock_saw_is_no_pair() -> None:
    with pytest.raises(ValueError, match="more than 0 ns"):
        Pair(400, 300, 0, 300)
