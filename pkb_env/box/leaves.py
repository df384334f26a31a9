"""What a candidate may return instead of plain tensors, as plain data that the judge can name.

The wire makes these out of leaves that it cannot or must not carry as a tensor.

Not here: how they are found (the worker and the wire), what they cost a candidate (the judge).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Foreign:
    """A leaf that is neither exactly a `torch.Tensor` nor a plain value: a subclass, a module, any other object."""

    type_name: str


@dataclass(frozen=True, eq=False)
class Alias:
    """A tensor that shares memory with an argument."""

    argument: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Oversized:
    """A tensor with more bytes than the wire carries."""

    dtype: torch.dtype
    shape: tuple[int, ...]
