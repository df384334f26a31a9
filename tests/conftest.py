"""What all tests share: one thread per process, a cache of their own, one real evaluator; the only place where tests are skipped.

Not here: stand-ins; a test that evaluates evaluates with real processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pkb_env.evaluator import Evaluator

# Before anything imports torch: spinning OpenMP threads slow every other process on a small machine down.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
# A shell has its background jobs ignore Ctrl-C, which every process of a test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow` runs what takes minutes too, and looks longer for counterexamples."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too, and draw many more examples")


def pytest_configure(config: pytest.Config) -> None:
    """How many examples hypothesis draws where a test does not say."""
    settings.register_profile("slow", max_examples=3000)
    if config.getoption("slow"):
        settings.load_profile("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine, or this call, cannot run; with the reason."""
    for item in items:
        if item.get_closest_marker("gpu") and not gpus():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU with a working driver"))
        if item.get_closest_marker("multigpu") and gpus() < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two NVIDIA GPUs, there are {gpus()}"))
        if item.get_closest_marker("slow") and not config.getoption("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))


@cache
def gpus() -> int:
    """How many GPUs a working driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


@pytest.fixture(scope="session", autouse=True)
def cache_folder() -> Iterator[Path]:
    """`PKB_CACHE` of this session and of every process it starts; the toolchain is prepared in it once."""
    with tempfile.TemporaryDirectory(prefix="pkb-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PKB_CACHE", folder)
        yield Path(folder)


@pytest.fixture(scope="session")
def evaluator(cache_folder: Path) -> Iterator[Evaluator]:
    """One real evaluator with the default configuration, for every test that needs no other."""
    from pkb_env.evaluator import Evaluator  # noqa: PLC0415  imports torch, which many tests do without

    assert cache_folder.is_dir()
    with Evaluator() as shared:
        yield shared
