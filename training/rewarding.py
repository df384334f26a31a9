"""What a trainer calls for rewards: a step's completions evaluated together, scored, told and kept.

`KernelReward` is a reward function in the form of TRL's trainers (GRPO, RLOO).  One evaluator serves all steps; equal
completions are run once; what could not be evaluated is None, which a trainer leaves out of the batch.

Not here: the trainers (`grpo`), what a verdict is worth (`rewards`).
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pkb_env.errors import HarnessError
from pkb_env.protocol import Evaluates
from pkb_env.rows import Rollout
from pkb_env.store import Store
from pkb_env.submission import Submission
from rewards.score import History, Reward, Score
from rewards.speed import proven_speedup
from rewards.verdict import Status, Verdict

DEADLINE_S = 600.0
Place = tuple[int, int]
"""Number of a group in its step, and of a sample in its group."""
_GROUPS = 1_000_000
"""More groups than one process has in a step."""


@dataclass(frozen=True)
class Batch:
    """One step's completions with what came of them, in the order in which the trainer gave them."""

    prompts: list[str]
    texts: list[str]
    verdicts: list[Verdict]
    scores: list[Score]
    seconds: float
    waited_s: float = 0.0
    """For a slot, all evaluations together."""

    @property
    def rewards(self) -> list[float | None]:
        """Totals; None where there is nothing to learn from."""
        return [None if score.unscored else score.total for score in self.scores]


class KernelReward:
    """A reward function for a batch of completions.

    Args:
        evaluator: what evaluates them; the caller closes it.
        reward: what a verdict is worth.
        settings: backend, world size, topology, profile and size of every submission; its text and problem are not looked at.
        store: where rollouts are kept; None: nowhere.
        run: name under which they are kept.  A step that is repeated after a restart replaces what it had left.
        deadline_s: most seconds a batch may take; what is late is unscored.
    """

    def __init__(
        self, evaluator: Evaluates, reward: Reward, settings: Submission, *,
        store: Store | None = None, run: str = "run", deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self._evaluator, self._reward, self._settings = evaluator, reward, settings
        self._store, self._run, self._deadline_s = store, run, deadline_s
        self.__name__ = reward.name
        """TRL names its columns after it."""

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], problem: Sequence[str],
        log_extra: Callable[[str, list[Any]], None] | None = None, log_metric: Callable[[str, float], None] | None = None,
        trainer_state: Any = None, **_: object,
    ) -> list[float | None]:  # fmt: skip
        """Rewards in the order of the completions; None: unscored.  `problem` is a column of the dataset."""
        batch = self.evaluate([text_of(p) for p in prompts], [text_of(c) for c in completions], problem)
        self.keep(batch, places_of(batch.prompts), getattr(trainer_state, "global_step", 0))
        if log_extra:
            for name, column in columns(batch).items():
                log_extra(name, column)
        if log_metric:
            for name, value in metrics(batch).items():
                log_metric(name, value)
        return batch.rewards

    def evaluate(
        self, prompts: Sequence[str], texts: Sequence[str], problem: Sequence[str], histories: Sequence[History] | None = None
    ) -> Batch:
        """Evaluate and score a batch; `histories` holds the earlier verdicts of every sample's episode."""
        start, waited_s, before = time.monotonic(), self._evaluator.waited_s, histories or [()] * len(texts)
        wanted = [replace(self._settings, text=text, problem=name) for text, name in zip(texts, problem, strict=True)]
        verdicts = self._verdicts(wanted)
        scores = [self._reward(*each) for each in zip(verdicts, before, strict=True)]
        return Batch(list(prompts), list(texts), verdicts, scores, time.monotonic() - start, self._evaluator.waited_s - waited_s)

    def keep(self, batch: Batch, places: Sequence[Place], step: int, turn: int = 0) -> None:
        """Store a batch as rollouts, if there is a store."""
        if self._store is None:
            return
        rows = [self._store.row_of(*each) for each in zip(batch.verdicts, batch.texts, strict=True)]
        self._store.add_rollouts(
            Rollout(self._run, step, group, turn, prompt, text, row, sample)
            for (group, sample), prompt, text, row in zip(places, batch.prompts, batch.texts, rows, strict=True)
        )

    def _verdicts(self, wanted: list[Submission]) -> list[Verdict]:
        """A harness that cannot be started is closed and started once more; training goes on without a score otherwise."""
        try:
            return self._evaluator.evaluate_many(wanted, self._deadline_s)
        except HarnessError as error:
            warnings.warn(f"the evaluator is started anew: {error}", RuntimeWarning, stacklevel=2)
            self._evaluator.close()
        try:
            return self._evaluator.evaluate_many(wanted, self._deadline_s)
        except HarnessError as error:
            return [_unevaluated(submission, error) for submission in wanted]


def places_of(prompts: Sequence[str]) -> list[Place]:
    """Group and sample of every row: samples of one prompt stand side by side; every process numbers its own groups."""
    base = _GROUPS * int(os.environ.get("RANK", "0"))
    return [(base + group, sample) for group, (_, same) in enumerate(groupby(prompts)) for sample, _ in enumerate(same)]


def text_of(message: Any) -> str:
    """What a policy wrote: the text itself, or the content of the last message of a conversation."""
    return message if isinstance(message, str) else str(message[-1]["content"])


def columns(batch: Batch) -> dict[str, list[Any]]:
    """Columns for the trainer's table of completions."""
    return {
        "status": [v.status.value for v in batch.verdicts],
        "speedup": [v.speedup for v in batch.verdicts],
        "message": [v.message for v in batch.verdicts],
    }


def metrics(batch: Batch) -> dict[str, float]:
    """What is worth a curve: shares of the batch, zeros too, of which a trainer takes means; mean terms; what evaluating took."""
    scored = [v for v in batch.verdicts if v.status is not Status.INFRA]
    count, seen = len(batch.verdicts), max(1, len(scored))
    found = Counter(v.status for v in scored)
    shares = {f"kernels/{s.value.lower()}": found[s] / seen for s in Status if s is not Status.INFRA}
    return shares | _terms(batch.scores) | {
        "kernels/unscored": 1 - len(scored) / max(1, count),
        "kernels/fast_1": sum((proven_speedup(v) or 0) > 1 for v in scored if v.correct) / seen,
        "kernels/duplicates": 1 - len(set(batch.texts)) / max(1, count),
        "kernels/evaluation_s": batch.seconds,
        "kernels/wait_s": batch.waited_s / max(1, count),
        "kernels/queue_depth": batch.waited_s / max(batch.seconds, 1e-9),
    }  # fmt: skip


def _terms(scores: Sequence[Score]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for score in scores:
        for term in score.terms:
            if term.score is not None:
                found.setdefault(f"terms/{term.name}", []).append(term.score)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _unevaluated(submission: Submission, error: HarnessError) -> Verdict:
    s = submission
    return Verdict(
        Status.INFRA, "harness", str(error), s.problem, 0, s.profile, s.size, s.world_size, s.backend, s.topology, digest=""
    )
