"""A problem tried on real ranks: inputs, truth, what the reference did, and the judge's opinion of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from gloo_ranks import ReferenceRun, run_reference

import problems
from pkb_env.judge import Comparison, Summary, compare, compare_arguments, summarise
from problems.base import Draw, Problem


@dataclass(frozen=True)
class Trial:
    """A problem's inputs on all ranks, what is true for them, and what the reference did on real ranks."""

    problem: Problem
    inputs: list[tuple[Any, ...]]
    other_inputs: list[tuple[Any, ...]]
    exact: list[Any]
    runs: list[ReferenceRun]

    def judge(self, candidate: list[Any]) -> list[Comparison]:
        reference = [run.output for run in self.runs]
        return compare(self.problem, trial=0, exact=self.exact, reference=reference, candidate=candidate)

    def judge_arguments(self, after: list[tuple[Any, ...]]) -> list[Comparison]:
        names, wanted = self.problem.arguments, [run.args for run in self.runs]
        return compare_arguments(
            self.problem, names, trial=0, pristine=self.inputs, after_reference=wanted, after_candidate=after
        )

    def summary(self, candidate: list[Any]) -> Summary:
        return summarise(self.judge(candidate), len(self.inputs))


def make(problem: Problem, world_size: int, *, size: str = "tiny", trial: int = 0, **more: Any) -> list[Any]:
    secret = more.pop("secret", b"s")
    draws = [Draw(secret, problem.slug, size, trial, rank, world_size, **more) for rank in range(world_size)]
    return [problem.make_inputs(draw, problem.size(size, draw.profile)) for draw in draws]


def possible(problem: Problem, world_size: int) -> None:
    """Skip the test where the problem cannot run on so many ranks."""
    if reason := problem.valid_world(world_size):
        pytest.skip(f"{problem.slug}: {reason}")


@cache
def tried(name: str, world_size: int, size: str = "tiny", dtype: torch.dtype = torch.float32) -> Trial:
    problem = problems.load(name)
    possible(problem, world_size)
    inputs, other = (make(problem, world_size, size=size, trial=trial, dtype=dtype) for trial in (0, 1))
    return Trial(problem, inputs, other, problem.exact(inputs), run_reference(name, inputs))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return all(map(same, left, right))
    return bool(left == right)
