"""Near relatives: problems of which one, solved, hands over most of another one.  Kin share a split.

Two looks that know nothing of each other: `KIN` says it from the statements, by number, problems that are still to be written
included; `likeness` measures it on the references, and what is alike across splits must be moved, or stand in `APART` with a
reason.

Not here: families of the catalogue (`Problem.family`), which are wider and may be split.
"""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Iterable
from functools import cache

from problems import collectives, load, names
from problems.base import Problem
from problems.syntax import bare

KIN: dict[str, tuple[int, ...]] = {
    "sum over ranks, to all or to one": (1, 4),
    "equal or unequal tensors of all ranks, joined": (2, 6, 34, 35),
    "blocks to every rank": (8, 27, 33),
    "positions for heads, and back": (36, 37, 38),
    "gathered columns times a matrix": (11, 12),
    "columns of a product, gathered": (14, 46),
    "blocks of fp8, to it and from it": (19, 20),
    "fp8 with delayed scaling around a collective": (52, 53),
    "clipping by a global norm": (21, 22),
    "tokens to experts, and back": (26, 28, 29),
    "a whole mixture of experts": (31, 32, 49, 50, 51),
    "a step of Adam over data-parallel ranks": (40, 41, 42, 43, 47),
    "attention around a ring": (54, 55, 56, 57),
    "Fourier transform of a split field": (59, 60),
    "convolution with its neighbours' edges": (71, 87),
    "rows of a split table": (10, 65, 66, 67, 68),
    "linear attention over a split sequence": (74, 75),
    "log-probabilities over a split vocabulary, filtered": (82, 83, 84),
}
"""What they share -> their numbers."""

APART: dict[tuple[int, int], str] = {}
"""Two numbers -> why they may be in different splits, although their references are alike."""

ALIKE = 0.4
"""From here on two references are alike."""
_RUN = 6
"""Tokens of a shingle."""


def likeness(left: Problem, right: Problem) -> float:
    """Share of the shingles of both references that both have, 0 to 1 (Jaccard)."""
    ours, theirs = _shingles(left.slug), _shingles(right.slug)
    return len(ours & theirs) / max(1, len(ours | theirs))


def across_splits(found: Iterable[Problem]) -> list[tuple[float, Problem, Problem]]:
    """Every pair of problems of different splits with its likeness, the most alike ones first."""
    pairs = [(likeness(a, b), a, b) for a, b in itertools.combinations(found, 2) if a.split != b.split]
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1].number, pair[2].number))


def torn() -> dict[str, dict[int, str]]:
    """Kin that do not share a split: name -> split of each number that is there."""
    split = {problem.number: problem.split for problem in map(load, names())}
    found = {name: {number: split[number] for number in numbers if number in split} for name, numbers in KIN.items()}
    return {name: splits for name, splits in found.items() if len(set(splits.values())) > 1}


@cache
def _shingles(slug: str) -> frozenset[tuple[str, ...]]:
    """Runs of tokens of the bare reference, without `problems.collectives`; all variables have one name."""
    own = [node for node in bare(load(slug)) if getattr(node, "name", "") not in vars(collectives)]
    tree = _Nameless().visit(ast.Module(own, []))
    tokens = [t.string for t in tokenize.generate_tokens(io.StringIO(ast.unparse(tree)).readline) if t.string.strip()]
    return frozenset(itertools.zip_longest(*(tokens[start:] for start in range(_RUN)), fillvalue=""))


class _Nameless(ast.NodeTransformer):
    """Calls all variables and functions of the reference's own one name; modules and attributes keep theirs."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return node if node.id in {"dist", "torch", "F"} else ast.Name("v", node.ctx)

    def visit_arg(self, _node: ast.arg) -> ast.arg:
        return ast.arg("v")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = "f"
        self.generic_visit(node)
        return node
