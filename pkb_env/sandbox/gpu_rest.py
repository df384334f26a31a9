"""Whether a box's GPUs are at rest: work of a trusted process there waits for what the ranks left running, and for its turn.

A stopped process runs no instruction, but its kernels go on: what says `done` before they are, or leaves one that watches for the
next arguments, is kept waiting here, inside the time of its call.
Not here: the clock (`box_group`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Rest:
    """A cell on each GPU; on the CPU there is none, and nothing to wait for."""

    def __init__(self, devices: Iterable[int]) -> None:
        self._devices, self._cells = sorted(set(devices)), list[torch.Tensor]()

    def prepare(self) -> None:
        """Make the contexts: a quarter of a second each, which ranks use to come up."""
        self._cells = [torch.zeros(1, device=f"cuda:{device}") for device in self._devices]
        self.wait()

    def wait(self) -> None:
        """Return once a little work of our own is done on every GPU."""
        for cell in self._cells:
            cell.add_(1)
        for device in self._devices:
            torch.cuda.synchronize(device)
