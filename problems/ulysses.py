"""The exchanges of Ulysses sequence parallelism: one axis is scattered over ranks while another one is gathered.

Not here: how a problem draws its inputs; the global view (each problem's `exact`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_to_all(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Piece j of `scatter_dim` goes to rank j; what comes in is joined along `gather_dim` in rank order, in new memory."""
    world_size = dist.get_world_size(group)
    pieces = torch.stack(x.chunk(world_size, scatter_dim))
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return came.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def unpadded(x: torch.Tensor, dim: int, length: int, world_size: int) -> torch.Tensor:
    """The first `length` positions along `dim`; all of them when `length` is 0 or a multiple of the world size."""
    return x.narrow(dim, 0, length) if length % world_size else x
