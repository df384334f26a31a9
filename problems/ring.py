"""Attention over a sequence that is split over a ring of ranks: blocks of keys and values travel, partial softmaxes are merged.

Peers are ranks of the whole world, in the order of the sequence; `group` is the process group that carries the messages.
Not here: load-balanced layouts, gradients (problem 57).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F


def ring_layer(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    scale: float | None,
    *,
    causal: bool,
    peers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Take x [B, S, E] through w_qkv [3 * heads * D, E], attention around the ring and w_o [E', heads * D]: [B, S, E']."""
    qkv = F.linear(x, weights[0])
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    out = ring_attention(q, k, v, scale, causal=causal, peers=peers, group=group)
    return F.linear(out.flatten(2), weights[1])


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    *,
    causal: bool,
    peers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Attention of the local queries to all peers' keys, [B, S, H, D]; blocks travel around the ring."""
    place, count = peers.index(dist.get_rank()), len(peers)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    block = [k.contiguous(), v.contiguous()]
    arriving, pending = start_exchange(block, peers, group) if count > 1 else ([], [])
    out, lse = attend(q, block[0], block[1], scale, causal=causal)
    for step in range(1, count):
        for work in pending:
            work.wait()
        block = arriving
        if step + 1 < count:
            arriving, pending = start_exchange(block, peers, group)
        if not causal or step <= place:
            out, lse = merge(out, lse, *attend(q, block[0], block[1], scale, causal=False))
    return out.transpose(1, 2).to(q.dtype)


def start_exchange(
    block: list[torch.Tensor], peers: Sequence[int], group: dist.ProcessGroup | None
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Send k and v to the next peer and receive those of the previous one; the buffers fill when all work is done."""
    place = peers.index(dist.get_rank())
    to, frm = peers[(place + 1) % len(peers)], peers[place - 1]
    following = [torch.empty_like(x) for x in block]
    ops = [dist.P2POp(dist.isend, x, to, group) for x in block]
    ops += [dist.P2POp(dist.irecv, x, frm, group) for x in following]
    return following, dist.batch_isend_irecv(ops)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block in at least float32: output [B, H, S, D] and log-sum-exp of the scores [B, H, S, 1]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-2, -1)).mul_(scale)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v, lse


def merge(
    out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two blocks of keys from the attention to each."""
    out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - F.logsigmoid(lse - block_lse)
