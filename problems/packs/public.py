"""A checkout of the public benchmark, used in place: `reference/<id>_<slug>.py`, inputs from `create_input_tensor`.

On ranks without a GPU its files are read as `on_cpu` writes them.  The reference becomes one text that needs no other file:
what it imports of the checkout goes with it.  Nobody told what a problem costs, which family it is of, or what is exactly true.
Code of the checkout runs here: only ever in a process that is there for one pack.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from problems.base import UNKNOWN, Draw, Packed, Problem, Size
from problems.packs import inputs, seeds
from problems.packs.layout import INPUTS, MAKER, Entry, Folder, PackError
from problems.packs.on_cpu import on_cpu
from problems.packs.ours import why

SIZES = {
    name: Size(name, {"M": rows, "N": columns})
    for name, rows, columns in (("tiny", 64, 128), ("default", 512, 512), ("large", 4096, 4096), ("upstream", 1024, 1024))
}
"""The base shape that `create_input_tensor` is given; what it makes of it is its own affair."""
NOT_TOLD = ("family", "parallelism", "collectives", "split", "cost", "mutates", "exact", "valid_world")
_PACKAGES = (INPUTS.parts[0], "reference")
_IN_A_BOX = "utils.cuda_helpers"
"""Every box has one of its own."""
_BESIDE = '''
import importlib.abc
import importlib.util
import sys


class _Beside(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that this one imports."""

    texts = {
        TEXTS
    }

    def find_spec(self, name, path=None, target=None):
        inside = any(each.startswith(name + ".") for each in self.texts)
        return importlib.util.spec_from_loader(name, self, is_package=inside) if inside or name in self.texts else None

    def exec_module(self, module):
        exec(compile(self.texts.get(module.__name__, ""), module.__name__, "exec"), module.__dict__)


