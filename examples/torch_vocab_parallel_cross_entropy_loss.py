"""Cross entropy over a vocabulary split by ranks, with torch over symmetric memory.

Axes  ... tokens, V = vocabulary / W entries per rank; rank r owns entries [r*V, (r+1)*V).

Two exchanges: the largest logit of every token, then (sum of exponentials, logit of the target).  They use different parts
of the workspace, so two barriers are enough, call after call: `largest` is written again only after everybody passed the
second barrier, the rest only after everybody passed the next first one.

The caller's logits change in place: the largest logit of the token, over all ranks, is subtracted.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from pkb_box import symm_mem

_workspaces: dict[dist.ProcessGroup | None, symm_mem.SymmetricMemory] = {}


def workspace(tokens: int, group: dist.ProcessGroup | None) -> symm_mem.SymmetricMemory:
    """Symmetric memory for at least 3 float32 per token; allocated at the first call, and when a call needs more."""
    found = _workspaces.get(group)
    if found is None or found.buffer_size < 12 * tokens:
        size = 12 << max(8, (tokens - 1).bit_length())
        found = _workspaces[group] = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8), group)
    return found


@torch.no_grad()
def solution(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Loss of every token, in the dtype of the logits (..., V); `target` (...) holds entries of the whole vocabulary."""
    logits = vocab_parallel_logits
    memory = workspace(target.numel(), group)
    largest = exchange(memory, [logits.amax(-1).float()], first_row=0)[0].amax(0)
    logits -= largest.to(logits.dtype)[..., None]
    owned = logits.shape[-1]
    local = target - memory.rank * owned
    foreign = (local < 0) | (local >= owned)
    of_target = logits.gather(-1, local.masked_fill(foreign, 0)[..., None])[..., 0].float().masked_fill(foreign, 0.0)
    sums, targets = exchange(memory, [logits.float().exp().sum(-1), of_target], first_row=1)
    return (sums.sum(0).log() - targets.sum(0)).to(logits.dtype)


def exchange(memory: symm_mem.SymmetricMemory, rows: list[torch.Tensor], first_row: int) -> torch.Tensor:
    """Show rows of one float32 per token to all ranks; gives (rows, ranks, tokens...)."""
    third, shape = memory.buffer_size // 12, rows[0].shape
    views = [
        [memory.get_buffer(peer, shape, torch.float32, third * (first_row + i)) for peer in range(memory.world_size)]
        for i in range(len(rows))
    ]
    for row, ranks in zip(rows, views, strict=True):
        ranks[memory.rank].copy_(row)
    memory.barrier()
    return torch.stack([torch.stack(ranks) for ranks in views])
