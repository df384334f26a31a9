"""Evaluates a mix of candidates, no two of them equal, with one number of slots after another.

Not here: the candidates (`texts`), what the times say (`throughput`).
"""

from __future__ import annotations

import os
import random
import secrets
import time
from dataclasses import dataclass

from pkb_env.bench import texts
from pkb_env.bench.throughput import Run, summarise
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.load import Meter
from pkb_env.submission import Submission


@dataclass(frozen=True)
class Mix:
    """How many candidates of each kind, for which problem."""

    problem: str
    counts: dict[str, int]
    backend: str = "torch"
    world_size: int = 2
    size: str = "default"

    def submissions(self) -> list[Submission]:
        """Fresh texts in random order; correct ones of backend `torch` are the reference, of others their example."""
        right = texts.reference(self.problem) if self.backend == "torch" else texts.example(self.problem, self.backend)
        kinds = [kind for kind, count in self.counts.items() for _ in range(count)]
        random.Random(0).shuffle(kinds)  # noqa: S311  an order, the same for every number of slots
        return [self._submission(kind, right) for kind in kinds]

    def _submission(self, kind: str, right: str) -> Submission:
        backend = self.backend if kind == "correct" else "torch"
        text = texts.unique(texts.of_kind(kind, self.problem, right), f"{kind} {secrets.token_hex(8)}")
        return Submission(text, self.problem, backend, self.world_size, size=self.size)


def measure(mix: Mix, config: EvalConfig, slots: int) -> Run:
    """Evaluate the mix with so many slots; the evaluator is up before the clock starts."""
    with Evaluator(config.model_copy(update={"slots": slots})) as evaluator:
        evaluator.machine().broker.prepared()
        submissions = mix.submissions()
        start = time.monotonic()
        with Meter() as meter:
            verdicts = evaluator.evaluate_many(submissions)
        seconds = time.monotonic() - start
    cores = os.cpu_count() or 1
    return summarise(slots, verdicts, seconds, cpu=min(1.0, meter.load.busy / cores), own_cpu=min(1.0, meter.load.own / cores))
