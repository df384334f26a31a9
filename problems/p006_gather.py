"""#006 gather: one rank gets all ranks' tensors, stacked along a new leading axis; the others get back their own.

Axes      M rows, N columns (neither is split), W ranks
In        tensor [M, N], differs per rank; dst, equal on every rank: each rank is it in turns
Out       on dst [W, M, N], elsewhere [M, N]; new memory on every rank (upstream's others return the argument itself)
Maths     out_dst[s] = tensor_s, out_r = tensor_r on the others, bit for bit
Wire      gather: every other rank sends its M*N elements, and dst receives (W-1)*M*N
Needs     any W
Not here  tensors of unequal shapes, concatenation along an existing axis
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, int]:
    """Normal values, in rows of unlike exponents; upstream's are the rank's number, and rank 0 is dst."""
    shape = size["M"], size["N"]
    if draw.profile == "upstream":
        return torch.full(shape, draw.rank + 1, dtype=draw.dtype), 0
    return normal_rows(shape, draw.own("tensor")).to(draw.dtype), turn(draw, draw.world_size, "dst")


def reference(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    """All ranks' tensors in rank order, [W, M, N], on `dst`; a copy of the own one, [M, N], elsewhere."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if dist.get_rank() != dst:
        dist.gather(tensor, None, dst=dst)
        return tensor
    out = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    dist.gather(tensor, list(out.unbind()), dst=dst)
    return out


def exact(inputs: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """The stack of all tensors on `dst`, in their own dtype: nothing is computed."""
    tensors = [tensor for tensor, _ in inputs]
    return [torch.stack(tensors) if rank == dst else tensor for rank, (tensor, dst) in enumerate(inputs)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Of dst, the busiest: what comes in over its links is W-1 times what any other rank sends."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=(1 + world_size) * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=6,
    slug="gather",
    version=1,
    title="Stack all ranks' tensors on one rank, which an argument tells; the others return copies of their own.",
    family="collective-primitives",
    parallelism="DP",
    collectives=("gather",),
    origin="generic (NCCL primitive)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 256, "N": 512}),
        "odd": Size("odd", {"M": 257, "N": 509}),
        # 128 MiB in and, on dst, 1 GiB out in bf16 at W = 8.
        "large": Size("large", {"M": 8192, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
