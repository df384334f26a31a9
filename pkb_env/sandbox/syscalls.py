"""libc through ctypes: the few calls that Python does not offer."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP = 1, 4, 15, 24
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38


def checked(result: int, what: str) -> int:
    """The result of a call.

    Raises:
        OSError: it was negative; carries errno and what was tried.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: int | bytes | None) -> int:
    """Raw system call; negative on failure, see `checked`."""
    return int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)))


def prctl(option: int, *args: int | bytes) -> None:
    padded = [*args, 0, 0, 0, 0][:4]
    checked(_libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)), f"prctl {option}")


def unshare(flags: int) -> None:
    checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Attach a file system."""
    arguments = [text.encode() for text in (source, target, kind)]
    checked(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount {kind or 'nothing'} on {target}")


def drop_capabilities() -> None:
    """Give up every capability of this process for good."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
