"""Order, looks and stopping, and what adaptive stopping does to claims and intervals on made and recorded traces."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pkb_env import stopping
from pkb_env.stopping import COARSE, FIRST_LOOK, looks, next_look, orders
from pkb_env.timing import GROUPS, LEVEL, MIN_PAIRS, NARROW, Pair, Speed, pool, sign_test, summarise

MOST, PRECISION = 384, 0.05
RECORDED = sorted((Path(__file__).parent / "data" / "traces").glob("*.npz"))
NULLS = [path for path in RECORDED if "cpp" not in path.stem]
EFFECTS = [path for path in RECORDED if "cpp" in path.stem]
Sides = np.ndarray
"""Times in ns, (pairs, 2): reference, candidate."""


@dataclass(frozen=True)
class Trace:
    """Recorded pairs: ns (pairs, 5) as `benchmarks/trace.py` says, and the launch of each (pairs,)."""

    pairs: np.ndarray
    launch: np.ndarray

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path) as file:
            assert str(file["machine"])
            return cls(file["pairs"], file["launch"])

    def groups(self) -> list[list[Pair]]:
        return [[_bare(*row[:4].tolist()) for row in self.pairs[self.launch == n]] for n in np.unique(self.launch)]

    def turns(self) -> np.ndarray:
        """First and second call of each pair, ns (pairs, 2)."""
        return np.where(self.pairs[:, 4:] == 1, self.pairs[:, 1::-1], self.pairs[:, :2])


def _bare(reference: int, candidate: int, skew: int, plumbing: int) -> Pair:
    """Recorded were both sides by the outside clock, and how much of the reference's time was plumbing; it is taken from both."""
    own = min(plumbing, candidate - 1, reference - 1)
    return Pair(reference - own, candidate, skew, own, own)


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  an order, not a secret


def drawn_orders(rng: np.random.Generator, count: int) -> np.ndarray:
    """As a timed stage draws them: whether the candidate is first (count,)."""
    return np.array(list(islice(orders(seeded(int(rng.integers(2**32)))), count)))


