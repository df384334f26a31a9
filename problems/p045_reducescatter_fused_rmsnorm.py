"""#045 reducescatter_fused_rmsnorm: the mean of all ranks' tensors, a block of rows on each rank, normalised row by row.

Axes      M rows on a rank (W*M in all), N hidden extent, W ranks
In        rs_input_1d [W*M*N], differs per rank: all rows, one after another; gamma [N] and eps, equal on every rank
Out       [M, N], differs per rank: rank r gets rows r*M .. (r+1)*M - 1
Maths     a = (sum over ranks of rs_input_1d) / W; out = a * (mean of a^2 over its row + eps)^-1/2 * gamma
Wire      reduce_scatter of W*M*N elements: a rank sends (W-1)*M*N
Needs     any W
Not here  a residual, 1 + gamma, subtracting the row's mean, switches that add
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import reduce_scattered

Inputs = tuple[torch.Tensor, torch.Tensor, float]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values; half of all rows lie within a decade of eps^1/2, where eps and the division by W show.

    The others are up to a thousand times as large.
    """
    rows, columns = draw.world_size * size["M"], size["N"]
    gamma = torch.randn(columns, generator=draw.shared("gamma")).to(draw.dtype)
    values = torch.randn(rows, columns, generator=draw.own("rs_input_1d"))
    if draw.profile == "upstream":
        return values.flatten().to(draw.dtype), gamma, 1e-5
    chance = draw.shared("scale")
    eps = 10 ** (-5 + 2 * float(torch.rand((), generator=chance)))
    decades = torch.rand(rows, 1, generator=chance).sub_(0.5)
    decades = torch.where(torch.rand(rows, 1, generator=chance) < 1 / 2, decades, 3 * decades + 1.5)
    scale = torch.pow(10, decades).mul_((eps * draw.world_size) ** 0.5)
    return values.mul_(scale).flatten().to(draw.dtype), gamma, eps


def reference(rs_input_1d: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """This rank's normalised rows, [M, N]; statistics in float32 at least."""
    mean = reduce_scattered(rs_input_1d) / dist.get_world_size()
    wide = torch.promote_types(mean.dtype, torch.float32)
    rows = mean.view(-1, len(gamma)).to(wide)
    scale = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (rows * scale * gamma.to(wide)).to(rs_input_1d.dtype)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """The whole sum over ranks in float64, which stands for the mean if eps is scaled instead; then cut into blocks."""
    world_size, (_, gamma, eps) = len(inputs), inputs[0]
    total = inputs[0][0].to(torch.float64, copy=True)
    for values, _, _ in inputs[1:]:
        total += values
    rows = total.view(-1, len(gamma))
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    rows.div_(torch.hypot(length / len(gamma) ** 0.5, torch.full_like(length, world_size * eps**0.5))).mul_(gamma)
    return list(rows.chunk(world_size))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Each rank sends every other rank its rows, adds W of each, and normalises."""
    count, others = size["M"] * size["N"], world_size - 1
    return Cost(
        wire_bytes=others * count * itemsize,
        memory_bytes=((world_size + 1) * count + size["N"]) * itemsize,
        flops=(others + 5) * count,
    )


PROBLEM = Problem(
    number=45,
    slug="reducescatter_fused_rmsnorm",
    version=1,
    title="Average a tensor over ranks, each keeping a block of rows, and RMS-normalise the rows.",
    family="normalisation",
    parallelism="TP",
    collectives=("reduce_scatter_tensor",),
    origin="Megatron-LM sequence parallelism, TensorRT-LLM and vLLM fused reduce-scatter and RMSNorm",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"M": 13, "N": 67}),
        "default": Size("default", {"M": 64, "N": 1024}),
        "odd": Size("odd", {"M": 61, "N": 1023}),
        # 1 GiB in on a rank in bf16 at W = 8.
        "large": Size("large", {"M": 8192, "N": 8192}),
        "upstream": Size("upstream", {"M": 256, "N": 128}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
