"""Inputs of problems with top-k and top-p filters, in which no decision is close, their truth in float64, and their floor.

Some ids of a row hold nearly all of its mass, the others 2 %.  Where a top-p filter cuts, it cuts well inside an id of
several percent, so that no rounding can turn it; the id of rank k often has an equal one beside it.
Not here: anything that a reference calls (`problems.topk_filter`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from problems.base import Cost, Draw, Size
from problems.draws import turn

Filtered = tuple[torch.Tensor, torch.Tensor, int | None, float]
"""Logits, target, top_k, top_p."""

TAIL = 0.02
"""What all other ids together weigh, in units of the weight of the likely ones."""
LEAST_K = 8
"""With fewer likely ids kept, a top-p filter could cut the last two of them, which may be equal."""


def positions(size: Size, world_size: int) -> int:
    """Positions of a sequence, rounded up so that ranks can share them equally."""
    return -(-size["S"] // world_size) * world_size


def chunk_size(draw: Draw, size: Size) -> int:
    """About C positions, so that ranks can share them and a part of a chunk remains; one trial of five needs no second chunk."""
    world_size = draw.world_size
    shares = positions(size, world_size) // world_size
    wanted = max(1, size["C"] // world_size)
    if draw.profile == "upstream":
        return min(shares, max(1, -(-shares // 4))) * world_size
    if turn(draw, 5, "chunk") == 4:
        return (shares + 1) * world_size
    return next((count for count in range(wanted, shares) if shares % count), 1) * world_size


def filter_inputs(draw: Draw, size: Size, steps: tuple[int, int]) -> Filtered:
    """Logits [B, S, U] and target [B, S]; half of the targets are among the five likeliest ids, some at the edges of ranks.

    No filter, top-k, both and top-p take turns over the trials.
    """
    shape, local = (size["B"], positions(size, draw.world_size)), max(1, size["V"] // draw.world_size)
    if draw.profile == "upstream":
        return _public(draw, shape, local, steps)
    vocabulary, rows = local * draw.world_size, shape[0] * shape[1]
    count = min(32, vocabulary // 4)
    top_k, top_p = _options(draw, count)
    head, level = _levels(draw, (rows, count), vocabulary, top_k, top_p)
    ids = _ids(draw, rows, count, vocabulary)
    spread = 0.7 + 0.6 * float(torch.rand((), generator=draw.own("spread")))
    logits = torch.randn(rows, local, generator=draw.own("logits")).clamp_(max=2).mul_(spread).add_(level - spread**2 / 2)
    column = ids - draw.rank * local
    row, place = ((column >= 0) & (column < local)).nonzero(as_tuple=True)
    logits[row, column[row, place]] = head[row, place]
    return logits.view(*shape, local).to(draw.dtype), _target(draw, ids, local).view(shape), top_k, top_p


def _options(draw: Draw, count: int) -> tuple[int | None, float]:
    """top_k, rather small, so that it leaves mass out, and top_p; None, 0 and -1 turn the first one off."""
    kind, chance = turn(draw, 4), draw.shared("options")
    top_k = LEAST_K + int(torch.rand((), generator=chance) ** 2 * max(0, count - 1 - LEAST_K))
    top_p = 0.7 + 0.2 * float(torch.rand((), generator=chance))
    return top_k if kind in {1, 2} else (None, 0, -1)[turn(draw, 3, "off")], top_p if kind > 1 else 1.0


def _levels(
    draw: Draw, shape: tuple[int, int], vocabulary: int, top_k: int | None, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the likely ids, falling, of that shape, and the level of all others, [rows, 1], for which the cut is clear."""
    chance, filtered = draw.shared("head"), top_k is not None and top_k > 0
    head = -torch.rand(shape, generator=chance).div_(10).add_(0.25).cumsum(1)
    kept = torch.ones_like(head, dtype=torch.bool)
    if top_k is not None and filtered:
        tied = torch.rand(shape[0], generator=chance) < 1 / 4
        head[tied, top_k] = head[tied, top_k - 1]
        kept = head >= head[:, top_k - 1 : top_k]
    tail = head.exp().sum(1, keepdim=True) * TAIL
    if top_p < 1:
        head = _clear(head, kept, 0 * tail if filtered else tail, 1 - top_p, 1 / 4 if filtered else 1 / 2)
    offset = torch.rand(shape[0], 1, generator=chance).mul_(8).sub_(4)
    return head + offset, (tail / (vocabulary - shape[1])).log() + offset


