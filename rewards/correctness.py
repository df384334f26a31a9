"""Terms that pay for getting an answer right, and for how far a failure got.

Not here: speed (`speed`).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import ClassVar

from rewards.score import History
from rewards.verdict import Status, Verdict

_FLOORS = {
    Status.TAMPERED: "tampered",
    Status.INVALID: "invalid",
    Status.COMPILE_ERROR: "compile_error",
    Status.LOAD_ERROR: "load_error",
    Status.RUNTIME_ERROR: "stopped",
    Status.DEADLOCK: "stopped",
    Status.TIMEOUT: "stopped",
    Status.OUT_OF_MEMORY: "stopped",
    Status.WRONG_RESULT: "wrong_result",
    Status.CORRECT: "correct",
}


@dataclass(frozen=True, slots=True)
class StatusFloor:
    """A fixed score per status, in the order of the fields.

    WRONG_RESULT earns `wrong_result + partial * passed`, which stays below `correct`.  The failures lie close together
    on purpose: policies paid well for code that merely compiles settle for it.

    Raises:
        ValueError: the floors fall, or the partial credit reaches `correct`.
    """

    kind: ClassVar[str] = "status_floor"

    tampered: float = -1.0
    invalid: float = 0.0
    compile_error: float = 0.05
    load_error: float = 0.1
    stopped: float = 0.15
    """RUNTIME_ERROR, DEADLOCK, TIMEOUT and OUT_OF_MEMORY."""
    wrong_result: float = 0.2
    partial: float = 0.1
    """On top of `wrong_result`, for the share of comparisons that hold."""
    correct: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in astuple(self)):
            raise ValueError("a floor is not finite")
        rungs = [getattr(self, name) for name in dict.fromkeys(_FLOORS.values())]
        if any(low > high for low, high in pairwise(rungs)):
            raise ValueError(f"floors must not fall in the order {', '.join(dict.fromkeys(_FLOORS.values()))}; came {rungs}")
        if self.partial < 0 or self.wrong_result + self.partial >= self.correct:
            raise ValueError(
                f"wrong_result + partial must stay below correct, and partial must be >= 0; "
                f"came {self.wrong_result} + {self.partial} and {self.correct}"
            )

    def score(self, verdict: Verdict, history: History) -> float:  # noqa: ARG002
        """The floor of the status, between `tampered` and `correct`."""
        floor: float = getattr(self, _FLOORS[verdict.status])
        return floor + self.partial * verdict.passed if verdict.status is Status.WRONG_RESULT else floor


@dataclass(frozen=True, slots=True)
class Correct:
    """1 for a correct answer, else 0."""

    kind: ClassVar[str] = "correct"

    def score(self, verdict: Verdict, history: History) -> float:  # noqa: ARG002
        """0.0 or 1.0."""
        return 1.0 if verdict.correct else 0.0
