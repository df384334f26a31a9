"""#016 gemm_reducescatter: products over a split inner axis are summed over ranks; rank r keeps the r-th block of rows.

Axes      M rows (rounded up to W*m; split in the result: m on a rank), N columns, K inner extent on one rank, W ranks
In        A_local [W*m, K] and B_local [K, N], both differ per rank; upstream's K shrinks with W and becomes degenerate
Out       [m, N], differs per rank
Maths     out_r = sum over ranks s of A_s[r*m : (r+1)*m] @ B_s, each product rounded to the dtype before the sum
Wire      reduce_scatter: a rank sends (W-1)*m*N elements, unless sending A and B themselves is less
Needs     rows divisible by W (true by construction); any W
Not here  bias, activation, uneven blocks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import reduce_scattered
from problems.gemm import rank_scale, rounded_up


def extents(size: Size, world_size: int) -> tuple[int, int]:
    """Rows in all, and the inner extent of one rank: the size's K, or its share of the size's K_all."""
    whole = size.dims.get("K_all")
    return rounded_up(size["M"], world_size), size["K"] if whole is None else max(1, whole // world_size)


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values scaled by K^-1/4, and A's by a factor of its own per rank too."""
    rows, inner = extents(size, draw.world_size)
    a = torch.randn(rows, inner, generator=draw.own("A_local"))
    b = torch.randn(inner, size["N"], generator=draw.own("B_local"))
    if draw.profile != "upstream":
        a, b = a.mul_(inner**-0.25 * rank_scale(draw)), b.mul_(inner**-0.25)
    return a.to(draw.dtype), b.to(draw.dtype)


def reference(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' products, [m, N]."""
    return reduce_scattered(A_local @ B_local)


def exact(inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """A block of rows at a time, of the matrices joined along the inner axis, in float64."""
    a = torch.cat([a for a, _ in inputs], dim=1).double()
    b = torch.cat([b for _, b in inputs]).double()
    return [rows @ b for rows in a.tensor_split(len(inputs))]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The local product, or as much of any other; blocks of the products or of A, with all of B, to the other ranks."""
    (rows, inner), columns, others = extents(size, world_size), size["N"], world_size - 1
    block = rows // world_size
    return Cost(
        wire_bytes=others * min(block * columns, (block + columns) * inner) * itemsize,
        memory_bytes=(rows * inner + inner * columns + block * columns) * itemsize,
        flops=2 * rows * inner * columns + others * block * columns,
    )


PROBLEM = Problem(
    number=16,
    slug="gemm_reducescatter",
    version=1,
    title="Multiply local slices of two matrices and sum the products over ranks; rank r keeps the r-th block of rows.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("reduce_scatter",),
    origin="Megatron-LM RowParallelLinear (sequence parallelism)",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67, "K": 96}),
        "default": Size("default", {"M": 192, "N": 256, "K": 1024}),
        "odd": Size("odd", {"M": 187, "N": 259, "K": 1031}),
        # 64 MiB of A, 32 MiB of B and 256 MiB of products in bf16.
        "large": Size("large", {"M": 16384, "N": 8192, "K": 2048}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "K_all": 512}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
