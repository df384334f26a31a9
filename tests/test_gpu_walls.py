"""The walls of a box whose ranks have a GPU: what CUDA needs is open, all else as shut as on the CPU.

Every wall is put up in a forked child, and tried there; files of the test stand for the GPU's.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from pkb_env.sandbox import landlock, limits, seccomp, walls
from pkb_env.sandbox.syscalls import mount, syscall

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
MIB, TIB = 1 << 20, 1 << 40
BIND, PRIVATE = 0x1000, 0x4000 | 1 << 18
_NORESERVE = 0x4000
"""Of mmap(2); Python 3.13 names it."""
Act = Callable[[], object]


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, as JSON carries it; its traceback fails the test."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = json.dumps({"came": work()})
        except BaseException:  # noqa: BLE001  told to the parent
            answer = json.dumps({"error": traceback.format_exc()})
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    assert text, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    answer = json.loads(text)
    assert "error" not in answer, answer["error"]
    return answer["came"]


@cache
def why_not() -> dict[str, str]:
    """For each wall why it does not hold on this machine, empty where it does."""
    return dict(in_child(walls.probe))


def needs(*names: str) -> None:
    missing = {name: why_not()[name] for name in names if why_not()[name]}
    if missing:
        pytest.skip(f"this machine lacks walls: {missing}")


def tried(act: Act) -> str:
    """How the kernel answers: `allowed` or the name of its error."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "allowed"


def raw(number: int, *args: int) -> None:
    if syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")


