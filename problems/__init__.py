"""The tasks, one file each: found by file name, imported one at a time and only when asked for.

Not here: the contract and the recipe for a new problem (`problems.base`), problems from other folders (`problems.packs`);
running, judging and timing (`pkb_env`).
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from problems.base import Problem
    from problems.packs import Pack

__all__ = ["UnknownProblem", "by_split", "check_world", "ladder", "load", "load_pack", "names", "reference_source"]

_FILE = re.compile(r"p(\d{3})_(\w+)")


class UnknownProblem(LookupError):
    """No problem, or more than one, goes by that name; says what is close and what exists."""


def names() -> list[str]:
    """Slugs of all problems, by number; imports none of them."""
    return [slug for _, slug in sorted(_files())]


def load(name: str | int) -> Problem:
    """The problem of that slug, number, file name or unique prefix of a slug; `pack/...` is one of a pack's.

    A slug without a pack is that of a pack's problem where no problem of this repository has it.

    Raises:
        UnknownProblem: nothing, or more than one thing, is meant.
    """
    wanted = str(name).strip()
    if "/" in wanted or ("problems.packs" in sys.modules and wanted not in names()):
        from problems import packs  # noqa: PLC0415  needs torch, which names do without

        if (found := packs.find(wanted) if "/" in wanted else packs.find_plain(wanted)) is not None:
            return found
    slug = pick(wanted, [(number, slug, f"p{number:03d}_{slug}") for number, slug in sorted(_files())])
    file = next(f"p{number:03d}_{each}" for number, each in _files() if each == slug)
    problem: Problem = importlib.import_module(f"problems.{file}").PROBLEM
    return problem


def load_pack(path: str | os.PathLike[str], name: str | None = None) -> Pack:
    """Make the problems of a folder known in this process, as `name/slug`: see `problems.packs.load_pack`."""
    from problems import packs  # noqa: PLC0415  needs torch, which names do without

    return packs.load_pack(path, name)


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


def reference_source(problem: Problem, *, on_gpu: bool = False) -> str:
    """Python source of the reference as a candidate: imports, what it calls, and the function itself as `solution`.

    What it takes from other modules of this package, or from those beside it in a pack, is written out too.  `on_gpu`: for ranks
    that have one; it matters where the reference of a pack names its device.
    """
    if problem.pack:
        return problem.pack.references[on_gpu]
    imports, rest = _written_out(problem.reference.__module__, problem.reference.__name__)
    head = "\n".join(["from __future__ import annotations\n", *dict.fromkeys(imports)])
    source = "\n\n\n".join([head, *dict.fromkeys(rest)]) + "\n"
    return re.sub(rf"\bdef {problem.reference.__name__}\(", "def solution(", source)


def _written_out(module: str, root: str) -> tuple[list[str], list[str]]:
    """Imports from elsewhere, and every other statement that `root` of a module needs, those of our other modules first."""
    home = importlib.import_module(module)
    text = inspect.getsource(home)
    imports, before, rest = list[str](), list[str](), list[str]()
    for node in _reachable(ast.parse(text), root):
        if isinstance(node, ast.ImportFrom) and _is_ours(node, Path(inspect.getfile(home)).parent):
            for alias in node.names:
                more, theirs = _written_out(str(node.module), alias.name)
                imports += more
                before += theirs
        else:
            (imports if isinstance(node, ast.Import | ast.ImportFrom) else rest).append(_cut(text, node))
    return imports, before + rest


def _is_ours(node: ast.ImportFrom, beside: Path) -> bool:
    """Whether it imports functions by their own names from this package, or from a module in that folder."""
    module = node.module or ""
    renamed = any(alias.asname or alias.name == "*" for alias in node.names)
    return not (node.level or renamed) and (module.startswith("problems.") or (beside / f"{module}.py").is_file())


def _files() -> list[tuple[int, str]]:
    found = (_FILE.fullmatch(path.stem) for path in Path(__file__).parent.glob("p*.py"))
    return [(int(match[1]), match[2]) for match in found if match]


def pick(name: str, files: Sequence[tuple[int, str, str]], pack: str = "") -> str:
    """The slug that is meant among (number, slug, file name).

    Raises:
        UnknownProblem: nothing, or more than one thing, is meant.
    """
    stem, number = name.removesuffix(".py"), name.lstrip("0")
    exact = [slug for n, slug, file in files if slug == name or file == stem or str(n) == number]
    close = exact or [slug for _, slug, _ in files if name and slug.startswith(name)]
    if len(close) != 1:
        raise UnknownProblem(_advice(name, close, [slug for _, slug, _ in files], f" in pack {pack!r}" if pack else ""))
    return close[0]


def _advice(name: str, candidates: list[str], known: list[str], where: str) -> str:
    if candidates:
        return f"problem {name!r}{where} may mean any of {', '.join(candidates)}: write one more letter"
    guess = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {guess[0]!r}?" if guess else ""
    return f"there is no problem {name!r}{where}{hint or '.'} There are: {', '.join(known)}"


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
