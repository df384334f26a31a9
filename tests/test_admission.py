"""Admission through real boxes, for whatever is registered: the reference passes, the same without communication is refused.

What needs no box (a higher-precision evaluation, the nine lazy answers) is judged in `test_problems`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from trials import possible

import problems
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.lazy import silenced_source
from pkb_env.submission import Submission
from rewards.verdict import Status


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(EvalConfig(trials=2, pairs=0)) as made:
        yield made


def a_third(names: list[str]) -> list[object]:
    """All names, of which two thirds run with `--slow` only; another third each day, or that of `PKB_THIRD`."""
    mine = int(os.environ.get("PKB_THIRD", datetime.now(UTC).toordinal())) % 3
    return [pytest.param(name, marks=() if i % 3 == mine else pytest.mark.slow) for i, name in enumerate(names)]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", a_third(problems.names()))
def test_admission(evaluator: Evaluator, name: str, world_size: int) -> None:
    problem = problems.load(name)
    possible(problem, world_size)
    sources = (problems.reference_source(problem), silenced_source(problem))
    right, lazy = (evaluator.evaluate(Submission(s, name, world_size=world_size, size="tiny")) for s in sources)
    print(f"{name} W={world_size}: reference {right.status}, without communication {lazy.status}: {lazy.message}")
    assert right.status is Status.CORRECT, right.message
    assert lazy.status is Status.WRONG_RESULT, lazy.message
    assert lazy.passed < 1.0
