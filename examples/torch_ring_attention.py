"""Exact attention over a sequence split by ranks, with torch over symmetric memory: every rank reads the blocks it needs.

Axes  B batch, S positions per rank, H heads, D head size; rank r owns positions [r*S, (r+1)*S).

Keys and values are staged where peers can read them; a rank then merges one block after the other with running softmax
statistics in float32, so no rank ever holds the whole sequence.  The closing barrier keeps a fast rank's next call from
overwriting what a slow one still reads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from pkb_box import symm_mem

_workspaces: dict[dist.ProcessGroup | None, symm_mem.SymmetricMemory] = {}


def workspace(nbytes: int, group: dist.ProcessGroup | None) -> symm_mem.SymmetricMemory:
    """Symmetric memory of at least so many bytes; allocated at the first call, and when a call needs more."""
    found = _workspaces.get(group)
    if found is None or found.buffer_size < nbytes:
        size = 1 << max(12, (nbytes - 1).bit_length())
        found = _workspaces[group] = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8), group)
    return found


@torch.no_grad()
def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of q (B, S, H, D) to the keys and values of all ranks, in rank order; causal: to positions up to its own."""
    memory = workspace(k.nbytes + v.nbytes, group)
    mine = memory.rank
    for peer_view, own in zip(blocks_of(memory, mine, k, v), (k, v), strict=True):
        peer_view.copy_(own)
    memory.barrier()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    queries = q.transpose(1, 2).float() * scale
    merged = Merged(queries)
    for peer in range(mine + 1) if causal else range(memory.world_size):
        keys, values = (block.transpose(1, 2).float() for block in blocks_of(memory, peer, k, v))
        merged.add(queries @ keys.transpose(-1, -2), values, diagonal=causal and peer == mine)
    memory.barrier()
    return merged.output().transpose(1, 2).to(q.dtype).contiguous()


def blocks_of(memory: symm_mem.SymmetricMemory, peer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a rank stages its keys and values."""
    return memory.get_buffer(peer, k.shape, k.dtype), memory.get_buffer(peer, v.shape, v.dtype, k.numel())


class Merged:
    """Softmax attention over the blocks seen so far: largest score, sum of weights and weighted values of every query."""

    def __init__(self, queries: torch.Tensor) -> None:
        self.largest = torch.full(queries.shape[:-1], -torch.inf)
        self.weight = torch.zeros(queries.shape[:-1])
        self.value = torch.zeros_like(queries)

    def add(self, scores: torch.Tensor, values: torch.Tensor, *, diagonal: bool) -> None:
        """Merge a block; `diagonal`: its positions are the queries' own, so later ones are hidden."""
        if diagonal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        largest = torch.maximum(self.largest, scores.amax(-1))
        keep, weights = torch.exp(self.largest - largest), torch.exp(scores - largest[..., None])
        self.weight = self.weight * keep + weights.sum(-1)
        self.value = self.value * keep[..., None] + weights @ values
        self.largest = largest

    def output(self) -> torch.Tensor:
        return self.value / self.weight[..., None]
