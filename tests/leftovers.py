"""What an evaluation could leave behind on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pkb_env.evaluator import Evaluator
from pkb_env.sandbox.launcher import OWNER


@dataclass(frozen=True)
class Leftovers:
    """Compared before and after: processes of ours, folders of boxes, POSIX and SysV shared memory, own descriptors."""

    boxes: int
    folders: tuple[str, ...]
    shared_memory: tuple[str, ...]
    segments: int
    descriptors: int

    @classmethod
    def now(cls, evaluator: Evaluator) -> Leftovers:
        folder = evaluator.machine().folder
        return cls(
            boxes=len(processes("pkb-rank")),
            folders=tuple(sorted(p.name for p in folder.iterdir())),
            shared_memory=tuple(sorted(os.listdir("/dev/shm"))),  # noqa: S108  looked at, not written
            segments=len(Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()),
            descriptors=len(os.listdir("/proc/self/fd")),
        )


def processes(name: str, owner: int | None = None) -> list[int]:
    """Every live process of that name (any, if empty) which `owner` (default: this process) had started; no zombies."""
    mark = f"{OWNER}={owner or os.getpid()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ours and (not name or f"({name})" in text) and text.rsplit(")", 1)[1].split()[0] not in "ZX":
                found.append(int(entry.name))
    return found