def connected(path: str, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as client:
        client.connect(path)


# ---- system calls -----------------------------------------------------------------------------------------------------

UNIX, INET, INET6, NETLINK = socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK
STREAM, DATAGRAM, RAW, PACKETS = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET
SOCKETS: dict[str, tuple[tuple[int, int, int], str, str]] = {
    "unix stream": ((UNIX, STREAM, 0), "EPERM", "EPERM"), "unix raw": ((UNIX, RAW, 0), "EPERM", "EPERM"),
    "unix packets": ((UNIX, PACKETS, 0), "EPERM", "allowed"), "unix datagram": ((UNIX, DATAGRAM, 0), "EPERM", "allowed"),
    "unix packets, not blocking": ((UNIX, PACKETS | socket.SOCK_NONBLOCK, 0), "EPERM", "allowed"),
    "tcp": ((INET, STREAM, 0), "allowed", "allowed"), "interfaces": ((NETLINK, RAW, 0), "allowed", "allowed"),
    "audit": ((NETLINK, RAW, 9), "EPERM", "EPERM"),
    "udp": ((INET, DATAGRAM, 0), "EPERM", "EPERM"), "udp 6": ((INET6, DATAGRAM, 0), "EPERM", "EPERM"),
    "ip": ((INET, RAW, 1), "EPERM", "EPERM"), "sctp": ((INET, PACKETS, 132), "EPERM", "EPERM"),
    "frames": ((socket.AF_PACKET, RAW, 0), "EPERM", "EPERM"), "the kernel's ciphers": ((38, PACKETS, 0), "EPERM", "EPERM"),
    "the host of a virtual machine": ((40, STREAM, 0), "EPERM", "EPERM"),
}  # fmt: skip
"""Family, type, protocol; the answer without a GPU, and with one."""
PAIRS = {
    "stream": (STREAM, "allowed", "allowed"), "datagram": (DATAGRAM, "EPERM", "allowed"),
    "packets": (PACKETS, "EPERM", "allowed"),
}  # fmt: skip


def filtered(acts: dict[str, Act], *, gpu: bool) -> dict[str, str]:
    """How the kernel answers each of them behind the filter."""
    needs("seccomp")

    def work() -> dict[str, str]:
        seccomp.install(gpu=gpu)
        return {name: tried(act) for name, act in acts.items()}

    return dict(in_child(work))


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_sockets(gpu: bool) -> None:
    acts: dict[str, Act] = {name: partial(raw, 41, *made) for name, (made, _, _) in SOCKETS.items()}
    assert filtered(acts, gpu=gpu) == {name: with_gpu if gpu else without for name, (_, without, with_gpu) in SOCKETS.items()}


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_connected_pairs(gpu: bool) -> None:
    acts: dict[str, Act] = {name: partial(socket.socketpair, UNIX, kind) for name, (kind, _, _) in PAIRS.items()}
    wanted = {name: with_gpu if gpu else without for name, (_, without, with_gpu) in PAIRS.items()}
    assert filtered(acts, gpu=gpu) == wanted


def test_a_descriptor_crosses_a_packet_socket() -> None:
    """As CUDA hands memory on; in an abstract name, which Landlock keeps inside the box."""
    needs("seccomp")

    def work() -> str:
        seccomp.install(gpu=True)
        with socket.socket(UNIX, PACKETS) as server, socket.socket(UNIX, PACKETS) as client:
            server.bind(f"\0pkb-{os.getpid()}")
            server.listen(1)
            client.connect(server.getsockname())
            socket.send_fds(client, [b"here"], [os.open("/proc/self/comm", os.O_RDONLY)])
            message, (fd,), _, _ = socket.recv_fds(server.accept()[0], 99, 1)
            return message.decode() + " " + os.readlink(f"/proc/self/fd/{fd}").split("/")[-1]

    assert in_child(work) == "here comm"


def test_a_stream_service_outside_cannot_be_spoken_to(tmp_path: Path) -> None:
    """Neither by a socket made for it nor by one of the kinds that are open."""
    needs("seccomp")
    with socket.socket(UNIX, STREAM) as server:
        server.bind(str(tmp_path / "service"))
        server.listen(1)

        def work() -> list[str]:
            seccomp.install(gpu=True)
            path = str(tmp_path / "service")
            return [tried(partial(connected, path, kind)) for kind in (STREAM, PACKETS, DATAGRAM)]

        assert in_child(work) == ["EPERM", "EPROTOTYPE", "EPROTOTYPE"]


def test_everything_that_is_denied_on_the_cpu_is_denied_with_a_gpu() -> None:
    """Each call of the table, made; arguments that no call could use, should one get through."""
    acts: dict[str, Act] = {name: partial(raw, number, *[-1] * 6) for number, name in seccomp._DENIED.items()}  # noqa: SLF001
    answers = filtered(acts, gpu=True)
    assert {"fork", "execve", "ptrace", "memfd_create", "mount", "unshare", "io_uring_setup"} <= answers.keys()
    assert {name: answer for name, answer in answers.items() if answer != "EPERM"} == {}
    assert filtered(acts, gpu=False) == answers


def test_conditions_are_the_same_with_a_gpu() -> None:
    """Calls that are denied for some arguments only."""
    parent, init = os.getpid(), 1
    acts: dict[str, Act] = {
        "clone3": partial(raw, 435, 0, 0), "clone a process": partial(raw, 56, signal.SIGCHLD, 0, 0, 0, 0),
        "clone a name space": partial(raw, 56, 0x10010000, 0, 0, 0, 0), "kill the parent": partial(raw, 62, parent, 0),
        "kill init": partial(raw, 62, init, 0), "wake oneself": lambda: os.kill(os.getpid(), signal.SIGCONT),
        "ask whether one lives": lambda: os.kill(os.getpid(), 0), "limits of the parent": partial(raw, 302, parent, 7, 0, 0),
        "own limits": partial(raw, 302, 0, 7, 0, 0), "place the parent": partial(raw, 203, parent, 8, 0),
        "outlive the parent": partial(raw, 157, 1, 0, 0, 0, 0), "name oneself": partial(raw, 157, 16, mmap.PAGESIZE, 0, 0, 0),
        "real time": partial(raw, 144, 0, os.SCHED_FIFO, 0), "signals of descriptors": partial(raw, 72, 0, 10, 9),
        "linger": partial(raw, 54, 0, 1, 13, 0, 0), "another architecture": partial(raw, 0x40000000 | 39),
    }  # fmt: skip
    answers = filtered(acts, gpu=True)
    allowed = {"ask whether one lives", "own limits"}
    assert {name for name, answer in answers.items() if answer == "allowed"} == allowed
    refused = {n: a for n, a in answers.items() if n not in allowed | {"clone3", "another architecture", "name oneself"}}
    assert set(refused.values()) == {"EPERM"}, refused
    assert (answers["clone3"], answers["another architecture"], answers["name oneself"]) == ("ENOSYS", "ENOSYS", "EFAULT")
    assert filtered(acts, gpu=False) == answers


def test_memory_that_grows_uncounted_is_refused_with_a_gpu() -> None:
    """The limit on a GPU counts private writable memory, and not what a mapping grows by."""
    kept = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    acts: dict[str, Act] = {
        "fixed": partial(raw, 9, 0, mmap.PAGESIZE, 3, kept, -1, 0),
        "grows": partial(raw, 9, 0, mmap.PAGESIZE, 3, kept | 0x100, -1, 0),
    }
    assert filtered(acts, gpu=True) == {"fixed": "allowed", "grows": "EPERM"}
    assert filtered(acts, gpu=False) == {"fixed": "allowed", "grows": "allowed"}


LOOKED_INTO = {41, 53, 54, 56, 62, 72, 129, 144, 157, 203, 234, 297, 302}
"""Calls whose arguments a filter looks at."""


def decided(rows: list[tuple[int, int, int, int]], number: int, args: tuple[int, ...]) -> int:
    """What a filter answers to a system call: the machine of classic BPF, as far as these programs use it."""
    words = {0: number, 4: 0xC000003E} | {16 + 8 * place: value for place, value in enumerate(args)}
    at, value = 0, 0
    tests: dict[int, Callable[[int, int], bool]] = {
        0x15: lambda a, k: a == k, 0x45: lambda a, k: bool(a & k), 0x35: lambda a, k: a >= k,
    }  # fmt: skip
    while True:
        code, yes, no, operand = rows[at]
        if code == 0x06:
            return operand
        if code in tests:
            at += yes if tests[code](value, operand) else no
        else:
            value = words.get(operand, 0) if code == 0x20 else value & operand
        at += 1


def test_the_filters_differ_in_unix_sockets_only() -> None:
    pid = 4711
    plain, gpu = (seccomp._program(pid, gpu=gpu).rows for gpu in (False, True))  # noqa: SLF001
    values = (0, 1, 2, 3, 5, 9, 10, 13, 15, 16, 18, 0x801, 0x80002, 0x10000, 0x10010000, 40, pid)
    few = [(a, b, 0) for a in (0, 1, pid) for b in (0, 1, 2)]
    many = [(a, b, c) for a in values for b in values for c in values[:6]]
    calls = [(n, args) for n in (*range(500), 0x40000000, 0x40000029) for args in (many if n in LOOKED_INTO else few)]
    differ = {(n, args[0], args[1] & 0xF) for n, args in calls if decided(plain, n, args) != decided(gpu, n, args)}
    pairs = {(53, a, b & 0xF) for a in values for b in values if b & 0xF != 1}
    assert differ == {(41, 1, 2), (41, 1, 5)} | pairs


# ---- memory -----------------------------------------------------------------------------------------------------------


def private(nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot=protection)


def unlocked(nbytes: int) -> None:
    """Make part of a reserved address space writable."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    at = libc.mmap(None, ctypes.c_size_t(TIB), 0, flags, -1, ctypes.c_long(0))
    if at == ctypes.c_void_p(-1).value or libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), 3):
        raise OSError(ctypes.get_errno(), "mmap or mprotect")


MEMORY: dict[str, Act] = {
    "reserved": lambda: private(TIB, 0), "little": lambda: private(16 * MIB), "much": lambda: private(256 * MIB),
    "little of what was reserved": lambda: unlocked(16 * MIB), "much of what was reserved": lambda: unlocked(256 * MIB),
}  # fmt: skip


@pytest.mark.parametrize(("reserves", "refused"), [
    (True, {"much", "much of what was reserved"}),
    (False, {"reserved", "much", "little of what was reserved", "much of what was reserved"}),
])  # fmt: skip
def test_what_a_memory_limit_counts(reserves: bool, refused: set[str]) -> None:
    """Each beyond what the child had: with `reserves` private writable memory, else address space."""

    def work(act: Act) -> str:
        limits.cap(limits.memory_in_use(reserves=reserves) + 64 * MIB, MIB, reserves=reserves)
        return tried(act)

    answers = {name: in_child(partial(work, act)) for name, act in MEMORY.items()}
    assert answers == {name: "ENOMEM" if name in refused else "allowed" for name in MEMORY}


def test_python_runs_out_of_memory_at_the_limit() -> None:
    def work() -> list[int]:
        limits.cap(limits.memory_in_use(reserves=True) + 64 * MIB, MIB, reserves=True)
        with pytest.raises(MemoryError):
            bytearray(4096 * MIB)  # more than any heap that the tests before may have left in this process
        return [len(bytearray(16 * MIB))]

    assert in_child(work) == [16 * MIB]


def test_other_limits_hold_with_reserves_too(tmp_path: Path) -> None:
    def work() -> list[str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits.cap(limits.memory_in_use(reserves=True) + 64 * MIB, MIB, reserves=True)
        fd = os.open(tmp_path / "big", os.O_WRONLY | os.O_CREAT)
        return [tried(lambda: os.pwrite(fd, b"x", 2 * MIB)), tried(lambda: [os.dup(fd) for _ in range(limits.MAX_OPEN_FILES)])]

    assert in_child(work) == ["EFBIG", "EMFILE"]


# ---- /proc and files --------------------------------------------------------------------------------------------------


def in_namespaces(first: Callable[[], Any], scratch: Path) -> dict[str, Any]:
    """What the first process of a box's name spaces returns, and how its supervisor then sees /proc."""

    def supervisor() -> dict[str, Any]:
        outer = os.getpid()
        walls.enter_namespaces(walls.NAMES, str(scratch), 16 * MIB)
        came = in_child(first)
        return {"came": came, "outer": outer, "still": Path(f"/proc/{outer}/comm").exists() and str(outer) in os.listdir("/proc")}

    return dict(in_child(supervisor))


def test_a_proc_that_is_covered_in_part_cannot_be_mounted_anew_and_the_probe_says_so() -> None:
    """As containers cover it: name spaces then do for a box without a GPU only."""
    needs("namespaces")

    def covered() -> list[str]:
        limits.own_namespaces()
        mount("none", "/", "", PRIVATE, "")
        mount("/dev/null", "/proc/cmdline", "", BIND, "")
        return list(in_child(lambda: [walls.probe(gpu=gpu)["namespaces"] for gpu in (False, True)]))

    without, beside = in_child(covered)
    assert without == ""
    assert "mount proc on /proc" in beside


def test_own_proc_shows_the_processes_of_the_box_only(tmp_path: Path) -> None:
    needs("namespaces")
    before = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    outside = os.getpid()

    def first() -> dict[str, Any]:
        libc = ctypes.CDLL(None)
        libc.prctl(15, b"pkb-first", 0, 0, 0)
        limits.own_proc()
        seen = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        other = in_child(lambda: [os.getpid(), os.getppid(), os.readlink("/proc/self")])
        return {"pid": os.getpid(), "seen": seen, "name": Path("/proc/1/comm").read_text(encoding="utf-8").strip(),
                "outside": os.path.exists(f"/proc/{outside}"), "other": other}  # fmt: skip

    found = in_namespaces(first, tmp_path)
    assert found["came"] == {"pid": 1, "seen": [1], "name": "pkb-first", "outside": False, "other": [2, 1, "2"]}
    assert found["still"]
    assert Path("/proc/self/mountinfo").read_text(encoding="utf-8") == before
    assert Path(f"/proc/{outside}").exists()


class Scene:
    """Folders and files of one box, and what stands for its GPUs."""

    def __init__(self, folder: Path) -> None:
        self.scratch, self.visible, self.hidden, self.devices = (folder / n for n in ("scratch", "visible", "hidden", "dev"))
        for made in (self.scratch, self.visible, self.hidden, self.devices):
            made.mkdir()
        for file in (self.visible / "file", self.hidden / "file", self.devices / "nvidia0", self.devices / "nvidia9"):
            file.write_text("something")
        self.outside = os.getpid()
        self.gpu = [str(self.devices / "nvidia0")]

    def as_rank(self, tries: Callable[[int], dict[str, Act]], names: tuple[str, ...]) -> dict[str, str]:
        """How the kernel answers one of two ranks; `tries` gets the other one's process id."""
        memory = limits.memory_in_use(reserves=bool(self.gpu)) + 64 * MIB

        def rank(other: int) -> dict[str, str]:
            walls.confine_rank(names, memory, MIB, [str(self.scratch)], self.gpu)
            return {name: tried(act) for name, act in tries(other).items()}

        def first() -> Any:
            walls.confine_group(names, [str(self.visible)], [str(self.scratch)], self.gpu)
            other = self._sibling(names)
            return in_child(lambda: rank(other))

        return dict(in_namespaces(first, self.scratch)["came"])

    def _sibling(self, names: tuple[str, ...]) -> int:
        """The other rank, behind its walls; it ends with the first process."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            limits.die_with_parent(None)
            walls.confine_rank(names, TIB, MIB, [str(self.scratch)], self.gpu)
            os.close(writer)
            signal.pause()
        os.close(writer)
        assert os.read(reader, 1) == b""
        os.close(reader)
        return pid


def opened(path: str | Path, flags: int) -> Act:
    return lambda: os.close(os.open(path, flags, 0o600))


def written(path: str | Path) -> Act:
    def act() -> None:
        with open(path, "r+b", buffering=0) as file:
            file.write(b"pkb-named")

    return act


READ, CHANGE, CUT, NEW = os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_CREAT | os.O_EXCL | os.O_WRONLY


def rank_tries(scene: Scene, other: int) -> dict[str, tuple[Act, str]]:
    """What a rank tries, and how it shall be answered."""
    threads = f"/proc/self/task/{os.getpid()}"
    return {
        "names its thread": (written(f"{threads}/comm"), "allowed"),
        "reads its maps": (opened("/proc/self/maps", READ), "allowed"),
        "uses the device": (written(scene.gpu[0]), "allowed"), "reads the device": (opened(scene.gpu[0], READ), "allowed"),
        "another device": (opened(scene.devices / "nvidia9", READ), "EACCES"),
        "makes a device": (opened(scene.devices / "nvidia1", NEW), "EACCES"),
        "lists devices": (lambda: os.listdir(scene.devices), "EACCES"),
        "writes scratch": (opened(scene.scratch / "new", NEW), "allowed"),
        "cuts scratch": (opened(scene.scratch / "new", CUT), "allowed"),
        "renames in scratch": (lambda: os.rename(scene.scratch / "new", scene.scratch / "old"), "allowed"),
        "makes a folder in scratch": (lambda: os.mkdir(scene.scratch / "folder"), "allowed"),
        "moves within scratch": (
            lambda: os.rename(scene.scratch / "old", scene.scratch / "folder" / "old"),
            "allowed" if landlock.abi() >= 2 else "EXDEV",
        ),
        "null": (opened("/dev/null", CHANGE), "allowed"),
        "reads what is visible": (opened(scene.visible / "file", READ), "allowed"),
        "changes what is visible": (opened(scene.visible / "file", CHANGE), "EACCES"),
        "cuts what is visible": (opened(scene.visible / "file", CUT), "EACCES"),
        "adds to what is visible": (opened(scene.visible / "new", NEW), "EACCES"),
        "reads what is hidden": (opened(scene.hidden / "file", READ), "EACCES"),
        "reads the host's name": (opened("/proc/sys/kernel/hostname", READ), "allowed"),
        "changes the host's name": (opened("/proc/sys/kernel/hostname", CHANGE), "EACCES"),
        "names the first process": (opened("/proc/1/comm", CHANGE), "EACCES"),
        "names the other rank": (opened(f"/proc/{other}/task/{other}/comm", CHANGE), "EACCES"),
        "the first one's memory": (opened("/proc/1/mem", READ), "EACCES"),
        "the other's memory": (opened(f"/proc/{other}/mem", READ), "EACCES"),
        "changes the other's memory": (opened(f"/proc/{other}/mem", CHANGE), "EACCES"),
        "the other's environment": (opened(f"/proc/{other}/environ", READ), "EACCES"),
        "the other's descriptors": (lambda: os.readlink(f"/proc/{other}/fd/1"), "EACCES"),
        "opens what the other has open": (opened(f"/proc/{other}/fd/1", READ), "EACCES"),
        "the other's root": (opened(f"/proc/{other}/root", READ), "EACCES"),
        "a process outside": (opened(f"/proc/{scene.outside}/comm", READ), "ENOENT"),
    }  # fmt: skip


@pytest.mark.parametrize("names", [walls.NAMES, ("namespaces", "landlock")], ids=["all", "without seccomp"])
def test_a_rank_with_a_gpu_reaches_its_device_and_changes_nothing_else(tmp_path: Path, names: tuple[str, ...]) -> None:
    needs(*names)
    scene = Scene(tmp_path)
    answers = scene.as_rank(lambda other: {name: act for name, (act, _) in rank_tries(scene, other).items()}, names)
    assert answers == {name: wanted for name, (_, wanted) in rank_tries(scene, 1).items()}
    assert Path(scene.gpu[0]).read_text() == "pkb-named"
    assert (scene.visible / "file").read_text() == "something"


def test_a_rank_without_a_gpu_sees_no_proc(tmp_path: Path) -> None:
    needs(*walls.NAMES)
    scene = Scene(tmp_path)
    scene.gpu = []
    answers = scene.as_rank(lambda _: {
        "maps": opened("/proc/self/maps", READ), "first": opened("/proc/1/comm", READ),
        "device": opened(scene.devices / "nvidia0", READ), "scratch": opened(scene.scratch / "new", NEW),
    }, walls.NAMES)  # fmt: skip
    assert answers == {"maps": "EACCES", "first": "EACCES", "device": "EACCES", "scratch": "allowed"}
