"""From what a supervisor saw to a status, a message and a report per rank.  Pure: the same report gives the same words.

Rule (design of statuses): a raise, exit or signal on any rank is RUNTIME_ERROR; running out of the memory cap is
OUT_OF_MEMORY; at the deadline a rank that waits for another one, or has returned, makes it DEADLOCK, else TIMEOUT.
TAMPERED needs outside evidence.  The rank that failed first is the cause; what its siblings report is consequence.
What a rank told is its own word (`told`): any bytes give some message, none gives an exception.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from pkb_env.told import Raised, clean
from rewards.verdict import RankReport, Status

Body = dict[str, Any]
MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|bad_alloc|out.of.memory|MemoryError", re.IGNORECASE)
"""How an error reads whose cause is that memory ran out."""
_ECHO = re.compile(r"connection (closed|reset|refused)|broken pipe|pair closure|socket (closed|error)", re.IGNORECASE)
"""How a rank's error reads when another rank went away."""
_WAIT = "wait for "
"""How a page words that a rank waits for an asynchronous collective."""


@dataclass(frozen=True)
class Outcome:
    """Status, the station that decided, the message for a policy, and one report per rank."""

    status: Status
    stage: str
    message: str
    ranks: tuple[RankReport, ...]
    killed: bool = False
    """Whether it was SIGKILL that ended the rank which failed first: the kernel's when memory runs out, or somebody's."""


def explain(report: Body, deadline_s: float) -> Outcome:
    """Turn a supervisor's `failed` message into an outcome.

    Args:
        report: see `sandbox.hang.report`.
        deadline_s: what the stage was allowed, in seconds; only for the words.
    """
    ranks = tuple(_rank_report(rank) for rank in report["ranks"])
    stage = "load" if report["stage"] == "load" else "run"
    cause = min(report["ranks"], key=_order_of_blame)
    if not _failed(cause):
        status, message = _late(report, deadline_s)
        return Outcome(status, stage, message, ranks)
    status, message = _failure(cause, report["stage"])
    killed = cause["exit"] == -signal.SIGKILL and not (cause["violation"] or cause["raised"])
    return Outcome(status, "compile" if status is Status.COMPILE_ERROR else stage, message, ranks, killed)


def _failed(rank: Body) -> bool:
    return rank["failed_at"] is not None


def _order_of_blame(rank: Body) -> tuple[int, float]:
    """Evidence first, then failures by time, then those that only tell of another rank's end, then the rest."""
    if not _failed(rank):
        return 3, 0.0
    said = Raised.of(rank["raised"]).text if rank["raised"] else rank["printed"]
    kind = 0 if rank["violation"] else 2 if _ECHO.search(said) else 1
    return kind, rank["failed_at"]


def _failure(rank: Body, stage: str) -> tuple[Status, str]:
    if rank["violation"]:
        return Status.TAMPERED, f"rank {rank['rank']} broke the protocol of the box: {clean(rank['violation'], 500)}"
    if rank["raised"] is None:
        return _ended(rank, stage)
    raised = Raised.of(rank["raised"])
    where = f"rank {rank['rank']}" + (f", line {raised.line}" if raised.line else "") + (
        f" in {raised.function}()" if raised.function not in ("", "<module>") else "")  # fmt: skip
    if raised.log:
        return Status.COMPILE_ERROR, f"the compiler refused a source ({where}):\n{raised.log}"
    text = f"{where}: {raised}"
    if raised.type == "MemoryError" or MEMORY.search(raised.text):
        return Status.OUT_OF_MEMORY, f"{text} (the memory of a rank is capped)"
    if stage == "load":
        return Status.LOAD_ERROR, f"importing the module failed on {text}"
    return Status.RUNTIME_ERROR, f"solution() raised on {text}"


def _ended(rank: Body, stage: str) -> tuple[Status, str]:
    code = rank["exit"]
    doing = "while the module was imported" if stage == "load" else "during the call"
    where = f" at line {rank['line']} in {rank['function']}()" if rank["line"] else ""
    text = f"rank {rank['rank']} ended {doing} with {exit_text(code)}{where}"
    if code == -signal.SIGKILL:
        text += " (which is also how the kernel ends a process when memory runs out)"
    printed = clean(rank["printed"]).strip()[-500:]
    if MEMORY.search(printed):
        return Status.OUT_OF_MEMORY, f"{text}: {printed}"
    left = stage == "load" and code is not None and code >= 0
    return (Status.LOAD_ERROR if left else Status.RUNTIME_ERROR), text + (f"; it had printed: {printed}" if printed else "")


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
    waiting = any(rank["collective"] or rank["waits"] for rank in report["ranks"] if not rank["done"])
    if report["stage"] == "load":
        return (Status.DEADLOCK if waiting else Status.TIMEOUT), f"importing the module took more than {deadline_s:g} s: {places}"
    if waiting or any(rank["done"] for rank in report["ranks"]):
        return Status.DEADLOCK, f"deadlock: the call did not end within {deadline_s:g} s: {places}"
    return Status.TIMEOUT, f"the call did not end within {deadline_s:g} s: {places}"


def _place(rank: Body) -> str:
    if rank["done"]:
        return "returned"
    at = f"is at line {rank['line']} in {clean(rank['function'], 100)}()" if rank["line"] else f"is in phase {rank['phase']}"
    if rank["waits"]:
        return f"{at}, in symmetric-memory {rank['waits']}"
    if rank["collective"]:
        return f"{at}, {_waiting(rank['collective'], rank['sequence'])}"
    stopped = ", stopped by a signal" if rank["state"] == "T" else ""
    inside = f", inside {clean(rank['inside'], 100)}" if rank["inside"] else ""
    after = f", after {_numbered(rank['after'], rank['sequence'])}" if rank["after"] else ", before any collective"
    return f"{at}{inside}{stopped}{after}"


def _waiting(collective: str, number: int) -> str:
    return f"waits {'for the result of' if collective.startswith(_WAIT) else 'in'} {_numbered(collective, number)}"


def _numbered(collective: str, number: int) -> str:
    """`collective #3 all_reduce`; a work that no collective of torch.distributed made has no number."""
    name = collective.removeprefix(_WAIT)
    return f"collective #{number} {name}" if number else name


def _rank_report(rank: Body) -> RankReport:
    raised = Raised.of(rank["raised"]) if rank["raised"] else None
    return RankReport(
        rank=rank["rank"], phase=rank["phase"], exit=exit_text(rank["exit"]) if rank["exit"] is not None else None,
        stuck=None if rank["done"] or _failed(rank) else _place(rank), line=raised.line if raised else rank["line"],
        error=str(raised)[:600] if raised else clean(rank["violation"], 500) if rank["violation"] else None,
        peak_memory_bytes=rank["peak_memory_bytes"],
    )  # fmt: skip
