"""#005 scatter: rank r gets the r-th slice of one rank's tensor.

Axes      M rows, N columns (neither is split), W ranks and slices
In        tensor: on src [W, M, N], elsewhere [M, N] with values that mean nothing; src, equal on every rank: each is it in turns
Out       [M, N], differs per rank, new memory
Maths     out_r = tensor_src[r], bit for bit
Wire      scatter: src sends (W-1)*M*N elements
Needs     as many slices as ranks (true by construction); any W
Not here  uneven slices, results in place
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, int]:
    """Normal values, in rows of unlike exponents, on src and elsewhere; upstream's are constants, and rank 0 is src."""
    ranks, shape = draw.world_size, (size["M"], size["N"])
    if draw.profile == "upstream":
        numbers = torch.arange(1, ranks + 1, dtype=draw.dtype)[:, None, None]
        return (torch.zeros(shape, dtype=draw.dtype) if draw.rank else numbers.repeat(1, *shape)), 0
    src = turn(draw, ranks, "src")
    mine = (ranks, *shape) if draw.rank == src else shape
    return normal_rows(mine, draw.own("tensor")).to(draw.dtype), src


def reference(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """This rank's slice of the tensor of `src`, [M, N]."""
    here = dist.get_rank() == src
    out = tensor.new_empty(tensor.shape[1:] if here else tensor.shape)
    dist.scatter(out, list(tensor.contiguous().unbind()) if here else None, src=src)
    return out


def exact(inputs: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Slices of the tensor that every rank's `src` points to, in its own dtype: nothing is computed."""
    return [inputs[src][0][rank] for rank, (_, src) in enumerate(inputs)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Of src, the busiest: it reads all slices, sends all but its own and copies that one."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=(world_size + 1) * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=5,
    slug="scatter",
    version=1,
    title="Give every rank its slice of one rank's tensor; which rank's is told by an argument.",
    family="collective-primitives",
    parallelism="DP",
    collectives=("scatter",),
    origin="generic (NCCL primitive)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 256, "N": 512}),
        "odd": Size("odd", {"M": 257, "N": 509}),
        # 1 GiB on src in bf16 at W = 8.
        "large": Size("large", {"M": 8192, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
