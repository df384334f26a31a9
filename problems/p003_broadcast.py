"""#003 broadcast: every rank gets a copy of the tensor of one of them.

Axes      M rows, N columns (neither is split), W ranks
In        tensor [M, N], differs per rank; src, equal on every rank: each rank is it in turns
Out       [M, N], equal on every rank, new memory on src too
Maths     out = tensor_src, bit for bit
Wire      broadcast: src sends its M*N elements at least once
Needs     any W
Not here  results in place: the tensors of the others stay as they were
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, int]:
    """Normal values, in rows of unlike exponents, on every rank; upstream's are the rank's number, and rank 0 is src."""
    shape = size["M"], size["N"]
    if draw.profile == "upstream":
        return torch.full(shape, draw.rank + 1, dtype=draw.dtype), 0
    return normal_rows(shape, draw.own("tensor")).to(draw.dtype), turn(draw, draw.world_size, "src")


def reference(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """The tensor of `src`, [M, N]; the argument stays as it was."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, src)
    return out


def exact(inputs: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """The tensor that every rank's `src` points to, in its own dtype: nothing is computed."""
    return [inputs[src][0] for _, src in inputs]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Of src, the busiest: every element leaves it at least once, for others to pass it on, and is copied."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=count * itemsize if world_size > 1 else 0,
        memory_bytes=2 * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=3,
    slug="broadcast",
    version=1,
    title="Copy one rank's tensor to every rank; which rank's is told by an argument.",
    family="collective-primitives",
    parallelism="DP",
    collectives=("broadcast",),
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
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
