"""The judge: what it accepts, what it refuses, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import problems
from pkb_env.box.leaves import Alias, Foreign, Oversized
from pkb_env.judge import Comparison, compare, compare_arguments, public_rule, summarise
from problems.base import Problem, Tolerance

NAN, INF = float("nan"), float("inf")


def judged(exact: Any, reference: Any, candidate: Any, tolerance: Tolerance | None = None) -> list[Comparison]:
    """The comparisons of a single rank."""
    problem = replace(problems.load("allreduce"), tolerance=tolerance or Tolerance())
    return compare(problem, trial=3, exact=[exact], reference=[reference], candidate=[candidate])


def refused(exact: Any, reference: Any, candidate: Any, tolerance: Tolerance | None = None) -> Comparison:
    """The only comparison, which must have failed."""
    (found,) = judged(exact, reference, candidate, tolerance)
    assert not found.passed
    return found


@pytest.fixture
def exact() -> torch.Tensor:
    return torch.randn(50, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_reference_and_something_better_pass(exact: torch.Tensor) -> None:
    poor = exact.to(torch.bfloat16) + 0.01 * exact.to(torch.bfloat16)
    for candidate in (poor, exact.to(torch.bfloat16)):
        (found,) = judged(exact, poor, candidate)
        assert found.passed, str(found)
        assert found.max_error == float((candidate.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_half_the_precision_is_refused(exact: torch.Tensor, dtype: torch.dtype) -> None:
    wide = torch.complex(exact, exact.flip(0)) if dtype.is_complex else exact
    less = {torch.float64: torch.float32, torch.float32: torch.float16, torch.complex64: torch.float16}
    parts = torch.view_as_real(wide) if dtype.is_complex else wide
    coarse = parts.to(less.get(dtype, torch.float8_e4m3fn)).double()
    rounded = (torch.view_as_complex(coarse) if dtype.is_complex else coarse).to(dtype)
    assert "expected" in refused(wide, wide.to(dtype), rounded).reason


def test_first_wrong_element_is_named(exact: torch.Tensor) -> None:
    candidate = exact.float()
    candidate[7, 5] += 0.25
    candidate[30, 1] -= 0.5
    found = refused(exact, exact.float(), candidate)
    assert found.index == (7, 5)
    assert found.got == f"{candidate[7, 5].item():.9g}"
    assert found.expected is not None
    assert float(found.expected) == pytest.approx(exact[7, 5].item())
    assert found.max_error == pytest.approx(0.5, abs=1e-5)
    assert found.allowed is not None
    assert found.allowed < 1e-4
    assert str(found).startswith("trial 3, rank 0, output 0: element [7, 5] is ")


def test_a_small_bias_everywhere_is_refused_by_the_norm(exact: torch.Tensor) -> None:
    scale = float(exact.norm()) / exact.numel() ** 0.5
    candidate = (exact + 0.02 * scale).to(torch.bfloat16)
    assert "all errors together" in refused(exact, exact.to(torch.bfloat16), candidate).reason


def test_a_useless_reference_does_not_open_the_door(exact: torch.Tensor) -> None:
    assert refused(exact, torch.zeros(50, 40), torch.zeros(50, 40)).index is not None


@pytest.mark.parametrize(
    ("truth", "came", "passes"),
    [(1, NAN, False), (1, INF, False), (NAN, NAN, True), (INF, INF, True), (INF, -INF, False), (NAN, 1, False), (INF, 9, False)],
)
def test_nan_and_infinity_only_where_exact_has_them(truth: float, came: float, passes: bool) -> None:
    reference = torch.tensor([[2.0, truth]])
    (found,) = judged(reference.double(), reference, torch.tensor([[2.0, came]]))
    assert found.passed is passes
    assert passes or found.index == (0, 1)


@pytest.mark.parametrize(("truth", "came", "passes"), [(1, NAN, False), (NAN, NAN, True), (NAN, 1, False)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_nan_of_narrow_floats_is_judged_too(dtype: torch.dtype, truth: float, came: float, passes: bool) -> None:
    """Torch does not know which 8-bit floats are finite."""
    reference = torch.tensor([[2.0, truth]]).to(dtype)
    (found,) = judged(reference.double(), reference, torch.tensor([[2.0, came]]).to(dtype))
    assert found.passed is passes


def test_overflow_is_judged_in_the_dtype_of_the_output() -> None:
    exact = torch.tensor([1.0, 1e6], dtype=torch.float64)
    (found,) = judged(exact, exact.half(), torch.tensor([1.0, INF], dtype=torch.float16))
    assert found.passed


@pytest.mark.parametrize("value", [torch.arange(6).view(2, 3), torch.tensor([True, False, True])])
def test_integers_and_booleans_are_exact(value: torch.Tensor) -> None:
    assert judged(value, value, value.clone())[0].passed
    wrong = value.clone()
    wrong.view(-1)[2] = 0
    assert refused(value, value, wrong).index in {(0, 2), (2,)}


def test_bits_sees_the_sign_of_zero() -> None:
    value = torch.tensor([1.0, 0.0, NAN])
    assert judged(value, value, value.clone(), Tolerance(bits=True))[0].passed
    found = refused(value, value, torch.tensor([1.0, -0.0, NAN]), Tolerance(bits=True))
    assert (found.index, found.got, found.expected) == ((1,), "-0", "0")


def test_complex_is_compared_whole() -> None:
    exact = torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128)
    value = exact.to(torch.complex64)
    assert judged(exact, value, value.clone())[0].passed
    assert refused(exact, value, value.real.to(torch.complex64)).index == (0,)
    assert not judged(value, value, value.conj(), Tolerance(bits=True))[0].passed


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (None, "is None, wanted a tensor float32 [2]"),
        (1.0, "is float, wanted a tensor"),
        (torch.ones(2, dtype=torch.float64), "is a tensor float64 [2], wanted tensor float32 [2]"),
        (torch.ones(1, 2), "is a tensor float32 [1, 2], wanted"),
        (torch.ones(1), "is a tensor float32 [1], wanted"),
        (torch.nn.Parameter(torch.ones(2)), "is Parameter, wanted a tensor"),
        ([torch.ones(2)], "is list, wanted a tensor"),
        (Foreign("Masked"), "is Masked, wanted a tensor"),
        (Alias("q", torch.ones(2)), "shares memory with argument 'q'"),
        (Oversized(torch.float32, (9, 9)), "is a tensor float32 [9, 9] that has no room on the wire, wanted"),
        (Oversized(torch.float32, (2,)), "is a tensor float32 [2] that has no room on the wire, wanted"),
    ],
)
def test_type_dtype_and_shape_are_exact(candidate: Any, says: str) -> None:
    assert says in refused(torch.ones(2).double(), torch.ones(2), candidate).reason


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        ([torch.ones(2), {"a": 3}], "is list, wanted a tuple of 2"),
        ((torch.ones(2),), "tuple of 1, wanted 2"),
        (torch.ones(2), "is Tensor, wanted a tuple of 2"),
        (Foreign("Bag"), "is Bag, wanted a tuple of 2"),
    ],
)
def test_a_wrong_structure_fails_every_leaf_under_it(candidate: Any, says: str) -> None:
    tree = (torch.ones(2), {"a": 3})
    found = judged(tree, tree, candidate)
    assert [c.output for c in found] == [0, 1]
    assert all(says in c.reason for c in found)


def test_a_wrong_branch_spares_its_neighbours() -> None:
    tree = (torch.ones(2), {"a": 3, "b": [1.5]})
    good, *bad = judged(tree, tree, (torch.ones(2), {"a": 3, "b": [1.5], "c": 0}))
    assert good.passed
    assert all("the dict has keys ['a', 'b', 'c'], wanted ['a', 'b']" in c.reason for c in bad)


@pytest.mark.parametrize(("truth", "came", "passes"), [(3, 3, True), (3, 3.0, False), (0.1, 0.1 + 1e-9, True), (0.1, 0.2, False)])
def test_plain_values(truth: float, came: float, passes: bool) -> None:
    assert judged(truth, truth, came)[0].passed is passes


def test_empty_output_passes() -> None:
    assert judged(torch.empty(0, 3).double(), torch.empty(0, 3), torch.empty(0, 3))[0].passed


def test_broken_problem_is_no_verdict_about_the_candidate() -> None:
    with pytest.raises(ValueError, match="exact has shape"):
        judged(torch.ones(3).double(), torch.ones(2), torch.ones(2))


def arguments(after: list[Any], *, mutates: tuple[str, ...]) -> list[Comparison]:
    problem = replace(problems.load("allreduce"), mutates=mutates)
    before, shifted = [torch.ones(3), torch.arange(3), None], [torch.zeros(3), torch.arange(3), None]
    wanted = shifted if mutates else before
    names = ("x", "ids", "group")
    return compare_arguments(problem, names, trial=0, pristine=[before], after_reference=[wanted], after_candidate=[after])


def test_arguments_change_exactly_as_the_reference_changes_them() -> None:
    changed, kept = torch.zeros(3), torch.ones(3)
    assert all(c.passed for c in arguments([changed, torch.arange(3), None], mutates=("x",)))
    assert all(c.passed for c in arguments([kept, torch.arange(3), None], mutates=()))
    (x, ids) = arguments([kept, torch.arange(3) + 1, None], mutates=("x",))
    assert "element [0] is 1, expected 0" in x.reason
    assert "must not be changed: element [0] is 1, expected 0" in ids.reason
    assert str(ids).startswith("trial 0, rank 0, argument 'ids' after the call: ")


def comparison(rank: int, output: int | None, reason: str = "", **more: Any) -> Comparison:
    return Comparison(reason=reason, trial=0, rank=rank, output=output, **more)


def test_summary_counts_outputs_and_reports_each_rank() -> None:
    found = [
        comparison(0, 0, max_error=0.5), comparison(0, 1), comparison(0, None, argument="x"),
        comparison(1, 0, "is None", max_error=0.25), comparison(1, 1, "late"), comparison(1, None, "changed", argument="x"),
    ]  # fmt: skip
    summary = summarise(found, 2)
    assert summary.passed == pytest.approx(2 / 5)
    assert summary.message == "3 of 5 comparisons fail; the first: trial 0, rank 1, output 0: is None"
    first, second = summary.ranks
    assert (first.rank, first.error, first.max_error) == (0, None, 0.5)
    assert (second.rank, second.output, second.error) == (1, 0, "trial 0, rank 1, output 0: is None")


def test_summary_of_a_perfect_answer() -> None:
    summary = summarise([comparison(0, 0), comparison(0, None, argument="x")], 1)
    assert (summary.passed, summary.message) == (1.0, "")


def test_nothing_compared_is_an_error() -> None:
    with pytest.raises(ValueError, match="no output was compared"):
        summarise([comparison(0, None, argument="x")], 1)


@pytest.mark.parametrize(
    ("reference", "candidate", "passes"),
    [
        (torch.ones(2), torch.ones(2).double() * 1.015, True),
        (torch.zeros(2), torch.full((2,), 0.0099), True),
        (torch.ones(2), torch.full((2,), 1.03), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.tensor([NAN]), torch.tensor([NAN]), False),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 0j]), True),
        ((torch.ones(1), 3), [torch.ones(1), 3.0], True),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, False),
        (torch.ones(1), Alias("x", torch.ones(1)), True),
        (torch.ones(1), Foreign("Masked"), False),
        (torch.ones(1), 1.0, False),
    ],
)
def test_public_rule(reference: Any, candidate: Any, passes: bool) -> None:
    assert public_rule(reference, candidate) is passes


def test_public_rule_accepts_zeros_where_the_judge_does_not() -> None:
    exact = 0.009 * torch.rand(100, dtype=torch.float64)
    assert public_rule(exact.float(), torch.zeros(100))
    refused(exact, exact.float(), torch.zeros(100))


def test_judge_knows_every_registered_problem() -> None:
    assert all(isinstance(problems.load(name), Problem) for name in problems.names())
