"""Which candidates are planted, in which order: drawn from a seed, every text another one.  No process, no clock.

Kinds come in shuffled decks that hold each kind, so that the beginning and the end of a long run can be compared.
Not here: the kinds (`soak_texts`, `soak_attacks`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pkb_env.bench import soak_attacks, soak_texts, texts
from pkb_env.bench.soak_kinds import Kind
from pkb_env.submission import Submission

KINDS = (*soak_texts.KINDS, *soak_attacks.KINDS)
_LATE_CALLS = (1, 2, 5, 8)
_EARLY_CALLS = (1, 2)


@dataclass(frozen=True)
class Planted:
    """A candidate and what must come of it."""

    number: int
    """In its mix, from 1."""
    kind: Kind
    submission: Submission


@dataclass(frozen=True)
class Mix:
    """What is drawn; the same fields give the same texts, but for where the store lies."""

    seed: int
    problems: tuple[str, ...]
    """Slugs; allreduce need not be among them."""
    world_size: int = 2
    size: str = "tiny"
    timed: bool = True
    """Whether there are timed calls, in which faults may come."""

    def plant(self, numbers: Sequence[int], store: str) -> list[Planted]:
        """The candidates with these numbers, which count from 1."""
        order = self._order(max(numbers, default=0))
        return [self._planted(number, order[number - 1], store) for number in numbers]

    def _order(self, count: int) -> list[Kind]:
        rng, order = random.Random(f"soak {self.seed}"), list[Kind]()  # noqa: S311  a mix that can be repeated
        deck = [kind for kind in KINDS for _ in range(kind.weight) if self._places(kind)]
        while len(order) < count:
            order += rng.sample(deck, len(deck))
        return order

    def _places(self, kind: Kind) -> list[str]:
        """Problems that a kind has a text for."""
        if not kind.anywhere:
            return ["allreduce"]
        if not kind.name.startswith("example"):
            return list(self.problems)
        return [slug for slug in self.problems if (texts.EXAMPLES / f"{kind.backend}_{slug}.py").is_file()]

    def _planted(self, number: int, kind: Kind, store: str) -> Planted:
        rng = random.Random(f"soak {self.seed} {number}")  # noqa: S311  the same
        mark = f"soak-{self.seed}-{number}"
        problem = rng.choice(self._places(kind))
        call = rng.choice(_LATE_CALLS if kind.late and self.timed else _EARLY_CALLS)
        text = kind.source(problem).replace("@rank@", str(rng.randrange(self.world_size))).replace("@call@", str(call))
        text = texts.unique(text.replace("@store@", store).replace("@mark@", mark), mark)
        return Planted(number, kind, Submission(text, problem, kind.backend, self.world_size, size=self.size))
