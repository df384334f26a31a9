"""#001 allreduce: every rank gets the element-wise sum of all ranks' tensors.

Axes      M rows, N columns (neither is split), W ranks
In        tensor [M, N], differs per rank
Out       [M, N], equal on every rank, new memory
Maths     out = sum over ranks s of tensor_s
Wire      all_reduce of M*N elements: a rank sends at least 2*(W-1)/W of them
Needs     any W; M*N need not divide by W
Not here  other reductions, results in place, switches that add
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor]:
    """Normal values at a scale of its own per rank, plus a part that cancels between neighbouring ranks."""
    shape = size["M"], size["N"]
    if draw.profile == "upstream":
        return (torch.full(shape, draw.rank + 1, dtype=draw.dtype),)
    order = torch.randperm(draw.world_size, generator=draw.shared("scale"))
    scale = 2.0 ** (int(order[draw.rank]) % 4)
    unpaired = draw.world_size % 2 and draw.rank == draw.world_size - 1
    sign = 0.0 if unpaired else (-1.0) ** draw.rank
    values = torch.randn(shape, generator=draw.own("tensor")).mul_(scale)
    values += torch.randn(shape, generator=draw.shared("cancelling")).mul_(2 * sign)
    return (values.to(draw.dtype),)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of `tensor` over all ranks, [M, N]; the argument stays as it was."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out)
    return out


def exact(inputs: Sequence[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    """The sum in float64, once, for every rank."""
    total = inputs[0][0].to(torch.float64, copy=True)
    for (tensor,) in inputs[1:]:
        total += tensor.double()
    return [total] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Reduce-scatter and all-gather of M*N elements; each rank adds its share."""
    count, others = size["M"] * size["N"], world_size - 1
    return Cost(
        wire_bytes=2 * others / world_size * count * itemsize,
        memory_bytes=2 * count * itemsize,
        flops=others / world_size * count,
    )


PROBLEM = Problem(
    number=1,
    slug="allreduce",
    version=1,
    title="Sum a tensor over all ranks; every rank gets the result.",
    family="collective-primitives",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="generic (NCCL primitive)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 512, "N": 512}),
        "odd": Size("odd", {"M": 509, "N": 513}),
        "large": Size("large", {"M": 16384, "N": 16384}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
