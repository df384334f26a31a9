"""Answers that a problem must refuse, made mechanically: outputs of all ranks without doing the work.

Whoever adds a problem gets them for free; the judge must find each of them wrong, on real inputs.

Not here: judging them (`judge`), counting what passes (`bench.lazy`), attacks on the harness (`tests/exploits`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from pkb_env.box import silence
from problems import reference_source
from problems.base import Problem

Inputs = Sequence[tuple[Any, ...]]
"""The arguments of every rank."""

_NEAR = 1.05
"""A guess of a number that is not the number."""


@dataclass(frozen=True)
class Case:
    """What the lazy answers to one trial are made of, each part once and when it is asked for."""

    problem: Problem
    inputs: Inputs
    """What the answers are to be judged on; left untouched."""
    other_inputs: Inputs
    """Inputs of another trial."""
    truth: list[Any] | None = None
    """`exact` of the inputs, where it is known already."""

    @cached_property
    def silenced(self) -> list[Any]:
        """The reference's answers when nobody talks."""
        return silenced_answer(self.problem, self.inputs)

    @cached_property
    def right(self) -> list[Any]:
        """The best answers that there are."""
        return _all_like(self.silenced, self.problem.exact(self.inputs) if self.truth is None else self.truth)

    def exactly(self, inputs: Inputs) -> list[Any]:
        """What would be right for other arguments."""
        return _all_like(self.silenced, self.problem.exact(inputs))


KINDS: dict[str, Callable[[Case], list[Any]]] = {
    "zeros": lambda case: _map(torch.zeros_like, case.silenced),
    "ones": lambda case: _map(torch.ones_like, case.silenced),
    "constants": lambda case: _map(_typical, case.right),
    "first input": lambda case: [_first_input(args, like) for args, like in zip(case.inputs, case.silenced, strict=True)],
    "rank only": lambda case: case.exactly([_ranked(args, rank) for rank, args in enumerate(case.inputs)]),
    "communication left out": lambda case: case.silenced,
    "answer for other inputs": lambda case: case.exactly(case.other_inputs),
    "dtype changed": lambda case: _map(_other_dtype, case.right),
    "one rank idle": lambda case: [*case.right[:-1], _map(torch.zeros_like, case.right[-1])],
}
"""Name -> lazy outputs of all ranks."""


def lazy_answers(problem: Problem, inputs: Inputs, other_inputs: Inputs) -> dict[str, list[Any]]:
    """Lazy outputs of all ranks by name; the other inputs must have the same shapes."""
    case = Case(problem, inputs, other_inputs)
    return {name: make(case) for name, make in KINDS.items()}


def honest_answer(problem: Problem, inputs: Inputs) -> list[Any]:
    """`exact`, rounded once to the dtypes of the reference: the best answer that there is."""
    return Case(problem, inputs, inputs).right


def rounded_answer(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> list[Any]:
    """The answer of a kernel that is exact except that it reads its floating arguments as `dtype`."""
    rounded = _map(partial(_read_as, dtype), list(inputs))
    return Case(problem, inputs, inputs).exactly(rounded)


def _read_as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to another type and back; of complex numbers both parts."""
    if tensor.is_complex():
        return torch.view_as_complex(_read_as(dtype, torch.view_as_real(tensor).contiguous()))
    return tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor


def silenced_answer(problem: Problem, inputs: Inputs) -> list[Any]:
    """What the reference answers on every rank when nobody talks; not thread-safe."""
    answers = []
    for rank, args in enumerate(inputs):
        with silence.alone(rank, len(inputs)):
            answers.append(problem.reference(*_map(torch.clone, args)))
    return answers


def silenced_source(problem: Problem) -> str:
    """The same as a candidate: the reference behind a head that silences torch.distributed."""
    head = inspect.getsource(silence).rstrip()
    body = reference_source(problem).replace("from __future__ import annotations\n", "", 1).strip()
    return f"{head}\n\n\napply()\n\n{body}\n"


def _map(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The tree with the function applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, value) for value in tree)
    return tree


def _all_like(patterns: list[Any], trees: list[Any]) -> list[Any]:
    return [_like(pattern, tree) for pattern, tree in zip(patterns, trees, strict=True)]


def _like(pattern: Any, tree: Any) -> Any:
    """The tree with every tensor in the dtype that the pattern has there, in memory of its own."""
    if isinstance(pattern, torch.Tensor):
        return tree.to(pattern.dtype, copy=True)
    if isinstance(pattern, dict):
        return {key: _like(value, tree[key]) for key, value in pattern.items()}
    if isinstance(pattern, list | tuple):
        return type(pattern)(map(_like, pattern, tree))
    return tree


def _first_input(args: tuple[Any, ...], like: Any) -> Any:
    """The first tensor among the arguments in the place of every output."""
    found: list[torch.Tensor] = []
    _map(found.append, args)
    return _map(lambda out: _squeezed(found[0], out), like)


def _squeezed(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """As many leading elements as fit, repeated where they do not suffice; zeros where there are none."""
    if source.is_complex() and not like.is_complex():
        source = torch.view_as_real(source)
    if not source.numel():
        return torch.zeros_like(like)
    times = -(-like.numel() // source.numel())
    return source.flatten().repeat(times)[: like.numel()].view(like.shape).to(like.dtype)


def _typical(tensor: torch.Tensor) -> torch.Tensor:
    """The mean everywhere, of a single element something near it; for integers and booleans the most frequent value."""
    flat = tensor.flatten()
    if not flat.numel():
        return flat.view(tensor.shape)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.full_like(tensor, flat.to(torch.int64).mode().values.item())
    mean = (flat if tensor.is_complex() else flat.double()).mean()
    return torch.full_like(tensor, (mean * _NEAR if flat.numel() == 1 else mean).item())


def _ranked(args: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Arguments whose floating tensors hold nothing but the rank."""
    ranked: tuple[Any, ...] = _map(
        lambda x: torch.full_like(x, rank + 1) if x.is_floating_point() or x.is_complex() else x, args
    )
    return ranked


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    narrow = {torch.float64: torch.float32, torch.int64: torch.int32, torch.complex128: torch.complex64}
    wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
    return tensor.to(narrow[wide] if tensor.dtype == wide else wide)
