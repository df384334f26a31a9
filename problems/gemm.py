"""Inputs of products spread over ranks, and a sum of products that stands for one over a joined inner axis.

Not here: anything that a reference calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Draw


def rounded_up(extent: int, parts: int) -> int:
    """The least multiple of `parts` that is no less than `extent`."""
    return -(-extent // parts) * parts


def rank_scale(draw: Draw) -> float:
    """Between 1 and 2^(3/2), of its own per rank, so that a block in the wrong place shows."""
    order = torch.randperm(draw.world_size, generator=draw.shared("scale"))
    return float(2.0 ** (int(order[draw.rank]) % 4 / 2))


def draw_gathered(draw: Draw, rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of columns of A [rows, inner // W], and a B [inner, columns] of the rank's own; a product is O(1).

    An inner extent that W does not divide is cut down to one that it does.
    """
    local = max(1, inner // draw.world_size)
    a = torch.randn(rows, local, generator=draw.own("A_local"))
    b = torch.randn(local * draw.world_size, columns, generator=draw.own("B"))
    if draw.profile != "upstream":
        a, b = a.mul_(inner**-0.25 * rank_scale(draw)), b.mul_(inner**-0.25)
    return a.to(draw.dtype), b.to(draw.dtype)


def exact_gathered(blocks: Sequence[torch.Tensor], b: torch.Tensor) -> torch.Tensor:
    """The product of `blocks`, joined side by side, and `b`, as a sum over blocks in float64."""
    out = torch.zeros(len(blocks[0]), b.shape[1], dtype=torch.float64, device=b.device)
    for block, rows in zip(blocks, b.double().chunk(len(blocks)), strict=True):
        out.addmm_(block.double(), rows)
    return out
