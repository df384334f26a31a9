"""Truth and inputs of problems of the delta rule: the recurrence step by step, and queries that ask for what other ranks store.

Not here: anything that a reference calls (`delta_rule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from problems.base import Draw


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Outputs [T, N, V] of N states [K, V]; q and k are [T, N, K], v [T, N, V], decay [T, N, K or 1], beta [T, N, 1].

    A state starts at zero; at every step it decays by the row, what it says of the key moves towards the value by beta, then
    the query reads it.
    """
    state = k.new_zeros(*k.shape[1:], v.shape[2])
    outs = []
    for one_q, one_k, one_v, one_decay, one_beta in zip(q, k, v, decay, beta, strict=True):
        state = state * one_decay.unsqueeze(2)
        error = one_beta * (one_v - torch.einsum("nkv,nk->nv", state, one_k))
        state.addcmul_(one_k.unsqueeze(2), error.unsqueeze(1))
        outs.append(torch.einsum("nkv,nk->nv", state, one_q))
    return torch.stack(outs)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows of length 1, or less where they are shorter than eps."""
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)


def draw_keys(draw: Draw, shape: Sequence[int], eps: float) -> torch.Tensor:
    """Normal keys with a part in common; of 32 one is zero and two are about as short as eps."""
    keys = torch.randn(tuple(shape), generator=draw.own("k"))
    keys += 0.5 * torch.randn(*shape[2:], generator=draw.shared("common part of keys"))
    kind = torch.randint(32, (*shape[:3], 1), generator=draw.own("short keys"))
    factor = torch.tensor([0.0, eps, eps, 1.0]) * torch.tensor([1, shape[3] ** -0.5, shape[3] ** -0.5, 1])
    return keys.mul_(factor[kind.clamp(max=3)])


def draw_queries(draw: Draw, shape: Sequence[int], eps: float, earlier: Sequence[int]) -> torch.Tensor:
    """Noisy copies, in another order, of the keys of one of the `earlier` ranks; of the rank itself if there is none."""
    chance = draw.own("q")
    ranks = list(earlier) or [draw.rank]
    source = ranks[int(torch.randint(len(ranks), (), generator=chance))]
    keys = draw_keys(replace(draw, rank=source), shape, eps)
    return keys[:, torch.randperm(shape[1], generator=chance)].add_(torch.randn(tuple(shape), generator=chance), alpha=0.5)


def draw_values(draw: Draw, shape: Sequence[int]) -> torch.Tensor:
    """Normal values about an offset per rank and head."""
    return torch.randn(tuple(shape), generator=draw.own("v")).add_(torch.randn(*shape[2:], generator=draw.own("offset")))
