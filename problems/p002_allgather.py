"""#002 allgather: every rank gets all ranks' tensors, stacked along a new leading axis.

Axes      M rows, N columns (neither is split), W ranks
In        tensor [M, N], differs per rank
Out       [W, M, N], equal on every rank
Maths     out[s] = tensor_s, bit for bit
Wire      all_gather: a rank receives (W-1)*M*N elements, and sends as many without multicast
Needs     any W
Not here  tensors of unequal shapes, concatenation along an existing axis
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor]:
    """Normal values; every row has a binary exponent of its own, so that a row in the wrong place is seen."""
    shape = size["M"], size["N"]
    if draw.profile == "upstream":
        return (torch.full(shape, draw.rank + 1, dtype=draw.dtype),)
    exponent = torch.randint(-6, 7, (size["M"], 1), generator=draw.own("exponent"))
    values = torch.randn(shape, generator=draw.own("tensor")).mul_(torch.exp2(exponent.float()))
    return (values.to(draw.dtype),)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors in rank order, [W, M, N]."""
    # The newer of two names for one collective; where both exist the older one warns.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    world_size = dist.get_world_size()
    # gloo takes the concatenated output only, so the stacked one is a view of it.
    flat = tensor.new_empty((world_size * tensor.shape[0], *tensor.shape[1:]))
    all_gather(flat, tensor.contiguous())
    return flat.view(world_size, *tensor.shape)


def exact(inputs: Sequence[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    """The stack of all tensors, in their own dtype: nothing is computed."""
    stacked = torch.stack([tensor for (tensor,) in inputs])
    return [stacked] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Every rank's tensor to every other rank."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=(1 + world_size) * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=2,
    slug="allgather",
    version=1,
    title="Stack all ranks' tensors in rank order on every rank.",
    family="collective-primitives",
    parallelism="FSDP",
    collectives=("all_gather",),
    origin="generic (NCCL primitive)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 256, "N": 512}),
        "odd": Size("odd", {"M": 257, "N": 509}),
        "large": Size("large", {"M": 8192, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
