"""Sending and receiving tensors of a GPU over gloo, which would hand a GPU's address to the kernel: staged through host memory.

Collectives need no such help: gloo stages those itself.
"""

from __future__ import annotations

from typing import Any

import torch

from .gaps import Joined, Original


def send(original: Original, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`dist.send`, and `dist.isend`: the work keeps the copy that it sends."""
    return original(tensor.detach().cpu().contiguous(), *args, **kwargs)


def recv(original: Original, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`dist.recv`."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    source = original(host, *args, **kwargs)
    tensor.detach().copy_(host)
    return source


def irecv(original: Original, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`dist.irecv`: the contents are on the GPU once the work was waited for."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    work = original(host, *args, **kwargs)

    def land() -> None:
        tensor.detach().copy_(host)

    return None if work is None else Joined([work], land)


STAGED = {"send": send, "isend": send, "recv": recv, "irecv": irecv}
"""By name; a tensor in host memory goes through as well."""
