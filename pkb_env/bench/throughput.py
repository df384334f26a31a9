"""Verdicts per hour, and what keeps there from being more.  Arithmetic only.

Not here: evaluating the mix (`throughput_run`), its candidates (`texts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewards.verdict import Verdict

EXCLUSIVE = "time"
"""The stage that has the machine for itself."""
_PARTS = ("slot", "oracle", "load", "run", "queue", "time", "end")
_MOST = 0.8
"""Share of a resource above which it counts as the limit."""


@dataclass(frozen=True)
class Run:
    """One mix, evaluated with so many slots."""

    slots: int
    candidates: int
    seconds: float
    per_hour: float
    cpu: float
    """Share of the machine's cores that was busy."""
    own_cpu: float
    """Share of them that was busy with this."""
    statuses: Mapping[str, int]
    occupied: Mapping[str, float]
    """Stage -> evaluations that were in it, on average; `share` is waiting for others' timed stages and all that has no name."""
    slots_used: float
    """Share of the slots that was taken, on average."""
    limit: str


def summarise(slots: int, verdicts: Sequence[Verdict], seconds: float, *, cpu: float, own_cpu: float) -> Run:
    """One row of the table."""
    totals = {name: sum(v.stage_s.get(name, 0.0) for v in verdicts) for name in _PARTS}
    whole = sum(v.stage_s.get("total", 0.0) for v in verdicts)
    totals["share"] = max(0.0, whole - sum(totals.values()))
    occupied = {name: total / seconds for name, total in totals.items()}
    used = max(0.0, (whole - totals["slot"]) / seconds / slots)
    return Run(
        slots=slots, candidates=len(verdicts), seconds=seconds, per_hour=3600 * len(verdicts) / seconds, cpu=cpu, own_cpu=own_cpu,
        statuses={s: sum(v.status.value == s for v in verdicts) for s in sorted({v.status.value for v in verdicts})},
        occupied=occupied, slots_used=used, limit=limit(occupied, used, cpu, own_cpu),
    )  # fmt: skip


def limit(occupied: Mapping[str, float], slots_used: float, cpu: float, own_cpu: float) -> str:
    """What keeps there from being more verdicts, in words."""
    if occupied[EXCLUSIVE] > _MOST:
        return f"timed stage: taken {occupied[EXCLUSIVE]:.0%} of the time, and only one at a time"
    waiting = occupied["queue"] + occupied["share"]
    if cpu > _MOST:
        others = f", {cpu - own_cpu:.0%} by others" if own_cpu < _MOST * cpu else ""
        return f"cores: {cpu:.0%} busy{others}"
    if waiting > sum(occupied[name] for name in ("oracle", "load", "run", "time", "end")):
        return f"machine lock: {waiting:.1f} evaluations wait for stages of others that exclude theirs"
    if slots_used > _MOST:
        return f"slots: {slots_used:.0%} taken while cores idle; candidates wait for deadlines or each other"
    return "candidates: too few to fill the slots"
