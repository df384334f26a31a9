"""The process that waits for a box's GPUs: it waits inside the call, and its absence is said.  Its work is made up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pkb_env.sandbox.gpu_rest import Rest


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def started(prepare: Callable[[list[int]], Callable[[], None]]) -> Rest:
    rest = Rest([0, 0])
    rest.start(prepare)
    return rest


def busy_for(seconds: float) -> Callable[[list[int]], Callable[[], None]]:
    return lambda _devices: lambda: time.sleep(seconds)


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    rest = Rest([])
    rest.start()
    rest.ready()
    assert rest.watched
    assert rest.wait() == 0


def test_waiting_lasts_as_long_as_the_gpus_are_busy() -> None:
    rest = started(busy_for(0.05))
    rest.ready()
    assert rest.devices == [0]
    assert rest.wait() > 50e6
    assert rest.watched


def broken(_devices: list[int]) -> Callable[[], None]:
    raise RuntimeError("there is no driver")


def test_a_child_that_cannot_work_is_missed() -> None:
    rest = started(broken)
    rest.ready()
    assert not rest.watched
    assert rest.wait() == 0


def test_a_child_that_dies_is_missed() -> None:
    before = children()
    rest = started(busy_for(0.0))
    rest.ready()
    assert rest.wait() > 0
    (child,) = children() - before
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest.wait()
    assert not rest.watched


@pytest.mark.gpu
def test_a_kernel_that_runs_is_waited_for() -> None:
    import torch  # noqa: PLC0415

    rest = Rest([0])
    rest.start()
    rest.ready()
    assert rest.watched
    idle = min(rest.wait() for _ in range(20))
    matrix = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        torch.mm(matrix, matrix)
    busy = rest.wait()
    torch.cuda.synchronize()
    print(f"at rest {idle / 1e3:.0f} us, beside a kernel {busy / 1e3:.0f} us")
    assert busy > 5 * idle
