"""What is true where the reference alone says so: its run in more precision, by the makers of a problem's inputs together.

float64 where the reference runs in it and memory suffices, else float32, else the dtype of the inputs: tried once, by all ranks
alike, before the first trial.  A problem's inputs are looked at too: some do not depend on the secret.
Not here: when the reference's own output is taken instead (`judging`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pkb_env import hardware
from pkb_env.box import wire

_WIDER = (torch.float64, torch.float32)
_COPIES, _MEMORY_SHARE = 4, 0.5
"""Of arguments and outputs that a run may hold at once, and what they may take of the machine's memory."""
_ROOM = 3
"""An arena for outputs takes so many times their bytes."""


class Answers:
    """The runs of one rank."""

    def __init__(self, reference: Callable[..., Any], first: tuple[Any, ...]) -> None:
        """Collective: every rank tries with its own inputs; they stay as they are."""
        self._reference = reference
        out = reference(*_copied(first, None))
        self.precision = self._best(first, wire.tensor_bytes(first) + wire.tensor_bytes(out))
        self.bytes = max(wire.tensor_bytes(out), -(-wire.tensor_bytes(self(first)) // _ROOM))
        """Bytes of outputs that arenas must have room for."""
        self._arena: wire.Arena | None = None

    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        """Collective: what the reference answers; the inputs stay as they are."""
        return self._reference(*_copied(inputs, self.precision))

    def map_arena(self, fd: int, slots: int, capacity: int) -> None:
        """Where `leave` puts answers."""
        self._arena = wire.Arena(fd, slots, capacity)

    def leave(self, slot: int, nonce: int, inputs: tuple[Any, ...]) -> None:
        """Collective: answer, and put the answer where the judge reads it."""
        assert self._arena is not None
        self._arena.write(slot, nonce, _mapped(torch.Tensor.cpu, self(inputs)))

    def _best(self, first: tuple[Any, ...], nbytes: int) -> torch.dtype | None:
        """The most precise dtype in which the reference runs on every rank; None: that of the inputs."""
        narrow = max((x.element_size() // (2 if x.is_complex() else 1) for x in _floating(first)), default=0)
        for dtype in _WIDER:
            if not 0 < narrow < dtype.itemsize:
                continue
            held = nbytes * dtype.itemsize // narrow * _COPIES * dist.get_world_size()
            if held <= _MEMORY_SHARE * hardware.memory_bytes() and self._runs(first, dtype):
                return dtype
        return None

    def _runs(self, first: tuple[Any, ...], dtype: torch.dtype) -> bool:
        fails = torch.zeros(1)
        try:
            self._reference(*_copied(first, dtype))
        except Exception:  # noqa: BLE001  whatever the reference raises where a dtype does not suit it
            fails += 1
        dist.all_reduce(fails)
        return not bool(fails.item())


def alike(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether two sets of inputs hold the same tensors."""
    pairs = list(zip(_tensors(left), _tensors(right), strict=False))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _copied(tree: Any, dtype: torch.dtype | None) -> Any:
    """The tree with new tensors, its floating ones as `dtype`."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        if dtype is None or not (x.is_floating_point() or x.is_complex()):
            return x.clone()
        return x.to(torch.promote_types(torch.complex64, dtype) if x.is_complex() else dtype, copy=True)

    return _mapped(copied, tree)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with the function applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _mapped(function, value) for key, value in tree.items()}
    return type(tree)(_mapped(function, each) for each in tree) if type(tree) in (tuple, list) else tree


def _floating(tree: Any) -> list[torch.Tensor]:
    return [x for x in _tensors(tree) if x.is_floating_point() or x.is_complex()]


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [x for each in inside for x in _tensors(each)]
