"""A trial as the oracle judges it: prepared from its inputs alone, then compared; and the judge's shortcut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import problems
from pkb_env import closeness, lazy
from pkb_env.judging import Answers, Record
from pkb_env.trial import make
from problems.base import Problem, Tolerance

NAMES = ("allreduce", "allgather", "gemm_allreduce", "ring_attention", "vocab_parallel_cross_entropy_loss")


def copied(inputs: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args) for args in inputs]


def judged(problem: Problem, candidate: list[Any], after: list[Any], inputs: list[Any]) -> tuple[Record, dict[str, Any]]:
    """One trial in which the reference is as good as rounding allows and leaves its arguments alone."""
    record = Record(problem, public=True)
    prepared = record.prepare(7, copied(inputs))
    answers = Answers(lazy.honest_answer(problem, inputs), candidate, copied(inputs), after)
    return record, record.add(prepared, answers)


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_trial_holds_for_an_honest_answer(name: str) -> None:
    problem = replace(problems.load(name), mutates=())
    inputs = make(problem, 2)
    record, count = judged(problem, lazy.honest_answer(problem, inputs), copied(inputs), inputs)
    assert count["passed"] == count["total"] >= 4
    summary = record.summary()
    assert (summary["passed"], summary["message"], summary["public_rule"]) == (1.0, "", True)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_trial_names_what_is_wrong(name: str) -> None:
    problem = replace(problems.load(name), mutates=())
    inputs = make(problem, 2)
    after = copied(inputs)
    after[1][0].view(-1)[3] += 1
    record, count = judged(problem, lazy.silenced_answer(problem, inputs), after, inputs)
    assert count["passed"] < count["total"]
    message = record.summary()["message"]
    assert "the first: trial 7, rank " in message
    changed = [rank for rank in record.summary()["ranks"] if rank["error"]]
    assert changed[-1]["rank"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_preparing_leaves_the_inputs_alone(name: str) -> None:
    problem = problems.load(name)
    inputs = make(problem, 3)
    kept = copied(inputs)
    prepared = Record(problem, public=False).prepare(0, inputs)
    assert prepared.pristine is inputs
    for before, now in zip(kept, inputs, strict=True):
        assert all(torch.equal(b, n) for b, n in zip(before, now, strict=True) if isinstance(b, torch.Tensor))


def leaf(exact: torch.Tensor, off: float, special: float | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Exact, reference and candidate; `off`: the candidate's relative error in round-offs; `special` in its last element."""
    error = off * torch.finfo(dtype).eps / 2 * exact.sign()
    candidate = (exact + error * exact.abs().mean()).to(dtype)
    if special is not None:
        candidate.view(-1)[-1] = special
    return exact, exact.to(dtype), candidate


@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(inner_ulps=8), Tolerance(element_ulps=6, norm_ulps=1, cap=0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_shortcut_decides_as_the_whole_rule_does(
    dtype: torch.dtype, tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.randn(50, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cases = [leaf(exact, off, special, dtype) for off in (0, 1, 3, 9, 30, 90, 900) for special in (None, 0.0, float("inf"))]
    quick = [closeness.judge_leaf(tolerance, *case) for case in cases]
    settled = [closeness.within(closeness.Floors.of(tolerance, dtype), e, c) for e, _, c in cases]
    monkeypatch.setattr(closeness, "within", lambda *_: None)
    assert quick == [closeness.judge_leaf(tolerance, *case) for case in cases]
    assert any(worst is not None for worst in settled)
    assert {bool(x.reason) for x in quick} == {True, False}


def test_the_shortcut_leaves_open_what_is_not_finite() -> None:
    floors = closeness.Floors.of(Tolerance(), torch.float64)
    huge = torch.full((3,), 1e200, dtype=torch.float64)
    assert closeness.within(floors, huge, torch.tensor([1e200, float("inf"), 1e200], dtype=torch.float64)) is None
    assert closeness.within(floors, torch.tensor([float("nan")]).double(), torch.tensor([float("nan")])) is None
