"""Evaluates the examples of this repository one after the other, with the budget of a real evaluation and without a store.

Not here: what the table says (`examples`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pkb_env import backends
from pkb_env.bench import texts
from pkb_env.bench.examples import Row, row
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.load import Meter
from pkb_env.problem_set import fitting, named
from pkb_env.submission import Submission


@dataclass(frozen=True)
class Plan:
    """Which examples, where."""

    world_size: int = 2
    size: str = "default"
    config: EvalConfig = field(default_factory=EvalConfig)
    topology: str = "cpu"

    def submissions(self) -> list[Submission]:
        """`BACKEND_PROBLEM.py`, by number of the problem and then in the order of the backends.

        Raises:
            UsageError: there are no examples here, or they do not run on so many ranks.
        """
        there = [b for b in backends.names() if self.topology in backends.load(b).topologies]
        found = {b: [p.stem.removeprefix(f"{b}_") for p in texts.EXAMPLES.glob(f"{b}_*.py")] for b in there}
        slugs = {slug for of_backend in found.values() for slug in of_backend}
        if not slugs:
            texts.example("any", "torch")  # says where it looked
        fits = fitting(map(named, slugs), world_size=self.world_size, size=self.size, profile="hardened")
        ordered = [p.slug for p in sorted(fits, key=lambda problem: problem.number)]
        return [self._submission(slug, b) for slug in ordered for b in found if slug in found[b]]

    def _submission(self, problem: str, backend: str) -> Submission:
        return Submission(texts.example(problem, backend), problem, backend, self.world_size, self.topology, size=self.size)


def evaluate(submissions: list[Submission], config: EvalConfig, heard: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row for each submission; `heard` is told of each one as it comes."""
    rows = []
    with Evaluator(config) as evaluator:
        evaluator.machine().broker.prepared()  # so that the first one shares the machine with no compiler
        for submission in submissions:
            with Meter() as meter:  # through `evaluate_many`, which an interrupt leaves without a trace
                verdict = evaluator.evaluate_many([submission])[0]
            rows.append(row(verdict, meter.load.other))
            heard(rows[-1])
    return rows
