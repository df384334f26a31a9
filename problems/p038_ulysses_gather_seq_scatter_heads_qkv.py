"""#038 ulysses_gather_seq_scatter_heads_qkv: #036 for queries, keys and values that lie side by side in the last axis.

Axes      B batch, S positions on a rank (W*S in all), H heads (rounded up to a multiple of W), D head size, W ranks
In        qkv_tensor [B, S, 3*H*D] or [B*S, 3*H*D], differs per rank: per position all of q, then all of k, then all of v;
          seq_dim (1 or 0); group (None: all ranks); unpadded_dim_size (None or 0: all); restore_shape, equal on every rank
Out       [B, W*S, 3*H*D/W], or [B, W*S, 3, H*D/W] unless restore_shape (without B: likewise), differs per rank:
          rank r gets the r-th of W parts of q, of k and of v
Maths     all ranks' positions one after another, bit for bit; then, if unpadded_dim_size is neither 0 nor a multiple of W,
          the first unpadded_dim_size of them
Wire      all_to_all: a rank sends (W-1)/W of its tensor
Needs     any W
Not here  heads that W does not divide, fewer key heads, negative seq_dim, more than W - 1 positions of padding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn
from problems.ulysses import all_to_all, unpadded

Inputs = tuple[torch.Tensor, int, None, int | None, bool]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values in runs of D with an exponent each.  With and without axes restored and padding, 3-D and 2-D, take turns."""
    b, s, h, d = extents(size, draw.world_size)
    if draw.profile == "upstream":
        return torch.randn(b, s, 3 * h * d, generator=draw.own("qkv")).to(draw.dtype), 1, None, None, True
    now = turn(draw, 12)
    qkv = normal_rows((b, s, 3 * h, d), draw.own("qkv")).to(draw.dtype).flatten(2)
    qkv, seq_dim = (qkv.flatten(0, 1), 0) if now // 2 % 3 == 0 else (qkv, 1)
    padding = 1 + int(torch.randint(max(1, draw.world_size - 1), (), generator=draw.shared("padding")))
    whole = qkv.shape[seq_dim] * draw.world_size
    length = (None, 0, whole - padding % draw.world_size, whole - padding * (now < 6) % draw.world_size)[now % 4]
    return qkv, seq_dim, None, length, now % 2 == 0


def extents(size: Size, world_size: int) -> tuple[int, int, int, int]:
    """Batch, positions on a rank, heads and head size."""
    return size["B"], size["S"], -(-size["H"] // world_size) * world_size, size["D"]


def reference(
    qkv_tensor: torch.Tensor,
    seq_dim: int,
    group: dist.ProcessGroup | None = None,
    unpadded_dim_size: int | None = None,
    restore_shape: bool = True,
) -> torch.Tensor:
    """All positions of this rank's parts of q, k and v."""
    parts = qkv_tensor.reshape(*qkv_tensor.shape[:-1], 3, -1)
    whole = all_to_all(parts, parts.dim() - 1, seq_dim, group)
    whole = whole.flatten(-2) if restore_shape else whole
    return unpadded(whole, seq_dim, unpadded_dim_size or 0, dist.get_world_size(group))


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """q, k and v of the whole sequence, each cut into W parts: nothing is computed."""
    _, seq_dim, _, length, restored = inputs[0]
    whole = torch.cat([args[0] for args in inputs], dim=seq_dim)
    if length is not None and length % len(inputs):
        whole = whole.narrow(seq_dim, 0, length)
    parts = zip(*(side.chunk(len(inputs), dim=-1) for side in whole.chunk(3, dim=-1)), strict=True)
    return [torch.cat(mine, dim=-1) if restored else torch.stack(mine, dim=-2) for mine in parts]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Every position but the most that may be padding, W - 1 in all, to every other rank."""
    b, s, h, d = extents(size, world_size)
    count = (s - (world_size - 1) / world_size) * b * 3 * h * d
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * itemsize,
        memory_bytes=2 * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=38,
    slug="ulysses_gather_seq_scatter_heads_qkv",
    version=1,
    title="Exchange a block of positions of fused q, k, v for all positions of a part of each.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_to_all",),
    origin="VeOmni (fused q, k, v before attention)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "S": 7, "H": 4, "D": 14}),
        "default": Size("default", {"B": 1, "S": 256, "H": 8, "D": 64}),
        "odd": Size("odd", {"B": 3, "S": 83, "H": 7, "D": 42}),
        # 768 MiB on a rank in bf16.
        "large": Size("large", {"B": 1, "S": 16384, "H": 64, "D": 128}),
        "upstream": Size("upstream", {"B": 16, "S": 16, "H": 8, "D": 64}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
