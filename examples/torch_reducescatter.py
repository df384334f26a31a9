"""Reduce-scatter (sum) along dimension 0 with torch over symmetric memory: stage, barrier, add up the own chunk, barrier.

The closing barrier keeps a fast rank's next call from overwriting what a slow one still reads.
"""

from __future__ import annotations

import torch
from pkb_box import symm_mem

_workspace: symm_mem.SymmetricMemory | None = None


def workspace(nbytes: int) -> symm_mem.SymmetricMemory:
    """Symmetric memory of at least so many bytes; allocated at the first call, and when a call needs more."""
    global _workspace
    if _workspace is None or _workspace.buffer_size < nbytes:
        size = 1 << max(12, (nbytes - 1).bit_length())
        _workspace = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8))
    return _workspace


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    """Rows [r*M, (r+1)*M) of the sum of `tensor` (W*M, ...) over the W ranks, on rank r; 16-bit floats in float32."""
    memory = workspace(tensor.nbytes)
    views = [memory.get_buffer(peer, tensor.shape, tensor.dtype) for peer in range(memory.world_size)]
    views[memory.rank].copy_(tensor)
    memory.barrier()
    chunks = [view.chunk(memory.world_size)[memory.rank] for view in views]
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    total = chunks[0].to(wide, copy=True)
    for chunk in chunks[1:]:
        total += chunk
    memory.barrier()
    return total.to(tensor.dtype)
