"""The walls of a box by name: which can be had here, and how each is put up.

Names: `namespaces` (own network, IPC, process ids, scratch folder), `landlock` (files, signals, abstract sockets),
`seccomp` (system calls), `limits` (memory, files, descriptors, capabilities).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from pkb_env.sandbox import landlock, limits, seccomp, visible
from pkb_env.sandbox.syscalls import drop_capabilities

NAMES = ("namespaces", "landlock", "seccomp", "limits")


def probe(*, gpu: bool = False) -> dict[str, str]:
    """Try each wall in a child process: name -> empty when it holds here, else why not.  Call from a single-threaded process.

    `gpu`: also what boxes with a GPU need.
    """
    trials: dict[str, Callable[[], object]] = {
        "namespaces": lambda: _try_namespaces(gpu=gpu),
        "landlock": lambda: landlock.restrict(["/usr"]),
        "seccomp": seccomp.install,
        "limits": drop_capabilities,
    }
    return {name: _why_not(trials[name]) for name in NAMES if name != "seccomp" or seccomp.supported()} | (
        {} if seccomp.supported() else {"seccomp": f"no filter for {os.uname().machine}"}
    )


def _try_namespaces(*, gpu: bool) -> None:
    enter_namespaces(NAMES, "/tmp", 1 << 20)  # noqa: S108  covered in this child only
    if gpu and (why_not := _why_not(limits.own_proc)):
        raise OSError(why_not)


def _why_not(trial: Callable[[], object]) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trial()
        except OSError as error:
            os.write(writer, str(error).encode()[:500] or b"refused")
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as file:
        return file.read().decode("utf-8", "replace")


def enter_namespaces(walls: Iterable[str], scratch: str, scratch_bytes: int) -> None:
    """For the supervisor, before it forks init; the scratch folder is then in memory and of limited size."""
    if "namespaces" in walls:
        limits.own_namespaces()
        limits.small_folder(scratch, scratch_bytes)


def confine_group(walls: Iterable[str], read: list[str], write: list[str], gpu: Sequence[str] = ()) -> None:
    """For init, before it forks the ranks: they share one Landlock domain.

    CUDA looks into /proc and names its threads there, so with a GPU the box sees one: with name spaces that of its own
    processes.  What may be changed in it is left to `confine_rank`.
    """
    limits.go_first()
    if gpu and "namespaces" in walls:
        limits.own_proc()
    if "landlock" in walls:
        read, write = (read + list(visible.GPU_READ), [*write, visible.PROC]) if gpu else (read, write)
        landlock.restrict(read, write, [*visible.DEVICES, *gpu])


def confine_rank(
    walls: Iterable[str], memory_bytes: int, file_bytes: int, write: Iterable[str] = (), gpu: Sequence[str] = ()
) -> None:
    """For each rank, before any line of the candidate's.  `gpu`: device files of the GPUs, for ranks that have one."""
    if gpu and "landlock" in walls:
        landlock.restrict_writing([*write, visible.OWN_THREADS], [*visible.DEVICES, *gpu])
    if "limits" in walls:
        limits.cap(memory_bytes, file_bytes, reserves=bool(gpu))
        drop_capabilities()
    if "seccomp" in walls:
        seccomp.install(gpu=bool(gpu))
