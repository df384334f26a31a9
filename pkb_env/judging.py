"""Between the arenas and the judge: reads what the ranks left, calls the pure comparisons, words them as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pkb_env import judge
from pkb_env.box.tree import WireViolation
from pkb_env.box.wire import Arena
from problems.base import Problem

_OWN_WORD = "unstable: in {} trials the reference's own output was the truth; more precision answers otherwise"
Arguments = Sequence[tuple[Any, ...]]
"""The arguments of every rank."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """All about one trial that follows from its inputs; each sequence holds one entry per rank."""

    number: int
    pristine: Arguments
    exact: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Answers:
    """What was left after the calls of one trial; each sequence holds one entry per rank."""

    reference: Sequence[Any]
    candidate: Sequence[Any]
    after_reference: Arguments
    after_candidate: Arguments


def read_ranks(arenas: Sequence[Arena], slot: int, nonce: int) -> list[Any]:
    """The outputs of every rank.

    Raises:
        WireViolation: names the rank that did not put a tree on the wire.
    """
    outputs = []
    for rank, arena in enumerate(arenas):
        try:
            outputs.append(arena.read(slot, nonce))
        except WireViolation as error:
            raise WireViolation(f"rank {rank} left no output that can be read: {error}") from None
    return outputs


class Record:
    """The comparisons of one evaluation, trial after trial."""

    def __init__(self, problem: Problem, *, public: bool) -> None:
        self.problem, self._public, self._names = problem, public, problem.arguments
        self._found: list[judge.Comparison] = []
        self._public_holds, self._unstable = True, 0

    def prepare(self, number: int, inputs: Arguments, answers: Sequence[Any] | None = None) -> Prepared:
        """The exact answers of one trial, unless they are given; the inputs are kept, and nobody may change them."""
        return Prepared(number, inputs, self.problem.exact(inputs) if answers is None else answers)

    def stable(self, trial: Prepared, reference: Sequence[Any]) -> Prepared:
        """Where the reference alone says what is true: its own output, if that lies too far from its more precise run.

        There its dtype decides what comes out (the choice of an expert, say), and more precision answers another question.
        """
        try:
            found = judge.compare(
                self.problem, trial=trial.number, exact=trial.exact, reference=reference, candidate=reference
            )
            unstable = not all(c.passed for c in found)
        except (ValueError, TypeError, LookupError, AttributeError):  # not even alike in structure
            unstable = True
        self._unstable += unstable
        return dataclasses.replace(trial, exact=reference) if unstable else trial

    def add(self, trial: Prepared, answers: Answers) -> dict[str, Any]:
        """Judge one trial: how many comparisons hold, of how many."""
        found = judge.compare(
            self.problem, trial=trial.number, exact=trial.exact, reference=answers.reference, candidate=answers.candidate
        )
        found += judge.compare_arguments(
            self.problem, self._names, trial=trial.number, pristine=trial.pristine,
            after_reference=answers.after_reference, after_candidate=answers.after_candidate,
        )  # fmt: skip
        self._found += found
        if self._public:
            self._public_holds &= judge.public_rule(list(answers.reference), list(answers.candidate))
        return {"passed": sum(c.passed for c in found), "total": len(found)}

    def summary(self) -> dict[str, Any]:
        """Share passed, message and one report per rank, remarks; the public rule's opinion when asked for."""
        world_size = 1 + max(c.rank for c in self._found)
        summary = judge.summarise(self._found, world_size)
        return {
            "passed": summary.passed, "message": summary.message, "ranks": [dataclasses.asdict(r) for r in summary.ranks],
            "public_rule": self._public_holds if self._public else None,
            "notes": [_OWN_WORD.format(self._unstable)] if self._unstable else [],
        }  # fmt: skip
