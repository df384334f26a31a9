"""Ranks on a grid with contiguous rows: who shares a row or column, how an axis is cut, and exchanges along either side.

Without a group of its own, an exchange goes through the group of all ranks with nothing for those who are no peers.
Not here: collectives of all ranks (`collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def grid_peers(columns: int) -> tuple[list[int], list[int]]:
    """Ranks of this rank's row and of its column."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = rank // columns * columns
    return list(range(first, first + columns)), list(range(rank % columns, world_size, columns))


def cut(extent: int, parts: int) -> list[int]:
    """Pieces of extent / parts, rounded up unless nothing were left for the last one, which gets what is left."""
    step = -(-extent // parts)
    if step * (parts - 1) >= extent:
        step = extent // parts
    return [step] * (parts - 1) + [extent - step * (parts - 1)]


def exchanged_along(
    x: torch.Tensor, split: int, join: int, extents: Sequence[int], group: dist.ProcessGroup | None, peers: Sequence[int]
) -> torch.Tensor:
    """A piece of x along axis `split` for every peer; theirs, of these extents along axis `join`, are joined there."""
    if len(peers) == 1:
        return x
    pieces = torch.split(x, cut(x.shape[split], len(peers)), split)
    mine = list(pieces[peers.index(dist.get_rank())].shape)
    shapes = [[*mine[:join], extent, *mine[join + 1 :]] for extent in extents]
    to, frm = [piece.numel() for piece in pieces], [torch.Size(shape).numel() for shape in shapes]
    out = x.new_empty(sum(frm))
    flat = torch.cat([piece.flatten() for piece in pieces])
    counts = (frm, to) if group is not None else (among_all(frm, peers), among_all(to, peers))
    dist.all_to_all_single(out, flat, *counts, group=group)
    return torch.cat([part.view(shape) for part, shape in zip(torch.split(out, frm), shapes, strict=True)], join)


def among_all(counts: Sequence[int], peers: Sequence[int]) -> list[int]:
    """The peers' counts, and 0 for all other ranks."""
    of = dict(zip(peers, counts, strict=True))
    return [of.get(rank, 0) for rank in range(dist.get_world_size())]
