"""seccomp: which system calls a rank may make, for good.  A classic BPF program written out by hand (x86-64 only).

Denied: starting processes and programs, tracing, name spaces, mounting, kernel interfaces, SysV IPC, memory that no limit
counts, sockets other than TCP and the list of interfaces, signals to anybody but oneself, waking oneself, outliving one's
parent, changing modes, owners, times and attributes of files and taking leases on them, which Landlock leaves open, and having
the kernel read or send on by itself, which goes on while the rank is stopped.
Threads are allowed.
Not here: which files may be opened (`landlock`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Collection
from dataclasses import dataclass, field

from pkb_env.sandbox.syscalls import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, checked, prctl, syscall

_LD, _JEQ, _JSET, _JGE, _RET, _AND = 0x20, 0x15, 0x45, 0x35, 0x06, 0x54
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_ARCH_X86_64 = 0xC000003E
_SECCOMP, _CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _PRCTL, _FCNTL, _SETSOCKOPT = 317, 56, 435, 41, 53, 157, 72, 54
_SCHED_SETSCHEDULER, _MMAP, _MAP_GROWSDOWN = 144, 9, 0x100
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
_NUMBER, _ARCH, _ARG0, _ARG1, _ARG2, _ARG3 = 0, 4, 16, 24, 32, 40
_SIGNALS = {62: ("kill", _ARG1), 129: ("rt_sigqueueinfo", _ARG1), 234: ("tgkill", _ARG2), 297: ("rt_tgsigqueueinfo", _ARG2)}
"""With the place of the signal among the arguments: a rank may signal itself, but not wake itself while it is stopped."""
_SIGCONT, _SOL_SOCKET, _SOL_TCP, _IOCTL = 18, 1, 6, 16
_FCNTL_DENIED = {8: "F_SETOWN", 10: "F_SETSIG", 15: "F_SETOWN_EX", 1024: "F_SETLEASE", 1026: "F_NOTIFY"}
"""A file signals whom it belongs to; who opens one on which a stopped rank holds a lease waits for most of a minute."""
_IOCTL_DENIED = {
    0x40086602: "FS_IOC_SETFLAGS", 0x40046602: "FS_IOC32_SETFLAGS", 0x401C5820: "FS_IOC_FSSETXATTR",
    0x40806685: "FS_IOC_ENABLE_VERITY", 0x800C6613: "FS_IOC_SET_ENCRYPTION_POLICY", 0x40087602: "FS_IOC_SETVERSION",
    0x8901: "FIOSETOWN", 0x8902: "SIOCSPGRP",
}  # fmt: skip
"""Attributes of files, for which an owner needs no more than to read them, and whom a socket signals."""
_SOCKET_DENIED = {13: "SO_LINGER", 47: "SO_MAX_PACING_RATE"}
_TCP_ALLOWED = {
    1: "TCP_NODELAY", 3: "TCP_CORK", 4: "TCP_KEEPIDLE", 5: "TCP_KEEPINTVL", 6: "TCP_KEEPCNT", 12: "TCP_QUICKACK",
    18: "TCP_USER_TIMEOUT", 23: "TCP_FASTOPEN",
}  # fmt: skip
"""Not how the kernel paces and cuts up what is sent: tiny segments at a low rate keep it busy long after the call."""
_DENIED = {
    59: "execve", 322: "execveat", 57: "fork", 58: "vfork", 101: "ptrace", 310: "process_vm_readv",
    311: "process_vm_writev", 312: "kcmp", 438: "pidfd_getfd", 434: "pidfd_open", 424: "pidfd_send_signal", 200: "tkill",
    165: "mount", 166: "umount2", 272: "unshare", 308: "setns", 155: "pivot_root", 161: "chroot", 430: "fsopen",
    432: "fsmount", 429: "move_mount", 428: "open_tree", 442: "mount_setattr", 321: "bpf", 298: "perf_event_open",
    250: "keyctl", 248: "add_key", 249: "request_key", 323: "userfaultfd", 246: "kexec_load", 320: "kexec_file_load",
    175: "init_module", 313: "finit_module", 176: "delete_module", 169: "reboot", 425: "io_uring_setup",
    426: "io_uring_enter", 427: "io_uring_register", 303: "name_to_handle_at", 304: "open_by_handle_at", 167: "swapon",
    168: "swapoff", 164: "settimeofday", 227: "clock_settime", 159: "adjtimex", 305: "clock_adjtime", 163: "acct",
    179: "quotactl", 135: "personality", 133: "mknod", 259: "mknodat", 279: "move_pages", 256: "migrate_pages",
    29: "shmget", 64: "semget", 68: "msgget", 30: "shmat", 71: "msgctl", 240: "mq_open", 153: "vhangup", 172: "iopl",
    173: "ioperm", 103: "syslog", 170: "sethostname", 171: "setdomainname", 317: "seccomp", 142: "sched_setparam",
    319: "memfd_create", 447: "memfd_secret", 141: "setpriority", 314: "sched_setattr",
    112: "setsid", 109: "setpgid", 222: "timer_create", 90: "chmod", 91: "fchmod", 268: "fchmodat", 452: "fchmodat2",
    92: "chown", 93: "fchown", 94: "lchown", 260: "fchownat", 132: "utime", 235: "utimes", 261: "futimesat",
    280: "utimensat", 188: "setxattr", 189: "lsetxattr", 190: "fsetxattr", 463: "setxattrat", 197: "removexattr",
    198: "lremovexattr", 199: "fremovexattr", 466: "removexattrat", 469: "file_setattr", 253: "inotify_init",
    206: "io_setup", 440: "process_madvise", 448: "process_mrelease",
    254: "inotify_add_watch", 294: "inotify_init1", 300: "fanotify_init", 301: "fanotify_mark",
}  # fmt: skip
_ONLY_ON_SELF = {302: "prlimit64", 203: "sched_setaffinity"}
"""Allowed for the calling process: Python reads its own limits, OpenMP places its own threads."""
Row = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, operand."""


