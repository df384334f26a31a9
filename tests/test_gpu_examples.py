"""The examples in CUDA and Triton: as far as a machine without a GPU can tell, and judged where there is one.

Not here: what they reach; times of ranks that share a GPU mean nothing.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import problems
from pkb_env import backends
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.screen import mechanisms, screen
from pkb_env.source import compiled_text, read_tree
from pkb_env.submission import Candidate, Submission, read

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "pkb_env" / "box" / "native" / "pkb_cuda.h"
WRITTEN = sorted(p.stem for p in (ROOT / "examples").glob("*.py") if p.stem.startswith(("cuda_", "triton_")))
IN_CUDA = [name for name in WRITTEN if name.startswith("cuda_")]


def text_of(name: str) -> str:
    """An example, or the worked one of a backend."""
    path = ROOT / "examples" / f"{name}.py"
    return path.read_text(encoding="utf-8") if path.exists() else backends.load(name).example


def cuda_in(candidate: Candidate) -> list[str]:
    tree = read_tree(candidate)
    texts = [compiled_text(tree, call) for name, call in tree.calls() if name.rpartition(".")[2] == "compile_cuda"]
    return [text.value for text in texts if text is not None]


def test_whatever_has_an_example_for_the_cpu_has_one_in_cuda() -> None:
    assert {name.removeprefix("cuda_") for name in IN_CUDA} == {p.stem[4:] for p in (ROOT / "examples").glob("cpp_*.py")}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_example_takes_the_arguments_of_its_problem(name: str) -> None:
    backend, _, slug = name.partition("_")
    tree = ast.parse(text_of(name))
    solution = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "solution")
    assert tuple(a.arg for a in solution.args.args) == tuple(problems.load(slug).arguments)
    assert {"node", "shared"} <= set(backends.load(backend).topologies)


@pytest.mark.parametrize("name", [*WRITTEN, "cuda", "triton"])
def test_an_example_passes_the_screen_and_shows_what_it_uses(name: str) -> None:
    candidate, backend = read(text_of(name)), name.partition("_")[0]
    findings = screen(candidate, backend)
    assert [f for f in findings if f.severity != "note" or f.rule == "delegation"] == []
    assert set(mechanisms(candidate)) >= {"symmetric_memory", "native_code" if backend == "cuda" else "triton"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
@pytest.mark.parametrize("name", [*IN_CUDA, "cuda"])
def test_cuda_compiles(name: str, tmp_path: Path) -> None:
    (source,) = cuda_in(read(text_of(name)))
    file = tmp_path / "candidate.cu"
    file.write_text(source, encoding="utf-8")
    command: list[str | Path] = ["nvcc", "-arch=sm_90a", "-std=c++17", "-O1", "-Werror", "all-warnings", "-include", HEADER]
    done = subprocess.run([*command, "-o", tmp_path / "candidate.o", "-c", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(EvalConfig(pairs=0)) as evaluator:
        yield evaluator


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", WRITTEN)
def test_an_example_is_correct_on_a_gpu(evaluator: Evaluator, name: str, world_size: int) -> None:
    backend, _, slug = name.partition("_")
    verdict = evaluator.evaluate(Submission(text_of(name), slug, backend, world_size, topology="shared", size="tiny"))
    assert verdict.correct, f"{verdict.status}: {verdict.message}\n{verdict.ranks}"
