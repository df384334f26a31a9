"""The least time that a problem can take on a machine: its least cost over the machine's peaks.

Roofline (Williams, Waterman, Patterson 2009): the slowest of moving bytes locally, moving bytes between ranks, computing.  The
three are not added, which keeps the bound low.
"""

from __future__ import annotations

from pkb_env.peaks import Peaks
from problems.base import Cost


def bound_ms(cost: Cost, peaks: Peaks) -> float:
    """Milliseconds below which no algorithm can stay."""
    moved = max(cost.wire_bytes / peaks.wire_bytes_per_s, cost.memory_bytes / peaks.bytes_per_s)
    return 1e3 * max(moved, cost.flops / peaks.flops_per_s)
