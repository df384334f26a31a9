"""Which folders a C++ or CUDA compiler reads, asked of the compiler itself: outside /usr nobody could guess them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PROGRAMS = ("cc1plus", "cc1", "collect2", "as", "ld")
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
    return run([compiler, *arguments])


@functools.cache
def nvcc_folders(nvcc: str) -> tuple[Path, ...]:
    """The root of a CUDA toolkit first, then what nvcc names outside of it; empty when this is no nvcc.  Links followed."""
    log = run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]).stderr
    root = re.search(r"^#\$ TOP=(.+)$", log, re.MULTILINE)
    if root is None:
        return ()
    settings = re.findall(r"^#\$ (?:CICC_PATH|NVVMIR_LIBRARY_DIR|\w*INCLUDES|LIBRARIES)=(.*)$", log, re.MULTILINE)
    named = [path for line in settings for path in re.findall(r'(?:^|-[IL]|")(/[^"\n]*)', line)]
    top, *rest = (Path(path.strip()).resolve() for path in (root[1], *named))
    return (top, *dict.fromkeys(path for path in rest if top not in path.parents))


def without_folders(log: str, limit: int) -> str:
    """A log with the last part of every absolute path only, cut to `limit` characters."""
    log = re.sub(r"(?<![\w.])/(?:[^\s:'\"()/]+/)+", "", log)
    return log if len(log) <= limit else log[:limit] + f"\n... {len(log) - limit} more characters"


def run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a trusted compiler in a plain environment, with nothing to read from."""
    plain = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": tempfile.gettempdir()}
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
