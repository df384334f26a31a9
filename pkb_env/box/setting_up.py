"""What one rank's process sets up before it works: output, threads, its GPU, the default process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
from datetime import timedelta

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_TIMEOUT = timedelta(hours=1)
"""The supervisor owns every deadline; the group's own must never fire first."""
_GPU_SHARE = 0.7
"""Of a GPU's memory, what the ranks on it may take together."""
_synchronize = torch.cuda.synchronize


def silence(output: int) -> None:
    """Send standard output and error to the supervisor, take input from nowhere."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)


def one_thread() -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(15, b"pkb-rank", 0, 0, 0)


def use(device: torch.device, sharers: int = 0) -> None:
    """Make a GPU the current one; its context is made here.

    Args:
        device: nothing happens for a CPU.
        sharers: so many ranks share what torch's allocator gives of the GPU, and leave the rest to the judge and the reference;
            0 for who has no cap.  Memory taken past torch, from the driver, is not counted.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if sharers:
            torch.cuda.set_per_process_memory_fraction(_GPU_SHARE / sharers, device)
        torch.empty(0, device=device)


def stay_on_one_core() -> None:
    """Keep this thread, and those that it makes from now on, on the last of its cores.

    What drives a GPU is one thread, and cores differ in how soon a launch is done; the reference's has the same core, at other
    times.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def at_work(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Tensors made without saying where are made on this device."""
    return device if device.type == "cuda" else contextlib.nullcontext()


def finish(device: torch.device) -> None:
    """Wait until everything that this process asked of its GPU is done."""
    if device.type == "cuda":
        _synchronize(device)


def join_group(rank: int, world_size: int, store: str, backend: str = "gloo", device: torch.device = CPU) -> None:
    """Initialise the default process group; the store is a file, no port is opened for it.

    Gloo's threads inherit the batch policy: as ordinary ones they push the thread off its core that holds the lock they
    want, and then poll for it until the next tick, which made 1 MiB all-reduces of 0.8 ms last 5 ms.
    """
    shared = dist.FileStore(store, world_size)  # type: ignore[attr-defined]  # public, yet not in its stub
    bound = device if backend == "nccl" else None
    _schedule_as(os.SCHED_BATCH)
    try:
        dist.init_process_group(backend, None, _TIMEOUT, world_size, rank, shared, device_id=bound)
    finally:
        _schedule_as(os.SCHED_OTHER)


def _schedule_as(policy: int) -> None:
    with contextlib.suppress(OSError):  # a container may refuse it; then times are only noisier
        os.sched_setscheduler(0, policy, os.sched_param(0))
