"""Whether a box's GPUs are at rest: work of a trusted process there waits for what the ranks left running, and for its turn.

A stopped process runs no instruction, but its kernels go on: what says `done` before they are, or leaves one that watches for the
next arguments, keeps its own call waiting here.  The process that waits is a child, forked before the supervisor enters name
spaces: after that the supervisor can make no thread, and CUDA makes some.
Not here: the clock (`box_group`).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable

from pkb_env.sandbox.limits import close_all_but, die_with_parent

_START_S, _WAIT_S = 30.0, 10.0
Work = Callable[[], None]


class Rest:
    """A child that does a little work on each GPU when asked; on the CPU there is none, and nothing to wait for."""

    def __init__(self, devices: Iterable[int]) -> None:
        self.devices = sorted(set(devices))
        self._go = self._done = -1
        self.watched = not self.devices
        """Whether somebody can tell."""

    def start(self, prepare: Callable[[list[int]], Work] | None = None) -> None:
        """Fork the child; it makes its contexts while ranks come up.  `prepare`: gives the work to be done at each call."""
        if not self.devices:
            return
        (go, self._go), (self._done, done) = os.pipe(), os.pipe()
        parent = os.getpid()
        if os.fork() == 0:
            try:
                die_with_parent(parent)
                close_all_but({go, done})
                _watch((prepare or _on_gpus)(self.devices), go, done)
            finally:
                os._exit(0)
        os.close(go)
        os.close(done)

    def ready(self) -> None:
        """Wait until the child can work; without it nothing is waited for, which `watched` says."""
        self.watched = not self.devices or self._heard(_START_S)

    def wait(self) -> int:
        """Return once a little work is done on every GPU; how long that took in ns."""
        if not self.devices or not self.watched:
            return 0
        start = time.perf_counter_ns()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"g")
        self.watched = self._heard(_WAIT_S)
        return time.perf_counter_ns() - start

    def _heard(self, seconds: float) -> bool:
        return bool(select.select([self._done], [], [], seconds)[0]) and os.read(self._done, 1) == b"d"


def _watch(work: Work, go: int, done: int) -> None:
    """Work once to be ready, then for each byte that comes, until the supervisor is gone."""
    work()
    os.write(done, b"d")
    while os.read(go, 1):
        work()
        os.write(done, b"d")


def _on_gpus(devices: list[int]) -> Work:
    import torch  # noqa: PLC0415  in the child only

    cells = [torch.zeros(1, device=f"cuda:{device}") for device in devices]

    def work() -> None:
        for cell in cells:
            cell.add_(1)
        for device in devices:
            torch.cuda.synchronize(device)

    return work
