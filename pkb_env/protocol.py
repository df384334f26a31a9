"""What every evaluator can do, wherever it runs: on this machine, from a recording, behind a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pkb_env.submission import Submission
from rewards.verdict import Verdict


class Evaluates(Protocol):
    """Turns submissions into verdicts; never raises for what a policy wrote."""

    @property
    def waited_s(self) -> float:
        """Seconds that evaluations have waited for a slot so far, together."""
        ...

    def evaluate(self, submission: Submission) -> Verdict:
        """One verdict.

        Raises:
            UsageError: the problem, backend, size or world size does not exist or does not fit.
        """
        ...

    def evaluate_many(self, submissions: Iterable[Submission], deadline_s: float | None = None) -> list[Verdict]:
        """Verdicts in the order of the submissions, evaluated concurrently; equal submissions are run once.

        What is not done `deadline_s` seconds later is INFRA.
        """
        ...

    def close(self) -> None:
        """Give back every process, file and lock."""
        ...
