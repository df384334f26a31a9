"""How many cores this machine keeps busy, and how many of them are not ours: over a bench, and over one timed stage.

Busy is read from `/proc/stat` (the cores this process may use; time stolen by a hypervisor counts as busy).  For a bench ours is
this process and its descendants, sampled while they live, because a box that ends hands its CPU time to nobody.  What a process
uses between its last sample and its end therefore counts as others', whose load is overstated by some hundredths of a core.
Not here: which load is too much (`null`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_INTERVAL_S = 0.1
"""A sample takes about a millisecond; more of them would themselves be load."""
_CPUCLOCK_SCHED = 2
_TOLERATED = 0.25
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of `/proc/stat`: user, nice, system, irq, softirq, steal."""


@dataclass(frozen=True)
class Load:
    """Averages over a stretch of time."""

    seconds: float
    busy: float
    """Cores busy with anything."""
    own: float
    """Cores busy with this process and its descendants."""

    @property
    def other(self) -> float:
        """Cores busy with what others do."""
        return max(0.0, self.busy - self.own)


class Meter:
    """Measures the load while a `with` block runs.

    Example:
        >>> with Meter() as meter:
        ...     total = sum(range(1000))
        >>> meter.load.other >= 0
        True
    """

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._stop = threading.Event()
        self.load = Load(0.0, 0.0, 0.0)

    def __enter__(self) -> Self:
        self._own = tree_seconds(os.getpid())
        self._before, self._busy, self._start = sum(self._own.values()), busy_seconds(), time.monotonic()
        self._thread = threading.Thread(target=self._sample, name="pkb-load", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._own |= tree_seconds(os.getpid())
        seconds = max(time.monotonic() - self._start, 1e-9)
        own = sum(self._own.values()) - self._before
        self.load = Load(seconds, (busy_seconds() - self._busy) / seconds, own / seconds)

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._own |= tree_seconds(os.getpid())


class Others:
    """Cores that neither this thread nor the processes at and below `roots` keep busy while a `with` block runs."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots, self.cores = roots, 0.0

    def __enter__(self) -> Self:
        self._start, self._before = time.monotonic(), self._seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cores = max(0.0, self._seconds() - self._before) / max(time.monotonic() - self._start, 1e-9)

    def _seconds(self) -> float:
        ours = sum(_precise_seconds(pid) for root in self._roots for pid in tree_seconds(root)) + time.thread_time()
        return busy_seconds() - ours


def disturbing(others: float, world_size: int) -> bool:
    """Whether so many cores busy with others are too many beside ranks with two busy threads each."""
    spare = max(0, len(os.sched_getaffinity(0)) - 2 * world_size)
    return others > _TOLERATED + spare / 2


def _precise_seconds(pid: int) -> float:
    """CPU seconds of a process by its clock, to the ns where `/proc` counts ticks."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def busy_seconds() -> float:
    """Seconds that the cores this process may use have been busy, all together, since the machine started."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    with open("/proc/stat", encoding="ascii") as file:
        rows = [line.split() for line in file if line.startswith("cpu")]
    return sum(int(row[1 + i]) for row in rows if row[0] in names for i in _BUSY) / _TICKS_PER_S


def tree_seconds(root: int) -> dict[int, float]:
    """CPU seconds of a process and of each of its living descendants, by process id."""
    found: dict[int, float] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        try:
            found[pid] = _seconds(pid)
            todo += [child for task in os.listdir(f"/proc/{pid}/task") for child in _children(pid, task)]
        except OSError:  # it ended meanwhile
            continue
    return found


def _seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        columns = file.read().rpartition(")")[2].split()
    return (int(columns[11]) + int(columns[12])) / _TICKS_PER_S


def _children(pid: int, task: str) -> list[int]:
    with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]
