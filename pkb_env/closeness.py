"""Whether one leaf of a candidate's answer is close enough to the truth: `problems.base.Tolerance` in arithmetic.

Not here: trees of leaves, ranks and trials (`judge`); single-step rules for fp8 values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from pkb_env.box.leaves import Alias, Foreign, Oversized
from pkb_env.told import clean
from problems.base import Tolerance

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SINGLE = 2.0**-24
"""Unit round-off of float32: what an accumulator is expected to have at least."""
_SLACK = 1e-6
"""More than the order in which a norm's terms are added can change, relative."""
_SHOWN_CHARS = 200
"""How much of a plain value is shown."""


@dataclass(frozen=True)
class Leaf:
    """Whether one leaf holds, and if not, why."""

    reason: str = ""
    """Empty when it holds."""
    index: tuple[int, ...] | None = None
    """First element that does not hold, or the worst one when only the whole is off."""
    got: str | None = None
    expected: str | None = None
    max_error: float | None = None
    """Largest absolute error of a floating leaf; None when a value is not finite and should be."""
    allowed: float | None = None
    """Largest absolute error that was allowed at `index`."""


@dataclass(frozen=True)
class Misplaced:
    """Stands in for a leaf that cannot be found because the structure around it is another one."""

    reason: str


def judge_leaf(tolerance: Tolerance, exact: Any, reference: Any, candidate: Any) -> Leaf:
    """Compare one leaf; the reference sets type, dtype and shape, `exact` the values.

    Raises:
        ValueError: exact and reference do not have one shape: the problem is broken, not the candidate.
    """
    if not isinstance(reference, torch.Tensor):
        return _judge_plain(tolerance, exact, reference, candidate)
    if exact.shape != reference.shape:
        raise ValueError(f"exact has shape {list(exact.shape)} where the reference has {list(reference.shape)}")
    if reason := _unlike(reference, candidate):
        return Leaf(reason)
    exact, candidate = (x.detach().to(reference.device) for x in (exact, candidate))
    if tolerance.bits or not (reference.is_floating_point() or reference.is_complex()):
        return _judge_bits(exact.to(reference.dtype), candidate)
    return _judge_values(tolerance, exact, reference, candidate)


def _unlike(reference: torch.Tensor, candidate: Any) -> str:
    """Why a leaf is not a tensor like the reference's, whatever its values; empty when it is."""
    if type(candidate) is torch.Tensor and candidate.dtype == reference.dtype and candidate.shape == reference.shape:
        return ""
    wanted = _kind(reference)
    if isinstance(candidate, Alias):
        return f"shares memory with argument {candidate.argument!r}, wanted a new tensor"
    if isinstance(candidate, Oversized):
        return f"is a {_kind(candidate)} that has no room on the wire, wanted {wanted}"
    if type(candidate) is not torch.Tensor:
        return wrong_kind(candidate, f"a {wanted}")
    return f"is a {_kind(candidate)}, wanted {wanted}"


def wrong_kind(came: Any, wanted: str) -> str:
    """What came instead of what was wanted."""
    if isinstance(came, Misplaced):
        return came.reason
    if isinstance(came, Foreign):
        name = " ".join(clean(came.type_name, _SHOWN_CHARS).split())
        return f"is {name or 'something without a name'}, wanted {wanted}"
    return f"is {'None' if came is None else type(came).__name__}, wanted {wanted}"


def _kind(tensor: torch.Tensor | Oversized) -> str:
    return f"tensor {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _judge_plain(tolerance: Tolerance, exact: Any, reference: Any, candidate: Any) -> Leaf:
    if type(candidate) is not type(reference):
        return Leaf(wrong_kind(candidate, type(reference).__name__))
    if isinstance(reference, float):
        # A float usually was a float32 element before `item()`.
        e, r, c = (torch.tensor(x, dtype=dtype) for x, dtype in ((exact, torch.float64), (reference, None), (candidate, None)))
        return _judge_values(tolerance, e, r.float(), c.float())
    if candidate == exact:
        return Leaf()
    got, expected = (repr(value)[:_SHOWN_CHARS] for value in (candidate, exact))
    return Leaf(f"is {got}, expected {expected}", got=got, expected=expected)


def _judge_bits(expected: torch.Tensor, candidate: torch.Tensor) -> Leaf:
    if _same_bits(expected, candidate):
        return Leaf(max_error=0.0)
    wrong = (_bits(expected) != _bits(candidate)).any(-1)
    return _failure(_first(wrong), expected, candidate, "", allowed=0.0)