def _clear(head: torch.Tensor, kept: torch.Tensor, tail: torch.Tensor, cut: float, inside: float) -> torch.Tensor:
    """The same, with upper logits raised until a share `cut` of the mass, counted from below, takes a share `inside` of an id.

    A quarter after top-k: whoever counts what top-k dropped then cuts elsewhere.
    """
    weight = head.exp() * kept
    below = weight.flip(1).cumsum(1).flip(1) - weight + tail
    total = weight.sum(1, keepdim=True) + tail
    last = ((below + inside * weight >= cut * total).sum(1, keepdim=True) - 1).clamp_(min=1)
    under, middle = below.gather(1, last), weight.gather(1, last)
    above = (under + inside * middle) / cut - middle - under
    raised = (above / (total - middle - under)).log()
    return head + raised * (torch.arange(head.shape[1]) < last)


def _ids(draw: Draw, rows: int, count: int, vocabulary: int) -> torch.Tensor:
    """Different ids per row, [rows, count]: side by side in some rows, spread over all ranks in others."""
    chance = draw.shared("ids")
    stride = torch.rand(rows, 1, generator=chance).square_().mul_(vocabulary // count).long().clamp_(min=1)
    order = torch.rand(rows, count, generator=chance).argsort(1)
    step = torch.minimum((torch.rand(rows, count, generator=chance) * stride).long(), stride - 1)
    return (torch.randint(vocabulary, (rows, 1), generator=chance) + order * stride + step) % vocabulary


def _target(draw: Draw, ids: torch.Tensor, local: int) -> torch.Tensor:
    """Ids of all rows, [rows]: mostly likely ones, an eighth at the edges of ranks' ranges, a sixteenth anywhere."""
    chance, rows = draw.shared("target"), len(ids)
    place = torch.rand(rows, 1, generator=chance).pow_(3).mul_(ids.shape[1]).long().clamp_(max=ids.shape[1] - 1)
    edges = (torch.arange(draw.world_size)[:, None] * local + torch.tensor([0, local - 1])).flatten()
    edge = edges[torch.randint(len(edges), (rows,), generator=chance)]
    anywhere = torch.randint(local * draw.world_size, (rows,), generator=chance)
    kind = torch.rand(rows, generator=chance)
    return torch.where(kind < 1 / 8, edge, torch.where(kind > 15 / 16, anywhere, ids.gather(1, place)[:, 0]))


def _public(draw: Draw, shape: tuple[int, int], local: int, steps: tuple[int, int]) -> Filtered:
    """Normal logits, that of the target raised by 8; targets count in steps."""
    flat = torch.arange(shape[0] * shape[1])
    target = (steps[0] * flat + steps[1] + draw.trial) % (local * draw.world_size)
    logits = torch.randn(len(flat), local, generator=draw.own("logits"))
    column = target - draw.rank * local
    logits += 8 * (torch.arange(local) == column[:, None])
    return logits.view(*shape, local).to(draw.dtype), target.view(shape), 10, 0.9


def exact_rows(
    parts: Sequence[torch.Tensor], target: torch.Tensor, top_k: int | None, top_p: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some rows at a time: targets [n], logits in float64 and which of them the filters keep, both [n, V]."""
    rows = max(1, 2**20 // sum(part.shape[-1] for part in parts))
    flat = (torch.split(part.flatten(0, 1), rows) for part in parts)
    for ids, *slices in zip(torch.split(target.flatten(), rows), *flat, strict=True):
        logits = torch.cat([part.double() for part in slices], -1)
        yield ids, logits, _exact_kept(logits, top_k, top_p)


def _exact_kept(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Counted from above: an id is kept when those before it hold less than top_p."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_k is not None and 0 < top_k < logits.shape[1]:
        kept = logits >= logits.kthvalue(logits.shape[1] + 1 - top_k, keepdim=True).values
    if top_p < 1:
        falling, order = logits.masked_fill(~kept, -torch.inf).softmax(-1).sort(-1, descending=True)
        before = falling.cumsum(-1) - falling
        kept &= torch.zeros_like(kept).scatter_(1, order, before < top_p)
    return kept


def exact_log_probs(parts: Sequence[torch.Tensor], target: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """The target's logit less the logarithm of the kept ids' weight, -inf where it is dropped, [B, S]."""
    found = []
    for ids, logits, kept in exact_rows(parts, target, top_k, top_p):
        picked, taken = (x.take_along_dim(ids[:, None], 1)[:, 0] for x in (logits, kept))
        total = torch.where(kept, logits, -torch.inf).logsumexp(-1)
        found.append(torch.where(taken, picked - total, -torch.inf))
    return torch.cat(found).view(target.shape)


def floor(size: Size, world_size: int, itemsize: int, written: float) -> Cost:
    """Without filters: (max, sum, target logit) of every row over ranks, the first two in fp32; logits are read once.

    `written` is how many bytes of output there are on a rank.
    """
    rows = size["B"] * positions(size, world_size)
    count = rows * max(1, size["V"] // world_size)
    return Cost(
        wire_bytes=2 * (world_size - 1) / world_size * rows * (8 + itemsize),
        memory_bytes=count * itemsize + 8 * rows + written,
        flops=4 * count,
    )
