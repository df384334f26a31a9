"""Compares what a candidate returned with what is true: tensors and numbers in, frozen comparisons out.

The measure is the error against `exact` (float64), not the distance to the reference; what is allowed follows from the
dtype and from the reference's own error (`problems.base.Tolerance`).

Not here: how one tensor is compared (`closeness`); processes, clocks, files; what a comparison is worth (`rewards`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pkb_env.box.leaves import Alias
from pkb_env.closeness import Leaf, Misplaced, judge_leaf, wrong_kind
from problems.base import Problem, Tolerance
from rewards.verdict import RankReport


@dataclass(frozen=True)
class Comparison(Leaf):
    """One leaf of one rank in one trial: an output, or an argument after the call."""

    trial: int = 0
    rank: int = 0
    output: int | None = None
    """Position among the flattened outputs; None for an argument."""
    argument: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the leaf holds."""
        return not self.reason

    def __str__(self) -> str:
        what = f"output {self.output}" if self.argument is None else f"argument {self.argument!r} after the call"
        return f"trial {self.trial}, rank {self.rank}, {what}: {self.reason or 'holds'}"


@dataclass(frozen=True)
class Summary:
    """All comparisons of an evaluation in short."""

    passed: float
    """Share of outputs that hold, 0 to 1; an argument that was changed against the rules counts as one more output."""
    message: str
    """How many failed and the first of them; empty when all hold."""
    ranks: tuple[RankReport, ...]
    """Of each rank: largest error, and its first failure."""


def compare(
    problem: Problem, *, trial: int, exact: Sequence[Any], reference: Sequence[Any], candidate: Sequence[Any]
) -> list[Comparison]:
    """Judge the outputs of one trial; each sequence holds one entry per rank.

    Args:
        problem: its tolerance is used.
        trial: number to be reported.
        exact: trees of float64 (or exact) tensors, shaped like the reference's.
        reference: trees of tensors and plain values; they set structure, dtype and shape.
        candidate: the same from a candidate, with `Foreign`, `Alias` and `Oversized` where a leaf is no plain tensor.

    Raises:
        ValueError: the three do not hold equally many ranks, or exact and reference differ in structure.
    """
    found = []
    for rank, (e, r, c) in enumerate(zip(exact, reference, candidate, strict=True)):
        for output, leaves in enumerate(_walk(e, r, c)):
            found.append(_comparison(judge_leaf(problem.tolerance, *leaves), trial=trial, rank=rank, output=output))
    return found


def compare_arguments(
    problem: Problem,
    names: Sequence[str],
    *,
    trial: int,
    pristine: Sequence[Sequence[Any]],
    after_reference: Sequence[Sequence[Any]],
    after_candidate: Sequence[Sequence[Any]],
) -> list[Comparison]:
    """Judge the tensors among the arguments after the call; each sequence holds the arguments of one rank each.

    Those that the problem mutates must have become what the reference made of them, all others must be as before, bit for
    bit.  Where nobody told which ones those are, it is those that the reference changed.

    Raises:
        ValueError: the three do not hold equally many ranks or arguments.
    """
    found = []
    for rank, ranks in enumerate(zip(pristine, after_reference, after_candidate, strict=True)):
        for name, before, wanted, came in zip(names, *ranks, strict=True):
            mutated = _changed(before, wanted) if "mutates" in problem.unknown else name in problem.mutates
            truth, tolerance = (wanted, problem.tolerance) if mutated else (before, Tolerance(bits=True))
            leaves = [judge_leaf(tolerance, *leaf) for leaf in _walk(truth, truth, came) if isinstance(leaf[0], torch.Tensor)]
            if not mutated:
                leaves = [replace(x, reason=f"must not be changed: {x.reason}") if x.reason else x for x in leaves]
            found += [_comparison(leaf, trial=trial, rank=rank, argument=name) for leaf in leaves]
    return found


