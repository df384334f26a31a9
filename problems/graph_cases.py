"""Requests of graph learning as they are drawn: which ids, how many, between which ranks.

Not here: anything that a reference or `exact` calls.
"""

from __future__ import annotations

from itertools import count
from math import gcd, log10

import torch

from problems.base import Draw
from problems.draws import ragged


def drawn_table(draw: Draw, mean: int) -> torch.Tensor:
    """Rows from rank i (first axis) to rank j, [W, W], about `mean` each; no more than one 0 in a line of the table.

    In every third trial one rank sends nothing and another one receives nothing.
    """
    ranks, chance = draw.world_size, draw.shared("table")
    table = torch.randint(1, 2 * mean, (ranks, ranks), generator=chance)
    senders, receivers = (torch.randperm(ranks, generator=chance).tolist() for _ in range(2))
    if draw.trial % 3 == 2 and ranks > 1:
        quiet, deaf = senders[0], senders[1]
        table[deaf] += table[quiet]
        table[:, quiet] += table[:, deaf]
        table[quiet], table[:, deaf] = 0, 0
        return table
    for i, j in zip(senders[: ranks // 2], receivers, strict=False):
        table[i, (j + 1) % ranks] += table[i, j]
        table[i, j] = 0
    return table


def counts_from(table: torch.Tensor, rank: int) -> tuple[list[int], list[int]]:
    """How many rows come from rank, rank + 1, ... and go to them."""
    return table[:, rank].roll(-rank).tolist(), table[rank].roll(-rank).tolist()


def drawn_counts(draw: Draw, mean: int) -> list[int]:
    """How many requests each rank makes, `mean` on average; in every third trial one of several ranks makes none."""
    counts = ragged(mean * draw.world_size, draw.world_size, draw.shared("counts"), least=1)
    if draw.trial % 3 == 1 and draw.world_size > 1:
        frm, to = torch.randperm(draw.world_size, generator=draw.shared("idle")).tolist()[:2]
        counts[frm], counts[to] = 0, counts[frm] + counts[to]
    return counts


def drawn_quiet(draw: Draw) -> int | None:
    """The rank whose nodes nobody asks for, in every third trial if there are several ranks."""
    if draw.trial % 3 != 2 or draw.world_size == 1:
        return None
    return int(torch.randint(draw.world_size, (), generator=draw.shared("quiet")))


def popular_ids(requests: int, ids: int, chance: torch.Generator, popularity: torch.Generator) -> torch.Tensor:
    """Requests by Zipf's law: place k in a list of all ids by popularity is drawn in proportion to log((k + 1) / k)."""
    uniform = torch.rand(requests, generator=chance, dtype=torch.float64)
    place = ((ids + 1) ** uniform).long().clamp_(1, ids) - 1
    # Ids by popularity: steps of constant length, too many ids for a permutation.
    first, least = torch.randint(ids, (2,), generator=popularity).tolist()
    step = next(step for step in count(least + 1) if gcd(step, ids) == 1)
    return place.mul_(step).add_(first).remainder_(ids)


def distinct(ids: int, requests: int) -> float:
    """Ids that are expected among so many requests of `popular_ids`, to a percent; many ids of like popularity at a time."""
    bounds = torch.logspace(0, log10(ids + 1), 4097, dtype=torch.float64)
    inside = bounds.diff()
    return float((inside * -torch.expm1(-requests / 4096 / inside)).sum())
