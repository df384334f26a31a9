"""#008 alltoall: rank r gets the r-th chunk of every rank's tensor.

Axes      M rows, N columns (neither is split), W ranks and chunks of M*N elements
In        tensor, cut along axis 0 in W chunks: [W, M, N], [W*M, N] and [3*W, M, N/3] take turns; differs per rank
Out       the shape of tensor, differs per rank
Maths     chunk s of out_r = chunk r of tensor_s, bit for bit
Wire      all_to_all: a rank sends (W-1)*M*N elements
Needs     extent of axis 0 divisible by W (true by construction); any W
Not here  uneven chunks, other axes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor]:
    """Normal values in rows of unlike exponents; upstream's are ten times the rank's number plus the chunk's."""
    m, n, ranks = size["M"], size["N"], draw.world_size
    if draw.profile == "upstream":
        numbers = 10 * draw.rank + torch.arange(ranks, dtype=draw.dtype)
        return (numbers[:, None, None].repeat(1, m, n),)
    shape = ((ranks, m, n), (ranks * m, n), (3 * ranks, m, n // 3))[turn(draw, 3)]
    return (normal_rows(shape, draw.own("tensor")).to(draw.dtype),)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's chunk for this one, in rank order, in the shape of the argument."""
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, tensor.contiguous())
    return out


def exact(inputs: Sequence[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    """Chunks by name, in their own dtype: nothing is computed."""
    chunks = [tensor.tensor_split(len(inputs)) for (tensor,) in inputs]
    return [torch.cat(received) for received in zip(*chunks, strict=True)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A chunk to every other rank."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=2 * world_size * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=8,
    slug="alltoall",
    version=1,
    title="Exchange chunks of the first axis: rank r gets the r-th chunk of every rank, in rank order.",
    family="collective-primitives",
    parallelism="EP",
    collectives=("all_to_all_single",),
    origin="generic (NCCL primitive)",
    split="train",
    # N is three times something.
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 69}),
        "default": Size("default", {"M": 256, "N": 480}),
        "odd": Size("odd", {"M": 257, "N": 507}),
        # 1 GiB in and out in bf16 at W = 8.
        "large": Size("large", {"M": 8192, "N": 8190}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
