"""A folder of solution files as a policy: each file is one sample of its problem.

Names that are known, for problem 1, `allreduce`: `allreduce.py`, `allreduce_2.py`, the public benchmark's `1_allreduce.py` and
`1_allreduce_cuda.py`, and ours, `p001_allreduce.py`; in the folder itself or in folders below it, one for each sample, say.
Samples are numbered in the order of folders, of the numbers in names, of names.  Any other file is left out, which one warning
tells; so is a file whose name says that it is written for another backend.

Not here: whether a file holds a candidate (`submission`).
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import problems
from pkb_env import backends
from pkb_env.errors import UsageError
from pkb_env.policies import Ask, Policy, Sampling

_NAMED = 5
"""So many files that are left out are named, the rest is counted."""


class Folder:
    """Files below a folder.

    Raises:
        UsageError: no such folder, or no file in it that is named after a problem.
    """

    turns = False

    def __init__(self, folder: Path, backend: str) -> None:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {str(folder)!r}; folder:PATH takes one with solution files")
        self.folder = folder
        self.files, self.left_out = _solutions(folder, backend)
        if not self.files:
            wanted = f"a problem and fit for backend {backend!r}, such as allreduce.py or 1_allreduce_{backend}.py"
            raise UsageError(f"no file in {folder} is named after {wanted}{self._rest()}")
        if self.left_out:
            warnings.warn(f"left out of {folder}{self._rest()}", RuntimeWarning, stacklevel=2)

    def setting(self) -> dict[str, Any]:
        """Path, contents, and the number of samples of the problem that has most."""
        digest = hashlib.sha256()
        for slug, paths in sorted(self.files.items()):
            for path in paths:
                digest.update(f"{slug} {path.stat().st_size} ".encode() + path.read_bytes())
        most = max(map(len, self.files.values()))
        return {"kind": "folder", "path": str(self.folder), "contents": digest.hexdigest(), "most": most}

    def draw(self, asks: Sequence[Ask]) -> Iterator[tuple[Ask, str]]:
        """The files; a sample that has none is left out."""
        for ask in asks:
            files = self.files.get(ask.problem, [])
            if ask.turn == 0 and ask.sample < len(files):
                yield ask, files[ask.sample].read_bytes().decode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Nothing is open."""

    def _rest(self) -> str:
        names = [f"{path.relative_to(self.folder)} ({why})" for path, why in self.left_out[:_NAMED]]
        more = [f"{len(self.left_out) - _NAMED} more"] if len(self.left_out) > _NAMED else []
        return f": {', '.join(names + more)}" if names else ""


def open_policy(rest: str, sampling: Sampling, backend: str) -> Policy:  # noqa: ARG001
    """The folder at a path."""
    return Folder(Path(rest), backend)


def _solutions(folder: Path, backend: str) -> tuple[dict[str, list[Path]], list[tuple[Path, str]]]:
    """Files by problem, in the order of their samples; and those that are left out, with the reason."""
    found, left_out = defaultdict[str, list[tuple[int, Path]]](list), list[tuple[Path, str]]()
    patterns = {slug: _pattern(slug, problems.load(slug).number) for slug in problems.names()}
    for path in sorted(_files(folder), key=lambda path: _natural(path.relative_to(folder))):
        slug, match = _named_after(path, patterns)
        if match is None:
            left_out.append((path, "named after no problem"))
        elif match["backend"] not in (None, backend):
            left_out.append((path, f"for backend {match['backend']}"))
        else:
            found[slug].append((int(match["first"] or match["last"] or 0), path))
    ordered = {
        slug: [path for _, path in sorted(each, key=lambda e: (_natural(e[1].parent), e[0]))] for slug, each in found.items()
    }
    return ordered, left_out


def _files(folder: Path) -> list[Path]:
    below = [path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file()]
    return [folder.joinpath(*parts) for parts in below if not any(p.startswith(".") or p == "__pycache__" for p in parts)]


def _pattern(slug: str, number: int) -> re.Pattern[str]:
    ends = rf"(?:_(?P<first>\d+))?(?:_(?P<backend>{'|'.join(backends.NAMES)}))?(?:_(?P<last>\d+))?"
    return re.compile(rf"(?:p?0*{number}_)?{re.escape(slug)}{ends}\.py")


def _named_after(path: Path, patterns: dict[str, re.Pattern[str]]) -> tuple[str, re.Match[str] | None]:
    hits = ((slug, pattern.fullmatch(path.name)) for slug, pattern in patterns.items())
    return next(((slug, match) for slug, match in hits if match), ("", None))


def _natural(path: Path) -> list[list[tuple[int, str]]]:
    """Numbers inside names in their own order: sample_2 before sample_10."""
    return [[(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)] for name in path.parts]
