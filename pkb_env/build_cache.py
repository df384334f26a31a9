"""The folder of built libraries, by content: found again, and kept from growing without end.

Boxes hold links of their own, so what is removed here is missed by nobody who runs.
Not here: building (`broker`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MOST_BYTES = 4 << 30
"""A candidate may ask for libraries of 64 MiB by the dozen; without an end they would fill the disk of everybody."""
_LEFT_SHARE = 0.75


def find(library: Path) -> bool:
    """Whether it is there; then it is the one used last."""
    try:
        os.utime(library)
    except FileNotFoundError:
        return False
    return True


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Above so many bytes, remove the libraries whose use is longest ago until a quarter of the room is free."""
    libraries = sorted(_sized(folder))
    total = sum(size for _, size, _ in libraries)
    if total <= most_bytes:
        return
    for _, size, path in libraries:
        if total <= _LEFT_SHARE * most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def _sized(folder: Path) -> list[tuple[float, int, Path]]:
    found = []
    for path in folder.glob("*.so"):
        with contextlib.suppress(FileNotFoundError):
            seen = path.stat()
            found.append((seen.st_mtime, seen.st_size, path))
    return found