def coins(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.random(count) < 0.5


def renamed(path: Path, rng: np.random.Generator, draw: Callable[[np.random.Generator, int], np.ndarray]) -> Sides:
    """An exact null: recorded calls from a random moment on, of which `draw` says which ones are called the candidate's."""
    turns = np.roll(Trace.load(path).turns(), -int(rng.integers(10**6)), axis=0)[:MOST]
    return np.where(draw(rng, MOST)[:, None], turns[:, ::-1], turns)


def made(rng: np.random.Generator, noise: float, stalls: float = 0.05) -> Sides:
    """A null of a machine with drift, stalls of one side, and first calls that take 5 % longer."""
    drift = np.exp(np.cumsum(rng.normal(0, 0.05, MOST)))[:, None]
    sides = 1e6 * drift * np.exp(rng.normal(0, noise, (MOST, 2))) * np.where(rng.random((MOST, 2)) < stalls, 3.0, 1.0)
    first = drawn_orders(rng, MOST)
    return sides * (1 + 0.05 * np.stack([~first, first], 1))


MADE = {f"made {noise} {stalls}": (noise, stalls) for noise, stalls in ((0.02, 0.0), (0.06, 0.05), (0.15, 0.1))}
SOURCES = [*MADE, *(path.stem for path in NULLS)]


def null(source: str, rng: np.random.Generator) -> Sides:
    if source in MADE:
        return made(rng, *MADE[source])
    return renamed(next(path for path in NULLS if path.stem == source), rng, drawn_orders)


def as_pairs(sides: Sides, effect: float = 1.0) -> list[Pair]:
    return [Pair(max(1, int(reference * effect)), int(candidate)) for reference, candidate in sides.tolist()]


def enough(pairs: list[Pair], precision: float = PRECISION, most: int = FIRST_LOOK) -> bool:
    return stopping.enough(pairs, precision, most)


def stopped(pairs: list[Pair], most: int = MOST, precision: float = PRECISION) -> Speed:
    """The whole procedure: look, stop or go on, summarise."""
    taken = 0
    while taken < most:
        taken = next_look(taken, most)
        if enough(pairs[:taken], precision, most):
            break
    speed = summarise(pairs[:taken], looks(most))
    assert speed is not None
    return speed


@cache
def many(source: str, effect: float, count: int = 400) -> list[Speed]:
    rng = np.random.default_rng(7)
    return [stopped(as_pairs(null(source, rng), effect)) for _ in range(count)]


def shown(name: str, effect: float, found: list[Speed]) -> None:
    faster, covered = np.mean([(s.faster, s.low <= effect <= s.high) for s in found], axis=0)
    pairs, low = np.mean([(s.pairs, s.low / effect) for s in found], axis=0)
    error = np.quantile([abs(s.speedup / effect - 1) for s in found], 0.9)
    print(f"{name}, true {effect}x: {pairs:.0f} pairs, faster {faster:.3f}, covered {covered:.3f}, low / truth {low:.3f}, "
          f"9 in 10 errors below {error:.3f}")  # fmt: skip


@given(st.integers(0, 2**32), st.integers(0, 100))
def test_every_block_of_two_holds_both_orders(seed: int, blocks: int) -> None:
    found = list(islice(orders(seeded(seed)), 2 * blocks))
    assert all(first is not second for first, second in zip(found[::2], found[1::2], strict=True))


def test_the_order_inside_a_block_is_a_fair_coin_of_its_own() -> None:
    firsts = np.array(list(islice(orders(seeded(0)), 20_000))[::2])
    assert firsts.mean() == pytest.approx(0.5, abs=0.015)  # 3 standard errors
    assert (firsts[1:] == firsts[:-1]).mean() == pytest.approx(0.5, abs=0.015)


@pytest.mark.parametrize(("most", "wanted"), [
    (1, [1]), (5, [5]), (24, [24]), (25, [24, 25]), (30, [24, 30]), (36, [24, 36]), (37, [24, 36, 37]),
    (384, [24, 36, 54, 80, 120, 180, 270, 384]), (405, [24, 36, 54, 80, 120, 180, 270, 404, 405]),
])  # fmt: skip
def test_looks_come_after_half_as_many_pairs_again(most: int, wanted: list[int]) -> None:
    found = [0]
    while found[-1] < most:
        found.append(next_look(found[-1], most))
    assert found[1:] == wanted


@given(st.integers(1, 5000), st.data())
def test_wherever_pairs_ended_there_are_at_most_so_many_looks(most: int, data: st.DataObject) -> None:
    taken = seen = 0
    while taken < most:
        upcoming = next_look(taken, most)
        assert taken < upcoming <= most
        taken, seen = upcoming, seen + 1
    assert seen == looks(most)
    ended = data.draw(st.integers(0, most))
    assert next_look(ended, most) >= ended
    assert looks(max(1, ended)) <= looks(most)


def test_a_narrow_interval_is_enough_anywhere() -> None:
    for reference in (80, 100, 104, 200):
        assert enough([Pair(reference, 100), Pair(reference + 1, 100)] * 12)


@pytest.mark.parametrize("count", range(MIN_PAIRS))
def test_few_pairs_are_never_enough(count: int) -> None:
    assert not enough([Pair(200, 100)] * count)


@pytest.mark.parametrize(("low", "high", "decided"), [
    (120, 140, True), (70, 85, True), (100, 120, False), (110, 130, False), (150, 200, False),
])  # fmt: skip
def test_a_coarse_interval_is_enough_only_when_all_of_it_is_far_from_one(low: int, high: int, decided: bool) -> None:
    pairs = ([Pair(low, 100)] * 2 + [Pair(high, 100)] * 2) * 6
    assert enough(pairs) is decided
    assert enough(pairs, precision=1.0)
    assert not enough(pairs, precision=0.01) or decided


def test_far_from_one_is_measured_against_the_bare_reference() -> None:
    pairs = ([Pair(120, 100)] * 2 + [Pair(140, 100)] * 2) * 6
    assert enough(pairs)
    assert not enough([Pair(p.reference_ns - 10, p.candidate_ns, 0, 10, 10) for p in pairs])


def test_timing_goes_on_while_a_claim_is_open() -> None:
    """Ten blocks of twelve: 1.9 %, which one look may believe, but not one of five."""
    pairs = [Pair(130, 100)] * 20 + [Pair(98, 100)] * 4
    assert enough(pairs)
    assert not enough(pairs, most=MOST)
    assert enough([Pair(p.candidate_ns, p.reference_ns) for p in pairs], most=MOST)


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_to_find_is_rarely_faster_whenever_it_stops(source: str) -> None:
    found = many(source, 1.0)
    shown(source, 1.0, found)
    assert np.mean([s.faster for s in found]) < LEVEL


@pytest.mark.parametrize("path", NULLS, ids=lambda path: path.stem)
def test_swapping_the_sides_of_any_pair_is_a_null_too(path: Path) -> None:
    rng = np.random.default_rng(8)
    assert np.mean([stopped(as_pairs(renamed(path, rng, coins))).faster for _ in range(400)]) < LEVEL


def test_looking_often_without_paying_for_it_errs_more() -> None:
    """What the level is divided for: a rule of stopping may end at the first claim."""
    values = np.where(np.random.default_rng(9).random((3000, MOST // 2)) < 0.5, 2.0, 0.5)
    least = np.array([min(sign_test(row[:blocks]) for blocks in (12, 24, 48, 96, 192)) for row in values])
    greedy, paid = (least <= LEVEL).mean(), (least <= LEVEL / looks(MOST)).mean()
    print(f"some look of {looks(MOST)} claims falsely: {greedy:.4f} at 2 % each, {paid:.4f} at 2 % together")
    assert paid < LEVEL < greedy


@pytest.mark.parametrize("effect", [1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("source", SOURCES)
def test_the_interval_holds_the_truth_after_stopping_early(source: str, effect: float) -> None:
    found = many(source, effect)
    assert np.mean([s.low <= effect <= s.high for s in found]) > 0.917  # 95 %, less 3 standard errors of 400 runs


@pytest.mark.parametrize("effect", [1.25, 2.0])
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_there_is_found(source: str, effect: float) -> None:
    found = many(source, effect)
    shown(source, effect, found)
    assert np.mean([s.faster for s in found]) > 0.95
    assert np.median([s.speedup for s in found]) == pytest.approx(effect, rel=0.03)


@pytest.mark.parametrize("source", ["made 0.15 0.1", *(path.stem for path in NULLS)])
def test_coarse_intervals_save_pairs_where_the_noise_is_large(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []
    for coarse in (PRECISION, COARSE, 2 * COARSE):
        monkeypatch.setattr(stopping, "COARSE", coarse)
        rng = np.random.default_rng(10)
        found = [stopped(as_pairs(null(source, rng), 2.0)) for _ in range(60)]
        shown(f"{source}, coarse {coarse}", 2.0, found)
        spent.append(sum(s.pairs for s in found))
    assert spent == sorted(spent, reverse=True)


@pytest.mark.parametrize("path", NULLS, ids=lambda path: path.stem)
def test_fresh_launches_of_the_reference_make_no_claim(path: Path) -> None:
    launches = Trace.load(path).groups()
    found = [pool(groups, looks(MOST)) for groups in combinations(launches, GROUPS)]
    assert not any(s and s.faster for s in found)
    whole = pool(launches)
    assert whole is not None
    assert whole.low <= 1.0 <= whole.high


@pytest.mark.parametrize("path", EFFECTS, ids=lambda path: path.stem)
def test_every_launch_of_a_faster_kernel_claims(path: Path) -> None:
    """A compiled all-reduce beside the reference; what it gains differs from launch to launch less than the intervals say."""
    found = [stopped(pairs, most=len(pairs)) for pairs in Trace.load(path).groups()]
    assert all(s.faster and s.speedup > NARROW for s in found)
    whole = pool(Trace.load(path).groups())
    assert whole is not None
    assert whole.faster
    assert all(s.low <= whole.speedup <= s.high for s in found)


def test_statistics_take_milliseconds() -> None:
    pairs = as_pairs(made(np.random.default_rng(0), 0.06))
    start = time.perf_counter()
    for _ in range(10):
        summarise(pairs, looks(MOST))
    middle = time.perf_counter()
    for _ in range(10):
        enough(pairs)
    summary_ms, enough_ms = (middle - start) * 100, (time.perf_counter() - middle) * 100
    print(f"{len(pairs)} pairs: summarise {summary_ms:.2f} ms, enough {enough_ms:.2f} ms")
    assert max(summary_ms, enough_ms) < 50
