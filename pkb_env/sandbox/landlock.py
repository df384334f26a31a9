"""Landlock: which files a process and its children may touch, for good.  Needs no privilege (Linux 5.13).

Rules only ever allow, and hold for everything beneath a path; `visible` says how parts are left out.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from pkb_env.sandbox.syscalls import PR_SET_NO_NEW_PRIVS, checked, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_MAKE_DEVICES = 64 | 2048
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_BASE = (1 << 13) - 1
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2


def abi() -> int:
    """Version of Landlock in this kernel, 0 when there is none."""
    return max(0, syscall(_CREATE, None, 0, 1))


def restrict(read: Iterable[str | Path], write: Iterable[str | Path] = (), devices: Iterable[str | Path] = ()) -> int:
    """Confine the calling thread, and all it starts, to these paths; also to signals and abstract sockets of its own.

    Args:
        read: may be read, listed and executed.
        write: may be changed too.
        devices: may be read and written, nothing made.

    Returns:
        The ABI version that was used.

    Raises:
        OSError: Landlock is not there, or refused.
    """
    version = checked(syscall(_CREATE, None, 0, 1), "landlock_create_ruleset")
    handled = _BASE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL if version >= 5 else 0)
    ruleset = _ruleset(version, handled)
    for path in read:
        _allow(ruleset, path, (_EXECUTE | _READ | _LIST) & handled)
    for path in write:
        _allow(ruleset, path, handled & ~(_MAKE_DEVICES | _IOCTL))
    for path in devices:
        _allow(ruleset, path, (_READ | _WRITE | _IOCTL) & handled)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked(syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return version


def restrict_writing(write: Iterable[str | Path], devices: Iterable[str | Path]) -> None:
    """Within what `restrict` left, change nothing but what lies here, and these devices; reading stays as it is.

    Rules that do not speak of moving files from folder to folder forbid it everywhere.

    Raises:
        OSError: Landlock is not there, or refused.
    """
    version = abi()
    handled = _WRITE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    ruleset = checked(syscall(_CREATE, struct.pack("Q", handled), 8, 0), "landlock_create_ruleset")
    for path in (*write, *devices):
        _allow(ruleset, path, handled)
    checked(syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _ruleset(version: int, handled: int) -> int:
    scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, 0, scope)[: 8 if version < 4 else 16 if version < 6 else 24]
    return checked(syscall(_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")


def _allow(ruleset: int, path: str | Path, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _ON_FILES
        rule = struct.pack("=Qi", access, fd)
        checked(syscall(_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(fd)
