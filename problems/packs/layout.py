"""What kind of pack a folder is, which files hold its problems, and what the identity of each one depends on.

Files are listed and hashed here, never run.
Not here: what is in them (`told`, `inside`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from problems import UnknownProblem

INPUTS = Path("utils/input_output_tensors.py")
MAKER = "create_input_tensor"
_PUBLIC, _OURS = re.compile(r"(\d{1,4})_(\w+)"), re.compile(r"p(\d{3})_(\w+)")
_REFERENCES = "reference"
_NAME = re.compile(r"(?!(?:all|train|validation|test|rung-\d+)$)[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Sets of problems are called the others."""
_MOST_FILES, _MOST_BYTES = 2000, 64 << 20
"""Of what a problem's identity depends on; a folder with more is hardly a pack."""


class PackError(UnknownProblem):
    """A folder is no pack, or a problem of it cannot be had; says what came, what was looked for and what to do."""


@dataclass(frozen=True)
class Entry:
    """One problem's file."""

    number: int
    slug: str
    file: Path


@dataclass(frozen=True)
class Folder:
    """A pack as files."""

    root: Path
    public: bool
    """Whether it is laid out like the public benchmark; else it is a folder of files after `problems.base`."""
    entries: tuple[Entry, ...]

    def entry(self, slug: str) -> Entry:
        """The file of a problem.

        Raises:
            PackError: there is none (any more).
        """
        for entry in self.entries:
            if entry.slug == slug:
                return entry
        raise PackError(f"pack {self.root} has no problem {slug!r}")

    def version(self, slug: str) -> int:
        """A hash of all that a problem depends on: its own file, those it imports, and every file that is no problem's.

        Raises:
            PackError: a file cannot be read, or there are too many.
        """
        digest, total = hashlib.blake2b(digest_size=6), 0
        for file in sorted(self._needed(self.entry(slug).file)):
            content = _read(file)
            total += len(content)
            if total > _MOST_BYTES:
                raise PackError(f"{self.root}: more than {_MOST_BYTES >> 20} MiB belong to {slug!r}; keep data out of a pack")
            digest.update(f"{file.relative_to(self.root)}\0{len(content)}\0".encode() + content)
        return int.from_bytes(digest.digest(), "big")

    def _needed(self, file: Path) -> set[Path]:
        own = {entry.file.stem: entry.file for entry in self.entries}
        helpers = set(_files(self.root / INPUTS.parent if self.public else self.root)) - set(own.values())
        needed, todo = set(helpers), [file, *(helper for helper in helpers if helper.suffix == ".py")]
        while todo:
            now = todo.pop()
            needed.add(now)
            words = set(re.findall(r"\w+", _read(now).decode("utf-8", "replace")))
            todo += [other for stem, other in own.items() if stem in words and other not in needed]
        return needed


def look_at(path: str | os.PathLike[str]) -> Folder:
    """The pack in a folder.

    Raises:
        PackError: no such folder, or it is no pack.
    """
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        what = "is a file; a pack is a folder" if root.exists() else "does not exist"
        raise PackError(f"pack {os.fspath(path)} {what}")
    public, ours = _entries(root / _REFERENCES, _PUBLIC), _entries(root, _OURS)
    if public and (root / INPUTS).is_file():
        return Folder(root, public=True, entries=public)
    if ours:
        return Folder(root, public=False, entries=ours)
    found = f"has {_REFERENCES}/ with problems, but no {INPUTS}" if public else "is no pack"
    wanted = f"{_REFERENCES}/<id>_<slug>.py with {INPUTS} (the public benchmark), or pNNN_<slug>.py"
    raise PackError(f"folder {root} {found}; looked for {wanted}")


def name_of(folder: Folder, wanted: str | None) -> str:
    """The name that goes before the slugs of a pack: the folder's own unless another one is wanted.

    Raises:
        PackError: it cannot be part of a problem's name.
    """
    name = wanted or folder.root.name
    if not _NAME.fullmatch(name):
        raise PackError(f"{name!r} cannot be the name of a pack: letters, digits, '_', '-', '.', and no set's; give another one")
    return name


def _entries(folder: Path, pattern: re.Pattern[str]) -> tuple[Entry, ...]:
    matches = [(pattern.fullmatch(file.stem), file) for file in sorted(folder.glob("*.py"))]
    found = sorted((Entry(int(m[1]), m[2], file) for m, file in matches if m), key=lambda entry: (entry.number, entry.slug))
    slugs = [entry.slug for entry in found]
    if twice := sorted({slug for slug in slugs if slugs.count(slug) > 1}):
        raise PackError(f"{folder} has more than one file for {', '.join(twice)}; a slug names one problem")
    return tuple(found)


def _files(folder: Path) -> list[Path]:
    """Every file beneath a folder, without what is hidden or compiled."""
    found = []
    for file in _walk(folder):
        found.append(file)
        if len(found) > _MOST_FILES:
            raise PackError(f"{folder} holds more than {_MOST_FILES} files; a pack is a folder of problems and their helpers")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".") and each not in ("__pycache__", "venv")]
        yield from (Path(path, each) for each in files if not each.startswith(".") and not each.endswith(".pyc"))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise PackError(f"{file} cannot be read: {error.strerror}") from None
