"""Directions of the packages, over the syntax tree: nothing points up, nothing runs in circles, modules stay small.

Not here: what the modules do.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("problems", "rewards", "pkb_env", "training", "tests")
PACKAGES = ("problems", "rewards", "pkb_env")
MAX_LINES = 250
MAY_IMPORT = {
    "problems": {"problems", "torch"},
    "rewards": {"rewards"},
    "pkb_env/box": {"pkb_env.box", "torch"},
    "pkb_env/sandbox": {"pkb_env.sandbox", "pkb_env.box", "pkb_env.errors", "pkb_box", "torch"},
    "pkb_env": {*PACKAGES, "pkb_box", "torch", "numpy", "gymnasium", "jinja2", "pydantic", "rich", "typer"},
}
"""Besides the standard library.  A name allows everything beneath it."""
ARITHMETIC = ("judge", "closeness", "timing", "stopping", "outcome", "judging", "metrics")
"""No process, no clock, no file."""
TRAINERS = {"transformers", "trl", "datasets", "wandb"}
"""Slow to import, and optional: whoever needs them imports them when he does."""
EFFECTS = {"subprocess", "socket", "multiprocessing", "threading", "time", "os", "pathlib", "signal", "fcntl"}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path, *, top_level: bool = False) -> frozenset[str]:
    """Full names of what a file imports; with `top_level` only what importing it really imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _executed(tree.body) if top_level else ast.walk(tree)
    return frozenset(name for node in nodes for name in _names(path, node))


def _executed(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that run on import: not inside functions, not for the type checker only."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _executed(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody", "handlers"):
            yield from _executed(getattr(node, name, []))


def _names(path: Path, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parts = module_name(path).split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
    return [f"{base}.{alias.name}" for alias in node.names]


def beneath(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_package_imports_only_what_lies_beneath_it(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | set(sys.stdlib_module_names)
    wrong = {
        module_name(path): sorted(name for name in imports(path) if not beneath(name, allowed))
        for path in files(folder)
    }
    assert not {module: names for module, names in wrong.items() if names}


def test_relative_and_hidden_imports_are_seen() -> None:
    package = ROOT / "pkb_env" / "box" / "collectives.py"
    assert "pkb_env.box.gaps" in imports(package)
    assert "torch.distributed" in imports(package)
    nodes = list(ast.walk(ast.parse("import os\ndef f():\n    from training import grpo")))
    assert [name for node in nodes for name in _names(ROOT / "planted.py", node)] == ["os", "training.grpo"]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_judging_is_arithmetic(name: str) -> None:
    used = {full.split(".")[0] for full in imports(ROOT / "pkb_env" / f"{name}.py")}
    assert not (used - {"signal"} if name == "outcome" else used) & EFFECTS  # outcome only reads the names of signals


def test_only_the_command_line_imports_the_command_line() -> None:
    wrong = [
        module_name(path) for path in files("pkb_env")
        if "cli" not in path.parts and any(beneath(name, {"pkb_env.cli", "pkb_env.doctor"}) for name in imports(path))
    ]  # fmt: skip
    assert wrong == []


def test_no_import_cycles() -> None:
    modules = {module_name(path): path for folder in PACKAGES for path in files(folder)}
    graph = {name: _dependencies(name, path, modules) for name, path in modules.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def _dependencies(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for full in imports(path, top_level=True):
        target = full if full in modules else full.rpartition(".")[0]
        found |= {target} & modules.keys() - {name}
    return found


def test_modules_stay_small() -> None:
    every = [path for folder in PACKAGES for path in files(folder)]
    lines = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in every}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


def test_no_file_is_a_drawer() -> None:
    drawers = ("utils", "common", "helpers", "misc")
    assert [str(path) for folder in OURS for path in files(folder) if path.stem.startswith(drawers)] == []


def loaded_after(statement: str, **environment: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    program = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    settings = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=settings, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_the_package_does_no_work() -> None:
    loaded = loaded_after("import pkb_env")
    assert "gymnasium" in loaded  # the one id is registered
    assert not loaded & {"torch", "pydantic", "jinja2", "typer", "rich", "sqlite3", "problems", "rewards"}
    assert "gymnasium" not in loaded_after("import pkb_env", PKB_NO_GYM="1")


def test_rewards_need_the_standard_library_only() -> None:
    assert not loaded_after("import rewards") & {"torch", "numpy", "pydantic", "problems", "pkb_env"}


def test_asking_for_names_loads_no_problem() -> None:
    assert "torch" not in loaded_after("import problems; problems.names()")


def test_help_loads_neither_torch_nor_the_evaluator() -> None:
    loaded = loaded_after("from pkb_env.cli import app")
    assert not loaded & {"torch", "pydantic", "jinja2", "sqlite3", "problems", "rewards"}
    assert not loaded & TRAINERS


def test_evaluating_loads_no_trainer() -> None:
    hot = "import pkb_env.env, pkb_env.evaluator, pkb_env.policies.folder, pkb_env.policy_report, pkb_env.policies.hugging_face"
    assert not loaded_after(hot) & {*TRAINERS, "matplotlib"}
