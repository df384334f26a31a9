"""A problem tried without a box: inputs, truth, what the reference did on real ranks, and the judge's opinion of any answer.

Not here: trials of candidates (`attempt`, `judging`), answers that must be refused (`lazy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pkb_env.judge import Comparison, Summary, compare, compare_arguments, public_rule, summarise
from pkb_env.unboxed import ReferenceRun, run_reference
from problems.base import Draw, Problem


@dataclass(frozen=True)
class Trial:
    """A problem's inputs on all ranks, what is true for them, and what the reference did on real ranks."""

    problem: Problem
    inputs: list[tuple[Any, ...]]
    other_inputs: list[tuple[Any, ...]]
    """Those of another trial."""
    exact: list[Any]
    runs: list[ReferenceRun]

    def judge(self, candidate: list[Any]) -> list[Comparison]:
        """Outputs of all ranks, compared."""
        return compare(self.problem, trial=0, exact=self.exact, reference=self.outputs, candidate=candidate)

    def judge_arguments(self, after: list[tuple[Any, ...]]) -> list[Comparison]:
        """Arguments of all ranks after the call, compared."""
        names, wanted = self.problem.arguments, [run.args for run in self.runs]
        return compare_arguments(
            self.problem, names, trial=0, pristine=self.inputs, after_reference=wanted, after_candidate=after
        )

    def summary(self, candidate: list[Any]) -> Summary:
        """The comparisons of outputs in short."""
        return summarise(self.judge(candidate), len(self.inputs))

    def public(self, candidate: list[Any]) -> bool:
        """Whether the public benchmark's rule accepts the outputs of every rank."""
        return public_rule(self.outputs, candidate)

    @property
    def outputs(self) -> list[Any]:
        """What the reference gave on every rank."""
        return [run.output for run in self.runs]


def make(
    problem: Problem,
    world_size: int,
    *,
    size: str = "tiny",
    trial: int = 0,
    secret: bytes = b"s",
    profile: str = "hardened",
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Any, ...]]:
    """The arguments of every rank; the size is taken by its name alone, so that `upstream` inputs may have any extents."""
    draws = [Draw(secret, problem.slug, size, trial, rank, world_size, profile, dtype) for rank in range(world_size)]
    return [problem.make_inputs(draw, problem.size(size)) for draw in draws]


def tried(
    problem: Problem,
    world_size: int,
    *,
    size: str = "tiny",
    trial: int = 0,
    profile: str = "hardened",
    dtype: torch.dtype = torch.float32,
    deadline_s: float = 60,
) -> Trial:
    """One trial; the one after it has the other inputs.

    Raises:
        RankFailed: the reference failed, or took longer than the deadline.
    """
    inputs, other = (
        make(problem, world_size, size=size, trial=number, profile=profile, dtype=dtype) for number in (trial, trial + 1)
    )
    runs = run_reference(problem.slug, inputs, deadline_s=deadline_s)
    return Trial(problem, inputs, other, problem.exact(inputs), runs)
