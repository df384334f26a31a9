"""Tensors that are nothing but their bytes: which there are, and how to see one in a buffer.

Not here: whether the bytes are where somebody says they are (`wire`).
"""

from __future__ import annotations

import math
import mmap

import torch

_NAMES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""By name.  A quantised type needs more than its bytes: reading one from a buffer crashes torch."""
Buffer = mmap.mmap | torch.Tensor
"""Host memory, or a GPU's as a tensor of bytes."""
_MAX_DIMS = 16
_MAX_ELEMENTS = 1 << 48


def countable(shape: list[int]) -> bool:
    """Whether torch can count the elements; the other dimensions of an empty tensor count too."""
    return len(shape) <= _MAX_DIMS and all(n >= 0 for n in shape) and math.prod(n for n in shape if n) < _MAX_ELEMENTS


def device_of(buffer: Buffer) -> torch.device:
    """Where the tensors in a buffer live."""
    return buffer.device if isinstance(buffer, torch.Tensor) else torch.device("cpu")


def view(buffer: Buffer, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
    """The tensor that lies at `offset` bytes of a buffer and shares its memory."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device=device_of(buffer))
    if isinstance(buffer, torch.Tensor):
        return buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)
