"""The processes of an evaluation, found from outside by what /proc says, and by which part of the harness they are.

Not here: killing them (`test_kills`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leftovers import processes


@dataclass(frozen=True)
class Process:
    """A process by number and by when it began, so that a later one with the same number is another one."""

    pid: int
    began: int
    parent: int
    name: str
    state: str

    @property
    def lives(self) -> bool:
        now = look(self.pid)
        return now is not None and now.began == self.began and now.state not in "ZX"


def look(pid: int) -> Process | None:
    """The process with this number, if there is one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid, int(fields[19]), int(fields[1]), text.partition("(")[2].rpartition(")")[0], fields[0])


def everybody() -> list[Process]:
    return [p for entry in os.listdir("/proc") if entry.isdigit() and (p := look(int(entry))) is not None]


def tree(root: int) -> list[Process]:
    """A process and all below it."""
    found, everyone = [p for p in [look(root)] if p is not None], everybody()
    for each in found:  # grows while it is walked
        found += [p for p in everyone if p.parent == each.pid]
    return found


def still_there(known: Iterable[Process], seconds: float) -> list[Process]:
    """Which of them live on after so many seconds; returns as soon as none does."""
    end = time.monotonic() + seconds
    while (left := [p for p in known if p.lives]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _folder(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def _ranks(owner: int, wanted: Callable[[str], bool]) -> list[int]:
    return [pid for pid in processes("pkb-rank", owner) if wanted(_folder(pid))]


def _makers(owner: int) -> list[int]:
    return _ranks(owner, lambda folder: "/box-" not in folder)


def _candidates(owner: int) -> list[int]:
    return _ranks(owner, lambda folder: "/box-" in folder and "/oracle-" not in folder)


def _references(owner: int) -> list[int]:
    return _ranks(owner, lambda folder: "/box-" in folder and "/oracle-" in folder)


def _supervisors(ranks: Iterable[int]) -> Iterator[int]:
    """Whoever started the process that started these."""
    for pid in ranks:
        init = look(look(pid).parent) if look(pid) else None  # type: ignore[union-attr]
        if init is not None and init.name == "pkb-init":
            yield init.parent


def _zygotes(owner: int) -> list[int]:
    return [p.pid for p in everybody() if p.parent == owner and b"pkb_env.sandbox.zygote" in _command(p.pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


PARTS: dict[str, Callable[[int], list[int]]] = {
    "zygote": _zygotes,
    "oracle": lambda owner: processes("pkb-oracle", owner),
    "maker": _makers,
    "supervisor of the box": lambda owner: list(_supervisors(_candidates(owner))),
    "supervisor of the reference": lambda owner: list(_supervisors(_references(owner))),
    "rank": _candidates,
    "supervisor of the compiler": lambda owner: processes("pkb-compile", owner),
    "compiler": lambda owner: [p.pid for pid in processes("pkb-compile", owner) for p in tree(pid)[1:]],
}
"""Part of the harness -> the processes that are it, of the evaluator in the process `owner`."""


def of_owner(owner: int) -> list[Process]:
    """Everything that a process which evaluates has started, itself left out; also what no longer belongs to it."""
    marked = {p.pid: p for pid in processes("", owner) if (p := look(pid)) is not None}
    below = {p.pid: p for pid in marked for p in tree(pid)}
    return [p for p in (marked | below).values() if p.pid != owner]
