"""#023 grad_acc_loss: the mean loss per token over ranks with unequal numbers of tokens, and its gradient for the local loss.

Axes      T: a rank counts at most T tokens; everything is a scalar, W ranks
In        loss, the mean over the rank's tokens (infinite or NaN if it has none), local_valid_tokens (int64), differ per rank;
          global_valid_tokens (int64, their sum), grad_normalized_loss, grad_loss_sum (or None), the same on every rank
Out       (normalized_loss, loss_sum, grad_loss), scalars in the dtype of the loss; the first two are equal on every rank
Maths     loss_sum = sum over ranks of loss * local, where a loss of no tokens counts nothing;
          normalized_loss = loss_sum / global;
          grad_loss = grad_normalized_loss * local / global + grad_loss_sum * local (None: without that)
Wire      all_reduce of one number
Needs     any W
Not here  the loss of a token, gradients that need communication
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Losses between 0.5 and 4, between T/16 and T tokens; in three of four trials one rank without any, its loss inf or NaN.

    grad_loss_sum is None in every second trial.  Its part of the gradient is about as large as the other one and has its sign.
    """
    if draw.profile == "upstream":
        return _public_inputs(draw, size["T"])
    common, chance, world_size = draw.shared("tokens"), draw.own("loss"), draw.world_size
    tokens = torch.randint(max(1, size["T"] // 16), size["T"] + 1, (world_size,), generator=common)
    idle = int(torch.randint(world_size, (), generator=common))
    if world_size > 1 and (kind := turn(draw, 4, "idle")):
        tokens[idle] = 0
    total = tokens.sum()
    loss = _between(chance, 3)
    if not tokens[draw.rank]:
        loss.fill_((torch.inf, -torch.inf, torch.nan)[kind - 1])
    common = draw.shared("gradients")
    sign = 1 - 2 * torch.randint(2, (), generator=common)
    normalized = sign * _between(common, 2)
    summed = sign * _between(common, 2) / total.log2().ceil().exp2() if turn(draw, 2) else None
    floats = [None if x is None else x.to(draw.dtype) for x in (loss, normalized, summed)]
    return floats[0], tokens[draw.rank].clone(), total, *floats[1:]


def _between(chance: torch.Generator, octaves: int) -> torch.Tensor:
    """A value from 0.5 on, just above the middle between two that have three binary places: fp8 is at least 2 % above."""
    place = torch.randint(8, (), generator=chance) + torch.rand((), generator=chance).mul_(0.08).add_(0.55)
    return (1 + place / 8) * 2.0 ** (torch.randint(octaves, (), generator=chance) - 1)


def _public_inputs(draw: Draw, tokens: int) -> tuple[Any, ...]:
    """As many tokens on every rank, and the gradients 1 and 0."""
    counts = torch.tensor(tokens), torch.tensor(tokens * draw.world_size)
    one, zero = (torch.tensor(value, dtype=draw.dtype) for value in (1.0, 0.0))
    return torch.randn((), generator=draw.own("loss")).to(draw.dtype), *counts, one, zero


def reference(
    loss: torch.Tensor,
    local_valid_tokens: torch.Tensor,
    global_valid_tokens: torch.Tensor,
    grad_normalized_loss: torch.Tensor,
    grad_loss_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss and sum of losses over all ranks' tokens, and the gradient of the local loss."""
    finite = torch.where(local_valid_tokens == 0, torch.nan_to_num(loss), loss)
    loss_sum = finite * local_valid_tokens
    dist.all_reduce(loss_sum)
    grad_loss = grad_normalized_loss * local_valid_tokens / global_valid_tokens
    if grad_loss_sum is not None:
        grad_loss = grad_loss + grad_loss_sum * local_valid_tokens
    return loss_sum / global_valid_tokens, loss_sum, grad_loss


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A weighted sum over the ranks that have tokens, in float64."""
    counts = torch.stack([args[1] for args in inputs]).double()
    losses = torch.stack([args[0] for args in inputs]).double()
    total = torch.dot(losses[counts > 0], counts[counts > 0])
    mean = total / inputs[0][2]
    return [(mean, total, count * _slope(*args[2:])) for count, args in zip(counts, inputs, strict=True)]


def _slope(tokens: torch.Tensor, grad_normalized: torch.Tensor, grad_sum: torch.Tensor | None) -> torch.Tensor:
    """The gradient per local token."""
    return grad_normalized.double() / tokens + (0 if grad_sum is None else grad_sum.double())


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One number is summed over ranks; five are read, three written."""
    del size
    return Cost(wire_bytes=2 * (world_size - 1) / world_size * itemsize, memory_bytes=6 * itemsize + 16, flops=6)


PROBLEM = Problem(
    number=23,
    slug="grad_acc_loss",
    version=1,
    title="Average losses over all ranks' tokens, and give the gradient of the local loss.",
    family="loss",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="VeOmni, xorl (loss of accumulated gradients)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"T": 101}),
        "default": Size("default", {"T": 1024}),
        "odd": Size("odd", {"T": 1499}),
        # A few bytes at any size: nothing but latency.  The sum of eight ranks' losses does not fit into float16.
        "large": Size("large", {"T": 65536}),
        "upstream": Size("upstream", {"T": 2**20}),
    },
    # Each output is one number, whose roundings cannot average out: up to one per rank and operation, all of one sign.
    tolerance=Tolerance(norm_ulps=3, inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
