"""What one rank of this machine can do at best: bytes moved and operations done per second, measured once and kept.

The best of several sizes is taken: a peak is there to bound what is possible, not to describe what is usual.
Not here: the bound of a problem (`roofline`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pkb_env import topology
from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.errors import HarnessError
from pkb_env.sandbox.launcher import Zygote

_SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23)
"""Elements of float32 that are copied; the small ones stay in the nearest caches."""
_EXTENTS = (128, 256, 512)
"""Of the square matrices that are multiplied."""
_GPU_SIZE, _GPU_EXTENTS = 1 << 28, (4096, 8192)
"""On a GPU: float32 copied, far more than its caches hold, because arguments come from memory; bfloat16 matrices multiplied."""
_SECONDS = 0.03
"""For each size."""
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Peaks:
    """Of one rank, with one thread or one GPU."""

    bytes_per_s: float
    """Read plus written, by a copy."""
    flops_per_s: float
    """Multiply and add counted apart; single precision, on a GPU bfloat16."""
    wire_bytes_per_s: float
    """Received from another rank, by a copy; where ranks share memory, or there is one GPU, as `bytes_per_s`."""


def main(upstream: Channel) -> None:
    """Measure in a fresh process and tell the starter."""
    torch.set_num_threads(1)
    upstream.send(asdict(measure_gpu() if upstream.recv().body["gpu"] else measure()))


def measure() -> Peaks:
    """Best rates of a copy and of a matrix product."""
    copied = max(2 * 4 * n / _best(_copy(torch.ones(n), torch.empty(n)), time.perf_counter) for n in _SIZES)
    return Peaks(copied, max(_multiplied(n, time.perf_counter, dtype=torch.float32) for n in _EXTENTS), copied)


def measure_gpu() -> Peaks:
    """The same on the first GPU, and of a copy from the second one."""
    with torch.device("cuda", 0):
        source, target = torch.ones(_GPU_SIZE), torch.empty(_GPU_SIZE)
        copied = 2 * 4 * _GPU_SIZE / _best(_copy(source, target), _when_done)
        multiplied = max(_multiplied(n, _when_done, dtype=torch.bfloat16) for n in _GPU_EXTENTS)
    if torch.cuda.device_count() < 2:
        return Peaks(copied, multiplied, copied)
    return Peaks(copied, multiplied, 4 * _GPU_SIZE / _best(_copy(source.to("cuda:1"), target), _when_done))


def _copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


def _multiplied(extent: int, clock: Callable[[], float], *, dtype: torch.dtype) -> float:
    left, right, out = (torch.ones(extent, extent, dtype=dtype) for _ in range(3))
    return 2 * extent**3 / _best(lambda: torch.mm(left, right, out=out), clock)


def _when_done() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _best(act: Callable[[], object], clock: Callable[[], float]) -> float:
    """Shortest of many runs, in seconds."""
    end, shortest = clock() + _SECONDS, float("inf")
    while (start := clock()) < end:
        act()
        shortest = min(shortest, clock() - start)
    return shortest


def kept(folder: Path, where: str = "cpu") -> Peaks | None:
    """The peaks of this machine for a topology, if they were measured before."""
    path = _file(folder, where)
    return Peaks(**json.loads(path.read_text(encoding="ascii"))) if path.exists() else None


def _file(folder: Path, where: str) -> Path:
    what = f"{topology.hardware_name(where)} {torch.__version__} {sorted(Peaks.__dataclass_fields__)}"
    return folder / f"peaks-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def known(zygote: Zygote, folder: Path, where: str = "cpu") -> Peaks:
    """The peaks of this machine for a topology: from a file in `folder`, else measured now and written there.

    Raises:
        HarnessError: they cannot be measured.
    """
    if there := kept(folder, where):
        return there
    channel = zygote.spawn("peaks")
    try:
        channel.send({"gpu": where != "cpu"})
        found = Peaks(**channel.recv(_DEADLINE_S).body)
    except (ChannelClosed, TimeoutError) as error:
        raise HarnessError(f"the peaks of this machine cannot be measured: {error}") from None
    finally:
        channel.close()
    path = _file(folder, where)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(found)), encoding="ascii")
    aside.rename(path)
    return found
