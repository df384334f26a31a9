"""#037 ulysses_gather_heads_scatter_seq: from all positions with a block of heads to a block of positions with all heads.

Axes      B batch, T positions (split: S = ceil(T/W) on a rank), H heads on a rank (W*H in all), D head size, W ranks
In        x with all T at seq_dim and H at head_dim: [B, T, H, D], [B, H, T, D] and [T, H, B*D] take turns, differs per rank;
          seq_dim and head_dim, equal on every rank; group (None: all ranks)
Out       x's shape with S positions and W*H heads, differs per rank: rank r gets positions r*S .. (r+1)*S - 1
Maths     all ranks' x one after another along head_dim, then zeros at the end of seq_dim up to W*S positions, bit for bit
Wire      all_to_all: a rank sends all positions but its own; zeros need not be sent
Needs     any W; T need be neither a multiple of W nor as large
Not here  negative dims, cutting the padding off
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn
from problems.ulysses import all_to_all

Inputs = tuple[torch.Tensor, int, int, None]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values; every row has a binary exponent of its own.  T takes every remainder by W in turn, and three layouts."""
    b, t, h, d = (size[axis] for axis in "BTHD")
    if draw.profile == "upstream":
        return torch.randn(b, t, h, d, generator=draw.own("x")).to(draw.dtype), 1, 2, None
    t = -(-t // draw.world_size) * draw.world_size - turn(draw, draw.world_size, "remainder")
    shape, seq_dim, head_dim = (((b, t, h, d), 1, 2), ((b, h, t, d), 2, 1), ((t, h, b * d), 0, 1))[turn(draw, 3)]
    return normal_rows(shape, draw.own("x")).to(draw.dtype), seq_dim, head_dim, None


def reference(x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's block of positions, with all heads."""
    missing = -x.shape[seq_dim] % dist.get_world_size(group)
    padded = F.pad(x, (0, 0) * (x.dim() - 1 - seq_dim) + (0, missing)) if missing else x
    return all_to_all(padded, seq_dim, head_dim, group)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """All heads side by side in a sheet of zeros, cut into blocks of positions: nothing is computed."""
    _, seq_dim, head_dim, _ = inputs[0]
    heads = torch.cat([args[0] for args in inputs], dim=head_dim)
    shape, length = list(heads.shape), heads.shape[seq_dim]
    local = -(-length // len(inputs))
    shape[seq_dim] = local * len(inputs)
    sheet = heads.new_zeros(shape)
    sheet.narrow(seq_dim, 0, length).copy_(heads)
    return list(sheet.chunk(len(inputs), dim=seq_dim))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The shortest T of a turn: each position to the one rank that keeps it."""
    local = -(-size["T"] // world_size)
    shortest, width = (local - 1) * world_size + 1, size["B"] * size["H"] * size["D"]
    return Cost(
        wire_bytes=(world_size - 1) / world_size * shortest * width * itemsize,
        memory_bytes=(shortest + local * world_size) * width * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=37,
    slug="ulysses_gather_heads_scatter_seq",
    version=1,
    title="Exchange all positions with a block of heads for a block of positions with all heads, padded with zeros.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_to_all",),
    origin="VeOmni, DeepSpeed-Ulysses (after attention)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "T": 13, "H": 3, "D": 14}),
        # Fewer positions than ranks in most turns: some ranks get zeros only.
        "short": Size("short", {"B": 3, "T": 1, "H": 2, "D": 10}),
        "default": Size("default", {"B": 2, "T": 512, "H": 4, "D": 64}),
        "odd": Size("odd", {"B": 3, "T": 331, "H": 3, "D": 42}),
        # 256 MiB on a rank in bf16 at W = 8.
        "large": Size("large", {"B": 1, "T": 131072, "H": 8, "D": 128}),
        "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
