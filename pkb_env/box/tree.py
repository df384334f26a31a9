"""Trees of tensors as JSON: what a slot's description says, and how a hostile one is read.

{"t": [dtype, shape, offset]} tensor, {"a": [argument, dtype, shape, offset]} tensor that lies inside an argument,
{"o": [dtype, shape]} tensor too large for the slot, {"f": type name} anything else, {"v": plain value}, {"(": [...]} tuple,
{"[": [...]} list, {"{": [[key, value], ...]} dict.
Not here: slots, headers, nonces (`wire`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .leaves import Alias, Foreign, Oversized
from .raw_tensor import DTYPES, Buffer, countable, device_of, view

ALIGN = 256
"""Offsets of tensors are multiples of it."""
ROOM_FOR_TREE = 1 << 16
"""Bytes at the start of a slot that are kept for header and description."""
_MAX_NODES = 20_000
_MAX_DEPTH = 20
_PLAIN = (type(None), bool, int, float, str)
_MAX_NAME = 200
_MAX_INT_BITS = 1024

Aliases = Callable[[torch.Tensor], str | None]


class WireViolation(ValueError):
    """A slot does not hold what its writer had to put there."""


class _TooLarge(ValueError):
    """A structure has more leaves or levels than the wire carries."""


class Writer:
    """Puts the tensors of a tree into a slot and describes the tree."""

    def __init__(self, buffer: Buffer, start: int, capacity: int, aliases: Aliases, *, copies: bool = True) -> None:
        self._buffer, self._start, self._capacity, self._aliases, self._copies = buffer, start, capacity, aliases, copies
        self._device = device_of(buffer)
        self._next, self._nodes = ROOM_FOR_TREE, 0
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
        if value.is_nested or value.layout is not torch.strided or (self._copies and value.device != self._device):
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            return {"f": f"Tensor on {value.device if value.is_cuda else value.device.type} with layout {layout}"}
        shape = list(value.shape)
        if dtype not in DTYPES or not countable(shape):
            return {"f": f"Tensor of dtype {dtype} with shape {str(shape)[:80]}"}
        size = value.numel() * value.element_size()
        place = value.data_ptr() - self._base
        if ROOM_FOR_TREE <= place <= self._used - size and place % ALIGN == 0 and value.is_contiguous() and not value.is_conj():
            return {"t": [dtype, shape, place]}
        if self._next + size > self._capacity:
            return {"o": [dtype, shape]}
        offset, self._next = self._next, self._next + -(-size // ALIGN) * ALIGN
        if size and self._copies:
            view(self._buffer, value.dtype, shape, self._start + offset).copy_(value.detach())
        argument = self._aliases(value)
        return {"t": [dtype, shape, offset]} if argument is None else {"a": [argument, dtype, shape, offset]}


class Reader:
    """Finds the tensors of a described tree in a slot; every number is checked before it is used."""

    def __init__(self, buffer: Buffer, start: int, capacity: int) -> None:
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
        if type(offset) is not int or not ROOM_FOR_TREE <= offset <= self._capacity - size or offset % ALIGN:
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