def _changed(before: Any, after: Any) -> bool:
    """Whether some tensor of an argument is another one after the call."""
    bits = Tolerance(bits=True)
    return any(judge_leaf(bits, *leaf).reason for leaf in _walk(before, before, after) if isinstance(leaf[0], torch.Tensor))


def summarise(comparisons: Sequence[Comparison], world_size: int) -> Summary:
    """Share passed, first failure in words, and a report for every rank.

    Raises:
        ValueError: no output was compared.
    """
    counted = [c for c in comparisons if c.argument is None or not c.passed]
    if not counted:
        raise ValueError("no output was compared: the reference must return at least one")
    failed = [c for c in counted if not c.passed]
    message = f"{len(failed)} of {len(counted)} comparisons fail; the first: {failed[0]}" if failed else ""
    ranks = tuple(_report(rank, [c for c in comparisons if c.rank == rank]) for rank in range(world_size))
    return Summary(passed=1 - len(failed) / len(counted), message=message, ranks=ranks)


def public_rule(reference: Any, candidate: Any) -> bool:
    """The public benchmark's rule: |reference - candidate| <= 0.01 + 0.01 * |candidate| in float32, whatever the dtype."""
    if isinstance(candidate, Alias):
        candidate = candidate.tensor
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        ours, theirs = (x.real.float() if x.is_complex() else x.float() for x in (reference, candidate))
        return ours.shape == theirs.shape and torch.allclose(ours, theirs.to(ours.device), rtol=1e-2, atol=1e-2)
    if isinstance(reference, dict) and isinstance(candidate, dict):
        named = {str(k): v for k, v in candidate.items()}
        return set(named) == {str(k) for k in reference} and all(public_rule(v, named[str(k)]) for k, v in reference.items())
    if isinstance(reference, list | tuple) and isinstance(candidate, list | tuple):
        return len(reference) == len(candidate) and all(map(public_rule, reference, candidate))
    return not any(isinstance(x, torch.Tensor) for x in (reference, candidate)) and bool(reference == candidate)


def _comparison(leaf: Leaf, **where: Any) -> Comparison:
    return Comparison(**vars(leaf), **where)


def _report(rank: int, comparisons: list[Comparison]) -> RankReport:
    errors = [c.max_error for c in comparisons if c.max_error is not None and c.argument is None]
    largest = max(errors, default=None)
    first = next((c for c in comparisons if not c.passed), None)
    if first is None:
        return RankReport(rank, max_error=largest)
    return RankReport(
        rank, error=str(first), output=first.output, index=first.index, got=first.got, expected=first.expected, max_error=largest
    )


def _walk(exact: Any, reference: Any, candidate: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Leaves of the reference's tree with what belongs to them on both sides."""
    if isinstance(reference, dict):
        keys, reason = list(reference), _wrong_dict(reference, candidate)
        named = {} if reason else {str(key): value for key, value in candidate.items()}
        parts = [(exact[key], reference[key], Misplaced(reason) if reason else named[str(key)]) for key in keys]
    elif isinstance(reference, list | tuple):
        reason = _wrong_sequence(reference, candidate)
        came = [Misplaced(reason)] * len(reference) if reason else candidate
        parts = list(zip(exact, reference, came, strict=True))
    else:
        yield exact, reference, candidate
        return
    for part in parts:
        yield from _walk(*part)


def _wrong_dict(reference: dict[Any, Any], candidate: Any) -> str:
    if not isinstance(candidate, dict):
        return wrong_kind(candidate, f"a dict with keys {sorted(map(str, reference))}")
    if {str(key) for key in candidate} == {str(key) for key in reference}:
        return ""
    return f"the dict has keys {sorted(map(str, candidate))}, wanted {sorted(map(str, reference))}"


def _wrong_sequence(reference: Sequence[Any], candidate: Any) -> str:
    kind = tuple if isinstance(reference, tuple) else list
    if not isinstance(candidate, kind):
        return wrong_kind(candidate, f"a {kind.__name__} of {len(reference)}")
    return "" if len(candidate) == len(reference) else f"{kind.__name__} of {len(candidate)}, wanted {len(reference)}"