def supported() -> bool:
    return platform.machine() == "x86_64"


@dataclass
class _Program:
    """Instructions in order."""

    rows: list[Row] = field(default_factory=list)

    def load(self, offset: int) -> None:
        self.rows.append((_LD, 0, 0, offset))

    def give(self, value: int) -> None:
        self.rows.append((_RET, 0, 0, value))

    def when(self, number: int, *body: Row) -> None:
        """Run `body`, which ends in a return, for one system call."""
        self.rows.append((_JEQ, 0, len(body), number))
        self.rows.extend(body)


def install(*, gpu: bool = False) -> None:
    """Filter this thread and all threads of this process; `gpu`: with the sockets that CUDA and symmetric memory need.

    Raises:
        OSError: the kernel refused.
    """
    rows = _program(os.getpid(), gpu=gpu).rows
    code = b"".join(struct.pack("HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    tsync = 1
    checked(syscall(_SECCOMP, 1, tsync, program), "seccomp")


def _program(pid: int, *, gpu: bool = False) -> _Program:
    program = _Program()
    program.load(_ARCH)
    program.rows.append((_JEQ, 1, 0, _ARCH_X86_64))
    program.give(_KILL)
    program.load(_NUMBER)
    program.rows.append((_JGE, 0, 1, 0x40000000))
    program.give(_ERRNO | errno.ENOSYS)
    refuse = (_RET, 0, 0, _ERRNO | errno.EPERM)
    allow = (_RET, 0, 0, _ALLOW)
    for number in sorted(_DENIED):
        program.when(number, refuse)
    program.when(_CLONE3, (_RET, 0, 0, _ERRNO | errno.ENOSYS))
    program.when(_CLONE, (_LD, 0, 0, _ARG0), (_JSET, 0, 1, _CLONE_NEW), refuse, (_JSET, 1, 0, _CLONE_THREAD), refuse, allow)
    for number, (_, place) in _SIGNALS.items():
        program.when(
            number, (_LD, 0, 0, _ARG0), (_JEQ, 1, 0, pid), refuse, (_LD, 0, 0, place), (_JEQ, 0, 1, _SIGCONT), refuse, allow
        )
    program.when(_FCNTL, *_by(_ARG1, _FCNTL_DENIED, refuse, allow))
    program.when(_IOCTL, *_by(_ARG1, _IOCTL_DENIED, refuse, allow))
    own, tcp = _by(_ARG2, _SOCKET_DENIED, refuse, allow), _by(_ARG2, _TCP_ALLOWED, allow, refuse)
    program.when(
        _SETSOCKOPT, (_LD, 0, 0, _ARG1), (_JEQ, 0, len(own), _SOL_SOCKET), *own, (_JEQ, 0, len(tcp), _SOL_TCP), *tcp, allow
    )
    for number in _ONLY_ON_SELF:
        program.when(number, (_LD, 0, 0, _ARG0), (_JEQ, 2, 0, 0), (_JEQ, 1, 0, pid), refuse, allow)
    program.when(  # its own thread, and between ordinary and batch only
        _SCHED_SETSCHEDULER, (_LD, 0, 0, _ARG0), (_JEQ, 0, 3, 0),
        (_LD, 0, 0, _ARG1), (_JEQ, 2, 0, os.SCHED_OTHER), (_JEQ, 1, 0, os.SCHED_BATCH), refuse, allow,
    )  # fmt: skip
    program.when(_PRCTL, (_LD, 0, 0, _ARG0), (_JEQ, 0, 1, PR_SET_PDEATHSIG), refuse, allow)
    if gpu:  # memory is counted by what is private and can be written to, and a mapping that grows is not counted at first
        program.when(_MMAP, (_LD, 0, 0, _ARG3), (_JSET, 0, 1, _MAP_GROWSDOWN), refuse, allow)
        _unix_sockets(program, allow)
    _sockets(program, refuse, allow)
    program.give(_ALLOW)
    return program


def _by(place: int, values: Collection[int], those: Row, others: Row) -> list[Row]:
    """One return for the calls whose argument is one of the values, another one for the rest."""
    count = len(values)
    return [(_LD, 0, 0, place), *((_JEQ, count - at, 0, value) for at, value in enumerate(values)), others, those]


def _unix_sockets(program: _Program, allow: Row) -> None:
    """Sequenced packets, through which CUDA passes descriptors and speaks with MPS, and datagrams, for symmetric memory's.

    Streams, which is what services outside speak, stay refused; connected pairs may be of any kind.
    """
    unix, packets, datagrams, kind = 1, 5, 2, 0xF
    program.when(_SOCKETPAIR, allow)
    program.when(
        _SOCKET,
        (_LD, 0, 0, _ARG0), (_JEQ, 0, 5, unix), (_LD, 0, 0, _ARG1), (_AND, 0, 0, kind), (_JEQ, 1, 0, packets),
        (_JEQ, 0, 1, datagrams), allow, (_LD, 0, 0, _NUMBER),
    )  # fmt: skip


def _sockets(program: _Program, refuse: Row, allow: Row) -> None:
    """AF_INET and AF_INET6 as streams; of AF_NETLINK the list of interfaces, which gloo reads; connected pairs.

    No socket of the unix family: Landlock does not keep a box from connecting to the socket files of services outside.
    """
    inet, inet6, netlink, stream, kind, route = 2, 10, 16, 1, 0xF, 0
    program.when(
        _SOCKET,
        (_LD, 0, 0, _ARG0), (_JEQ, 5, 0, netlink), (_JEQ, 1, 0, inet), (_JEQ, 0, 5, inet6),
        (_LD, 0, 0, _ARG1), (_AND, 0, 0, kind), (_JEQ, 3, 2, stream),
        (_LD, 0, 0, _ARG2), (_JEQ, 1, 0, route), refuse, allow,
    )  # fmt: skip
    program.when(_SOCKETPAIR, (_LD, 0, 0, _ARG1), (_AND, 0, 0, kind), (_JEQ, 1, 0, stream), refuse, allow)
