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
    host = _received_in(tensor)
    source = original(host, *args, **kwargs)
    if host is not tensor:
        tensor.detach().copy_(host)
    return source


def irecv(original: Original, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`dist.irecv`: the contents are on the GPU once the work was waited for."""
    host = _received_in(tensor)
    work = original(host, *args, **kwargs)

    def land() -> None:
        tensor.detach().copy_(host)

    return work if work is None or host is tensor else Joined([work], land)


def _received_in(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where gloo can write to it, else host memory of its size."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


STAGED = {"send": send, "isend": send, "recv": recv, "irecv": irecv}
"""By name.  What is dense in host memory goes straight: `dist.recv` itself receives through the patched `dist.irecv`."""
