"""#069 gnn_negative_scoring: the place of every positive edge's score among the scores of its own negative edges.

Axes      P_r positive edges on rank r (ragged, perhaps none), G = their sum, K negatives of each, W ranks
In        local_pos_scores [P_r], local_neg_scores [P_r, K], differ per rank; group (None: all ranks)
Out       [G] int64 in rank order, equal on every rank
Maths     1 + number of negatives with sigmoid(negative) > sigmoid(positive), sigmoids in the dtype of the scores: a tie counts
          for the positive
Wire      a place per edge to all others; where the scores go in its stead, K + 1 times as much
Needs     any W
Not here  means of reciprocal ranks, ties that matter (the inputs have none; `upstream` is full of them)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import ragged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Positives that score better than most of their negatives, each row on a level of its own; one negative in 16 scores alike.

    If its sigmoid lies within two steps of the dtype of the positive's, it is moved away by 1.  In every other trial one rank
    of more than two holds no edge.
    """
    edges, chance = size["P"], draw.own("scores")
    if draw.profile == "upstream":
        edges += draw.rank % 3
        pos, neg = torch.randn(edges, generator=chance), torch.randn(edges, size["K"], generator=chance)
        return pos.to(draw.dtype), neg.to(draw.dtype), None
    counts = ragged(edges * draw.world_size, draw.world_size, draw.shared("counts"), least=1)
    if draw.trial % 2 and draw.world_size > 2:
        frm, to = torch.randperm(draw.world_size, generator=draw.shared("idle")).tolist()[:2]
        counts[frm], counts[to] = 0, counts[frm] + counts[to]
    rows = counts[draw.rank]
    level, ahead = torch.rand(rows, 1, generator=chance).sub_(1.5), torch.rand(rows, 1, generator=chance).mul_(3)
    pos = (level + ahead).to(draw.dtype).float()
    apart = torch.randn(rows, size["K"], generator=chance)
    neg = torch.where(torch.rand(apart.shape, generator=chance) < 1 / 16, pos + apart / 8, level + apart).to(draw.dtype).float()
    near = (neg.sigmoid() - pos.sigmoid()).abs() < torch.finfo(draw.dtype).eps
    neg = torch.where(near, pos + torch.where(neg > pos, 1.0, -1.0), neg)
    return pos[:, 0].to(draw.dtype), neg.to(draw.dtype), None


def reference(
    local_pos_scores: torch.Tensor, local_neg_scores: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Places of all ranks' positive edges, [G]."""
    above = local_neg_scores.sigmoid() > local_pos_scores.sigmoid()[:, None]
    places = above.sum(1) + 1
    counts = gathered(places.new_tensor([len(places)]), group).tolist()
    padded = gathered(F.pad(places, (0, max(counts) - len(places))), group).view(-1, max(counts))
    return torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Looks a positive up among its sorted negatives; the sigmoids are those of the dtype, in float64 they would be others."""
    places = []
    for pos, neg, _ in inputs:
        sigmoids = neg.sigmoid().double().sort(dim=1).values
        below = torch.searchsorted(sigmoids, pos.sigmoid().double()[:, None], right=True)
        places.append(1 + neg.shape[1] - below[:, 0])
    return [torch.cat(places)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Even counts: two bytes per own place to all others; scores are read once and compared, all places are written."""
    edges, scores = size["P"], size["P"] * (size["K"] + 1)
    return Cost(
        wire_bytes=(world_size - 1) * edges * 2,
        memory_bytes=scores * itemsize + world_size * edges * 8,
        flops=scores,
    )


PROBLEM = Problem(
    number=69,
    slug="gnn_negative_scoring",
    version=1,
    title="Rank every positive edge among its negative edges; all ranks get the places of all edges.",
    family="gnn",
    parallelism="DP",
    collectives=("all_gather_into_tensor",),
    origin="GraphStorm link prediction (evaluation by mean reciprocal rank)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"P": 17, "K": 101}),
        "default": Size("default", {"P": 384, "K": 1000}),
        "odd": Size("odd", {"P": 251, "K": 997}),
        # 500 MiB of scores in bf16 per rank.
        "large": Size("large", {"P": 262144, "K": 1000}),
        "upstream": Size("upstream", {"P": 256, "K": 1000}),
    },
    # Places are whole numbers.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
