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

from pkb_env import hardware
from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.errors import HarnessError
from pkb_env.sandbox.launcher import Zygote

_SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23)
"""Elements of float32 that are copied; the small ones stay in the nearest caches."""
_EXTENTS = (128, 256, 512)
"""Of the square matrices that are multiplied."""
_SECONDS = 0.03
"""For each size."""
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Peaks:
    """Of one rank with one thread."""

    bytes_per_s: float
    """Read plus written, by a copy."""
    flops_per_s: float
    """Single precision, multiply and add counted apart."""


def main(upstream: Channel) -> None:
    """Measure in a fresh process and tell the starter."""
    torch.set_num_threads(1)
    upstream.send(asdict(measure()))


def measure() -> Peaks:
    """Best rates of a copy and of a matrix product."""
    return Peaks(max(map(_copied, _SIZES)), max(map(_multiplied, _EXTENTS)))


def _copied(count: int) -> float:
    source, target = torch.ones(count), torch.empty(count)
    return 2 * 4 * count / _best(lambda: target.copy_(source))


def _multiplied(extent: int) -> float:
    left, right, out = (torch.ones(extent, extent) for _ in range(3))
    return 2 * extent**3 / _best(lambda: torch.mm(left, right, out=out))


def _best(act: Callable[[], object]) -> float:
    """Shortest of many runs, in seconds."""
    end, shortest = time.perf_counter() + _SECONDS, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        act()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def kept(folder: Path) -> Peaks | None:
    """The peaks of this machine, if they were measured before."""
    path = _file(folder)
    return Peaks(**json.loads(path.read_text(encoding="ascii"))) if path.exists() else None


def _file(folder: Path) -> Path:
    name = hashlib.sha256(f"{hardware.cpu()} {torch.__version__}".encode()).hexdigest()[:16]
    return folder / f"peaks-{name}.json"


def known(zygote: Zygote, folder: Path) -> Peaks:
    """The peaks of this machine: from a file in `folder`, else measured now and written there.

    Raises:
        HarnessError: they cannot be measured.
    """
    if there := kept(folder):
        return there
    channel = zygote.spawn("peaks")
    try:
        found = Peaks(**channel.recv(_DEADLINE_S).body)
    except (ChannelClosed, TimeoutError) as error:
        raise HarnessError(f"the peaks of this machine cannot be measured: {error}") from None
    finally:
        channel.close()
    path = _file(folder)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(found)), encoding="ascii")
    aside.rename(path)
    return found
