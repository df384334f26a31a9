"""What evaluations of the examples say, as a table of GitHub's Markdown.  Arithmetic and text only.

Not here: the evaluations (`examples_run`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pkb_env.markdown import table
from rewards.verdict import Verdict

COLUMNS = (
    "problem", "backend", "speed-up", "interval", "faster?", "time ms", "reference ms", "bound ms", "bound / time", "notes",
)  # fmt: skip
_WORDS = frozenset({"problem", "backend", "faster?", "notes"})
"""Columns that are not set like numbers."""
_LEGEND = """\
- speed-up: the reference's `solution` over the example's, from paired calls; interval: 95 %, its lower end
  with the example's arguments and outputs handed over inside its time (that end is paid)
- faster?: whether the pairs prove it
- time, reference: `solution` alone, from the last rank's beginning to the last one's return, median
- bound: the least time in which this machine can move the bytes and do the operations that the problem needs (`pkb show`)
"""


@dataclass(frozen=True)
class Row:
    """One evaluated example; what was not measured is None."""

    problem: str
    backend: str
    status: str
    speedup: float | None
    low: float | None
    high: float | None
    faster: bool
    time_ms: float | None
    reference_ms: float | None
    bound_ms: float | None
    notes: tuple[str, ...]
    other_load: float
    """Cores busy with what others did meanwhile."""

    @property
    def share(self) -> float | None:
        """Bound over time: 1.0 cannot be beaten."""
        return None if self.bound_ms is None or not self.time_ms else self.bound_ms / self.time_ms


def row(verdict: Verdict, other_load: float) -> Row:
    """The row of a verdict; one that is not CORRECT says why in its notes."""
    trouble = () if verdict.correct else (f"{verdict.status}: {verdict.message}",)
    return Row(
        verdict.problem, verdict.backend, verdict.status.value, verdict.speedup, verdict.speedup_low, verdict.speedup_high,
        verdict.faster, verdict.time_ms, verdict.baselines.get("reference"), verdict.bound_ms, (*trouble, *verdict.notes),
        round(other_load, 3),
    )  # fmt: skip


def markdown(rows: Sequence[Row], told: Mapping[str, Any]) -> str:
    """The page: what made it and where, the table, what its columns mean.

    Args:
        rows: the examples, in the order of the table.
        told: `command`, `hardware`, `torch`, `date`, `world_size`, `size`.
    """
    head = f"# The examples on {told['hardware']}\n\nMade by `{told['command']}`; not edited by hand.\n"
    where = f"torch {told['torch']}, {told['date']}, {told['world_size']} ranks, size {told['size']}; {_load(rows)}.\n"
    return f"{head}\n{where}\n{table(COLUMNS, map(_cells, rows), _WORDS)}\n{_LEGEND}"


def _load(rows: Sequence[Row]) -> str:
    loads = [each.other_load for each in rows]
    return f"cores busy with what others did: {min(loads):.2f} to {max(loads):.2f}" if loads else "no examples"


def _cells(each: Row) -> list[str]:
    interval = "" if each.low is None or each.high is None else f"{each.low:.2f} - {each.high:.2f}"
    speedup = "" if each.speedup is None else f"{each.speedup:.2f}x"
    return [
        each.problem, each.backend, speedup, interval, "yes" if each.faster else "no", _ms(each.time_ms), _ms(each.reference_ms),
        _ms(each.bound_ms), "" if each.share is None else f"{each.share:.1%}", "; ".join(each.notes),
    ]  # fmt: skip


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
