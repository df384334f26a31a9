"""A folder of problem files after our own contract (`problems.base`), with helper modules beside them.

The files are imported here: only ever in a process that is there for one pack.
Not here: the public benchmark's layout (`public`).
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from pathlib import Path

from problems import reference_source
from problems.base import Packed, Problem
from problems.packs.layout import Entry, Folder, PackError


def load(folder: Folder, entry: Entry) -> Problem:
    """The problem that a file defines.

    Raises:
        PackError: the file cannot be imported, or holds no such problem.
    """
    if str(folder.root) not in sys.path:
        sys.path.insert(0, str(folder.root))
    spec = importlib.util.spec_from_file_location(entry.file.stem, entry.file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = sys.modules[entry.file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(entry.file.stem)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PackError(why(error, folder.root)) from error
    problem = getattr(module, "PROBLEM", None)
    if not isinstance(problem, Problem):
        what = "defines no PROBLEM" if problem is None else f"PROBLEM is {type(problem).__name__}"
        raise PackError(f"{entry.file}: {what}; wanted PROBLEM = problems.base.Problem(...)")
    if (problem.number, problem.slug) != (entry.number, entry.slug):
        came = f"PROBLEM has number {problem.number!r} and slug {problem.slug!r}"
        raise PackError(f"{entry.file}: {came}; wanted those of the file's name")
    return problem


def packed(folder: Folder, entry: Entry, problem: Problem) -> Packed:
    """What the caller is told instead of code.

    Raises:
        PackError: the reference cannot be written out as a module of its own.
    """
    try:
        source = reference_source(problem)
        left = [each for each in _imported(source) if (folder.root / f"{each}.py").exists() or (folder.root / each).is_dir()]
        if left:
            raise PackError(
                f"{entry.file}: the reference uses {', '.join(left)}, which lies beside it and is not to be had in a box; "
                "import functions by name at the top of the file: from helper import function"
            )
    except (OSError, TypeError, SyntaxError) as error:
        raise PackError(f"{entry.file}: the text of the reference is not to be had: {error}") from error
    return Packed(str(folder.root), problem.arguments, problem.statement, (source, source))


def _imported(source: str) -> list[str]:
    """Top-level names of the modules that a text imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return sorted({name.split(".")[0] for name in found} - {""})


def why(error: BaseException, root: Path) -> str:
    """An exception in one line, with the innermost file and line of the pack."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    text = " ".join(str(error).split())
    return f"{where}{type(error).__name__}{': ' if text else ''}{text}"
