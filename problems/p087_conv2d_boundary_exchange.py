"""#087 conv2d_boundary_exchange: a 2-D convolution of an image of which each rank holds a strip of rows.

Axes      B batch, I and O channels in and out, Y rows in all (ragged: rank r holds Y_r), X columns, K = 2*padding + 1, W ranks
In        x [B, I, Y_r, X], differs per rank, strips in rank order; weight [O, I, K, K] and bias [O] or None, equal on every rank
          (`upstream`: differ per rank); stride, padding, equal on every rank; group (None: all ranks)
Out       [B, O, Y_r / stride, X / stride] (rounded up), differs per rank
Maths     the whole image, padded with `padding` zeros on all sides, convolved with the weight, plus bias; the rank's rows of it
Wire      `padding` rows to and from both neighbours
Needs     Y_r >= padding; every strip but the last is a multiple of stride
Not here  dilation, groups of channels, stale halos, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.draws import ragged, turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Strips of unequal height and offset, shared weights; paddings 1 to 3, strides 1 and 2, with and without bias take turns."""
    batch, channels, outs, rows, width = (size[axis] for axis in "BIOYX")
    upstream = draw.profile == "upstream"
    padding = 1 if upstream else 1 + turn(draw, 3, "padding")
    stride = 1 if upstream else 1 + turn(draw, 5, "stride") % 2
    if upstream:
        mine = max(3, rows // max(1, draw.world_size // 2))
    else:
        mine = 2 * ragged(max(rows // 2, 2 * draw.world_size), draw.world_size, draw.shared("rows"), least=2)[draw.rank]
        mine -= draw.rank == draw.world_size - 1
    kernel = 2 * padding + 1
    source = draw.own if upstream else draw.shared
    x = torch.randn(batch, channels, mine, width, generator=draw.own("x"))
    weight = torch.randn(outs, channels, kernel, kernel, generator=source("weight"))
    bias: torch.Tensor | None = torch.randn(outs, generator=source("bias")).to(draw.dtype)
    if not upstream:
        weight *= (channels * kernel**2) ** -0.5
        x += torch.randn(batch, channels, 1, 1, generator=draw.own("offset"))
        bias = bias if turn(draw, 4, "bias") else None
    return x.to(draw.dtype), weight.to(draw.dtype), bias, stride, padding, None


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int = 1,
    padding: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's rows of the convolved image, [B, O, rows, columns]."""
    if padding == 0 or dist.get_world_size(group) == 1:
        return F.conv2d(x, weight, bias, stride, padding)
    above, below = exchanged(x[:, :, :padding].contiguous(), x[:, :, -padding:].contiguous(), group)
    return F.conv2d(torch.cat([above, x, below], dim=2), weight, bias, stride, (0, padding))


def exchanged(
    top: torch.Tensor, bottom: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bottom of the previous rank and the top of the next one; zeros beyond the ends."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    above, below = torch.zeros_like(bottom), torch.zeros_like(top)
    ops = []
    for peer, mine, theirs in ((rank - 1, top, above), (rank + 1, bottom, below)):
        if 0 <= peer < world_size:
            to = peer if group is None else dist.get_global_rank(group, peer)
            ops += [dist.P2POp(dist.isend, mine, to, group), dist.P2POp(dist.irecv, theirs, to, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return above, below


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The joined image, one matrix product per place in the kernel, in float64."""
    image = torch.cat([args[0].double() for args in inputs], dim=2)
    padding = inputs[0][4]
    image = F.pad(image, (padding,) * 4)
    outs, start = [], 0
    for x, weight, bias, stride, *_ in inputs:
        outs.append(_convolved(image[:, :, start : start + x.shape[2] + 2 * padding], weight.double(), bias, stride))
        start += x.shape[2]
    return outs


def _convolved(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int) -> torch.Tensor:
    """Without any padding."""
    height, width = ((extent - kernel) // stride + 1 for extent, kernel in zip(image.shape[2:], weight.shape[2:], strict=True))
    total = torch.zeros(len(image), len(weight), height, width, dtype=torch.float64, device=image.device)
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            seen = image[:, :, i::stride, j::stride][:, :, :height, :width]
            total += torch.einsum("oc,bcyx->boyx", weight[:, :, i, j], seen)
    return total if bias is None else total + bias.double()[:, None, None]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Padding 1 and stride 1, equal strips: a rank has one neighbour or two."""
    batch, channels, outs, rows, width = (size[axis] for axis in "BIOYX")
    local, others = max(1, rows / world_size), world_size - 1
    return Cost(
        wire_bytes=2 * others / world_size * batch * channels * width * itemsize,
        memory_bytes=(batch * (channels + outs) * local * width + 9 * channels * outs) * itemsize,
        flops=18 * batch * channels * outs * local * width,
    )


PROBLEM = Problem(
    number=87,
    slug="conv2d_boundary_exchange",
    version=1,
    title="Convolve an image whose rows are split over ranks in strips of unequal height.",
    family="conv-halo",
    parallelism="spatial",
    collectives=("isend", "irecv"),
    origin="DistriFusion patch-parallel convolution",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "I": 5, "O": 3, "Y": 38, "X": 17}),
        "default": Size("default", {"B": 1, "I": 24, "O": 24, "Y": 64, "X": 48}),
        "odd": Size("odd", {"B": 2, "I": 13, "O": 17, "Y": 62, "X": 47}),
        # 1.25 GiB of image and as much of output in bf16 over all ranks.
        "large": Size("large", {"B": 4, "I": 1280, "O": 1280, "Y": 1024, "X": 128}),
        "upstream": Size("upstream", {"B": 1, "I": 1280, "O": 1280, "Y": 128, "X": 128}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
