"""What a reward gives back: named terms and a total that is derived from them.

Not here: how a term is computed (`correctness`, `speed`), which terms make a reward (`compose`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rewards.verdict import Verdict

History = tuple[Verdict, ...]
"""The earlier verdicts of the same episode, oldest first."""


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of a score.

    Raises:
        ValueError: a score or weight that is not finite, or a negative weight.
    """

    name: str
    score: float | None
    """None: there is nothing to score, the term drops out and its weight is not handed on."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"term {self.name!r} has score {self.score!r}, wanted a finite number or None")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"term {self.name!r} has weight {self.weight!r}, wanted a finite number >= 0")


@dataclass(frozen=True, slots=True)
class Score:
    """The terms of one verdict."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        """Weighted sum over the terms that have a score; 0.0 when none has (ask `unscored` first)."""
        return math.fsum(t.weight * t.score for t in self.terms if t.score is not None)

    @property
    def unscored(self) -> bool:
        """Whether there is no result to learn from; a trainer skips it, it is not a zero."""
        return all(t.score is None for t in self.terms)


class Reward(Protocol):
    """What an evaluated candidate is worth; an instance survives pickling."""

    @property
    def name(self) -> str:
        """Stable name, written beside every score."""
        ...

    def __call__(self, verdict: Verdict, history: History = ()) -> Score:
        """Score one verdict, given the earlier ones of its episode."""
        ...


class Scorer(Protocol):
    """One kind of term: a frozen dataclass whose fields are the parameters a TOML file may set.

    It is never asked about INFRA.  It gives a failure no more than any correct answer, so that every sum with weights
    >= 0 keeps the two apart; a test asks this of every kind.
    """

    kind: ClassVar[str]

    def score(self, verdict: Verdict, history: History) -> float | None:
        """A finite number, or None where there is nothing to score."""
        ...
