"""What a reward makes of stored episodes, and how two rewards differ in it.  Arithmetic only.

Every turn is one value: its return (`rewards.discounted`); turns of the same number in one group are compared with each
other, as trainers do.

Not here: reading the store (`episodes`), pictures (`picture`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import rewards
from pkb_env.scoring.episodes import Episode, Group
from rewards.score import Reward


@dataclass(frozen=True)
class Rescored:
    """Every turn of every episode under one reward, in the order of episodes and turns."""

    reward: str
    advantage: str
    values: tuple[float | None, ...]
    """Returns; None: unscored."""
    advantages: tuple[float, ...]
    groups: int
    flat: int
    """Groups whose advantages are all 0: nothing is learnt from them."""

    @property
    def scored(self) -> list[float]:
        """The values that are there."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float:
        """Of the values that are there; NaN without any."""
        return float(np.mean(self.scored)) if self.scored else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of the values that are there; NaN without any."""
        return float(np.std(self.scored)) if self.scored else math.nan


@dataclass(frozen=True)
class Difference:
    """How a second reward differs from the first on the same turns."""

    rank_correlation: float
    """Spearman's, over turns that both score; NaN where one of them gives everything the same value."""
    changed_signs: int
    """Turns that one of them encourages (advantage > 0) and the other discourages (< 0)."""
    other_best: int
    """Groups in which none of the turns that the first likes best is among those that the second likes best."""


def rescore(
    found: Sequence[Episode], reward: Reward, *, gamma: float = 0.4, how: str = "sum", advantage: str | None = None
) -> Rescored:
    """Returns and advantages of all turns.

    Args:
        found: episodes.
        reward: what a verdict is worth; it sees the earlier verdicts of its episode.
        gamma: discount from one turn to the one before.
        how: `sum` or `max`, see `rewards.discounted`.
        advantage: a name of `rewards.ADVANTAGES`; None: the reward's own, else `grpo`.
    """
    name = advantage or str(getattr(reward, "advantage", "grpo"))
    values = [value for episode in found for value in rewards.discounted(_scores(episode, reward), gamma, how)]
    groups = places(found)
    advantages = [0.0] * len(values)
    for members in groups.values():
        for place, value in zip(members, rewards.ADVANTAGES[name]([values[m] for m in members]), strict=True):
            advantages[place] = value
    flat = sum(not any(advantages[m] for m in members) for members in groups.values())
    return Rescored(reward.name, name, tuple(values), tuple(advantages), len(groups), flat)


def difference(first: Rescored, second: Rescored, groups: Sequence[Sequence[int]]) -> Difference:
    """Two rewards on the same turns; `groups` holds positions of turns that are compared."""
    both = [(x, y) for x, y in zip(first.values, second.values, strict=True) if x is not None and y is not None]
    changed = sum(x * y < 0 for x, y in zip(first.advantages, second.advantages, strict=True))
    best = [(_best(first, members), _best(second, members)) for members in groups]
    return Difference(_spearman(both), changed, sum(bool(one and two and not one & two) for one, two in best))


def places(found: Sequence[Episode]) -> dict[tuple[Group, int], list[int]]:
    """Positions, among all turns, of those that are compared: the same turn of the samples of one group."""
    groups: dict[tuple[Group, int], list[int]] = {}
    place = 0
    for episode in found:
        for turn in episode.turns:
            groups.setdefault((episode.group, turn.turn), []).append(place)
            place += 1
    return groups


def _scores(episode: Episode, reward: Reward) -> list[float | None]:
    scores: list[float | None] = []
    for turn, verdict in enumerate(episode.verdicts):
        score = None if verdict is None else reward(verdict, tuple(v for v in episode.verdicts[:turn] if v is not None))
        scores.append(None if score is None or score.unscored else score.total)
    return scores


def _best(of: Rescored, members: Sequence[int]) -> set[int]:
    there = {place: value for place in members if (value := of.values[place]) is not None}
    return {place for place, value in there.items() if value == max(there.values())}


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Correlation of the ranks; equal values share the mean of their ranks."""
    if len(pairs) < 2:
        return math.nan
    first, second = (_ranks(np.array(values)) for values in zip(*pairs, strict=True))
    if first.std() == 0 or second.std() == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks
