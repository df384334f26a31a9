"""One machine, many evaluations: untimed stages share it, a timed stage has it alone.

File locks, so that independent processes of one user agree too; a lock falls open when its holder dies.  A turnstile
keeps a waiting timed stage from being overtaken for ever.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pkb_env.errors import HarnessError

_POLL_S = 0.002


class MachineLock:
    """Shared or exclusive use of this machine's cores.

    Raises:
        HarnessError: the folder for the locks belongs to somebody else.
    """

    def __init__(self, folder: Path | None = None) -> None:
        root = folder or Path(tempfile.gettempdir()) / f"pkb-locks-{os.getuid()}"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.getuid():
            raise HarnessError(f"{root} belongs to another user, so it cannot hold this user's locks: remove it or set TMPDIR")
        self._turnstile, self._machine, self._compilers = root / "turnstile", root / "machine", root / "compilers"

    @contextmanager
    def shared(self, check: Callable[[], None]) -> Iterator[Share]:
        """Hold the machine together with other untimed stages; `check` may raise while waiting."""
        share = Share(self._turnstile, self._machine, check)
        share.take()
        try:
            yield share
        finally:
            share.give_back()

    @contextmanager
    def alone(self, check: Callable[[], None]) -> Iterator[None]:
        """Hold the machine alone: no other stage, and no compiler that outlived the stage it ran for."""
        ways = self._turnstile, self._machine, self._compilers
        with ExitStack() as held:
            for way in ways:
                held.enter_context(_held(way, fcntl.LOCK_EX, check))
            yield

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A compiler runs, for a stage that has its share."""
        with _held(self._compilers, fcntl.LOCK_SH, lambda: None):
            yield


class Share:
    """One untimed stage's part of the machine; it can step aside for those who wait to have the machine alone."""

    def __init__(self, turnstile: Path, machine: Path, check: Callable[[], None]) -> None:
        self._turnstile, self._machine, self._check, self._fd = turnstile, machine, check, -1

    def take(self) -> None:
        with _held(self._turnstile, fcntl.LOCK_EX, self._check):
            self._fd = _acquire(self._machine, fcntl.LOCK_SH, self._check)

    def give_back(self) -> None:
        if self._fd >= 0:
            _release(self._fd)
            self._fd = -1

    def wanted(self) -> bool:
        """Whether somebody waits to have the machine alone."""
        fd = os.open(self._turnstile, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def step_aside(self) -> None:
        """Let them go first; whoever calls this keeps no core busy meanwhile."""
        self.give_back()
        self.take()


@contextmanager
def _held(path: Path, kind: int, check: Callable[[], None]) -> Iterator[None]:
    fd = _acquire(path, kind, check)
    try:
        yield
    finally:
        _release(fd)


def _release(fd: int) -> None:
    # Closing alone would leave the lock with a process that was forked meanwhile and inherited the descriptor.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _acquire(path: Path, kind: int, check: Callable[[], None]) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                check()
                time.sleep(_POLL_S)
            else:
                return fd
    except BaseException:
        os.close(fd)
        raise
