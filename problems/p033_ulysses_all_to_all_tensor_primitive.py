"""#033 ulysses_all_to_all_tensor_primitive: one axis is scattered over ranks while another one, or the same, is gathered.

Axes      A, B, C, D of one rank's tensor; the scattered one is rounded up to a multiple of W; W ranks
In        x [A, B, C, D], differs per rank; scatter_dim and gather_dim, equal on every rank, which may be one and the same;
          group (None: all ranks)
Out       x's shape with 1/W of scatter_dim and W times gather_dim, differs per rank, contiguous new memory
Maths     x is cut into W equal pieces along scatter_dim, piece j goes to rank j; the pieces that come in are joined along
          gather_dim in the order of their senders, bit for bit
Wire      all_to_all: a rank sends (W-1)/W of its x
Needs     any W
Not here  uneven pieces, negative dims
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn
from problems.ulysses import all_to_all

Inputs = tuple[torch.Tensor, int, int, None]
PAIRS = ((0, 1), (1, 2), (2, 1), (1, 0), (2, 0), (1, 1), (3, 0))
"""(scatter_dim, gather_dim)."""


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values; every row has a binary exponent of its own.  Pairs of axes take turns."""
    scatter_dim, gather_dim = PAIRS[0] if draw.profile == "upstream" else PAIRS[turn(draw, len(PAIRS))]
    shape = [size[axis] for axis in "ABCD" if axis in size.dims]
    shape[scatter_dim] = -(-shape[scatter_dim] // draw.world_size) * draw.world_size
    if draw.profile == "upstream":
        return torch.randn(shape, generator=draw.own("x")).to(draw.dtype), scatter_dim, gather_dim, None
    return normal_rows(shape, draw.own("x")).to(draw.dtype), scatter_dim, gather_dim, None


def reference(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's piece of every rank's x, joined along gather_dim."""
    return all_to_all(x, scatter_dim, gather_dim, group).contiguous()


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """Piece r of all tensors, joined: nothing is computed."""
    _, scatter_dim, gather_dim, _ = inputs[0]
    pieces = [x.chunk(len(inputs), dim=scatter_dim) for x, *_ in inputs]
    return [torch.cat(mine, dim=gather_dim) for mine in zip(*pieces, strict=True)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """All pieces but the own one; x is read and the result written once."""
    count = torch.Size(size.dims.values()).numel()
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * itemsize,
        memory_bytes=2 * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=33,
    slug="ulysses_all_to_all_tensor_primitive",
    version=1,
    title="Cut a tensor along one axis, send piece j to rank j and join what comes along another axis.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_to_all",),
    origin="VeOmni, DeepSpeed-Ulysses",
    split="train",
    sizes={
        "tiny": Size("tiny", {"A": 4, "B": 5, "C": 3, "D": 7}),
        "default": Size("default", {"A": 16, "B": 32, "C": 16, "D": 64}),
        "odd": Size("odd", {"A": 13, "B": 37, "C": 11, "D": 63}),
        # 512 MiB on a rank in bf16.
        "large": Size("large", {"A": 64, "B": 1024, "C": 32, "D": 128}),
        "upstream": Size("upstream", {"A": 1024, "B": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
