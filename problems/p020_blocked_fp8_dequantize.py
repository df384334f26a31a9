"""#020 blocked_fp8_dequantize: fp8 values times the scale of their block, then slice j goes to rank j.

Axes      W slices of M*N elements each, b elements of a block (divides M*N; may straddle rows), W ranks
In        local_y [W, M, N], values of float8_e4m3fn carried in the dtype of the run (profile `upstream`: any values),
          local_s [W, M*N/b], both differ per rank; block_size, equal on every rank
Out       [W, M, N] float32, differs per rank: out[c] comes from rank c
Maths     x = y * s of its block, blocks running along a slice's elements in memory order, in float32;
          out[c] = slice r of rank c's x
Wire      all_to_all: a rank sends W-1 slices, of which a byte per element and the scales suffice
Needs     any W
Not here  unequal slices, square blocks, results in the dtype of the run
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn

BLOCKS = (128, 64)
Inputs = tuple[torch.Tensor, torch.Tensor, int]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Values up to 448 as rounded to fp8, scales between 2^-12 and 2^-2; block sizes take turns."""
    shape = draw.world_size, size["M"], size["N"]
    y = torch.randn(shape, generator=draw.own("local_y"))
    block = 128 if draw.profile == "upstream" else BLOCKS[turn(draw, len(BLOCKS))]
    blocks, chance = (shape[0], shape[1] * shape[2] // block), draw.own("local_s")
    if draw.profile == "upstream":
        return y.to(draw.dtype), torch.randn(blocks, generator=chance).to(draw.dtype), block
    y = y.mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks, generator=chance).mul_(10).sub_(12).exp2_()
    return y.to(draw.dtype), scales.to(draw.dtype), block


def reference(local_y: torch.Tensor, local_s: torch.Tensor, block_size: int = 128) -> torch.Tensor:
    """This rank's slices of all ranks' values, [W, M, N] float32."""
    x = (local_y.float().view(-1, block_size) * local_s.float().view(-1, 1)).view_as(local_y)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """Slice by slice, every element with the scale at its position, in float64."""
    shape, block = inputs[0][0].shape, inputs[0][2]
    scale = torch.arange(shape[1] * shape[2], device=inputs[0][0].device).div(block, rounding_mode="floor").view(shape[1:])
    return [torch.stack([y[r].double() * s[r].double()[scale] for y, s, _ in inputs]) for r in range(len(inputs))]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A byte per element and a scale per block of 128 of the other ranks' slices; one product per element."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) * count * (1 + itemsize / 128),
        memory_bytes=world_size * count * (itemsize * (1 + 1 / 128) + 4),
        flops=world_size * count,
    )


PROBLEM = Problem(
    number=20,
    slug="blocked_fp8_dequantize",
    version=1,
    title="Scale blocks of fp8 values and send slice j of the result to rank j.",
    family="quantisation",
    parallelism="EP",
    collectives=("all_to_all_single",),
    origin="DeepSeek-V3, DeepEP block dequantisation around an exchange of tokens",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 16, "N": 72}),
        "default": Size("default", {"M": 512, "N": 512}),
        "odd": Size("odd", {"M": 384, "N": 515}),
        # 1 GiB in (bf16) and 2 GiB out at W = 8.
        "large": Size("large", {"M": 8192, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    # One product, rounded once at most.
    tolerance=Tolerance(inner_ulps=0),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
