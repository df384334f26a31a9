"""What a group's ranks were doing when it failed or ran past its deadline, as data.

Sources: exit codes from init, exceptions told by the ranks, Python stacks dumped on SIGUSR1, each rank's page (phase,
collective, what symmetric memory waits for) and the kernel's process state.  Only the words of a report depend on what
a rank wrote itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import Any

from pkb_env.box import wait_record
from pkb_env.box.worker import CANDIDATE
from pkb_env.sandbox.group import Group
from pkb_env.sandbox.rank import Rank

_DUMP_WAIT_S = 0.8
_FRAME = re.compile(r'File "([^"]+)", line (\d{1,6}) in ([\w<>.\\]{1,100})')
"""A candidate can write into its dump as well: neither number nor name may be of any length."""
_THREAD = re.compile(r"\n(?=(?:Thread|Current thread) 0x)")


def report(group: Group, stage: str, trouble: str) -> dict[str, Any]:
    """The message `failed`: stage (`load`, `call`), trouble (`failed`, `deadline`), one entry per rank."""
    ranks = [_describe(rank) for rank in group.ranks]
    if trouble == "deadline":
        _ask_for_stacks(group)
        ranks = [described | _place(rank) for described, rank in zip(ranks, group.ranks, strict=True)]
    else:
        ranks = [r | _place(rank) if rank.exit is not None else r for r, rank in zip(ranks, group.ranks, strict=True)]
    return {"event": "failed", "stage": stage, "trouble": trouble, "compiling": sorted(group.compiling), "ranks": ranks}


def peak_memory(group: Group) -> list[int | None]:
    """Largest resident set of each rank in bytes."""
    return [_peak(rank.pid) for rank in group.ranks]


def _ask_for_stacks(group: Group) -> None:
    group.resume()
    waiting = [r for r in group.ranks if not r.failed and r.pid is not None and r.finished_ns is None]
    for rank in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid or 0, signal.SIGUSR1)
    end = time.monotonic() + _DUMP_WAIT_S
    while time.monotonic() < end and any(_can_still_dump(rank) for rank in waiting):
        time.sleep(0.005)
    time.sleep(0.01)


def _can_still_dump(rank: Rank) -> bool:
    return not os.fstat(rank.dump).st_size and rank.state() not in ("T", "Z", "X", "")


def _describe(rank: Rank) -> dict[str, Any]:
    status = rank.page.status()
    return {
        "rank": rank.rank, "began": rank.greeted, "phase": status.phase, "ready": rank.ready is not None,
        "done": rank.finished_ns is not None,
        "exit": rank.exit, "raised": rank.raised, "violation": rank.violation, "state": rank.state(),
        "line": None, "function": None, "inside": None,
        "collective": status.collective if status.inside else "", "after": "" if status.inside else status.collective,
        "sequence": status.sequence, "waits": str(wait_record.read(rank.page.wait_record()) or ""),
        "peak_memory_bytes": _peak(rank.pid), "printed": rank.printed.decode("utf-8", "replace"), "failed_at": rank.failed_at,
    }  # fmt: skip


def _place(rank: Rank) -> dict[str, Any]:
    """Where a rank's stack was; asking for it may have woken the rank, so all else was read before."""
    candidate, innermost = _stack(os.pread(rank.dump, 200_000, 0).decode("utf-8", "replace"))
    line, function = candidate or (None, None)
    return {"line": line, "function": function, "inside": innermost}


def _stack(dump: str) -> tuple[tuple[int, str] | None, str | None]:
    """((line, function) of the candidate's innermost frame, name of the innermost frame called from it)."""
    for block in _THREAD.split(dump):
        frames = _FRAME.findall(block)
        at = next((i for i, frame in enumerate(frames) if os.path.basename(frame[0]) == CANDIDATE), None)
        if at is not None:
            return (int(frames[at][1]), frames[at][2]), frames[at - 1][2] if at else None
    return None, None


def _peak(pid: int | None) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        found = re.search(r"VmHWM:\s+(\d+) kB", file.read())
        return int(found[1]) * 1024 if found else None
    return None