def _same_bits(expected: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes; several times as fast as `torch.equal`."""
    if not expected.numel():
        return True
    return not any((_bits(expected) ^ _bits(candidate)).aminmax())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same bytes with one more, innermost axis: 2 parts when complex, else 1."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.unsqueeze(-1)
    return parts.contiguous().view(_INTEGERS[parts.element_size()])


def _judge_values(tolerance: Tolerance, exact: torch.Tensor, reference: torch.Tensor, candidate: torch.Tensor) -> Leaf:
    """Infinities and NaN must lie where `exact`, rounded to the dtype, has them; the rest is measured."""
    if not reference.numel() or (exact.dtype == candidate.dtype and _same_bits(exact, candidate)):
        return Leaf(max_error=0.0)
    floors = Floors.of(tolerance, reference.dtype)
    exact = exact.to(torch.complex128 if reference.is_complex() else torch.float64)
    if not exact.is_complex() and (worst := within(floors, exact, candidate)) is not None:
        return Leaf(max_error=worst)
    error, budget = _distance(candidate, exact), _distance(reference, exact)
    if not bool(error.max().isfinite()):
        expected = exact.to(reference.dtype)
        wanted, came = expected.to(exact.dtype), candidate.to(exact.dtype)  # 8-bit floats have no `isfinite` of their own
        finite = wanted.isfinite()
        right = torch.where(finite, came.isfinite(), (came == wanted) | (came.isnan() & wanted.isnan()))
        if not bool(right.all()):
            return _failure(_first(~right), expected, candidate, "")
        exact, error = torch.where(finite, exact, 0), torch.where(finite, error, 0)
    # Where only the reference overflowed, its error says nothing.
    budget.nan_to_num_(0, 0, 0)
    return _judge_errors(tolerance, floors, _Errors(exact, candidate, error, budget))


@dataclass(frozen=True)
class Floors:
    """The floors N and E of `Tolerance`, for one dtype."""

    norm: float
    element: float

    @staticmethod
    def of(tolerance: Tolerance, dtype: torch.dtype) -> Floors:
        unit = torch.finfo(dtype).eps / 2
        inner = tolerance.inner_ulps * min(unit, _SINGLE)
        return Floors(tolerance.norm_ulps * unit + inner, tolerance.element_ulps * unit + inner)


def within(floors: Floors, exact: torch.Tensor, candidate: torch.Tensor) -> float | None:
    """Largest error when it holds whatever the reference's error is; None leaves it open.

    What is allowed is at least N * ||exact|| and, for every element, E * rms(exact).
    """
    error = _difference(candidate, exact)
    worst = max(abs(float(x)) for x in error.aminmax())
    norm, total = (float(torch.linalg.vector_norm(x)) for x in (exact, error))
    rms, sure = norm / exact.numel() ** 0.5, 1 - _SLACK
    fits = worst <= sure * floors.element * rms and total <= sure * floors.norm * norm
    return worst if fits and isfinite(worst) else None


def _distance(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Absolute difference in float64."""
    difference = _difference(value, exact)
    return difference.abs() if difference.is_complex() else difference.abs_()


def _difference(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """In the precision of `exact`, in new memory; converted before it is subtracted, which is faster than both at once."""
    wide = value.float() if value.element_size() == 1 else value
    return wide.to(exact.dtype, copy=True).sub_(exact)


@dataclass(frozen=True)
class _Errors:
    """The values of one output and how far off they are, all finite."""

    exact: torch.Tensor
    candidate: torch.Tensor
    error: torch.Tensor
    budget: torch.Tensor
    """The reference's absolute error."""


def _judge_errors(tolerance: Tolerance, floors: Floors, values: _Errors) -> Leaf:
    """The two rules of `Tolerance`."""
    size, error, worst = values.exact.abs(), values.error, float(values.error.max())
    norm, total, bought = (float(torch.linalg.vector_norm(x)) for x in (size, error, values.budget))
    rms = norm / size.numel() ** 0.5

    least = tolerance.element_factor * min(float(values.budget.max()), tolerance.cap * rms)
    allowed = size.add_(rms).mul_(floors.element).clamp_(min=least)
    whole = max(tolerance.norm_factor * min(bought, tolerance.cap * norm), floors.norm * norm)
    wrong = error > allowed
    if bool(wrong.any()):
        at = _first(wrong)
        why = f" (error {float(error[at]):.3g}, allowed {float(allowed[at]):.3g})"
    elif total > whole:
        at = _first(error == worst)
        why = f" (the worst; all errors together have norm {total:.3g}, allowed {whole:.3g})"
    else:
        return Leaf(max_error=worst)
    return _failure(at, values.exact, values.candidate, why, max_error=worst, allowed=float(allowed[at]))


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    """Index of the first true element in row-major order."""
    flat = int(mask.flatten().to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), mask.shape))


def _failure(
    index: tuple[int, ...],
    expected: torch.Tensor,
    candidate: torch.Tensor,
    why: str,
    *,
    max_error: float | None = None,
    allowed: float | None = None,
) -> Leaf:
    got, wanted = (_text(x[index].item()) for x in (candidate, expected))
    where = f"element {list(index)}" if index else "the value"
    reason = f"{where} is {got}, expected {wanted}{why}"
    return Leaf(reason, index=index, got=got, expected=wanted, max_error=max_error, allowed=allowed)


def _text(value: complex | bool) -> str:
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)
