"""#004 reduce: one rank gets the element-wise sum of all ranks' tensors; the others get back their own.

Axes      M rows, N columns (neither is split), W ranks
In        tensor [M, N], differs per rank; dst, equal on every rank: each rank is it in turns
Out       [M, N], new memory on every rank
Maths     out_dst = sum over ranks s of tensor_s; out_r = tensor_r on the others, where the library leaves it open
Wire      reduce: every other rank sends its M*N elements, or sums of them, at least once
Needs     any W; M*N need not divide by W
Not here  other reductions, results in place, a sum on every rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, int]:
    """Normal values at a scale of its own per rank, plus a part that cancels between rank r and rank W-1-r."""
    shape, opposite = (size["M"], size["N"]), draw.world_size - 1 - draw.rank
    if draw.profile == "upstream":
        return torch.full(shape, draw.rank + 1, dtype=draw.dtype), 0
    order = torch.randperm(draw.world_size, generator=draw.shared("scale"))
    values = torch.randn(shape, generator=draw.own("tensor")).mul_(2.0 ** (int(order[draw.rank]) % 4))
    sign = (draw.rank < opposite) - (draw.rank > opposite)
    values += torch.randn(shape, generator=draw.shared("cancelling")).mul_(2 * sign)
    return values.to(draw.dtype), turn(draw, draw.world_size, "dst")


def reference(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    """The sum over all ranks on `dst`, a copy of the own tensor elsewhere, [M, N]."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.reduce(out, dst)
    # The library may leave partial sums with the others.
    return out if dist.get_rank() == dst else tensor.clone()


def exact(inputs: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """The sum in float64 on `dst`; the others' own tensors."""
    out = [tensor.double() for tensor, _ in inputs]
    dst = inputs[0][1]
    out[dst] = torch.stack(out).sum(0)
    return out


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Of any rank but dst: it sends what it has, and copies it; the additions may be anyone's."""
    count, others = size["M"] * size["N"], world_size - 1
    return Cost(
        wire_bytes=count * itemsize if others else 0,
        memory_bytes=2 * count * itemsize,
        flops=others / world_size * count,
    )


PROBLEM = Problem(
    number=4,
    slug="reduce",
    version=1,
    title="Sum a tensor over all ranks on one of them, which an argument tells; the others return copies of their own.",
    family="collective-primitives",
    parallelism="DP",
    collectives=("reduce",),
    origin="generic (NCCL primitive)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 512, "N": 512}),
        "odd": Size("odd", {"M": 509, "N": 513}),
        # 512 MiB in bf16.
        "large": Size("large", {"M": 16384, "N": 16384}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    # A sum of W terms: a few roundings of the accumulator.
    tolerance=Tolerance(inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
