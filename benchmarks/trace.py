"""Records paired times of a reference against a source through real boxes, by default against itself: a null.

Every launch is a fresh box of the candidate's beside a fresh one of the reference's; its first pairs are left out as in an
evaluation.  One file per problem, `FOLDER/LABEL_PROBLEM.npz`: `pairs` (n, 5) in ns, columns COLUMNS, `launch` (n,), strings
`machine`, `harness`, `size`.

    python benchmarks/trace.py FOLDER --label quiet
    python benchmarks/trace.py FOLDER --label quiet_cpp --problems allreduce --candidate examples/cpp_allreduce.py

Not here: the statistics (`pkb_env.timing`), judging (`pkb_env.attempt`).
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import problems
from pkb_env import hardware
from pkb_env.boxes import SLOTS, Box, Task
from pkb_env.cancellation import Cancellation
from pkb_env.evaluator import Evaluator
from pkb_env.machine import Machine
from pkb_env.oracles import Oracle
from pkb_env.stopping import orders

COLUMNS = ("reference_ns", "candidate_ns", "skew_ns", "plumbing_ns", "candidate_first")
_WARM_PAIRS = 2


def row(box: Box, oracle: Oracle, number: int, *, candidate_first: bool) -> list[int]:
    """One pair on new values, as COLUMNS."""
    slot, nonce = number % SLOTS, secrets.randbits(63)
    oracle.ask("fill", slot=slot, nonce=nonce, trial=number, secret=secrets.token_hex(32), last=None)
    sides = (box, oracle) if candidate_first else (oracle, box)
    calls = {side: side.call(slot, nonce) for side in sides}
    mine, theirs = calls[box], calls[oracle]
    return [theirs.ns, mine.ns, mine.skew_ns, theirs.ns - theirs.body_ns, int(candidate_first)]


def launch(machine: Machine, oracle: Oracle, source: str, count: int) -> np.ndarray:
    """Pairs of one fresh box (count, 5)."""
    with ExitStack() as stack:
        box = Box(machine.zygote, machine.config, machine.folder, machine.broker.build)
        stack.callback(box.close)
        oracle.renew()
        box.load(source, oracle.task, oracle.ready(), str(machine.broker.prepared().native_library))
        box.await_ready()
        order = orders(random.Random())  # noqa: S311  an order, not a secret
        with machine.lock.alone(lambda: None):
            taken = [row(box, oracle, number, candidate_first=next(order)) for number in range(_WARM_PAIRS + count)]
    return np.array(taken[_WARM_PAIRS:], np.int64)


def record(machine: Machine, options: argparse.Namespace, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (n, 5) of one problem, and the launch each belongs to (n,)."""
    problem = problems.load(name)
    task = Task(problem.slug, problem.version, options.ranks, options.size, "hardened", "float32")
    source = options.candidate.read_text() if options.candidate else problems.reference_source(problem)
    with machine.pool.taken(task, Cancellation()) as oracle:
        oracle.ready()
        oracle.ask("begin")
        launches = [launch(machine, oracle, source, options.pairs) for _ in range(options.launches)]
    return np.concatenate(launches), np.repeat(np.arange(options.launches), options.pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    with Evaluator() as evaluator:
        for name in options.problems:
            pairs, launches = record(evaluator.machine(), options, name)
            np.savez_compressed(
                options.folder / f"{options.label}_{name}.npz", pairs=pairs, launch=launches, machine=hardware.cpu(),
                harness=hardware.harness(), size=options.size,
            )  # fmt: skip
            for number in range(options.launches):
                ratios = pairs[launches == number, 0] / pairs[launches == number, 1]
                print(f"{name} launch {number}: median ratio {np.median(ratios):.3f}, of {len(ratios)} pairs", flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--label", required=True, help="first part of the files' names")
    parser.add_argument("--problems", nargs="+", default=["allreduce", "gemm_allreduce", "ring_attention"])
    parser.add_argument("--candidate", type=Path, help="a source; left out, the reference itself")
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=140, help="of each launch, without the first ones")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="default")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
