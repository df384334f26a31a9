"""Triton in a box that cannot start a program: what it would run `ptxas` or a C compiler for, the broker builds.

All else Triton does in this process, as everywhere.  Its own settings are used where it has one; where it has none, its modules
see a `subprocess` that knows the assembler only.  Nothing of this is a wall: a candidate that undoes it cannot build.
Not here: where builds go (`compile`), how they are made (the broker outside).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import linecache
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .compile import CompileError, build
from .worker import CANDIDATE


class _Programs:
    """What Triton's modules see as `subprocess`."""

    CalledProcessError, STDOUT, DEVNULL = subprocess.CalledProcessError, subprocess.STDOUT, subprocess.DEVNULL

    def __init__(self, versions: Mapping[str, str]) -> None:
        """`versions`: name of an assembler -> all that it prints for `--version`."""
        self._versions = versions

    def check_output(self, command: Sequence[str], **_settings: Any) -> bytes:
        """What an assembler prints of its version.

        Raises:
            FileNotFoundError: anything else is asked.
        """
        name = os.path.basename(command[0])
        if list(command[1:]) != ["--version"] or name not in self._versions:
            raise FileNotFoundError(errno.ENOENT, "a box starts no programs", command[0])
        return self._versions[name].encode()

    def run(self, command: Sequence[str], **_settings: Any) -> None:
        """Assemble a kernel: `[ptxas, flags ..., source, "-o", output]`.

        Raises:
            CompileError: with the assembler's log.
        """
        *flags, source, _, output = command[1:]
        kernel = Path(source).read_text(encoding="utf-8")
        body = {"kind": "ptx", "source": kernel, "flags": flags}
        try:
            shutil.copyfile(build(body, (repr(body),)), output)
        except CompileError as error:
            raise CompileError(_placed(error.log, kernel), error.reason) from None


def _placed(log: str, ptx: str) -> str:
    """The assembler's log, below the line of the candidate that its first error comes from, if the kernel's text tells."""
    file = re.search(rf'^\s*\.file\s+(\d+) "(?:[^"]*/)?{CANDIDATE}"', ptx, re.MULTILINE)
    at = re.search(r"line (\d+); error", log)
    if file is None or at is None:
        return log
    above = "\n".join(ptx.splitlines()[: int(at[1])])
    lines = re.findall(rf"^\s*\.loc\s+{file[1]} (\d+)", above, re.MULTILINE)
    return f"{CANDIDATE}:{lines[-1]}: error: in what this line became\n{log}" if lines else log


def _launcher(_name: str, source: str, *_folders_and_libraries: Any) -> str:
    """Path of the module that Triton wrote in C to launch a kernel, or to ask the driver."""
    body = {"kind": "launcher", "source": Path(source).read_text(encoding="utf-8"), "flags": []}
    return build(body, (repr(body),))


def install(versions: Mapping[str, str]) -> None:
    """Let Triton, which has been imported, build through the broker; `versions` as for `_Programs`.

    Modules are not linked with the driver's library, whose place only `ldconfig` knows: its names are made known here.
    """
    os.environ.setdefault("TRITON_LIBCUDA_PATH", "/")
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    modules: dict[str, Any] = sys.modules
    modules["triton.knobs"].subprocess = modules["triton.backends.nvidia.compiler"].subprocess = _Programs(versions)
    modules["triton.knobs"].build.impl = _launcher
    modules["triton.compiler.errors"].CompilationError.log = property(_log)


def _log(error: Any) -> str:
    """A kernel that Triton refuses, as compilers say it: `candidate.py:LINE: error: ...`, of the innermost function."""
    while hasattr(error.__cause__, "error_message"):
        error = error.__cause__
    text = "".join(linecache.getlines(CANDIDATE))
    above = text.find(error.src) if error.src else -1
    message = error.error_message or type(error).__name__
    if above < 0 or not hasattr(error.node, "lineno"):
        return f"{CANDIDATE}: error: {message}"
    line = text.count("\n", 0, above) + error.node.lineno
    return f"{CANDIDATE}:{line}: error: {message}\n    {text.splitlines()[line - 1].strip()}"
