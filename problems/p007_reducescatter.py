"""#007 reducescatter: rank r gets the sum over all ranks of their r-th chunk of rows.

Axes      M rows of a chunk, N columns, W ranks; the W*M rows are split over ranks in the result
In        tensor [W*M, N], differs per rank
Out       [M, N], differs per rank
Maths     out_r = sum over ranks s of tensor_s[r*M : (r+1)*M]
Wire      reduce_scatter: a rank sends (W-1)*M*N elements
Needs     rows divisible by W (true by construction); any W
Not here  other reductions, uneven chunks, switches that add
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor]:
    """Normal values; every chunk of every rank has a scale of its own."""
    chunks, shape = draw.world_size, (draw.world_size, size["M"], size["N"])
    if draw.profile == "upstream":
        return (torch.full(shape, draw.rank + 1, dtype=draw.dtype).flatten(0, 1),)
    scale = torch.exp2(torch.randperm(chunks, generator=draw.own("scale")).remainder(4).float())
    values = torch.randn(shape, generator=draw.own("tensor")).mul_(scale.view(-1, 1, 1))
    return (values.flatten(0, 1).to(draw.dtype),)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's chunk of the sum over all ranks, [M, N]."""
    # The newer of two names for one collective; where both exist the older one warns.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rows = tensor.shape[0] // dist.get_world_size()
    out = tensor.new_empty((rows, *tensor.shape[1:]))
    reduce_scatter(out, tensor.contiguous())
    return out


def exact(inputs: Sequence[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    """The whole sum in float64, cut into W chunks."""
    total = inputs[0][0].to(torch.float64, copy=True)
    for (tensor,) in inputs[1:]:
        total += tensor.double()
    return list(total.chunk(len(inputs)))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Each rank sends every other rank its chunk, and adds W chunks."""
    count, others = size["M"] * size["N"], world_size - 1
    return Cost(
        wire_bytes=others * count * itemsize,
        memory_bytes=(world_size + 1) * count * itemsize,
        flops=others * count,
    )


PROBLEM = Problem(
    number=7,
    slug="reducescatter",
    version=1,
    title="Sum a tensor over all ranks; rank r keeps the r-th chunk of rows.",
    family="collective-primitives",
    parallelism="FSDP",
    collectives=("reduce_scatter",),
    origin="generic (NCCL primitive)",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 256, "N": 512}),
        "odd": Size("odd", {"M": 257, "N": 509}),
        "large": Size("large", {"M": 8192, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
