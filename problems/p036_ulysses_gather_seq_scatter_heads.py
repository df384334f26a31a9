"""#036 ulysses_gather_seq_scatter_heads: from a block of positions with all heads to all positions with a block of heads.

Axes      B batch, S positions on a rank (W*S in all), H heads (rounded up to a multiple of W), D head size, W ranks
In        x with S at seq_dim and H at head_dim: [B, S, H, D], [B, H, S, D] and [B*S, H, D] take turns, differs per rank;
          seq_dim and head_dim; group (None: all ranks); unpadded_dim_size (0: all), equal on every rank
Out       x's shape with W times as many positions and H/W heads, differs per rank: rank r gets heads r*H/W .. (r+1)*H/W - 1
Maths     all ranks' x one after another along seq_dim, bit for bit; then, if unpadded_dim_size is neither 0 nor a multiple
          of W, its first unpadded_dim_size positions
Wire      all_to_all: a rank sends (W-1)/W of its x
Needs     any W
Not here  heads that W does not divide, negative dims, more than W - 1 positions of padding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn
from problems.ulysses import all_to_all, unpadded

Inputs = tuple[torch.Tensor, int, int, None, int]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values; every row has a binary exponent of its own.  Three layouts, with and without padding, take turns."""
    b, s, h, d = extents(size, draw.world_size)
    if draw.profile == "upstream":
        return torch.randn(b, s, h, d, generator=draw.own("x")).to(draw.dtype), 1, 2, None, 0
    shape, seq_dim, head_dim = (((b, s, h, d), 1, 2), ((b, h, s, d), 2, 1), ((b * s, h, d), 0, 1))[turn(draw, 3)]
    some = 1 + int(torch.randint(max(1, draw.world_size - 1), (), generator=draw.shared("padding")))
    padding = some if turn(draw, 2, "padded") and draw.world_size > 1 else 0
    length = shape[seq_dim] * draw.world_size - padding if padding else 0
    return normal_rows(shape, draw.own("x")).to(draw.dtype), seq_dim, head_dim, None, length


def extents(size: Size, world_size: int) -> tuple[int, int, int, int]:
    """Batch, positions on a rank, heads and head size."""
    return size["B"], size["S"], -(-size["H"] // world_size) * world_size, size["D"]


def reference(
    x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None, unpadded_dim_size: int = 0
) -> torch.Tensor:
    """All positions of this rank's block of heads."""
    whole = all_to_all(x, head_dim, seq_dim, group)
    return unpadded(whole, seq_dim, unpadded_dim_size, dist.get_world_size(group))


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """The whole sequence, cut off where padding begins and into blocks of heads: nothing is computed."""
    _, seq_dim, head_dim, _, length = inputs[0]
    whole = torch.cat([args[0] for args in inputs], dim=seq_dim)
    kept = length if length % len(inputs) else whole.shape[seq_dim]
    return list(whole.index_select(seq_dim, torch.arange(kept, device=whole.device)).chunk(len(inputs), dim=head_dim))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Every position but the most that may be padding, W - 1 in all, to every other rank."""
    b, s, h, d = extents(size, world_size)
    count = (s - (world_size - 1) / world_size) * b * h * d
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * itemsize,
        memory_bytes=2 * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=36,
    slug="ulysses_gather_seq_scatter_heads",
    version=1,
    title="Exchange a block of positions with all heads for all positions with a block of heads, less padding.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_to_all",),
    origin="VeOmni, DeepSpeed-Ulysses (before attention)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "S": 7, "H": 4, "D": 14}),
        "default": Size("default", {"B": 2, "S": 256, "H": 8, "D": 64}),
        "odd": Size("odd", {"B": 3, "S": 163, "H": 7, "D": 42}),
        # 256 MiB on a rank in bf16.
        "large": Size("large", {"B": 1, "S": 16384, "H": 64, "D": 128}),
        "upstream": Size("upstream", {"B": 16, "S": 16, "H": 8, "D": 64}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
