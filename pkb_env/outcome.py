"""From what a supervisor saw to a status, a message and a report per rank.  Pure: the same report gives the same words.

Rule (design of statuses): a raise, exit or signal on any rank is RUNTIME_ERROR; running out of the memory cap is
OUT_OF_MEMORY; at the deadline a rank that waits for another one, or has returned, makes it DEADLOCK, else TIMEOUT.
TAMPERED needs outside evidence.  The rank that failed first is the cause; what its siblings report is consequence.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from rewards.verdict import RankReport, Status

Body = dict[str, Any]
_MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|bad_alloc|out of memory|MemoryError", re.IGNORECASE)
_ECHO = re.compile(r"connection (closed|reset)|broken pipe|peer|gloo", re.IGNORECASE)
"""How a rank's error reads when another rank went away."""


@dataclass(frozen=True)
class Outcome:
    status: Status
    stage: str
    message: str
    ranks: tuple[RankReport, ...]


def explain(report: Body, deadline_s: float) -> Outcome:
    """Turn a supervisor's `failed` message into an outcome.

    Args:
        report: see `sandbox.hang.report`.
        deadline_s: what the stage was allowed, in seconds; only for the words.
    """
    ranks = tuple(_rank_report(rank) for rank in report["ranks"])
    stage = "load" if report["stage"] == "load" else "run"
    if report["trouble"] == "deadline":
        status, message = _late(report, deadline_s)
        return Outcome(status, stage, message, ranks)
    cause = min(report["ranks"], key=_order_of_blame)
    status, message = _failed(cause, report["stage"])
    return Outcome(status, "compile" if status is Status.COMPILE_ERROR else stage, message, ranks)


def _order_of_blame(rank: Body) -> tuple[int, float]:
    failed = rank["failed_at"] is not None
    raised = rank["raised"] or {}
    echo = bool(raised) and _ECHO.search(raised.get("text", "")) is not None and rank["exit"] is None
    return (2 if not failed else 1 if echo else 0, rank["failed_at"] or 0.0)


def _failed(rank: Body, stage: str) -> tuple[Status, str]:
    raised = rank["raised"]
    if rank["violation"]:
        return Status.TAMPERED, f"rank {rank['rank']} broke the protocol of the box: {rank['violation']}"
    if raised is None:
        return _ended(rank, stage)
    where = f"rank {rank['rank']}" + (f", line {raised['line']}" if raised.get("line") else "") + (
        f" in {raised['function']}()" if raised.get("function") not in (None, "<module>") else "")  # fmt: skip
    if raised.get("log"):
        return Status.COMPILE_ERROR, f"the compiler refused a source ({where}):\n{raised['log']}"
    text = f"{where}: {raised['type']}: {raised['text']}"
    if raised["type"] == "MemoryError" or _MEMORY.search(raised["text"]):
        return Status.OUT_OF_MEMORY, f"{text} (the memory of a rank is capped)"
    if stage == "load":
        return Status.LOAD_ERROR, f"importing the module failed on {text}"
    return Status.RUNTIME_ERROR, f"solution() raised on {text}"


def _ended(rank: Body, stage: str) -> tuple[Status, str]:
    how = exit_text(rank["exit"])
    doing = "while the module was imported" if stage == "load" else "during the call"
    text = f"rank {rank['rank']} ended {doing} with {how}"
    printed = rank["printed"].strip()
    if _MEMORY.search(printed):
        return Status.OUT_OF_MEMORY, f"{text}: {printed[-300:]}"
    return (Status.LOAD_ERROR if stage == "load" and rank["exit"] >= 0 else Status.RUNTIME_ERROR), (
        text + (f"; it had printed: {printed[-500:]}" if printed else ""))  # fmt: skip


def exit_text(code: int | None) -> str:
    """`exit 3`, `signal SIGSEGV`."""
    if code is None:
        return "no exit"
    if code >= 0:
        return f"exit {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _late(report: Body, deadline_s: float) -> tuple[Status, str]:
    places = "; ".join(f"rank {rank['rank']} {_place(rank)}" for rank in report["ranks"])
    waiting = [rank for rank in report["ranks"] if _waits(rank)]
    if report["stage"] == "load":
        return (Status.DEADLOCK if waiting else Status.TIMEOUT), f"importing the module took more than {deadline_s:g} s: {places}"
    if waiting or any(rank["done"] for rank in report["ranks"]):
        return Status.DEADLOCK, f"deadlock: the call did not end within {deadline_s:g} s: {places}"
    return Status.TIMEOUT, f"the call did not end within {deadline_s:g} s: {places}"


def _waits(rank: Body) -> bool:
    return bool(rank["collective"] or rank["waits"])


def _place(rank: Body) -> str:
    if rank["done"]:
        return "returned"
    if rank["exit"] is not None:
        return f"ended with {exit_text(rank['exit'])}"
    if rank["raised"]:
        return f"raised {rank['raised']['type']} at line {rank['raised'].get('line')}"
    at = f"is at line {rank['line']} in {rank['function']}()" if rank["line"] else f"is in phase {rank['phase']}"
    if rank["waits"]:
        return f"{at}, in symmetric-memory {rank['waits']}"
    if rank["collective"]:
        return f"{at}, waits in collective #{rank['sequence']} {rank['collective']}"
    stopped = ", stopped by a signal" if rank["state"] == "T" else ""
    inside = f", inside {rank['inside']}" if rank["inside"] else ""
    after = f", after collective #{rank['sequence']} {rank['after']}" if rank["after"] else ", before any collective"
    return f"{at}{inside}{stopped}{after}"


def _rank_report(rank: Body) -> RankReport:
    raised = rank["raised"] or {}
    stuck = None if rank["done"] or rank["failed_at"] is not None else _place(rank)
    error = f"{raised['type']}: {raised['text'][:500]}" if raised else rank["violation"]
    return RankReport(
        rank=rank["rank"], phase=rank["phase"], exit=exit_text(rank["exit"]) if rank["exit"] is not None else None,
        stuck=stuck, line=raised.get("line") or rank["line"], error=error, peak_memory_bytes=rank["peak_memory_bytes"],
    )  # fmt: skip
