"""Inputs and float64 truth of training steps: rows, parameters, moments, gradients, Adam.

Parameters are those of `problems.mlp`: W1 [H, I], b1 [H], W2 [O, H], b2 [O].

Not here: anything that a reference calls (`problems.mlp`, `problems.adam`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from problems.base import Draw
from problems.draws import ragged

Extents = tuple[int, int, int, int]
"""Rows on all ranks, I, H and O."""


def exact_mlp_gradients(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The mean over ranks of every rank's gradients, in float64: one weighted batch, biases as columns of their weights."""
    w1, b1, w2, b2 = (x.double() for x in parameters)
    x, y = (torch.cat([batch[i].double() for batch in batches]) for i in range(2))
    weight = torch.cat([y.new_full((len(own), 1), 2 / own.numel() / len(batches)) for _, own in batches])
    x = F.pad(x, (0, 1), value=1)
    hidden = F.pad((x @ torch.column_stack([w1, b1]).T).clamp_(min=0), (0, 1), value=1)
    delta = (hidden @ torch.column_stack([w2, b2]).T).sub_(y).mul_(weight)
    second = delta.T @ hidden
    first = ((delta @ w2) * hidden[:, :-1].sign()).T @ x
    return [first[:, :-1], first[:, -1], second[:, :-1], second[:, -1]]


def draw_training(draw: Draw, extents: Extents) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One rank's rows x, y and the four parameters, which count on rank 0 only: elsewhere they are something else.

    Ranks hold unequal numbers of rows.  Means that ranks share keep gradients, about 0.3/H^1/2 and 0.3/O^1/2, from averaging out.
    """
    rows, i, h, o = extents
    shapes = {"W1": (h, i), "b1": (h,), "W2": (o, h), "b2": (o,)}
    if draw.profile == "upstream":
        return _public_training(draw, rows, shapes)
    scales = (2 / i) ** 0.5, 0.3, h**-0.5, 0.3
    true, garbage = (
        [torch.randn(shapes[n], generator=source(n)).mul_(c).to(draw.dtype) for n, c in zip(shapes, scales, strict=True)]
        for source in (draw.shared, draw.own)
    )
    mine = ragged(rows, draw.world_size, draw.shared("rows"), least=1)[draw.rank]
    x = _clear_rows(draw, mine, *true[:2])
    y = torch.randn(mine, o, generator=draw.own("y"))
    y += torch.randn(o, generator=draw.shared("mean y")) + torch.randn(o, generator=draw.own("mean y"))
    y *= o**0.5 / 2
    return x, y.to(draw.dtype), garbage if draw.rank else true


def _clear_rows(draw: Draw, rows: int, w1: torch.Tensor, b1: torch.Tensor) -> torch.Tensor:
    """Inputs [rows, I] of which no hidden unit comes so close to zero that rounding in float32 could switch it.

    They are those of a few more with the widest margin.
    """
    x = torch.randn(rows + rows // 8 + 4, w1.shape[1], generator=draw.own("x"))
    x = x.add_(torch.randn(w1.shape[1], generator=draw.shared("mean x")).mul_(0.5)).to(draw.dtype)
    wide = torch.promote_types(draw.dtype, torch.float32)
    margin = F.linear(x.to(wide), w1.to(wide), b1.to(wide)).abs_().amin(1)
    return x[margin.topk(rows).indices]


def _public_training(
    draw: Draw, rows: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The public inputs: equal shares of rows; parameters are zero except on rank 0."""
    rows = -(-rows // draw.world_size)
    x, y = (torch.randn(rows, shapes[n][-1], generator=draw.own(n)) for n in ("W1", "b2"))
    drawn = [torch.randn(s, generator=draw.shared(n)) if draw.rank == 0 else torch.zeros(s) for n, s in shapes.items()]
    return x.to(draw.dtype), y.to(draw.dtype), [p.to(draw.dtype) for p in drawn]


def draw_parameter_moments(draw: Draw, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """First and second moments of every parameter, differing per rank; zeros under `upstream`."""
    if draw.profile == "upstream":
        return [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    chance = draw.own("moments")
    drawn = [draw_moments(p.shape, 0.3 * len(p) ** -0.5, chance) for p in parameters]
    return [m.to(draw.dtype) for m, _ in drawn], [v.to(draw.dtype) for _, v in drawn]


def exact_adam(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    parameter: torch.Tensor,
    hyper: tuple[float, float, float, float, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`problems.adam.adam` in float64; bias corrections are moved from the moments into the step size and eps."""
    lr, beta1, beta2, eps, step = hyper
    grad, exp_avg, exp_avg_sq, parameter = (x.double() for x in (grad, exp_avg, exp_avg_sq, parameter))
    exp_avg = grad.lerp(exp_avg, beta1)
    exp_avg_sq = grad.square().lerp(exp_avg_sq, beta2)
    correction = (1 - beta2**step) ** 0.5
    moved = lr * correction / (1 - beta1**step) * exp_avg / (exp_avg_sq.sqrt() + eps * correction)
    return parameter - moved, exp_avg, exp_avg_sq


def draw_hyper(draw: Draw, lr: float) -> tuple[float, float, float, float, int]:
    """Learning rate (0.2 to 1 times the argument), beta1, beta2, eps and step, equal on every rank."""
    if draw.profile == "upstream":
        return 1e-3, 0.9, 0.999, 1e-8, 1 + draw.trial % 7
    a, b, c, d, e = torch.rand(5, generator=draw.shared("hyper")).double().tolist()
    return lr * (0.2 + 0.8 * a), 0.8 + 0.15 * b, 0.95 + 0.049 * c, 10 ** (-8 + 5 * d), int(10 ** (3 * e))


def draw_moments(shape: torch.Size, scale: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments that gradients of size `scale` could have left: the second one well above zero, over two decades."""
    exp_avg = torch.randn(shape, generator=generator).mul_(scale)
    decades = torch.rand(shape, generator=generator).mul_(2).sub_(2.4)
    return exp_avg, torch.pow(10, decades).mul_(scale**2)
