"""Problems from somebody else's folder: the public benchmark's checkout, or files after `problems.base`.

A pack's problems are called `pack/slug`; `pack` is the name it was loaded under or, starting with '/', '.' or '~', the path of
its folder, which is then loaded.  No code of a pack runs in a process that calls this: see `told` and `inside`.
Not here: names of the problems of this repository (`problems`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from problems import UnknownProblem, pick
from problems.base import Problem
from problems.packs import caller, told
from problems.packs.layout import Folder, PackError, look_at, name_of

__all__ = ["Pack", "PackError", "find", "find_plain", "load_pack", "loaded"]


@dataclass(frozen=True)
class Pack:
    """A loaded pack."""

    name: str
    folder: Folder
    problems: Mapping[str, Problem]
    """By slug; problems of files that cannot be used are not in it."""
    broken: Mapping[str, str]
    """Slug -> why its file cannot be used."""

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.root

    def names(self) -> list[str]:
        """Full names of all problems that can be used, by number."""
        return [f"{self.name}/{entry.slug}" for entry in self.folder.entries if entry.slug in self.problems]

    def load(self, name: str) -> Problem:
        """The problem of that slug, number, file name or unique prefix of a slug.

        Raises:
            UnknownProblem: nothing, or more than one thing, is meant.
            PackError: its file cannot be used, or has changed since the pack was loaded.
        """
        entry = self.folder.entry(pick(name, [(e.number, e.slug, e.file.stem) for e in self.folder.entries], self.name))
        if entry.slug in self.broken:
            raise PackError(f"problem {self.name}/{entry.slug} cannot be used: {self.broken[entry.slug]}")
        problem = self.problems[entry.slug]
        if self.folder.version(entry.slug) != problem.version:
            raise PackError(f"the files of {problem.slug} have changed since its pack was loaded; load it again")
        return problem


_loaded: dict[str, Pack] = {}
_lock = threading.Lock()


def load_pack(path: str | os.PathLike[str], name: str | None = None) -> Pack:
    """Make the problems of a folder known in this process, as `name/slug`; again, where its files have changed.

    Args:
        path: the folder; it is used in place.
        name: the folder's own name if None.

    Raises:
        PackError: it is no pack, nothing in it can be used, or another pack has that name.
    """
    folder = look_at(path)
    name = name_of(folder, name)
    known = _loaded.get(name)
    if known is not None and known.path != folder.root:
        raise PackError(f"a pack {name!r} is loaded from {known.path} already; give this one another name")
    versions = {entry.slug: folder.version(entry.slug) for entry in folder.entries}
    if known is not None and known.folder == folder and {s: p.version for s, p in known.problems.items()} == versions:
        return known
    pack = _asked(folder, name, versions)
    with _lock:
        _loaded[name] = pack
    return pack


def _asked(folder: Folder, name: str, versions: Mapping[str, int]) -> Pack:
    answers, found = told.ask(folder), dict[str, Problem]()
    broken = dict(answers.broken)
    for slug, body in answers.told.items():
        try:
            found[slug] = caller.problem(body, name, versions[slug])
        except PackError as error:
            broken[slug] = f"{folder.entry(slug).file}: {error}"
    if not found:
        raise PackError(f"no problem of pack {folder.root} can be used; the first: {next(iter(broken.values()))}")
    return Pack(name, folder, found, broken)


def loaded() -> list[Pack]:
    """All that were loaded in this process."""
    with _lock:
        return list(_loaded.values())


def find(name: str) -> Problem:
    """The problem called `pack/slug`.

    Raises:
        UnknownProblem: no such pack, or no such problem in it.
    """
    where, _, slug = name.rpartition("/")
    return of(where).load(slug)


def of(where: str) -> Pack:
    """The pack of that name, or at that path.

    Raises:
        UnknownProblem: there is none.
    """
    if where.startswith(("/", ".", "~")):
        root = Path(where).expanduser().resolve()
        same = [pack for pack in loaded() if pack.path == root]
        return same[0] if same else load_pack(where)
    known = {pack.name: pack for pack in loaded()}
    if where not in known:
        there = f"loaded are {', '.join(known)}" if known else "none is loaded"
        raise UnknownProblem(f"there is no pack {where!r}; {there} (problems.load_pack(path), `--pack PATH`)")
    return known[where]


def find_plain(slug: str) -> Problem | None:
    """The problem of that slug in whatever pack has it; None where none has.

    Raises:
        UnknownProblem: more than one pack has it.
    """
    having = [pack for pack in loaded() if any(entry.slug == slug for entry in pack.folder.entries)]
    if len(having) > 1:
        raise UnknownProblem(f"problem {slug!r} may mean any of {', '.join(f'{pack.name}/{slug}' for pack in having)}")
    return having[0].load(slug) if having else None
