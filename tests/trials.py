"""Trials that several tests look at are made once; tests skip what a problem cannot do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import problems
from pkb_env import trial
from problems.base import Problem


def possible(problem: Problem, world_size: int) -> None:
    """Skip the test where the problem cannot run on so many ranks."""
    if reason := problem.valid_world(world_size):
        pytest.skip(f"{problem.slug}: {reason}")


@cache
def tried(name: str, world_size: int, size: str = "tiny", dtype: torch.dtype = torch.float32) -> trial.Trial:
    problem = problems.load(name)
    possible(problem, world_size)
    return trial.tried(problem, world_size, size=size, dtype=dtype)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return all(map(same, left, right))
    return bool(left == right)
