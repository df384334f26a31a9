"""What evaluations leave on this machine, looked at from outside: processes, memory, files, descriptors, threads, ports.

A process is ours when it lies below this one, was seen there once, or carries our mark in its environment.
Not here: how much of it is too much (`soak`), load (`load`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from pkb_env.bench.soak import Footprint
from pkb_env.load import tree_seconds
from pkb_env.sandbox.launcher import OWNER

_INTERVAL_S = 0.2
_SHARED = Path("/dev/shm")  # noqa: S108  looked at, not written
_LISTENING = "0A"
_MIB = 1 << 20
_SUPERVISED = "pkb-"
"""How the names of processes begin that a zygote forked; the zygote itself has the interpreter's."""


class Watch:
    """Remembers every process that was seen below this one while a `with` block runs, by id and time of start."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="pkb-soak", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.below()

    def below(self) -> dict[int, str]:
        """Living processes below this one with their names."""
        found = {pid: stat for pid in tree_seconds(os.getpid()) if pid != os.getpid() and (stat := _stat(pid))}
        self._seen |= {pid: started for pid, (_, started) in found.items()}
        return {pid: name for pid, (name, _) in found.items()}

    def strays(self, below: dict[int, str]) -> list[str]:
        """Living processes of ours that are not below this one, each as `name id`."""
        mark, found = f"{OWNER}={os.getpid()}".encode(), []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            stat = _stat(pid) if pid not in below and pid != os.getpid() else None
            if stat and (self._seen.get(pid) == stat[1] or mark in _environment(pid)):
                found.append(f"{stat[0]} {pid}")
        return found

    def footprint(self, folder: Path | None = None) -> Footprint:
        """Now; `folder` is the evaluator's, if it still lives."""
        below = self.below()
        strays = self.strays(below)
        pids = [os.getpid(), *below, *(int(text.rpartition(" ")[2]) for text in strays)]
        return Footprint(
            at=time.monotonic(), names=tuple(sorted(below.values())), strays=tuple(strays),
            folders=tuple(sorted(path.name for path in folder.iterdir())) if folder and folder.is_dir() else (),
            shared=(*sorted(os.listdir(_SHARED)), *_segments()), descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")), ports=tuple(sorted(_ports(pids))),
            zygote=min(_zygotes(below), default=0), resident_mib=_resident(below),
        )  # fmt: skip


def _stat(pid: int) -> tuple[str, str] | None:
    """Name and time of start of a living process, in ticks since boot."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    columns = tail.split()
    return None if columns[0] in "ZX" else (head.partition("(")[2], columns[19])


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _resident(below: dict[int, str]) -> dict[str, float]:
    """MiB of this process, of the zygote and of the largest oracle."""
    found = {"this process": _resident_mib(os.getpid())}
    for kind, pids in {"zygote": _zygotes(below), "oracle": [pid for pid in below if below[pid] == "pkb-oracle"]}.items():
        found[kind] = max(map(_resident_mib, pids), default=0.0)
    return found


def _zygotes(below: dict[int, str]) -> list[int]:
    return [pid for pid, name in below.items() if not name.startswith(_SUPERVISED)]


def _resident_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGESIZE") / _MIB


def _segments() -> list[str]:
    """Segments of System V shared memory of this user."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()[1:]]
    return [f"segment {row[1]}" for row in rows if row[7] == str(os.getuid())]


def _ports(pids: list[int]) -> set[int]:
    """TCP ports that one of these processes listens on, in this process's network."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _table(name)]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING and row[9] in inodes}


def _table(name: str) -> list[str]:
    try:
        return Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []


def _sockets(pid: int) -> Iterator[str]:
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for entry in entries:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
