"""Inputs of products spread over ranks, and a sum of products that stands for one over a joined inner axis.

Of the products with a gathered A, 11 and 12, also the truth and the least cost.

Not here: anything that a reference calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Cost, Draw, Size


def rounded_up(extent: int, parts: int) -> int:
    """The least multiple of `parts` that is no less than `extent`."""
    return -(-extent // parts) * parts


def rank_scale(draw: Draw) -> float:
    """Between 1 and 2^(3/2), of its own per rank, so that a block in the wrong place shows."""
    order = torch.randperm(draw.world_size, generator=draw.shared("scale"))
    return float(2.0 ** (int(order[draw.rank]) % 4 / 2))


def gathered_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of columns of A [M, K // W], and a B [K, N] of the rank's own; a product is O(1).

    Normal values scaled by K^-1/4, and A's by a factor of its own per rank too.
    An inner extent that W does not divide is cut down to one that it does.
    """
    inner, local = size["K"], max(1, size["K"] // draw.world_size)
    a = torch.randn(size["M"], local, generator=draw.own("A_local"))
    b = torch.randn(local * draw.world_size, size["N"], generator=draw.own("B"))
    if draw.profile != "upstream":
        a, b = a.mul_(inner**-0.25 * rank_scale(draw)), b.mul_(inner**-0.25)
    return a.to(draw.dtype), b.to(draw.dtype)


def gathered_truth(inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """A sum of products of blocks in float64, for every B."""
    blocks = [a for a, _ in inputs]
    return [exact_gathered(blocks, b) for _, b in inputs]


def gathered_cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A block of A to every other rank, then a whole product."""
    rows, columns, local = size["M"], size["N"], max(1, size["K"] // world_size)
    inner = local * world_size
    return Cost(
        wire_bytes=(world_size - 1) * rows * local * itemsize,
        memory_bytes=(rows * inner + inner * columns + rows * columns) * itemsize,
        flops=2 * rows * inner * columns,
    )


def exact_gathered(blocks: Sequence[torch.Tensor], b: torch.Tensor) -> torch.Tensor:
    """The product of `blocks`, joined side by side, and `b`, as a sum over blocks in float64."""
    out = torch.zeros(len(blocks[0]), b.shape[1], dtype=torch.float64, device=b.device)
    for block, rows in zip(blocks, b.double().chunk(len(blocks)), strict=True):
        out.addmm_(block.double(), rows)
    return out
