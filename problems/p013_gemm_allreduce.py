"""#013 gemm_allreduce: a matrix product whose inner dimension is spread over ranks; partial products are summed.

Axes      M rows, N columns, K inner extent on one rank (the whole inner extent is W*K), W ranks
In        A_local [M, K] and B_local [K, N], both differ per rank
Out       [M, N], equal on every rank
Maths     out = sum over ranks s of A_s @ B_s, each product rounded to the dtype before the sum
Wire      all_reduce of M*N elements: a rank sends at least 2*(W-1)/W of them
Needs     any W
Not here  bias, activation, replicated operands, switches that add
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values scaled by K^-1/4, so that a product is O(1), at a scale of its own per rank."""
    rows, inner, columns = size["M"], size["K"], size["N"]
    a = torch.randn(rows, inner, generator=draw.own("A_local"))
    b = torch.randn(inner, columns, generator=draw.own("B_local"))
    if draw.profile == "upstream":
        return a.to(draw.dtype), b.to(draw.dtype)
    order = torch.randperm(draw.world_size, generator=draw.shared("scale"))
    factor = inner**-0.25 * 2.0 ** (int(order[draw.rank]) % 4 / 2)
    return a.mul_(factor).to(draw.dtype), b.mul_(inner**-0.25).to(draw.dtype)


def reference(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    """Sum over ranks of the local products, [M, N]."""
    out = A_local @ B_local
    dist.all_reduce(out)
    return out


def exact(inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """One product of the matrices joined along the inner axis, in float64."""
    a = torch.cat([a.double() for a, _ in inputs], dim=1)
    b = torch.cat([b.double() for _, b in inputs], dim=0)
    return [a @ b] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The local product, then the sum of M*N elements over ranks."""
    rows, inner, columns = size["M"], size["K"], size["N"]
    count, others = rows * columns, world_size - 1
    return Cost(
        wire_bytes=2 * others / world_size * count * itemsize,
        memory_bytes=(rows * inner + inner * columns + count) * itemsize,
        flops=2 * count * inner + others / world_size * count,
    )


PROBLEM = Problem(
    number=13,
    slug="gemm_allreduce",
    version=1,
    title="Multiply local slices of two matrices and sum the products over all ranks.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("all_reduce",),
    origin="Megatron-LM RowParallelLinear",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67, "K": 48}),
        "default": Size("default", {"M": 256, "N": 384, "K": 256}),
        "odd": Size("odd", {"M": 253, "N": 387, "K": 259}),
        "large": Size("large", {"M": 8192, "N": 8192, "K": 4096}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "K": 512}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
