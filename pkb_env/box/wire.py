"""What crosses the wall: raw tensor bytes and a JSON description of their tree, in a sealed memory file.  Never pickle.

An arena is one memory file of one rank, cut into slots of equal size.  A slot holds a header (magic, nonce, length), the
description, then the bytes of every tensor at aligned offsets.  The reader assumes that a hostile rank wrote it: every
number is checked before it is used.

Description: {"t": [dtype, shape, offset]} tensor, {"a": [argument, dtype, shape, offset]} tensor that lies inside an
argument, {"o": [dtype, shape]} tensor too large for the slot, {"f": type name} anything else, {"v": plain value},
{"(": [...]} tuple, {"[": [...]} list, {"{": [[key, value], ...]} dict.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .leaves import Alias, Foreign, Oversized
from .raw_tensor import DTYPES, countable, view

_HEADER = struct.Struct("<QQQ")
_MAGIC = 0x31_57_42_4B_50
_ALIGN = 256
_ROOM_FOR_TREE = 1 << 16
_MAX_NODES = 20_000
_MAX_DEPTH = 20
_PLAIN = (type(None), bool, int, float, str)
_MAX_NAME = 200
_MAX_INT_BITS = 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Aliases = Callable[[torch.Tensor], str | None]


class WireViolation(ValueError):
    """A slot does not hold what its writer had to put there."""


class _TooLarge(ValueError):
    """A structure has more leaves or levels than the wire carries."""


def create_arena(name: str) -> int:
    """An empty memory file; `size_arena` gives it its length once that is known."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def size_arena(fd: int, slots: int, capacity: int) -> None:
    """Give an arena its final length and seal it: nobody can shrink it under a reader."""
    os.ftruncate(fd, slots * capacity)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def capacity_for(nbytes: int) -> int:
    """Bytes of a slot that holds trees like one of `nbytes` tensor bytes, with room for uneven trials."""
    return -(-(_ROOM_FOR_TREE + nbytes + nbytes // 2 + (1 << 20)) // mmap.PAGESIZE) * mmap.PAGESIZE


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors of a tree, padding included."""
    if isinstance(tree, torch.Tensor):
        return -(-tree.numel() * tree.element_size() // _ALIGN) * _ALIGN
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return sum(map(tensor_bytes, tree)) if isinstance(tree, (tuple, list)) else 0


class Arena:
    """A mapped arena of one rank."""

    def __init__(self, fd: int, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self._map = mmap.mmap(fd, slots * capacity)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._parsed: dict[int, tuple[bytes, Any]] = {}
        self._begun, self._free = -1, _ROOM_FOR_TREE

    def contains(self, tensor: torch.Tensor) -> int | None:
        """Byte position of a tensor's data inside its slot, or None when it lies elsewhere."""
        position = tensor.data_ptr() - self._base
        return position % self.capacity if 0 <= position < self.slots * self.capacity and tensor.numel() else None

    def begin(self, slot: int) -> None:
        """From now on `new` gives tensors in this slot, and `write` does not copy them."""
        self._begun, self._free = slot, _ROOM_FOR_TREE

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor inside the slot that was begun.

        Raises:
            MemoryError: the slot has no room for it.
        """
        size = math.prod(shape) * dtype.itemsize
        if size > self.capacity - self._free:
            raise MemoryError(f"an output of {size} bytes; {self.capacity - self._free} are left for the outputs of this call")
        offset, self._free = self._free, self._free + -(-size // _ALIGN) * _ALIGN
        return view(self._map, dtype, list(shape), self._begun * self.capacity + offset)

    def write(self, slot: int, nonce: int, tree: Any, aliases: Aliases = lambda _: None) -> None:
        """Put a tree into a slot; what cannot cross is described, not raised."""
        writer = _Writer(self._map, slot * self.capacity, self.capacity, aliases)
        if slot == self._begun:
            writer.resident(self._base, self._free)
        description = writer.describe(tree)
        if len(description) > _ROOM_FOR_TREE - _HEADER.size:
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
        if length > _ROOM_FOR_TREE - _HEADER.size:
            raise WireViolation(f"slot {slot} claims a description of {length} bytes")
        text = self._map[start + _HEADER.size : start + _HEADER.size + length]
        return _Reader(self._map, start, self.capacity).tree(self._description(slot, text))

    def holds(self, slot: int, nonce: int) -> bool:
        """Whether a tree with this nonce was put into the slot."""
        return _HEADER.unpack_from(self._map, slot * self.capacity)[:2] == (_MAGIC, nonce)

    def reread(self, slot: int, tree: Any) -> Any:
        """What a slot holds now where `tree` was written; the description in the slot is not looked at."""
        start = slot * self.capacity
        node = _Writer(None, start, self.capacity, lambda _: None).node(tree, 0)
        return _Reader(self._map, start, self.capacity).tree(node)

    def _description(self, slot: int, text: bytes) -> Any:
        known = self._parsed.get(slot)
        if known is not None and known[0] == text:
            return known[1]
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireViolation(f"slot {slot} holds no JSON: {type(error).__name__}") from None
        self._parsed[slot] = (text, parsed)
        return parsed


class _Writer:
    def __init__(self, buffer: mmap.mmap | None, start: int, capacity: int, aliases: Aliases) -> None:
        self._buffer, self._start, self._capacity, self._aliases = buffer, start, capacity, aliases
        self._next, self._nodes = _ROOM_FOR_TREE, 0
        self._base = self._used = 0

    def resident(self, base: int, used: int) -> None:
        """Tensors up to `used` bytes of the slot lie where they are read; `base` is the address of the arena."""
        self._base, self._used, self._next = base + self._start, used, used

    def describe(self, tree: Any) -> bytes:
        try:
            return json.dumps(self.node(tree, 0)).encode()
        except _TooLarge as error:
            return json.dumps({"f": str(error)}).encode()

    def node(self, value: Any, depth: int) -> dict[str, Any]:
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise _TooLarge(f"a structure deeper than {_MAX_DEPTH} levels or larger than {_MAX_NODES} leaves")
        if type(value) is AsyncCollectiveTensor:
            value = value.wait()  # the result of a functional collective; whoever reads it waits
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind in (tuple, torch.Size):
            return {"(": [self.node(v, depth + 1) for v in value]}
        if kind is list:
            return {"[": [self.node(v, depth + 1) for v in value]}
        if kind is dict:
            return self._dict(value, depth)
        if kind is int and value.bit_length() > _MAX_INT_BITS:
            return {"f": f"an int of {value.bit_length()} bits"}
        return {"v": value} if kind in _PLAIN else {"f": kind.__name__[:_MAX_NAME]}

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        """Keys cross as text, as the judge compares them."""
        if not all(type(key) in _PLAIN and (type(key) is not int or key.bit_length() <= _MAX_INT_BITS) for key in value):
            return {"f": "dict with keys that are no plain values"}
        keys = [str(key) for key in value]
        if len(set(keys)) < len(keys):
            return {"f": "dict with keys that read alike"}
        return {"{": [[key, self.node(v, depth + 1)] for key, v in zip(keys, value.values(), strict=True)]}

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            return {"f": f"Tensor on {value.device.type} with layout {layout}"}
        shape = list(value.shape)
        if dtype not in DTYPES or not countable(shape):
            return {"f": f"Tensor of dtype {dtype} with shape {str(shape)[:80]}"}
        size = value.numel() * value.element_size()
        place = value.data_ptr() - self._base
        if _ROOM_FOR_TREE <= place <= self._used - size and place % _ALIGN == 0 and value.is_contiguous() and not value.is_conj():
            return {"t": [dtype, shape, place]}
        if self._next + size > self._capacity:
            return {"o": [dtype, shape]}
        offset, self._next = self._next, self._next + -(-size // _ALIGN) * _ALIGN
        if size and self._buffer is not None:
            view(self._buffer, value.dtype, shape, self._start + offset).copy_(value.detach())
        argument = self._aliases(value)
        return {"t": [dtype, shape, offset]} if argument is None else {"a": [argument, dtype, shape, offset]}


class _Reader:
    def __init__(self, buffer: mmap.mmap, start: int, capacity: int) -> None:
        self._buffer, self._start, self._capacity, self._nodes = buffer, start, capacity, 0

    def tree(self, node: Any, depth: int = 0) -> Any:
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES or not isinstance(node, dict) or len(node) != 1:
            raise WireViolation("a description that is no tree")
        ((kind, value),) = node.items()
        if kind == "v" and isinstance(value, _PLAIN):
            return value
        if kind == "f" and isinstance(value, str):
            return Foreign(value[:_MAX_NAME])
        if not isinstance(value, list):
            raise WireViolation(f"a description with {kind[:10]!r} of {type(value).__name__}")
        return self._branch(kind, value, depth)

    def _branch(self, kind: str, value: list[Any], depth: int) -> Any:
        if kind == "t" and len(value) == 3:
            return self._tensor(*value)
        if kind == "a" and len(value) == 4 and isinstance(value[0], str):
            return Alias(value[0][:_MAX_NAME], self._tensor(*value[1:]))
        if kind == "o" and len(value) == 2:
            return Oversized(_dtype(value[0]), _shape(value[1]))
        if kind in ("(", "["):
            items = [self.tree(v, depth + 1) for v in value]
            return tuple(items) if kind == "(" else items
        if kind == "{" and all(isinstance(v, list) and len(v) == 2 and isinstance(v[0], str) for v in value):
            if len({k for k, _ in value}) < len(value):
                raise WireViolation("a description of a dict that names a key twice")
            return {k: self.tree(v, depth + 1) for k, v in value}
        raise WireViolation(f"a description with an unknown node {kind[:10]!r}")

    def _tensor(self, dtype: Any, shape: Any, offset: Any) -> torch.Tensor:
        kind, dims = _dtype(dtype), _shape(shape)
        size = math.prod(dims) * kind.itemsize
        if type(offset) is not int or not _ROOM_FOR_TREE <= offset <= self._capacity - size or offset % _ALIGN:
            raise WireViolation(f"a tensor of {size} bytes at offset {offset!r} of a slot of {self._capacity}")
        return view(self._buffer, kind, list(dims), self._start + offset)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise WireViolation(f"a tensor of dtype {str(name)[:40]!r}")
    return DTYPES[name]


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int for n in shape) or not countable(shape):
        raise WireViolation(f"a tensor of shape {str(shape)[:80]}")
    return tuple(shape)
