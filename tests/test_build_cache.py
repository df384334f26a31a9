"""The folder of built libraries: what was used longest ago goes first, and only when there is too much."""

from __future__ import annotations

import os
from pathlib import Path

from pkb_env import build_cache


def filled(folder: Path) -> list[Path]:
    """Ten libraries of 100 bytes, the first one the oldest."""
    libraries = [folder / f"{i}.so" for i in range(10)]
    for age, library in enumerate(libraries):
        library.write_bytes(bytes(100))
        os.utime(library, (age, age))
    return libraries


def test_nothing_goes_while_there_is_room(tmp_path: Path) -> None:
    libraries = filled(tmp_path)
    build_cache.trim(tmp_path, 1000)
    assert all(library.exists() for library in libraries)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    libraries = filled(tmp_path)
    assert build_cache.find(libraries[0])
    assert not build_cache.find(tmp_path / "another.so")
    build_cache.trim(tmp_path, 999)
    assert [library.exists() for library in libraries] == [True, False, False, False] + [True] * 6
