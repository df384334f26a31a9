"""Rows of nodes between ranks in a reference: requests to the owners of ids, chunks counted from the own rank on.

Not here: how inputs are drawn (`graph_cases`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.moe import exchanged


def from_first_rank(counts: Sequence[int], rank: int) -> list[int]:
    """Counts for ranks 0, 1, ... from those for rank, rank + 1, ... (modulo the number of ranks)."""
    return [counts[(peer - rank) % len(counts)] for peer in range(len(counts))]


def sent_to_owners(
    ids: torch.Tensor, owners: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
    """Ids travel to their owners.

    Args:
        ids: [n].
        owners: rank of each within the group, [n].
        group: all of its ranks take part.

    Returns:
        The stable order by owner in which ids were sent [n], how many went to each rank and came from it, what came.
    """
    order = owners.argsort(stable=True)
    to = owners.bincount(minlength=dist.get_world_size(group))
    frm = torch.empty_like(to)
    dist.all_to_all_single(frm, to, group=group)
    send, receive = torch.stack((to, frm)).tolist()
    return order, send, receive, exchanged(ids[order], send, receive, group)
