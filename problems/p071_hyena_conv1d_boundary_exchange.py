"""#071 hyena_conv1d_boundary_exchange: a short causal convolution of a sequence in zigzag order, two chunks per rank.

Axes      B batch, C channels, L = 2 * W chunks of N positions, K kernel, W ranks
In        x [B, C, 2*N], differs per rank; its halves are chunks r and 2*W - 1 - r of the sequence; weight [C, 1, K], equal on
          every rank (`upstream`: differs per rank); group (None: all ranks)
Out       [B, C, 2*N], the rank's own two chunks
Maths     y[t] = sum over k of weight[k] * x[t - (K - 1) + k] per channel, zeros before the sequence
Wire      K - 1 samples of either half to a neighbour: first halves' ends to rank r + 1, second halves' ends to rank r - 1
Needs     K - 1 <= N
Not here  halos longer than a chunk, plain rank order, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.draws import turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal samples about an offset per rank, batch and channel; kernels up to the longest take turns."""
    batch, channels, chunk, longest = (size[axis] for axis in "BCNK")
    x = torch.randn(batch, channels, 2 * chunk, generator=draw.own("x"))
    if draw.profile == "upstream":
        weight = torch.randn(channels, 1, longest, generator=draw.own("weight"))
        return x.to(draw.dtype), weight.to(draw.dtype), None
    kernel = max(2, longest * (1 + turn(draw, 4)) // 4)
    weight = torch.randn(channels, 1, kernel, generator=draw.shared("weight")).mul_(kernel**-0.5)
    x += torch.randn(batch, channels, 1, generator=draw.own("offset"))
    return x.to(draw.dtype), weight.to(draw.dtype), None


def reference(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The rank's two chunks of the filtered sequence, [B, C, 2*N]."""
    halo = weight.shape[-1] - 1
    first, second = x.chunk(2, dim=-1)
    before = halos(first[..., first.shape[-1] - halo :], second[..., second.shape[-1] - halo :], group)
    parts = [torch.cat(pair, dim=-1) for pair in zip(before, (first, second), strict=True)]
    return torch.cat([F.conv1d(part, weight, groups=len(weight)) for part in parts], dim=-1)


def halos(first: torch.Tensor, second: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """What lies before either chunk of this rank, from the ends of all ranks' chunks."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sent = [first.contiguous(), second.contiguous()]
    # The last rank's chunks are neighbours; nothing lies before the first rank's first chunk.
    before = [torch.zeros_like(first), sent[0].clone()]
    ops = []
    if rank + 1 < world_size:
        before[1] = torch.empty_like(sent[1])
        peer = peer_of(rank + 1, group)
        ops += [dist.P2POp(dist.isend, sent[0], peer, group), dist.P2POp(dist.irecv, before[1], peer, group)]
    if rank > 0:
        peer = peer_of(rank - 1, group)
        ops += [dist.P2POp(dist.isend, sent[1], peer, group), dist.P2POp(dist.irecv, before[0], peer, group)]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return before


def peer_of(rank: int, group: dist.ProcessGroup | None) -> int:
    """Global rank of a rank of the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Shifted copies of the whole sequence, one for each tap, in float64; every rank keeps its chunks, by its own weight."""
    chunk, last = inputs[0][0].shape[-1] // 2, len(inputs) - 1
    halves = [args[0].double() for args in inputs]
    whole = torch.cat([*(x[..., :chunk] for x in halves), *(x[..., chunk:] for x in reversed(halves))], dim=-1)
    out = []
    for rank, (_, weight, _) in enumerate(inputs):
        starts = torch.tensor([rank, 2 * last + 1 - rank], device=whole.device)[:, None] * chunk
        positions = (starts + torch.arange(chunk, device=whole.device)).flatten()
        total = torch.zeros_like(halves[rank])
        for tap, factor in enumerate(weight.double().unbind(-1)):
            source = positions - (weight.shape[-1] - 1) + tap
            total += factor * whole[..., source.clamp(min=0)] * (source >= 0)
        out.append(total)
    return out


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The longest kernel, the busiest rank: one end to each neighbour; samples are read and written once."""
    lines, count = size["B"] * size["C"], size["B"] * size["C"] * 2 * size["N"]
    return Cost(
        wire_bytes=min(2, world_size - 1) * lines * (size["K"] - 1) * itemsize,
        memory_bytes=(2 * count + size["C"] * size["K"]) * itemsize,
        flops=2 * count * size["K"],
    )


PROBLEM = Problem(
    number=71,
    slug="hyena_conv1d_boundary_exchange",
    version=1,
    title="Filter a sequence in zigzag order causally with a short kernel per channel.",
    family="conv-halo",
    parallelism="CP",
    collectives=("isend", "irecv"),
    origin="NeMo / Savanna StripedHyena (Evo 2)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "C": 5, "N": 19, "K": 11}),
        "default": Size("default", {"B": 2, "C": 64, "N": 512, "K": 16}),
        "odd": Size("odd", {"B": 3, "C": 37, "N": 509, "K": 19}),
        # Samples of 4.3 GB in bf16 in and as many out on a rank.
        "large": Size("large", {"B": 4, "C": 8192, "N": 32768, "K": 128}),
        "upstream": Size("upstream", {"B": 1, "C": 1024, "N": 1024, "K": 7}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
