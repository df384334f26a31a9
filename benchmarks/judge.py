"""Milliseconds per judged call and problem, in this process, one thread: of two answers that are as good as rounding allows.

prepare: exact answers, made before the candidate's; compare: every output and argument of all ranks, after the call; make: the
inputs of all ranks, one after the other, which the makers do side by side.

    python benchmarks/judge.py --world-size 2 --sizes tiny,default
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

import problems
from pkb_env import lazy
from pkb_env.box import silence
from pkb_env.judging import Answers, Record
from problems.base import Draw, Problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--sizes", default="tiny,default")
    parser.add_argument("--repeats", type=int, default=15, help="the median of so many is printed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'problem':34} {'size':8} {'make':>8} {'prepare':>8} {'compare':>8}   ms")
    for problem in map(problems.load, problems.names()):
        for size in asked.sizes.split(","):
            times = measure(problem, size, asked.world_size, asked.repeats)
            print(f"{problem.slug:34} {size:8}", *(f"{1e3 * t:8.3f}" for t in times))


def measure(problem: Problem, size: str, world_size: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of making the inputs, preparing and comparing one trial."""
    record = Record(problem, public=False)
    inputs = make(problem, size, world_size)
    prepared, answers = record.prepare(0, inputs), honest(problem, inputs)
    steps: tuple[Callable[[], Any], ...] = (
        lambda: make(problem, size, world_size), lambda: record.prepare(0, inputs), lambda: record.add(prepared, answers),
    )  # fmt: skip
    made, ready, found = (median(step, repeats) for step in steps)
    if message := record.summary()["message"]:
        raise SystemExit(f"{problem.slug}: an honest answer is refused: {message}")
    return made, ready, found


def make(problem: Problem, size: str, world_size: int) -> list[tuple[Any, ...]]:
    draws = [Draw(b"benchmark", problem.slug, size, 0, rank, world_size) for rank in range(world_size)]
    return [problem.make_inputs(draw, problem.size(size)) for draw in draws]


def honest(problem: Problem, inputs: list[tuple[Any, ...]]) -> Answers:
    """Rounded exact answers on both sides, arguments as a reference leaves them that talks to nobody."""
    before = [copied(args) for args in inputs]
    for rank, args in enumerate(before):
        with silence.alone(rank, len(inputs)):
            problem.reference(*args)
    reference, candidate = (lazy.honest_answer(problem, inputs) for _ in range(2))
    return Answers(reference, candidate, before, [copied(args) for args in before])


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)


def median(step: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        step()
        times.append(perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
