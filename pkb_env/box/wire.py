"""What crosses the wall: raw tensor bytes and a JSON description of their tree, in memory that both sides map.  Never pickle.

An arena is one sealed memory file of one rank, cut into slots of equal size.  A slot holds a header (magic, nonce, length), the
description, then the bytes of every tensor at aligned offsets; where the tensors live on a GPU they lie at the same offsets of
memory there, and the file holds the rest.  The reader assumes that a hostile rank wrote it: every number is checked before it
is used.
Not here: how a tree is described (`tree`), memory of a GPU (`device_memory`).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

import torch

from .leaves import Alias
from .raw_tensor import Buffer, view
from .tree import ALIGN, ROOM_FOR_TREE, Aliases, Reader, WireViolation, Writer

_HEADER = struct.Struct("<QQQ")
_MAGIC = 0x31_57_42_4B_50
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_arena(name: str) -> int:
    """An empty memory file; `size_arena` gives it its length once that is known."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def size_arena(fd: int, slots: int, capacity: int) -> None:
    """Give an arena its final length and seal it: nobody can shrink it under a reader."""
    os.ftruncate(fd, slots * capacity)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def capacity_for(nbytes: int) -> int:
    """Bytes of a slot for trees like one of `nbytes` tensor bytes.

    There is room for uneven trials, and for an output made in place beside the copy of another; what is not used takes no
    memory.
    """
    return -(-(ROOM_FOR_TREE + 3 * nbytes + (1 << 20)) // mmap.PAGESIZE) * mmap.PAGESIZE


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors of a tree, padding included."""
    if isinstance(tree, torch.Tensor):
        return -(-tree.numel() * tree.element_size() // ALIGN) * ALIGN
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return sum(map(tensor_bytes, tree)) if isinstance(tree, (tuple, list)) else 0


def map_arenas(
    fds: Sequence[int], slots: int, capacities: Sequence[int], gpu: int | None = None, home: torch.device | None = None
) -> list[Arena]:
    """One arena per capacity.  `fds`: their files; with a GPU, behind them as many descriptors of memory there."""
    if gpu is None:
        return [Arena(fd, slots, capacity) for fd, capacity in zip(fds, capacities, strict=True)]
    from .device_memory import attach  # noqa: PLC0415  wants a driver

    files, memory = fds[: len(capacities)], fds[len(capacities) :]
    return [
        Arena(file, slots, capacity, attach(fd, slots * capacity, gpu), home)
        for file, fd, capacity in zip(files, memory, capacities, strict=True)
    ]


class Arena:
    """A mapped arena of one rank."""

    def __init__(
        self, fd: int, slots: int, capacity: int, memory: torch.Tensor | None = None, home: torch.device | None = None
    ) -> None:
        """`memory`: uint8 [slots * capacity] on a GPU, for the tensors; without it they lie in the file.

        `home`: the device on which a reader wants them; without it they are views of the arena.
        """
        self.slots, self.capacity, self._home = slots, capacity, home
        self._map = mmap.mmap(fd, slots * capacity)
        self._tensors: Buffer = self._map if memory is None else memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) if memory is None else memory.data_ptr()
        self._seen: dict[int, tuple[bytes, Any]] = {}
        """What was read last from each slot, by its description: trials differ in values, seldom in shapes."""
        self._begun, self._free = -1, ROOM_FOR_TREE

    def contains(self, tensor: torch.Tensor) -> int | None:
        """Byte position of a tensor's data inside its slot, or None when it lies elsewhere."""
        position = tensor.data_ptr() - self._base
        return position % self.capacity if 0 <= position < self.slots * self.capacity and tensor.numel() else None

    def begin(self, slot: int) -> None:
        """From now on `new` gives tensors in this slot, and `write` does not copy them."""
        self._begun, self._free = slot, ROOM_FOR_TREE

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor inside the slot that was begun.

        Raises:
            MemoryError: the slot has no room for it.
        """
        size = math.prod(shape) * dtype.itemsize
        if size > self.capacity - self._free:
            raise MemoryError(f"an output of {size} bytes; {self.capacity - self._free} are left for the outputs of this call")
        offset, self._free = self._free, self._free + -(-size // ALIGN) * ALIGN
        return view(self._tensors, dtype, list(shape), self._begun * self.capacity + offset)

    def write(self, slot: int, nonce: int, tree: Any, aliases: Aliases = lambda _: None) -> None:
        """Put a tree into a slot; what cannot cross is described, not raised."""
        writer = Writer(self._tensors, slot * self.capacity, self.capacity, aliases)
        if slot == self._begun:
            writer.resident(self._base, self._free)
        description = writer.describe(tree)
        if len(description) > ROOM_FOR_TREE - _HEADER.size:
            description = json.dumps({"f": f"a structure of {len(description)} characters"}).encode()
        start = slot * self.capacity
        self._map[start + _HEADER.size : start + _HEADER.size + len(description)] = description
        _HEADER.pack_into(self._map, start, _MAGIC, nonce, len(description))

    def read(self, slot: int, nonce: int) -> Any:
        """The tree in a slot; its tensors are views of the arena.

        Raises:
            WireViolation: the slot holds another nonce or no valid tree.
        """
        start = slot * self.capacity
        magic, came, length = _HEADER.unpack_from(self._map, start)
        if magic != _MAGIC or came != nonce:
            raise WireViolation(f"slot {slot} holds magic {magic:#x} and nonce {came:#x}, wanted {_MAGIC:#x} and {nonce:#x}")
        if length > ROOM_FOR_TREE - _HEADER.size:
            raise WireViolation(f"slot {slot} claims a description of {length} bytes")
        text = self._map[start + _HEADER.size : start + _HEADER.size + length]
        known = self._seen.get(slot)
        if known is None or known[0] != text:
            known = self._seen[slot] = text, Reader(self._tensors, start, self.capacity).tree(_parsed(slot, text))
        return _anew(known[1], self._home)

    def wipe(self) -> None:
        """Leave nothing in it that a later user could read; its pages are given back."""
        self._map.madvise(mmap.MADV_REMOVE)
        if isinstance(self._tensors, torch.Tensor):
            self._tensors.zero_()

    def holds(self, slot: int, nonce: int) -> bool:
        """Whether a tree with this nonce was put into the slot."""
        return _HEADER.unpack_from(self._map, slot * self.capacity)[:2] == (_MAGIC, nonce)

    def reread(self, slot: int, tree: Any) -> Any:
        """What a slot holds now where `tree` was written; the description in the slot is not looked at."""
        start = slot * self.capacity
        node = Writer(self._tensors, start, self.capacity, lambda _: None, copies=False).node(tree, 0)
        return _anew(Reader(self._tensors, start, self.capacity).tree(node), self._home)


def _parsed(slot: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireViolation(f"slot {slot} holds no JSON: {type(error).__name__}") from None


def _anew(tree: Any, home: torch.device | None) -> Any:
    """The same tree of new tensors, on `home` if that is given: who gets it may change its shapes and lists."""
    kind = type(tree)
    if kind is torch.Tensor:
        again = tree.view(tree.shape)
        return again if home is None else again.to(home)
    if kind is Alias:
        return Alias(tree.argument, _anew(tree.tensor, home))
    if kind in (tuple, list):
        return kind(_anew(each, home) for each in tree)
    return {key: _anew(each, home) for key, each in tree.items()} if kind is dict else tree
