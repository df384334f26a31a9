"""#015 combined_sharded_gemms: a two-layer network on columns gathered from all ranks; rank r keeps the r-th block of rows.

Axes      M rows (rounded up to W*m; split in the result: m on a rank), H columns (rounded up to W*h; split in x: h on a rank),
          F hidden units (not split), W ranks
In        x_local [W*m, h], differs per rank; W1 [W*h, F] and W2 [F, W*h], in one trial equal on every rank, in the next not
Out       y [m, W*h], differs per rank
Maths     X = x_0, x_1, ... side by side; y_r = silu(X[r*m : (r+1)*m] @ W1_r) @ W2_r.  Nothing is summed over ranks: what upstream
          reduces is zero outside the own block.  So whole tiles of x suffice, and one block of rows
Wire      a tile of m*h elements to every other rank; the all_gather and reduce_scatter of the reference send 2*W times as much
Needs     any W
Not here  partial sums of a hidden axis that is split, bias, weights that may be taken for shared
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered, reduce_scattered
from problems.draws import turn
from problems.gemm import exact_gathered, rank_scale, rounded_up

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal x, with a factor of its own per rank, and weights scaled by fan-in^-1/2; upstream's always differ, unscaled."""
    rows, width = (rounded_up(size[axis], draw.world_size) for axis in "MH")
    hidden, public = size["F"], draw.profile == "upstream"
    whose = draw.shared if not public and turn(draw, 2) == 0 else draw.own
    x = torch.randn(rows, width // draw.world_size, generator=draw.own("x_local"))
    w1 = torch.randn(width, hidden, generator=whose("W1"))
    w2 = torch.randn(hidden, width, generator=whose("W2"))
    if not public:
        x, w1, w2 = x.mul_(rank_scale(draw)), w1.mul_(width**-0.5), w2.mul_(hidden**-0.5)
    return x.to(draw.dtype), w1.to(draw.dtype), w2.to(draw.dtype)


def reference(x_local: torch.Tensor, W1: torch.Tensor, W2: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the network's output, [m, W*h]; all rows go through the first layer."""
    rows, local = x_local.shape
    blocks = gathered(x_local).view(-1, rows, local)
    hidden = F.silu(blocks.transpose(0, 1).reshape(rows, -1) @ W1)
    mine = slice(dist.get_rank() * rows // len(blocks), (dist.get_rank() + 1) * rows // len(blocks))
    padded = hidden.new_zeros(rows, W2.shape[1])
    padded[mine] = hidden[mine] @ W2
    return reduce_scattered(padded)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """Of every rank its block of rows alone, tile by tile, in float64."""
    tiles = [x.double().tensor_split(len(inputs)) for x, _, _ in inputs]
    return [_network([column[rank] for column in tiles], w1, w2) for rank, (_, w1, w2) in enumerate(inputs)]


def _network(tiles: list[torch.Tensor], w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Of some rows, given as tiles side by side."""
    hidden = exact_gathered(tiles, w1)
    return (hidden / (1 + torch.exp(-hidden))) @ w2.double()


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Tiles of the own columns to every other rank, and the network of one block of rows."""
    rows, width = (rounded_up(size[axis], world_size) for axis in "MH")
    block, hidden = rows // world_size, size["F"]
    return Cost(
        wire_bytes=(world_size - 1) * block * width / world_size * itemsize,
        memory_bytes=2 * (block + hidden) * width * itemsize,
        flops=4 * block * width * hidden,
    )


PROBLEM = Problem(
    number=15,
    slug="combined_sharded_gemms",
    version=1,
    title="A two-layer network on an input whose columns are split over ranks; rank r gets the r-th block of rows.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("all_gather", "reduce_scatter"),
    origin="generic (Megatron-LM, shape of a sequence-parallel MLP)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 53, "H": 46, "F": 61}),
        "default": Size("default", {"M": 192, "H": 192, "F": 384}),
        "odd": Size("odd", {"M": 187, "H": 197, "F": 389}),
        # 512 MiB of x and 128 MiB of each weight in bf16, on a rank 64 MiB of either side of the network at W = 8.
        "large": Size("large", {"M": 65536, "H": 4096, "F": 16384}),
        "upstream": Size("upstream", {"M": 1024, "H": 256, "F": 512}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
