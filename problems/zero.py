"""What the ZeRO problems, 41 and 42, have in common: inputs, truth and least cost of one function of the same arguments.

Not here: their references, which differ in where gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from problems.base import Cost, Draw, Size
from problems.training import draw_hyper, draw_moments, draw_training, exact_adam, exact_mlp_gradients


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Moments as after many steps; an update is a considerable part of its parameter."""
    rows, i, h, o = _extents(size, draw.world_size)
    x, y, parameters = draw_training(draw, (rows, i, h, o))
    shape = torch.Size([sum(p.numel() for p in parameters) // draw.world_size])
    if draw.profile == "upstream":
        moments = [torch.zeros(shape), torch.zeros(shape)]
    else:
        moments = [*draw_moments(shape, 0.3 * h**-0.5, draw.own("moments"))]
    return (x, y, *parameters, *(m.to(draw.dtype) for m in moments), *draw_hyper(draw, 0.5 * i**-0.5))


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One batch of all ranks' rows and the slices of all ranks joined, in float64."""
    root = inputs[0]
    grad = torch.cat([g.flatten() for g in exact_mlp_gradients([args[:2] for args in inputs], root[2:6])])
    first, second = (torch.cat([args[i] for args in inputs]) for i in (6, 7))
    flat, first, second = exact_adam(grad, first, second, torch.cat([p.flatten() for p in root[2:6]]), root[8:])
    parameters, start = [], 0
    for p in root[2:6]:
        parameters.append(flat[start : start + p.numel()].view(p.shape))
        start += p.numel()
    slices = zip(first.chunk(len(inputs)), second.chunk(len(inputs)), strict=True)
    return [(*parameters, *mine) for mine in slices]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The mean rank gets all parameters before and after, and its slice's gradients or all rows.

    Moments and slice are read and written.
    """
    rows, i, h, o = _extents(size, world_size)
    count, local, others = h * i + h + o * h + o, rows / world_size, world_size - 1
    return Cost(
        wire_bytes=others / world_size * (2 * count + min(count, rows * (i + o))) * itemsize,
        memory_bytes=(2 * count + 4 * count / world_size + local * (i + o)) * itemsize,
        flops=local * h * (4 * i + 6 * o) + 12 * count / world_size,
    )


def _extents(size: Size, world_size: int) -> tuple[int, int, int, int]:
    """Rows in all, I, H, O, such that the number of parameters is a multiple of the world size."""
    h, o = (-(-size[axis] // world_size) * world_size for axis in "HO")
    return size["R"], size["I"], h, o
