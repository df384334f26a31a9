"""Sources for benchmarks: the examples, and a problem's reference made unique, wrong, failing or hanging.  Text only.

Not here: what becomes of them.
"""

from __future__ import annotations

from pathlib import Path

import problems
from pkb_env.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KINDS = ("correct", "wrong", "failing", "hanging")
_CHANGED = """

def solution(*args):
    import torch
    from torch.utils._pytree import tree_map_only
    return tree_map_only(torch.Tensor, lambda each: @changed@, _right(*args))
"""
_WRONG = "(each.to(torch.complex128 if each.is_complex() else torch.float64) * 1.5 + 1).to(each.dtype)"
_FAILING = """

def solution(*args):
    raise ValueError("this candidate fails on purpose")
"""
_HANGING = """

def solution(*args):
    import time
    import torch.distributed as dist
    while dist.get_rank() == 0:
        time.sleep(0.1)
    return _right(*args)
"""
"""Rank 0 never arrives; the others wait for it in the collectives of the problem."""


def reference(problem: str) -> str:
    """The reference of a problem as a candidate."""
    return problems.reference_source(problems.load(problem))


def example(problem: str, backend: str) -> str:
    """The example of this repository for a problem and a backend.

    Raises:
        UsageError: there is none.
    """
    path = EXAMPLES / f"{backend}_{problem}.py"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in EXAMPLES.glob("*_*.py"))) or "no examples (they come with the repository)"
        raise UsageError(f"there is no example {path}; there are {there}")
    return path.read_text(encoding="utf-8")


def unique(source: str, mark: str) -> str:
    """The same program as another text: also its C++, so that nothing built for another copy serves it."""
    return source.replace('extern "C"', f'/* {mark} */ extern "C"') + f"\n# {mark}\n"


def of_kind(kind: str, problem: str, right: str) -> str:
    """A candidate of one of `KINDS`; `right` is the source of correct ones."""
    if kind == "correct":
        return right
    if kind == "wrong":
        return changed(problem, _WRONG)
    return _called_right(problem) + {"failing": _FAILING, "hanging": _HANGING}[kind]


def changed(problem: str, expression: str) -> str:
    """The reference, but of every tensor `each` that it gives the expression."""
    return _called_right(problem) + _CHANGED.replace("@changed@", expression)


def _called_right(problem: str) -> str:
    return reference(problem).replace("def solution(", "def _right(")


def counts(shares: dict[str, float], total: int) -> dict[str, int]:
    """How many candidates of each kind, by largest remainder; together exactly `total`.

    Raises:
        UsageError: a share below 0, or nothing but zeros.
    """
    whole = sum(shares.values())
    if whole <= 0 or min(shares.values()) < 0:
        raise UsageError(f"shares of candidates must be >= 0 and not all 0; came {shares}")
    exact = {kind: total * share / whole for kind, share in shares.items()}
    found = {kind: int(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda k: found[k] - exact[k])[: total - sum(found.values())]:
        found[kind] += 1
    return found
