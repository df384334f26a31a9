"""From the scores of an episode's turns to what each turn is trained with.

Not here: the scores (`compose`), comparing samples of one prompt (`advantage`).
"""

from __future__ import annotations

from collections.abc import Sequence

HOW = ("sum", "max")


def discounted(scores: Sequence[float | None], gamma: float = 0.4, how: str = "sum") -> list[float | None]:
    """What every turn of one episode is worth, its own score and those of later turns, in the order of the turns.

    sum: G_t = r_t + gamma G_(t+1); max: G_t = max(r_t, gamma G_(t+1)), with r_t the score of turn t (Kevin, arXiv 2507.11948,
    found sum and gamma = 0.4 best).  An unscored turn (None) gets None and hands on what comes later, discounted.

    Known failure of sum: with gamma near 1 many mediocre turns earn more than one good one.  Of max: negative scores of later
    turns shrink to 0, so an early failure is blamed less the longer the episode lasts; use scores >= 0.

    Raises:
        ValueError: gamma outside [0, 1], or another word than sum or max.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma!r}: wanted a number from 0 to 1")
    if how not in HOW:
        raise ValueError(f"how={how!r}: wanted one of {', '.join(HOW)}")
    found, later = list[float | None](), None
    for score in reversed(scores):
        later = _earlier(score, None if later is None else gamma * later, how)
        found.append(None if score is None else later)
    return found[::-1]


def _earlier(score: float | None, later: float | None, how: str) -> float | None:
    if score is None or later is None:
        return later if score is None else score
    return score + later if how == "sum" else max(score, later)
