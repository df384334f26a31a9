"""The registry of problems: finds by name, imports nothing early, says what it knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import problems

NAMES = problems.names()


def test_registry_finds_by_slug_number_file_and_prefix() -> None:
    assert {"allreduce", "gemm_allreduce", "ring_attention"} <= set(NAMES)
    for name in ("ring_attention", 54, "54", "054", "p054_ring_attention", "p054_ring_attention.py", " ring_attention "):
        assert problems.load(name).number == 54
    assert problems.load(" vocab_parallel_cross ").number == 73
    assert [problems.load(name).number for name in NAMES] == sorted(problems.load(name).number for name in NAMES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("alreduce", "did you mean 'allreduce'"),
        ("all", "may mean any of allreduce, allgather"),
        ("99", "There are: allreduce"),
        ("", "no problem"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(name: str, says: str) -> None:
    with pytest.raises(problems.UnknownProblem, match=says):
        problems.load(name)


def test_splits_cover_everything_once() -> None:
    splits = [problem.slug for split in ("train", "validation", "test") for problem in problems.by_split(split)]
    assert sorted(splits) == sorted(NAMES)
    with pytest.raises(problems.UnknownProblem, match="split 'training'"):
        problems.by_split("training")


def test_importing_the_registry_imports_no_torch() -> None:
    code = "import problems, sys; assert problems.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(problems.__file__).parents[1], timeout=60)


def test_world_sizes_are_checked() -> None:
    for name in NAMES:
        problems.check_world(problems.load(name), 2)
    with pytest.raises(ValueError, match="allreduce cannot run on 0 ranks: world size 0 is less than 1"):
        problems.check_world(problems.load("allreduce"), 0)
    with pytest.raises(ValueError, match="ring_attention cannot run on 99 ranks: it needs 1 to"):
        problems.check_world(problems.load("ring_attention"), 99)
