"""Collectives on one flat buffer, under whichever of their two names does not warn.

Not here: the collectives that have one name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All ranks' tensors of one shape, joined along the first axis."""
    # The newer of two names for one collective; where both exist the older one warns.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    out = tensor.new_empty((dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:]))
    all_gather(out, tensor.contiguous(), group=group)
    return out


def reduce_scattered(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's piece, along the first axis, of the sum over ranks."""
    # The newer of two names for one collective; where both exist the older one warns.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    out = tensor.new_empty((tensor.shape[0] // dist.get_world_size(group), *tensor.shape[1:]))
    reduce_scatter(out, tensor.contiguous(), group=group)
    return out
