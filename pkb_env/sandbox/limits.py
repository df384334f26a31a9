"""Limits, name spaces and the tie between parent and child.

Not here: files (`landlock`) and system calls (`seccomp`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import struct
from pathlib import Path

from pkb_env.sandbox.syscalls import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, mount, prctl, unshare

_NEWUSER, _NEWNS, _NEWIPC, _NEWNET, _NEWPID = 0x10000000, 0x00020000, 0x08000000, 0x40000000, 0x20000000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
MAX_OPEN_FILES = 512


def die_with_parent(parent: int | None) -> None:
    """Be killed when the parent ends; `parent=None` skips the check that it still lives (it looks like 0 across name spaces)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(9)


def cap(memory_bytes: int, file_bytes: int, *, reserves: bool = False) -> None:
    """Limit memory and file size in bytes, open files, core dumps.

    `reserves`: the process reserves more address space than there is memory, as CUDA does; then what counts is memory that is
    private and can be written to.
    """
    memory = "DATA" if reserves else "AS"
    for name, value in ((memory, memory_bytes), ("FSIZE", file_bytes), ("NOFILE", MAX_OPEN_FILES), ("CORE", 0)):
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (limit, limit))


def go_first() -> None:
    """When memory runs out, let the kernel end this process, and none that watches it."""
    with contextlib.suppress(OSError):  # where /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def place(rank: int, world_size: int) -> None:
    """Keep this process on its share of the cores, the same for every group; more ranks than cores share them all."""
    cores = sorted(os.sched_getaffinity(0))
    first, end = (len(cores) * r // world_size for r in (rank, rank + 1))
    if len(cores) >= world_size:
        os.sched_setaffinity(0, cores[first:end])


def memory_in_use(*, reserves: bool = False) -> int:
    """Bytes of what `cap` limits that this process has now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5 if reserves else 0]) * resource.getpagesize()


def own_namespaces() -> None:
    """User, mount, network, IPC and process-id name spaces of one's own, the loopback interface up; the next child is pid 1.

    Raises:
        OSError: this machine does not allow it (inside many containers).
    """
    user, group = os.getuid(), os.getgid()
    prctl(PR_SET_DUMPABLE, 1)
    unshare(_NEWUSER | _NEWNS | _NEWIPC | _NEWNET | _NEWPID)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP | _IFF_RUNNING, b""))
    with contextlib.suppress(OSError):  # where /proc is read-only; the default may pace packets, which is noise between ranks
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno", encoding="ascii")


def small_folder(folder: str, size_bytes: int, files: int = 4096) -> None:
    """Cover a folder with one in memory that holds at most so many bytes and files; needs a mount name space of one's own.

    Raises:
        OSError: this machine does not allow it.
    """
    mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_bytes},nr_inodes={files},mode=700")


def own_proc() -> None:
    """Show the processes of one's own name space in /proc; for its first process, which alone sees them.

    Raises:
        OSError: this machine does not allow it.
    """
    unshare(_NEWNS)
    mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "")


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not named."""
    previous = 2
    for fd in [*sorted(fd for fd in keep if fd > 2), 1 << 20]:
        os.closerange(previous + 1, fd)
        previous = fd