sys.meta_path.insert(0, _Beside())
'''


class Checkout(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The files of a checkout as text and as modules, for ranks on CPUs or on GPUs."""

    def __init__(self, folder: Folder, *, on_gpu: bool) -> None:
        self.folder, self.on_gpu = folder, on_gpu
        seeds.install()
        sys.meta_path.insert(0, self)

    def text(self, file: Path) -> str:
        """A file as these ranks can run it.

        Raises:
            PackError: it is no Python; file and line.
        """
        try:
            text = file.read_text(encoding="utf-8")
            compile(text, file, "exec", dont_inherit=True)
            return text if self.on_gpu else on_cpu(text)
        except (SyntaxError, ValueError) as error:
            raise PackError(why(error, self.folder.root)) from None

    @cached_property
    def make(self) -> Callable[..., Any]:
        """The checkout's `create_input_tensor`.

        Raises:
            PackError: it is not there, cannot be imported, or wants what nobody knows.
        """
        try:
            module = importlib.import_module(".".join(INPUTS.with_suffix("").parts))
        except PackError:
            raise
        except Exception as error:
            raise PackError(why(error, self.folder.root)) from error
        function: Callable[..., Any] | None = getattr(module, MAKER, None)
        if not callable(function):
            raise PackError(f"{self.folder.root / INPUTS} defines no {MAKER}")
        inputs.check(function)
        return function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Import hook: the checkout's packages, and nothing else of it."""
        del path, target
        file, package = self._place(name)
        if file is None and not package:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(file or ""), is_package=package)

    def exec_module(self, module: types.ModuleType) -> None:
        """Import hook: run the text."""
        file, _ = self._place(module.__name__)
        if file is not None:
            module.__file__ = str(file)
            exec(compile(self.text(file), file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  what a pack is for

    def _place(self, name: str) -> tuple[Path | None, bool]:
        """The file of a module, and whether it is a package."""
        parts = name.split(".")
        place = self.folder.root.joinpath(*parts)
        if parts[0] not in _PACKAGES:
            return None, False
        if place.is_dir():
            return (place / "__init__.py" if (place / "__init__.py").is_file() else None), True
        return (file if (file := place.with_suffix(".py")).is_file() else None), False

    def source(self, entry: Entry) -> str:
        """The reference as a candidate.

        Raises:
            PackError: a file is no Python, or there is no `solution`.
        """
        text = self.text(entry.file)
        tree = ast.parse(text)
        if not any(isinstance(node, ast.FunctionDef) and node.name == "solution" for node in tree.body):
            raise PackError(f"{entry.file} defines no function `solution` at its top level")
        beside: dict[str, str] = {}
        self._gather(tree, beside, package=_PACKAGES[1])
        return _joined(text, tree, beside) if any(beside.values()) else text

    def _gather(self, tree: ast.Module, found: dict[str, str], package: str) -> None:
        for name in sorted({each for node in ast.walk(tree) for each in _imports(node, package)}):
            file, is_package = self._place(name)
            if name in found or name == _IN_A_BOX or (file is None and not is_package):
                continue
            found[name] = self.text(file) if file else ""
            self._gather(ast.parse(found[name]), found, name if is_package else name.rpartition(".")[0])

    def run(self, entry: Entry) -> Callable[..., Any]:
        """The reference as a function.

        Raises:
            PackError: its module raises.
        """
        text, name = self.source(entry), str(entry.file)
        module = types.ModuleType(entry.file.stem)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        try:
            exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  what a pack is for
        except Exception as error:
            raise PackError(why(error, self.folder.root)) from error
        solution: Callable[..., Any] = module.__dict__["solution"]
        return solution


def load(checkout: Checkout, entry: Entry) -> Problem:
    """The problem of a file, with its code; what nobody told is named in `unknown`.

    Raises:
        PackError: the file cannot be used.
    """
    solution = checkout.run(entry)
    takes = inputs.Signature.of(solution)

    def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
        try:
            with seeds.drawn_from(draw):
                return takes.arguments(inputs.called(checkout.make, entry, draw, size), draw.device)
        except Exception as error:
            raise PackError(f"{MAKER} for {entry.slug} failed: {why(error, checkout.folder.root)}") from error

    packed = Packed(str(checkout.folder.root), takes.names, statement(entry, checkout.text(entry.file)), ("", ""), NOT_TOLD)
    return Problem(
        number=entry.number, slug=entry.slug, version=0, title=_title(packed.statement, entry),
        family=UNKNOWN, parallelism=UNKNOWN, collectives=(UNKNOWN,), origin=f"pack {checkout.folder.root.name}", split=UNKNOWN,
        sizes=SIZES, make_inputs=make_inputs,
        reference=solution, exact=nobody_told, cost=nobody_told, pack=packed,
    )  # fmt: skip


def nobody_told(*_: Any) -> Any:
    """Stands in for `exact` and `cost` of a problem that has none."""
    raise PackError("the public benchmark tells neither exact answers nor costs")


def statement(entry: Entry, text: str) -> str:
    """What the reference says about itself."""
    tree = ast.parse(text)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "solution"]
    told = ast.get_docstring(tree) or (ast.get_docstring(found[0]) if found else None)
    return told or f"{entry.slug.replace('_', ' ')}: what the reference computes; nobody told more."


def _title(text: str, entry: Entry) -> str:
    first = text.strip().split("\n")[0].strip()
    return first or entry.slug


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """Names of modules that a statement may import, with the packages around them."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _joined(text: str, tree: ast.Module, beside: dict[str, str]) -> str:
    """The text with the others in its head, behind what must come first."""
    first = 0
    for node in tree.body:
        says = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is tree.body[0]
        if not (says or (isinstance(node, ast.ImportFrom) and node.module == "__future__")):
            break
        first = node.end_lineno or 0
    lines = text.splitlines(keepends=True)
    texts = "\n        ".join(f"{name!r}: {content!r}," for name, content in sorted(beside.items()))
    return "".join(lines[:first]) + _BESIDE.replace("TEXTS", texts) + "\n" + "".join(lines[first:])
