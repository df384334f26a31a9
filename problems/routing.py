"""Which tokens go to which experts, as a real router sends them: skewed, with a hot expert and one without tokens.

Not here: anything that a reference or `exact` calls; routers that compute (`moe_inputs`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from problems.base import Draw

NEVER = -20.0
"""Popularity of an expert that nobody chooses."""


def padded(experts: int, world_size: int) -> int:
    """Experts in all when every rank holds equally many, at least `experts`."""
    return -(-experts // world_size) * world_size


def tokens_of(draw: Draw, least: int) -> int:
    """Tokens of this rank, `least` to a quarter more, the same in every trial."""
    return least + int(torch.randint(least // 4 + 1, (), generator=replace(draw, trial=0).own("tokens")))


def popularity(draw: Draw, experts: int) -> torch.Tensor:
    """Logits [experts] of Zipf's law in an order of this trial's, equal on every rank; of four or more one is never chosen.

    All alike in the profile `upstream`.
    """
    if draw.profile == "upstream":
        return torch.zeros(experts)
    place = torch.randperm(experts, generator=draw.shared("popularity"))
    logits = -1.2 * (1.0 + place).log()
    return torch.where(place == experts - 1, NEVER, logits) if experts >= 4 else logits


def chosen(draw: Draw, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts of every token of the rank `draw.rank`, [tokens, top_k], ascending."""
    uniform = torch.rand(tokens, experts, generator=draw.own("routing")).clamp_(1e-7, 1 - 1e-7)
    scores = popularity(draw, experts) - (-uniform.log()).log()
    return scores.topk(top_k, dim=-1).indices.sort(dim=-1).values


def one_hot(selected: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Mask [experts, top_k, tokens], a view that is not contiguous, as a router makes it."""
    return torch.nn.functional.one_hot(selected, experts).to(dtype).permute(2, 1, 0)


def counted(selections: list[torch.Tensor], experts: int) -> torch.Tensor:
    """How many pairs (token, expert) each rank has for each expert, int64 [ranks, experts]; negative experts count nothing."""
    return torch.stack([torch.bincount(s[s >= 0], minlength=experts) for s in selections])


def even_table(pairs: int, ranks: int, experts: int) -> torch.Tensor:
    """The same count for all ranks and, but for a remainder that every block spreads alike, for all experts."""
    blocks = torch.tensor_split(torch.ones(pairs), ranks)
    local = [[len(part) for part in torch.tensor_split(block, experts // ranks)] for block in blocks]
    return torch.tensor([sum(local, [])] * ranks)  # noqa: RUF017  a few ranks
