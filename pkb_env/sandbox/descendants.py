"""Ending everything below a process: its children, their children, and orphans that it adopted as child subreaper."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from pkb_env.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl


def adopt_orphans() -> None:
    """From now on, descendants whose parent ends become children of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill and reap until nothing is left; new ones that appear meanwhile are caught in the next round."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> list[int]:
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            found += [int(pid) for pid in file.read().split()]
    return found
