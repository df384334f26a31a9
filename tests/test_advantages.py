"""Advantages of a group and returns of an episode: hand-computed cases, and what must hold for any scores."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdicts import example, relaxed, timed

import rewards
from rewards import ADVANTAGES, Status, discounted

every_advantage = pytest.mark.parametrize("name", ADVANTAGES)
scores = st.lists(st.none() | st.floats(-10, 10), max_size=8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [-2.0, -1.0, 0.0, 3.0]),
        ("grpo", [x / (math.sqrt(14 / 3) + 1e-4) for x in (-2.0, -1.0, 0.0, 3.0)]),
        ("rloo", [-8 / 3, -4 / 3, 0.0, 4.0]),
    ],
)
def test_advantages_by_hand(name: str, expected: list[float]) -> None:
    """Scores 0, 1, 2, 5 with mean 2; without the last one, the others' mean is 1."""
    found = ADVANTAGES[name]([0.0, None, 1.0, 2.0, 5.0])
    assert found == pytest.approx([expected[0], 0.0, *expected[1:]])


def test_an_outlier_is_clipped() -> None:
    found = ADVANTAGES["cuda_l1"]([1.0] * 7 + [18.0])
    assert found[-1] == 1.5
    assert found[0] == pytest.approx(-17 / 8 / (statistics.stdev([1.0] * 7 + [18.0]) + 1e-4))


@every_advantage
@relaxed
@given(group=scores)
def test_advantages_are_finite_and_keep_the_order(name: str, group: list[float | None]) -> None:
    found = ADVANTAGES[name](group)
    assert len(found) == len(group)
    assert all(map(math.isfinite, found))
    there = sorted((score, advantage) for score, advantage in zip(group, found, strict=True) if score is not None)
    assert [a for _, a in there] == pytest.approx(sorted(a for _, a in there))
    assert all(advantage == 0 for score, advantage in zip(group, found, strict=True) if score is None)


@every_advantage
@pytest.mark.parametrize("group", [[], [3.0], [2.0, 2.0, None], [None, None]])
def test_a_group_without_a_difference_teaches_nothing(name: str, group: list[float | None]) -> None:
    assert ADVANTAGES[name](group) == [0.0] * len(group)


def test_a_reward_compares_its_own_scores() -> None:
    reward = rewards.get("cuda_l1")
    verdicts = [timed(0.9), timed(1.1), timed(1.0), timed(1.0), timed(18.0), example(Status.INFRA), example(Status.DEADLOCK)]
    found = reward.advantages([reward(verdict) for verdict in verdicts])  # type: ignore[attr-defined]
    assert (found[4], found[5]) == (1.5, 0.0)
    assert found[6] < found[0] < found[2] < found[1] < 0


@pytest.mark.parametrize(
    ("how", "gamma", "turns", "expected"),
    [
        ("sum", 0.4, [0.0, 1.0, 2.0], [0.72, 1.8, 2.0]),
        ("max", 0.4, [0.0, 1.0, 2.0], [0.4, 1.0, 2.0]),
        ("max", 0.9, [0.0, 1.0, 2.0], [1.62, 1.8, 2.0]),
        ("sum", 0.0, [1.0, 2.0], [1.0, 2.0]),
        ("sum", 1.0, [1.0, 2.0], [3.0, 2.0]),
        ("sum", 0.5, [1.0, None, 4.0, None], [2.0, None, 4.0, None]),
        ("max", 0.5, [None, None], [None, None]),
        ("sum", 0.4, [], []),
    ],
)
def test_returns_by_hand(how: str, gamma: float, turns: list[float | None], expected: list[float | None]) -> None:
    assert discounted(turns, gamma, how) == pytest.approx(expected)


def test_returns_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"gamma=1.5: wanted a number from 0 to 1"):
        discounted([1.0], 1.5)
    with pytest.raises(ValueError, match="how='mean': wanted one of sum, max"):
        discounted([1.0], how="mean")
