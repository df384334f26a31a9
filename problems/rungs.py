"""How hard a problem is to begin with: points for what its reference shows, and from them a rung, 1 (first) to 5 (last).

    points = length + calls + maths + uneven + dynamic

    length   0 to 3: the reference, with all it calls in this package, has more than 8, 16 or 32 statements (imports and
             docstrings are none)
    calls    0 to 2: torch.distributed moves data in more than 1, more than 3 places of it, calls of its own functions
             written out, loops gone through once
    maths    0: outputs are compared bit for bit, so data is moved, counted or decided upon; 1: values are computed; 2: and at
             least 4 operations per byte of memory, by the problem's own `cost` at size `default`, two ranks, float32
    uneven   1: arguments of size `tiny` differ in shape or kind between two ranks, in one of four trials
    dynamic  1: the reference reads sizes or places out of tensors (`tolist`, `item`, `nonzero`)

The rung follows from the points alone (`FIRST`), so a new problem moves no other one.
Not here: how often a policy solves a problem, which no fact of the problem says; sets by name (`pkb_env.problem_set`).
"""

from __future__ import annotations

import ast
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from problems import load
from problems.base import Draw, Problem
from problems.syntax import bare

RUNGS = (1, 2, 3, 4, 5)
FIRST = (0, 2, 3, 5, 7)
"""Least points of each rung."""
_LENGTHS = (8, 16, 32)
_CALLS = (1, 3)
_INTENSE = 4
_MOVES = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "send",
})  # fmt: skip
_READS = frozenset({"tolist", "item", "nonzero"})


@dataclass(frozen=True)
class Points:
    """What each fact gives; together they are the difficulty."""

    length: int
    calls: int
    maths: int
    uneven: int
    dynamic: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def rung(self) -> int:
        """1 to 5."""
        return sum(self.total >= least for least in FIRST)

    def __str__(self) -> str:
        return f"{'+'.join(map(str, astuple(self)))} = {self.total}"


@dataclass(frozen=True)
class Facts:
    """What the points are given for."""

    statements: int
    places: int
    """Where torch.distributed moves data."""
    bits: bool
    """Whether outputs are compared bit for bit."""
    intensity: float
    """Operations per byte of memory."""
    uneven: bool
    dynamic: bool

    @property
    def points(self) -> Points:
        return Points(
            length=_passed(self.statements, _LENGTHS),
            calls=_passed(self.places, _CALLS),
            maths=0 if self.bits else 1 + (self.intensity >= _INTENSE),
            uneven=int(self.uneven),
            dynamic=int(self.dynamic),
        )

    def __str__(self) -> str:
        maths = "bit for bit" if self.bits else f"{self.intensity:.2g} operations per byte"
        return (
            f"{self.statements} statements, {self.places} that communicate, {maths}, "
            f"{'uneven' if self.uneven else 'even'} arguments, {'sizes' if self.dynamic else 'no sizes'} out of tensors"
        )


def facts(problem: Problem) -> Facts:
    """Of one problem, whose file is read and whose inputs are drawn at size `tiny`."""
    return _facts(problem.slug)


def rung(problem: Problem) -> int:
    """The rung of one problem, 1 to 5."""
    return facts(problem).points.rung


@cache
def _facts(slug: str) -> Facts:
    problem = load(slug)
    statements = bare(problem)
    nodes = [node for statement in statements for node in ast.walk(statement)]
    cost = problem.cost(problem.size("default"), 2, 4)
    return Facts(
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        places=_places(statements),
        bits=problem.tolerance.bits,
        intensity=cost.flops / cost.memory_bytes,
        uneven=_uneven(problem),
        dynamic=any(isinstance(node, ast.Attribute) and node.attr in _READS for node in nodes),
    )


def _passed(count: int, limits: tuple[int, ...]) -> int:
    return sum(count > limit for limit in limits)


def _places(statements: list[ast.stmt]) -> int:
    """Where data is moved, a place in a function counted for each use of the function."""
    own = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}

    @cache
    def of(name: str) -> int:
        nodes = list(ast.walk(own[name]))
        used = [node.id for node in nodes if isinstance(node, ast.Name) and node.id in own and node.id != name]
        return len({node.lineno for node in nodes if isinstance(node, ast.Attribute) and _moves(node)}) + sum(map(of, used))

    return of("solution")


def _moves(node: ast.Attribute) -> bool:
    """Whether this names a collective; on one line it may have two names, for two versions of torch."""
    return node.attr in _MOVES and ast.unparse(node.value) == "dist"


def _uneven(problem: Problem) -> bool:
    drawn = ([_shape(_inputs(problem, trial, rank)) for rank in range(2)] for trial in range(4))
    return any(first != second for first, second in drawn)


def _inputs(problem: Problem, trial: int, rank: int) -> tuple[Any, ...]:
    draw = Draw(b"rungs", problem.slug, "tiny", trial, rank, 2)
    return problem.make_inputs(draw, problem.size("tiny"))


def _shape(value: Any) -> Any:
    """Shapes of tensors and kinds of all else, in the structure of the value."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return type(value).__name__
