"""Which folders a C++ compiler reads, asked of the compiler itself: outside /usr nobody could guess them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

_PROGRAMS = ("cc1plus", "collect2", "as", "ld")
_FILES = ("libstdc++.so", "crtbeginS.o", "crti.o")


@functools.cache
def compiler_folders(compiler: str) -> tuple[Path, ...]:
    """Folders of the compiler, of the programs and libraries it calls for, and of its headers; links followed."""
    asked = [*(f"-print-prog-name={name}" for name in _PROGRAMS), *(f"-print-file-name={name}" for name in _FILES)]
    names = [_ask(compiler, question).stdout.strip() for question in asked]
    files = [Path(shutil.which(name) or name) for name in (compiler, *names) if name]
    known = [file for file in files if file.is_absolute()]  # a bare name is a file that the compiler has not got
    found = [path.parent for file in known for path in (file, file.resolve())] + _header_folders(compiler)
    return tuple(dict.fromkeys(path.resolve() for path in found if path.is_absolute()))


def _header_folders(compiler: str) -> list[Path]:
    log = _ask(compiler, "-E", "-v", "-x", "c++", os.devnull).stderr
    listed = log.split("search starts here:")[-1].split("End of search list")[0]
    return [Path(line.strip()) for line in listed.splitlines() if line.startswith(" ")]


def _ask(compiler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    plain = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    command = [compiler, *arguments]
    return subprocess.run(command, env=plain, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
