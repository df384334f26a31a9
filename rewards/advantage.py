"""From the scores of a group (samples of one prompt) to advantages, as trainers make them.

A score of None (unscored) takes no part: its advantage is 0 and the others are compared without it.  A group with fewer
than two scores, or none that differ, teaches nothing: all 0.

Not here: the scores (`compose`), turns of one episode (`returns`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

Scores = Sequence[float | None]
_EPSILON = 1e-4
"""Added to the standard deviation, as TRL does."""
_CLIP = 1.5


def centred(scores: Scores) -> list[float]:
    """The score less the mean (Dr. GRPO, arXiv 2503.20783): a group's spread keeps its weight."""
    return _each(scores, lambda score, there: score - statistics.fmean(there))


def standardised(scores: Scores) -> list[float]:
    """(score - mean) / (standard deviation + 1e-4), with n - 1 (GRPO, arXiv 2402.03300).

    Known failure: where all but one score are alike, the size of the difference is lost.
    """
    return _each(scores, lambda score, there: (score - statistics.fmean(there)) / (statistics.stdev(there) + _EPSILON))


def clipped(scores: Scores) -> list[float]:
    """The same, clipped to [-1.5, 1.5] (CUDA-L1, arXiv 2507.14111): one outlier does not rule its group."""
    return [min(max(score, -_CLIP), _CLIP) for score in standardised(scores)]


def leave_one_out(scores: Scores) -> list[float]:
    """The score less the mean of the others (RLOO, arXiv 2402.14740): the baseline does not contain the sample itself."""
    return _each(scores, lambda score, there: (score - statistics.fmean(there)) * len(there) / (len(there) - 1))


ADVANTAGES: Mapping[str, Callable[[Scores], list[float]]] = {
    "grpo": standardised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "cuda_l1": clipped,
}
"""By the name that a reward, a file or a command gives."""


def _each(scores: Scores, advantage: Callable[[float, list[float]], float]) -> list[float]:
    there = [score for score in scores if score is not None]
    if len(there) < 2 or min(there) == max(there):
        return [0.0] * len(scores)
    return [0.0 if score is None else advantage(score, there) for score in scores]
