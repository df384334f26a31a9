"""One call under torch's profiler: which kernels ran on this rank's GPU, how often, how long.  A rank's word, for feedback."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch._C._autograd import DeviceType  # where torch.profiler's own code takes it from
from torch.profiler import ProfilerActivity, profile

_MOST, _NAME_CHARS = 64, 300


def kernels(act: Callable[[], object]) -> str:
    """Run `act`, which must wait for its GPU; JSON rows [name, calls, microseconds], the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        act()
    rows = [
        [event.key[:_NAME_CHARS], event.count, event.self_device_time_total]
        for event in seen.key_averages()
        if event.device_type is DeviceType.CUDA
    ]
    return json.dumps(sorted(rows, key=lambda row: -float(row[2]))[:_MOST])
