"""Gives every lazy answer to every problem to the judge and to the public check, one problem after the other, without boxes.

Not here: the answers (`pkb_env.lazy`), what the table says (`lazy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pkb_env.bench.lazy import CHECKS, NOT_LAZY, REFERENCE, RIGHT, Row
from pkb_env.lazy import KINDS, Case
from pkb_env.trial import Trial, tried
from pkb_env.unboxed import RankFailed
from problems.base import PROFILES, Problem

_MOST_FLOPS = 4e9
_MOST_BYTES = 64 << 20
"""Least work and least memory of a rank above which a shape is too heavy for a CPU."""
_ITEMSIZE = 4
_WHY_CHARS = 200
ANSWERS = (*KINDS, RIGHT, REFERENCE)
"""What is given to the judge, in the order of the table."""


@dataclass(frozen=True)
class Plan:
    """Which problems, how."""

    problems: tuple[Problem, ...]
    profiles: tuple[str, ...] = PROFILES
    world_size: int = 2
    trials: int = 5
    size: str = "default"
    """Of both profiles; `upstream` means the public benchmark's shape by `default`."""
    deadline_s: float = 120

    def size_of(self, problem: Problem, profile: str) -> str:
        """The size that is asked for, or the next smaller one that is not too heavy."""
        asked = problem.size(self.size, profile).name
        fits = (size for size in (asked, "default") if _light(problem, problem.sizes[size].name, self.world_size))
        return next(fits, "tiny")


def _light(problem: Problem, size: str, world_size: int) -> bool:
    cost = problem.cost(problem.sizes[size], world_size, _ITEMSIZE)
    return cost.flops <= _MOST_FLOPS and max(cost.memory_bytes, cost.wire_bytes) <= _MOST_BYTES


def take(plan: Plan, heard: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row for each problem under each profile; `heard` is told of each one as it comes."""
    rows = []
    for profile in plan.profiles:
        for problem in plan.problems:
            started = time.monotonic()
            rows.append(replace(_row(plan, problem, profile), seconds=time.monotonic() - started))
            heard(rows[-1])
    return rows


def _row(plan: Plan, problem: Problem, profile: str) -> Row:
    size = plan.size_of(problem, profile)
    alive, not_made, peak, done = {check: set(ANSWERS) for check in CHECKS}, dict[str, str](), 0, 0
    while done < plan.trials and set().union(*alive.values()) - NOT_LAZY:
        try:
            trial = tried(problem, plan.world_size, size=size, trial=done, profile=profile, deadline_s=plan.deadline_s)
            _refuse(trial, alive, not_made)
        except (RankFailed, RuntimeError, ValueError) as error:
            return Row(problem.slug, profile, size, done, failed=_said(error))
        peak, done = max([peak, *(run.peak_bytes for run in trial.runs)]), done + 1
    kept = {check: tuple(kind for kind in ANSWERS if kind in kinds) for check, kinds in alive.items()}
    return Row(problem.slug, profile, size, done, kept["judge"], kept["public check"], not_made, rank_bytes=peak)


def _refuse(trial: Trial, alive: dict[str, set[str]], not_made: dict[str, str]) -> None:
    """Take away what one trial refuses; what cannot be made is refused too."""
    for kind, make in _answers(trial).items():
        asked = [check for check in CHECKS if kind in alive[check]]
        try:
            answer = make() if asked else []
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            not_made[kind] = _said(error)
            held = set[str]()
        else:
            held = {check for check in asked if _holds(trial, answer, check)}
        for check in set(asked) - held:
            alive[check].discard(kind)


def _answers(trial: Trial) -> dict[str, Callable[[], list[Any]]]:
    """Each of `ANSWERS`, made when it is called."""
    case = Case(trial.problem, trial.inputs, trial.other_inputs, trial.exact)
    lazy = {kind: partial(make, case) for kind, make in KINDS.items()}
    return {**lazy, RIGHT: lambda: case.right, REFERENCE: lambda: trial.outputs}


def _holds(trial: Trial, answer: list[Any], check: str) -> bool:
    return trial.summary(answer).passed == 1 if check == "judge" else trial.public(answer)


def _said(error: Exception) -> str:
    """The kind of an error and its last line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"[:_WHY_CHARS]

