"""#034 ulysses_all_gather_into_tensor_primitive: tensors of one shape, of one to four axes, joined along the first one.

Axes      M, H, D: shapes [M*H*D], [M, H*D], [M, H, D] and [M, H, 2, D/2] take turns (none is split), W ranks
In        x, differs per rank; group (None: all ranks)
Out       x's shape with W times the first extent, equal on every rank, new memory
Maths     out = x_0, x_1, ... one after another along axis 0, bit for bit
Wire      all_gather: a rank receives (W-1)*M*H*D elements, and sends as many without multicast
Needs     any W
Not here  unequal shapes, other axes, a new axis
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import normal_rows, turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, None]:
    """Normal values; every row has a binary exponent of its own."""
    m, h, d = size["M"], size["H"], size["D"]
    if draw.profile == "upstream":
        return torch.randn(m, h * d, generator=draw.own("x")).to(draw.dtype), None
    shapes = ((m * h * d,), (m, h * d), (m, h, d), (m, h, 2, d // 2))
    return normal_rows(shapes[turn(draw, len(shapes))], draw.own("x")).to(draw.dtype), None


def reference(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All ranks' x in rank order, joined along the first axis."""
    return gathered(x, group)


def exact(inputs: Sequence[tuple[torch.Tensor, None]]) -> list[torch.Tensor]:
    """The tensors one after another, in their own dtype: nothing is computed."""
    return [torch.cat([x for x, _ in inputs])] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Every rank's tensor to every other rank."""
    count = size["M"] * size["H"] * size["D"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=(1 + world_size) * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=34,
    slug="ulysses_all_gather_into_tensor_primitive",
    version=1,
    title="Join the equally shaped tensors of all ranks along the first axis, in rank order.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_gather_into_tensor",),
    origin="VeOmni (Ulysses all-gather into a tensor)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "H": 3, "D": 22}),
        "default": Size("default", {"M": 512, "H": 8, "D": 64}),
        "odd": Size("odd", {"M": 509, "H": 7, "D": 74}),
        # 256 MiB in and 2 GiB out in bf16 at W = 8.
        "large": Size("large", {"M": 16384, "H": 64, "D": 128}),
        "upstream": Size("upstream", {"M": 1024, "H": 1, "D": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
