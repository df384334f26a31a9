"""Gradients in ragged shards, norms on either side of a limit, and their truth in float64.

Not here: anything that a reference calls (`problems.clipping`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from problems.base import Draw, Size
from problems.draws import ragged, turn

Grads = list[torch.Tensor | None]
NORM_TYPES = (2.0, 1.0, 3.0)
_MOMENTS = {2.0: 1.0, 1.0: math.sqrt(2 / math.pi), 3.0: math.sqrt(8 / math.pi)}
"""Mean of |z|^p of a normal value."""


def draw_grads(draw: Draw, size: Size, name: str, norm_type: float) -> tuple[Grads, float]:
    """This rank's rows of two matrices [R, C], [R/2, C+1] and a vector [R], and the power sum to expect over all ranks.

    Ranks hold unequal numbers of rows, of the second sometimes none; between the tensors stands None.  Every tensor has a
    scale of its own, 2^-1 to 2, and every rank too.
    """
    chance, rows, world_size = draw.shared(name), size["R"] * draw.world_size, draw.world_size
    splits = [ragged(n, world_size, chance, least) for n, least in ((rows, 1), (max(1, rows // 2), 0), (rows, 1))]
    if world_size > 1 and turn(draw, 2, name):
        splits[1][0], splits[1][1] = 0, splits[1][0] + splits[1][1]
    scales = torch.rand(3, world_size, generator=chance) + torch.rand(3, 1, generator=chance) - 1
    scales = scales.mul_(1.5).exp2_().double()
    widths = ((size["C"],), (size["C"] + 1,), ())
    own, grads, expected = draw.own(name), Grads(), 0.0
    for split, width, scale in zip(splits, widths, scales, strict=True):
        values = torch.randn(split[draw.rank], *width, generator=own).mul_(float(scale[draw.rank]))
        grads.append(values.to(draw.dtype))
        powers = sum(n * float(s) ** norm_type for n, s in zip(split, scale, strict=True))
        expected += _MOMENTS[norm_type] * math.prod(width) * powers
    return [grads[0], None, *grads[1:]], expected


def draw_limit(draw: Draw, expected: float) -> float:
    """A limit that is 1.5 to 32 times below the expected norm; in every fifth trial as much above it."""
    factor = 2 ** (0.6 + 4.4 * float(torch.rand((), generator=draw.shared("max_norm"))))
    return expected * factor if turn(draw, 5, "above") == 0 else expected / factor


def exact_power_sum(ranks: Sequence[Grads], norm_type: float) -> torch.Tensor:
    """Sum of |g|^p over all ranks' elements in float64, in one go."""
    parts = [grad.flatten().double() for grads in ranks for grad in grads if grad is not None]
    return torch.cat(parts).abs_().pow_(norm_type).sum() if parts else torch.zeros((), dtype=torch.float64)


def elements(size: Size) -> float:
    """Elements of one list of gradients on an average rank."""
    return size["R"] * (size["C"] + (size["C"] + 1) / 2 + 1)
