"""Where the ranks live: which topologies there are, which one this machine can offer, on which GPU each rank is.

`cpu`: W processes, gloo, shared memory.  `node`: one GPU per rank, NCCL.  `shared`: W ranks on one GPU, gloo with its gaps
filled, for correctness and development; its times compare with nothing.  GPUs are counted without waking the driver, so that
asking costs a trainer no memory of its GPU.
Not here: what a rank does with its GPU (`box.worker`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from pkb_env import hardware
from pkb_env.errors import UsageError
from pkb_env.submission import Submission

TOPOLOGIES = ("cpu", "node", "shared")
AUTO = "auto"
_DRIVER, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")


def gpus() -> int:
    """GPUs that this machine's ranks can use; 0 where torch was built without CUDA."""
    import torch.version  # noqa: PLC0415

    return len([p for p in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]) if torch.version.cuda else 0


@cache
def gpu_name() -> str:
    """Model and number of the GPUs: `NVIDIA H200 x1`; of the first one, they are taken to be alike."""
    for card in sorted(_DRIVER.glob("*/information")):
        found = re.search(r"Model:\s*(.+)", card.read_text(encoding="utf-8", errors="replace"))
        if found:
            return f"{found[1].strip()} x{gpus()}"
    return f"GPU x{gpus()}"


def hardware_name(topology: str) -> str:
    """What the ranks of a topology run on, for records."""
    return hardware.cpu() if topology == "cpu" else gpu_name()


def choose(world_size: int, only: Sequence[int] = ()) -> tuple[str, str]:
    """The best topology here for so many ranks, and why; `only`: the GPUs that may be used, empty: all."""
    there = len(only) or gpus()
    if not there:
        return "cpu", "this machine has no GPU that torch can use"
    if there >= world_size:
        return "node", "there are as many GPUs as ranks, or more"
    return "shared", "there are fewer GPUs than ranks"


def named(topology: str, world_size: int, only: Sequence[int] = ()) -> str:
    """The topology, `auto` replaced by what this machine offers."""
    return choose(world_size, only)[0] if topology == AUTO else topology


def settled(submission: Submission, only: Sequence[int] = ()) -> Submission:
    """The submission with `auto` replaced by what this machine offers; `only`: the GPUs that may be used, empty: all.

    Raises:
        UsageError: no such topology, too few GPUs for it here, or GPUs that are not here.
    """
    world_size, there = submission.world_size, len(only) or gpus()
    if missing := sorted(set(only) - set(range(gpus()))):
        raise UsageError(f"GPUs {missing} of {list(only)} are not here: this machine has {gpus()}, counted from 0; name others")
    asked = named(submission.topology, world_size, only)
    if asked not in TOPOLOGIES:
        raise UsageError(f"topology {asked!r} does not exist; there is {', '.join(TOPOLOGIES)}, and {AUTO}")
    needed = {"cpu": 0, "node": world_size, "shared": 1}[asked]
    if there < needed:
        best, why = choose(world_size, only)
        raise UsageError(
            f"topology {asked!r} with {world_size} ranks needs {needed} GPUs, here are {there}; use {best!r} ({why})"
        )
    return replace(submission, topology=asked)


def devices(topology: str, world_size: int, only: Sequence[int] = ()) -> list[int]:
    """The GPU of every rank; none on the CPU.  Ranks themselves count within `only` (see `visible`)."""
    there = list(only) or list(range(world_size))
    return {"cpu": [], "node": there[:world_size], "shared": there[:1] * world_size}[topology]


def visible(only: Sequence[int]) -> dict[str, str]:
    """Variables that leave a process these GPUs alone, numbered from 0 in this order; none: all of the machine."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, only))} if only else {}


def group_backend(topology: str) -> str:
    """Backend of the ranks' default process group."""
    return "nccl" if topology == "node" else "gloo"


def environment(topology: str) -> dict[str, str]:
    """Variables that the ranks need: torch's symmetric memory refuses two ranks on one GPU unless it is told so."""
    return {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if topology == "shared" else {}
