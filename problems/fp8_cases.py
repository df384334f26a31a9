"""Inputs of problems with float8_e4m3fn, which keep off its ties, and their truth in float64, which casts nothing to it.

Not here: anything that a reference calls (`problems.fp8`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Draw
from problems.draws import turn

LARGEST = 448.0
"""The largest value of the format."""
HISTORY = 16
"""How many former maxima are remembered."""


def e4m3_step(x: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring values of the format around x."""
    return torch.exp2((x.frexp().exponent.clamp(min=-5) - 4).to(x.dtype))


def exact_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of the format, by arithmetic: three binary places, ties to even, saturating."""
    step = e4m3_step(x)
    return (x / step).round_().mul_(step).clamp_(-LARGEST, LARGEST)


def exact_delayed(x: torch.Tensor, amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`problems.fp8.fp8_round_trip` in float64, rounded to nothing but the format and the history's type."""
    wide = x.float().double()
    largest = max(float(wide.max()), -float(wide.min()))
    history = torch.cat([amax_history[1:], amax_history.new_tensor([largest])]).double()
    scale = max(float(history.max()), 1e-12) / LARGEST
    return exact_e4m3(wide / scale) * scale, history


def off_ties(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Zeros instead of elements where x / scale is so close to halfway between two values that a round-off could decide."""
    quotient = x.float() / scale
    steps = quotient.abs() / e4m3_step(quotient)
    return x.masked_fill((steps.frac() - 0.5).abs() < 2**-14, 0)


def draw_delayed(draw: Draw, name: str, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values with outliers, one in 64 and six times as large, and a history, [16]; scales differ by rank and by trial.

    Ranks take turns: the history lies below the largest value, or above it, or its one large entry is about to be dropped.
    In one trial of four one rank of several has nothing but zeros.
    """
    x = torch.randn(tuple(shape), generator=draw.own(name))
    if draw.profile == "upstream":
        return x.to(draw.dtype), torch.full((HISTORY,), 1e-8, dtype=torch.bfloat16)
    chance, common = draw.own("history"), draw.shared("scale")
    a, b = torch.rand(2, generator=chance).tolist()
    scale = 10 ** (4 * float(torch.rand((), generator=common)) - 2) * 2 ** (2 * a - 1)
    x = torch.where(torch.rand(x.shape, generator=chance) < 1 / 64, 6.0, 1.0).mul_(x).mul_(scale).to(draw.dtype)
    decay = torch.rand(HISTORY, generator=chance).mul_(4).add_(0.5)
    kind = (turn(draw, 3) + draw.rank) % 3
    if kind:
        slot = int(torch.randint(1, HISTORY, (), generator=chance)) if kind == 1 else 0
        decay[slot] = -1 - 2 * b
    history = (x.abs().amax().float() * decay.neg_().exp2_()).to(draw.dtype)
    if _has_nothing(draw):
        return torch.zeros_like(x), torch.zeros_like(history)
    return off_ties(x, torch.maximum(history[1:].amax(), x.abs().amax()).float() / LARGEST), history


def _has_nothing(draw: Draw) -> bool:
    rank = int(torch.randint(draw.world_size, (), generator=draw.shared("nothing")))
    return draw.world_size > 2 and turn(draw, 4, "nothing at all") == 0 and rank == draw.rank
