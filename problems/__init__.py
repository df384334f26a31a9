"""The tasks, one file each: found by file name, imported one at a time and only when asked for.

Not here: the contract and the recipe for a new problem (`problems.base`); running, judging and timing (`pkb_env`).
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from problems.base import Problem

__all__ = ["UnknownProblem", "by_split", "check_world", "ladder", "load", "names", "reference_source"]

_FILE = re.compile(r"p(\d{3})_(\w+)")


class UnknownProblem(LookupError):
    """No problem, or more than one, goes by that name; says what is close and what exists."""


def names() -> list[str]:
    """Slugs of all problems, by number; imports none of them."""
    return [slug for _, slug in sorted(_files())]


def load(name: str | int) -> Problem:
    """The problem of that slug, number, file name or unique prefix of a slug.

    Raises:
        UnknownProblem: nothing, or more than one thing, is meant.
    """
    number, slug = _find(str(name).strip())
    problem: Problem = importlib.import_module(f"problems.p{number:03d}_{slug}").PROBLEM
    return problem


def by_split(split: str) -> list[Problem]:
    """All problems of a split, by number.

    Raises:
        UnknownProblem: no problem belongs to such a split.
    """
    found = [problem for problem in map(load, names()) if problem.split == split]
    if not found:
        raise UnknownProblem(f"no problem belongs to split {split!r}; there are train, validation and test")
    return found


def ladder() -> dict[int, list[Problem]]:
    """All problems by rung, 1 (to begin with) to 5; the formula stands in the head of `problems.rungs`."""
    from problems.rungs import RUNGS, rung  # noqa: PLC0415  imports torch, which names do without

    every = list(map(load, names()))
    return {number: [problem for problem in every if rung(problem) == number] for number in RUNGS}


def check_world(problem: Problem, world_size: int) -> None:
    """Whether a problem can run on so many ranks.

    Raises:
        ValueError: it cannot, with the reason.
    """
    if reason := problem.valid_world(world_size):
        raise ValueError(f"problem {problem.slug} cannot run on {world_size} ranks: {reason}")


def reference_source(problem: Problem) -> str:
    """Python source of the reference as a candidate: imports, what it calls, and the function itself as `solution`.

    What it takes from other modules of this package is written out too.
    """
    imports, rest = _written_out(problem.reference.__module__, problem.reference.__name__)
    head = "\n".join(["from __future__ import annotations\n", *dict.fromkeys(imports)])
    source = "\n\n\n".join([head, *dict.fromkeys(rest)]) + "\n"
    return re.sub(rf"\bdef {problem.reference.__name__}\(", "def solution(", source)


def _written_out(module: str, root: str) -> tuple[list[str], list[str]]:
    """Imports from elsewhere, and every other statement that `root` of a module needs, those of our other modules first."""
    text = inspect.getsource(importlib.import_module(module))
    imports, before, rest = list[str](), list[str](), list[str]()
    for node in _reachable(ast.parse(text), root):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("problems."):
            for alias in node.names:
                more, theirs = _written_out(str(node.module), alias.name)
                imports += more
                before += theirs
        else:
            (imports if isinstance(node, ast.Import | ast.ImportFrom) else rest).append(_cut(text, node))
    return imports, before + rest


def _files() -> list[tuple[int, str]]:
    found = (_FILE.fullmatch(path.stem) for path in Path(__file__).parent.glob("p*.py"))
    return [(int(match[1]), match[2]) for match in found if match]


def _find(name: str) -> tuple[int, str]:
    files = sorted(_files())
    match = _FILE.fullmatch(name.removesuffix(".py"))
    meant = match[2] if match else name
    exact = [(n, slug) for n, slug in files if slug == meant or str(n) == name.lstrip("0")]
    close = exact or [(n, slug) for n, slug in files if name and slug.startswith(name)]
    if len(close) != 1:
        raise UnknownProblem(_advice(name, [slug for _, slug in close]))
    return close[0]


def _advice(name: str, candidates: list[str]) -> str:
    if candidates:
        return f"problem {name!r} may mean any of {', '.join(candidates)}: write one more letter"
    known = names()
    guess = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {guess[0]!r}?" if guess else ""
    return f"there is no problem {name!r}{hint or '.'} There are: {', '.join(known)}"


def _reachable(tree: ast.Module, root: str) -> list[ast.stmt]:
    """Top-level statements that the function `root` needs, itself included, in file order."""
    binding = {name: node for node in tree.body for name in _bound(node)}
    todo, wanted = [root], set()
    while todo:
        node = binding.get(todo.pop())
        if node is not None and node not in wanted:
            wanted.add(node)
            todo += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return [node for node in tree.body if node in wanted]


def _bound(node: ast.stmt) -> list[str]:
    """Names that a top-level statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []


def _cut(text: str, node: ast.stmt) -> str:
    """The lines of a statement, decorators included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
