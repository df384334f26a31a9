"""What a verdict holds beside its numbers: what the screen read, what each rank did, what ran on the GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the screen read in the source."""

    rule: str
    line: int
    """1-based line in the candidate's source."""
    severity: str
    """`note`, `warn` or `forbid`."""
    message: str


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did, as seen from outside its box."""

    rank: int
    phase: str = ""
    """Where it was last: start, init, load, ready, call, returned, raised."""
    exit: str | None = None
    """How the process ended if it ended by itself: `exit 3`, `signal SIGSEGV`; None while it lived."""
    stuck: str | None = None
    """Where it waited at the deadline: line, function and collective."""
    line: int | None = None
    """Candidate line of the failure, 1-based."""
    error: str | None = None
    """The exception it raised, or why its output is not the answer."""
    output: int | None = None
    """Position of its first wrong output among the flattened outputs."""
    index: tuple[int, ...] | None = None
    """Position of the first wrong element inside that output."""
    got: str | None = None
    expected: str | None = None
    max_error: float | None = None
    """Largest absolute error over its floating outputs, in the output's own unit; None when it is not finite."""
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.index is not None:
            object.__setattr__(self, "index", tuple(self.index))
        # Refusing it would turn a candidate's NaN into a failure of the harness; `got` tells what came.
        if self.max_error is not None and not math.isfinite(self.max_error):
            object.__setattr__(self, "max_error", None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ran on a GPU in one call, as the candidate's own process told it."""

    name: str
    calls: int
    ms: float
    """Of all its calls together."""
    own: bool
    """Whether it is no kernel of a library, by its name."""
