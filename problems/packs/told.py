"""What a pack says about its problems, asked of a process of its own: no line of a pack runs in the caller.

The process has a deadline for each file; where it ends before its time the file at hand is broken and another process goes on
with the next one.  What it says is plain JSON, and every type in it is checked before it is used.
Not here: that process (`describe`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Self

from problems.packs.layout import Folder, PackError

START_S, FILE_S = 90.0, 30.0
"""Seconds until the process must say its first word, and for one file."""
_MOST_BYTES = 64 << 20
_SHOWN = 300
_SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PKB_NO_GYM": "1"}
Body = dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """By slug: what each problem tells, and why others cannot be used."""

    told: dict[str, Body]
    broken: dict[str, str]


def ask(folder: Folder) -> Answers:
    """What all problems of a pack tell.

    Raises:
        PackError: none of them can be used, for a reason of the pack's own.
    """
    answers = Answers({}, {})
    left = [entry.slug for entry in folder.entries]
    while left:
        _ask(folder, left, answers)
        still = [slug for slug in left if slug not in answers.told and slug not in answers.broken]
        if still == left:
            raise PackError(f"pack {folder.root}: the process that reads it ended without a word about {left[0]}")
        left = still
    return answers


def _ask(folder: Folder, slugs: list[str], answers: Answers) -> None:
    """One process for as many as it survives."""
    reading = ""
    with tempfile.TemporaryFile() as errors, _Process(folder, slugs, errors) as process:
        for body in process.lines():
            if "unusable" in body:
                raise PackError(str(body["unusable"]))
            if "end" in body:
                return
            reading = str(body.get("reading", reading))
            if "broken" in body:
                answers.broken[reading] = str(body["broken"])
            elif "told" in body:
                answers.told[reading] = body["told"]
        why = f"{process.ended()}{_last_words(errors)}"
    if reading not in slugs:
        raise PackError(f"pack {folder.root}: the process that reads it {why}" + (f" in {reading}" if reading else ""))
    answers.told.pop(reading, None)
    answers.broken[reading] = f"{folder.entry(reading).file}: the process that read it {why}"


class _Process:
    """The process, its lines, and how it ended."""

    def __init__(self, folder: Folder, slugs: list[str], errors: IO[bytes]) -> None:
        self._reader, writer = os.pipe()
        self._late = self._garbage = False
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "problems.packs.describe", str(writer)], stdin=subprocess.PIPE, stdout=errors, stderr=errors,
            pass_fds=[writer], start_new_session=True, env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
        )  # fmt: skip
        os.close(writer)
        assert self._process.stdin is not None
        with self._process.stdin as order:
            order.write(json.dumps({"path": str(folder.root), "slugs": slugs}).encode())

    def lines(self) -> Iterator[Body]:
        """What it says, until it ends, is late or says something else."""
        buffer, total, deadline = b"", 0, time.monotonic() + START_S
        while True:
            if not select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._late = True
                return
            data = os.read(self._reader, 1 << 16)
            total += len(data)
            if not data or total > _MOST_BYTES:
                self._garbage = bool(data)
                return
            *whole, buffer = (buffer + data).split(b"\n")
            for line in whole:
                try:
                    body = json.loads(line)
                except ValueError:
                    body = None
                if not isinstance(body, dict):
                    self._garbage = True
                    return
                yield body
            deadline = time.monotonic() + FILE_S if whole else deadline

    def ended(self) -> str:
        """How, in words."""
        if self._late:
            return "did not answer in time"
        if self._garbage:
            return "said what nobody asked for"
        code = self._process.wait()
        return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None or self._late:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reader)


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return f" ({lines[-1][:_SHOWN]})" if lines else ""
