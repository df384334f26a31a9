"""Rows of logits whose vocabulary is split over ranks, brought together; top-k and top-p filters on whole rows.

Not here: inputs and the truth (`problems.topk_filter_cases`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from problems.collectives import gathered


def token_log_probs(
    logits: torch.Tensor, target: torch.Tensor, top_k: int | None, top_p: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Log-probabilities of `target` [n] after the filters, on every rank, from each rank's slice of the logits [n, U]."""
    mine = own_block(target, group)
    filtered = filtered_rows(token_rows(logits, group), top_k, top_p)
    return gathered(filtered.log_softmax(-1).gather(1, mine[:, None])[:, 0], group)


def own_block(tokens: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's equal share of some tokens, along the first axis."""
    world_size = dist.get_world_size(group)
    if len(tokens) % world_size:
        raise ValueError(f"{len(tokens)} tokens cannot be shared equally by {world_size} ranks")
    return tokens.view(world_size, -1)[dist.get_rank(group)]


def token_rows(logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """From all tokens' slices of the vocabulary, [n, U], to whole rows of the own share of tokens, [n / W, V]."""
    pieces = logits.contiguous()
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return came.view(dist.get_world_size(group), -1, logits.shape[1]).transpose(0, 1).flatten(1)


def vocabulary_slices(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The way back, from [n / W, V] to [n, U]."""
    pieces = rows.view(len(rows), dist.get_world_size(group), -1).transpose(0, 1).contiguous()
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return came.flatten(0, 1)


def filtered_rows(rows: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Rows in at least float32, with -inf in place of what the filters drop."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if top_k is not None and top_k > 0:
        least = wide.topk(min(top_k, wide.shape[-1])).values[:, -1:]
        wide = wide.masked_fill(wide < least, -torch.inf)
    if top_p < 1:
        rising, order = wide.sort(-1)
        dropped = rising.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        wide = wide.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -torch.inf)
    return wide


def tokens_of_chunk(target: torch.Tensor, chunk_size: int, group: dist.ProcessGroup | None) -> int:
    """How many of all tokens [B, S] a chunk of `chunk_size` positions takes."""
    count, world_size = target.shape[0] * max(1, chunk_size), dist.get_world_size(group)
    if target.numel() % world_size or target.shape[0] * chunk_size % world_size:
        raise ValueError(f"{target.numel()} tokens in chunks of {count} cannot be shared equally by {world_size} ranks")
    return count
