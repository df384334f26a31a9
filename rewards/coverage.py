"""The term that pays for work done in kernels of one's own.

Not here: how kernels are told apart (`pkb_env.kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rewards.score import History
from rewards.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of the kernels' time that is in kernels of the candidate's own; 0 for a failure."""

    kind: ClassVar[str] = "coverage"

    def score(self, verdict: Verdict, history: History) -> float | None:  # noqa: ARG002
        """From 0 to 1; None for a correct answer whose kernels were not looked at (`EvalConfig.kernels`)."""
        return verdict.own_kernel_share if verdict.correct else 0.0
