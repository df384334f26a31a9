"""The public way as a baseline: fresh launches of `python -m torch.distributed.run`, outputs compared from files.

Per trial one launch of the reference and one of the candidate, as the public benchmark does; then one timed launch of each.
The candidate is the reference's own source: the examples use `pkb_box`, which exists inside a box only.
Not here: what a rank does (`launched`), our own way (`latency_run`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pkb_env import topology
from pkb_env.bench import texts
from pkb_env.bench.latency import Launch
from pkb_env.errors import HarnessError
from pkb_env.load import Meter
from pkb_env.submission import Submission

_PROGRAM = Path(__file__).with_name("launched.py")
_DEADLINE_S = 600.0
_SIDES = ("reference", "candidate")
_PARTS = ("launcher", "import", "init", "run", "end")
_ERROR_CHARS = 600
_SECRET = secrets.token_hex(32)
"""Both sides of a trial get the same inputs."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PKB_NO_GYM": "1"}
"""Thread setting and network interface are those of a box."""
_EXTENSION = """
import sys, torch
from torch.utils.cpp_extension import load_inline
text = "torch::Tensor add(torch::Tensor a, torch::Tensor b) { return a + b; }"
module = load_inline("pkb_bench", text, functions=["add"], build_directory=sys.argv[1], extra_cflags=["-O3"])
assert module.add(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]
"""


@dataclass(frozen=True)
class PublicWay:
    """Settings of the baseline."""

    problem: str
    world_size: int = 2
    size: str = "default"
    profile: str = "hardened"
    trials: int = 5
    warm_up: int = 500
    calls: int = 100
    """Timed calls; 0 leaves the timed launches out."""
    topology: str = "cpu"

    def run(self, heard: Callable[[Launch], None] = lambda _: None) -> list[Launch]:
        """All launches, one after the other.

        Raises:
            HarnessError: a launch failed, or the reference's outputs do not equal its own by the public rule.
        """
        found: list[Launch] = []
        with tempfile.TemporaryDirectory(prefix="pkb-launches-") as root:
            (Path(root) / "source.py").write_text(texts.reference(self.problem), encoding="utf-8")
            for trial in range(self.trials):
                reference, candidate = (self._launch(Path(root), side, trial, found, heard) for side in _SIDES)
                found.append(_compared(reference, candidate, self.world_size))
            for side in _SIDES if self.calls else ():
                self._launch(Path(root), side, self.trials, found, heard, timed=True)
        return found

    def _launch(
        self, root: Path, side: str, trial: int, found: list[Launch], heard: Callable[[Launch], None], *, timed: bool = False
    ) -> Path:
        folder = root / f"{side}-{trial}"
        folder.mkdir()
        counts = {"warm_up": self.warm_up, "calls": self.calls} if timed else {"warm_up": 0, "calls": 0}
        task = {
            "problem": self.problem, "size": self.size, "profile": self.profile, "secret": _SECRET, "trial": trial,
            "source": str(root / "source.py"), "folder": str(folder), "group": topology.group_backend(self.topology), **counts,
            "on_gpus": self.topology != "cpu",
            "dtype": Submission("", self.problem, topology=self.topology).dtype,
        }  # fmt: skip
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        start = time.monotonic()
        with Meter() as meter:
            _torchrun(self.world_size, folder / "task.json")
        split, mean_ms = _stamps(folder, start, time.monotonic(), self.world_size)
        launch = Launch("timed" if timed else "trial", side, time.monotonic() - start, split, mean_ms, meter.load.other)
        found.append(launch)
        heard(launch)
        return folder


def _torchrun(world_size: int, task: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    _checked([*command, str(_PROGRAM), str(task)], "a fresh launch")


def _checked(command: list[str], what: str, **environment: str) -> None:
    paths = os.pathsep.join(p for p in sys.path if p)
    settings = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": paths, **environment}
    try:
        done = subprocess.run(
            command, env=settings, capture_output=True, text=True, errors="replace", check=False, timeout=_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise HarnessError(f"{what} did not end within {_DEADLINE_S:.0f} s") from None
    if done.returncode:
        raise HarnessError(f"{what} failed with exit code {done.returncode}: ...{done.stderr.strip()[-_ERROR_CHARS:]}")


def _stamps(folder: Path, start: float, end: float, world_size: int) -> tuple[dict[str, float], float | None]:
    """Where the seconds of a launch went, and the mean time of a timed call; of the slowest rank."""
    told = [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(world_size)]
    last = [max(each["stamps"][name] for each in told) for name in ("begun", "imported", "joined", "ran")]
    seconds = (after - before for before, after in pairwise([start, *last, end]))
    means = [each["mean_ms"] for each in told if each["mean_ms"] is not None]
    return dict(zip(_PARTS, seconds, strict=True)), max(means, default=None)


def _compared(reference: Path, candidate: Path, world_size: int) -> Launch:
    import torch  # noqa: PLC0415  slow, and needed here only

    from pkb_env.judge import public_rule  # noqa: PLC0415

    start = time.monotonic()
    for rank in range(world_size):
        ours, theirs = (torch.load(folder / f"rank_{rank}.pt") for folder in (reference, candidate))
        if not public_rule(ours, theirs):
            raise HarnessError(f"rank {rank} of two launches of the same source gave outputs that the public rule tells apart")
    return Launch("compare", "", time.monotonic() - start)


def load_inline_seconds() -> float:
    """Seconds of a fresh process that builds a one-function extension with `torch.utils.cpp_extension.load_inline`.

    Raises:
        HarnessError: it cannot be built, for example because ninja is missing.
    """
    with tempfile.TemporaryDirectory(prefix="pkb-extension-") as folder:
        start = time.monotonic()
        _checked([sys.executable, "-c", _EXTENSION, folder], "load_inline")
        return time.monotonic() - start


