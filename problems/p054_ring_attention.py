"""#054 ring_attention: exact softmax attention over a sequence of which each rank holds one block.

Axes      B batch, T positions in all (split: S = T // W on a rank), H heads, D head size, W ranks
In        q, k, v [B, S, H, D], differ per rank; rank r holds positions r*S .. (r+1)*S - 1
          softmax_scale (None: D^-1/2) and causal, equal on every rank; group (None: all ranks)
Out       [B, S, H, D] in the dtype of q, differs per rank
Maths     out = softmax(scale * q k^T) v over the whole sequence; causal: position i sees positions <= i
Wire      k and v of other ranks: 2*(W-1) blocks of B*S*H*D elements come in, half of that on average when causal
Needs     T >= W
Not here  load-balanced (zigzag) layouts, grouped key heads, dropout, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.ring import ring_attention
from problems.ring_cases import attention, options
from problems.worlds import one_each


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal q, k, v; one key in sixteen is six times as long, so that running maxima jump.

    Causal and not, default and explicit scale take turns over the trials, from a secret start.
    """
    shape = size["B"], max(1, size["T"] // draw.world_size), size["H"], size["D"]
    q, k, v = (torch.randn(shape, generator=draw.own(name)) for name in "qkv")
    if draw.profile == "upstream":
        return q.to(draw.dtype), k.to(draw.dtype), v.to(draw.dtype), None, True, None
    long = torch.rand(*shape[:3], 1, generator=draw.own("long keys")) < 1 / 16
    k *= torch.where(long, 6.0, 1.0)
    return q.to(draw.dtype), k.to(draw.dtype), v.to(draw.dtype), *options(draw, size["D"]), None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of the local queries to all ranks' keys, [B, S, H, D]; blocks travel around a ring."""
    peers = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    return ring_attention(q, k, v, softmax_scale, causal=causal, peers=peers, group=group)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Softmax over the joined sequence in float64, some query rows at a time."""
    q, k, v = (torch.cat([args[i] for args in inputs], dim=1) for i in range(3))
    return list(attention(q, k, v, inputs[0][3], causal=inputs[0][4]).chunk(len(inputs), dim=1))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The causal case, evenly spread over ranks: half of all pairs of blocks."""
    local = max(1, size["T"] // world_size)
    count = size["B"] * local * size["H"] * size["D"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=4 * count * itemsize,
        flops=4 * count * local * world_size / 2,
    )


SIZES = {
    "tiny": Size("tiny", {"B": 2, "T": 52, "H": 3, "D": 16}),
    "default": Size("default", {"B": 1, "T": 512, "H": 4, "D": 64}),
    "odd": Size("odd", {"B": 1, "T": 515, "H": 3, "D": 72}),
    "large": Size("large", {"B": 1, "T": 131072, "H": 32, "D": 128}),
    "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
}

PROBLEM = Problem(
    number=54,
    slug="ring_attention",
    version=1,
    title="Softmax attention over a sequence that is split over ranks, causal or not.",
    family="ring-attention",
    parallelism="CP",
    collectives=("isend", "irecv"),
    origin="ring-flash-attention, Megatron-LM context parallelism",
    split="test",
    sizes=SIZES,
    # A score of 40, rounded, moves its exponential by 40 round-offs.
    tolerance=Tolerance(inner_ulps=256),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=one_each(SIZES, "T", "position"),
)
