"""The first process of a group: puts up the walls, forks the ranks, tells the supervisor how they end.

It runs inside the walls and nothing of the candidate's; where process-id name spaces exist it is pid 1, so that its end
is the end of every process inside.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import astuple
from typing import NoReturn

from pkb_env.box.worker import Lines
from pkb_env.sandbox.limits import close_all_but, die_with_parent

_ExitNotice = struct.Struct("<ii")
"""Rank and exit code, negative for a signal."""


RANK_NEVER_BEGAN = 70
"""Exit code of a rank whose process failed outside of the candidate's code."""


def run_init(
    confine: Callable[[], None], rank_main: Callable[[int, Lines], None], lines: list[Lines], notices: int
) -> NoReturn:
    """Fork one process per entry of `lines` and report their ends on `notices`."""
    try:
        die_with_parent(None)
        os.setsid()
        confine()
        ranks = {_fork_rank(rank_main, rank, line): rank for rank, line in enumerate(lines)}
        close_all_but({notices})
        ctypes.CDLL(None).prctl(15, b"pkb-init", 0, 0, 0)
        _reap(ranks, notices)
    except BaseException:  # noqa: BLE001  a forked child must never return into its parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _fork_rank(rank_main: Callable[[int, Lines], None], rank: int, line: Lines) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        rank_main(rank, line)
    except BaseException as error:  # noqa: BLE001  what it prints may be shown to a policy: no traceback of ours
        os.write(2, f"the process of rank {rank} failed: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(RANK_NEVER_BEGAN)


def own_lines(line: Lines) -> set[int]:
    return set(astuple(line))


def _reap(ranks: dict[int, int], notices: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if pid in ranks:
            os.write(notices, _ExitNotice.pack(ranks[pid], os.waitstatus_to_exitcode(status)))


def read_ends(notices: int) -> list[tuple[int, int]] | None:
    """Supervisor: (rank, exit code) of those that have ended since the last time; None when nobody can tell any more."""
    try:
        data = os.read(notices, _ExitNotice.size * 64)
    except BlockingIOError:
        return []
    return list(_ExitNotice.iter_unpack(data)) if data else None
