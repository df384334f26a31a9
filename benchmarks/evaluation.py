"""Seconds from source to verdict, beside fresh launches of the same work; peak memory.

    python benchmarks/evaluation.py [--world-size 2] [--problem allreduce]

Baseline: two launches of `python -m torch.distributed.run`, one that calls the reference and one that calls the candidate, each
once on every rank: the least that a harness without warm processes has to do; it neither judges nor times.
Cold is the first evaluation of a new evaluator whose build cache is empty, warm a candidate never seen before, cached the same
candidate again without a store: its library is there, everything else is done anew.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import problems
from pkb_env import hardware
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Submission

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_REPEATS = 5
_LAUNCHED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
exec(open({path!r}).read())
solution(torch.ones(512, 512))
dist.destroy_process_group()
"""


def seconds(act: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def launch(folder: Path, source: str, world_size: int) -> float:
    """One fresh launch that loads a source and calls it once."""
    (folder / "solution.py").write_text(source, encoding="utf-8")
    (folder / "main.py").write_text(_LAUNCHED.format(path=str(folder / "solution.py")), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    return seconds(lambda: subprocess.run([*command, str(folder / "main.py")], check=True, capture_output=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--problem", default="allreduce")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PKB_CACHE"] = cache
        reference = problems.reference_source(problems.load(wanted.problem))
        launches = statistics.median(2 * launch(Path(cache), reference, wanted.world_size) for _ in range(2))
        print(f"{hardware.cpu()}, load {os.getloadavg()[0]:.2f}; {wanted.problem}, W={wanted.world_size}, {EvalConfig()}")
        print(f"{'two fresh launches':34} {launches:8.2f} s")
        for backend in ("torch", "cpp"):
            report(backend, wanted, launches)


def report(backend: str, wanted: argparse.Namespace, launches: float) -> None:
    """Cold, warm and cached evaluations of one backend's example."""
    source = (EXAMPLES / f"{backend}_{wanted.problem}.py").read_text(encoding="utf-8")
    with Evaluator() as evaluator:

        def evaluate(text: str) -> None:
            verdict = evaluator.evaluate(Submission(text, wanted.problem, backend, wanted.world_size))
            assert verdict.correct, verdict.message
            peaks.append(max(r.peak_memory_bytes or 0 for r in verdict.ranks))

        peaks: list[int] = []
        renamed = [source.replace('extern "C"', f'/* {i} */ extern "C"') + f"\n# {i}\n" for i in range(_REPEATS)]
        rows = {
            "cold": [seconds(lambda: evaluate(source))],
            "warm": [seconds(lambda text=text: evaluate(text)) for text in renamed],  # type: ignore[misc]
            "cached": [seconds(lambda: evaluate(source)) for _ in range(_REPEATS)],
        }
        for name, values in rows.items():
            median = statistics.median(values)
            print(f"{backend + ' ' + name:34} {median:8.2f} s   {launches / median:6.1f}x of two fresh launches")
        print(f"{backend + ' peak memory of a rank':34} {max(peaks) / 2**20:8.0f} MiB")


if __name__ == "__main__":
    main()
