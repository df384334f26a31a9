"""#019 blocked_fp8_quantize: rows rounded to fp8 with one scale per block, then all ranks' rows and scales to every rank.

Axes      M rows of a rank, N columns (neither is split), b elements of a block (a power of two, divides N), W ranks
In        local_tensor [M, N], differs per rank; block_size, equal on every rank
Out       (y [W*M, N] float8_e4m3fn, s [W*M, N/b] float32), equal on every rank, in rank order
Maths     s = largest |x| of a block / 448; y = e4m3(x / s), to nearest even, in float32; a block of zeros has s = 0 and y = 0
Wire      all_gather of bytes and scales: a rank sends M*N*(1 + 4/b) bytes to every other one, without multicast
Needs     any W
Not here  scales that are powers of two, square blocks, other formats, blocks across rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import turn
from problems.fp8_cases import LARGEST, exact_e4m3, off_ties

BLOCKS = (128, 64, 32)
Inputs = tuple[torch.Tensor, int]
Output = tuple[torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Blocks between 2^-12 and 2^8 with outliers, one element in 64 and 16 times as large; one block in 16 is zero.

    Block sizes take turns.  No quotient is close to a tie.
    """
    x, chance = torch.randn(size["M"], size["N"], generator=draw.own("local_tensor")), draw.own("blocks")
    if draw.profile == "upstream":
        return x.to(draw.dtype), 128
    block = BLOCKS[turn(draw, len(BLOCKS))]
    x = x.view(-1, block) * torch.where(torch.rand(x.numel() // block, block, generator=chance) < 1 / 64, 16.0, 1.0)
    scale = torch.rand(len(x), 1, generator=chance).mul_(20).sub_(12).exp2_()
    scale.masked_fill_(torch.rand(len(x), 1, generator=chance) < 1 / 16, 0)
    x = (x * scale).to(draw.dtype)
    largest = x.abs().amax(1, keepdim=True).float()
    return off_ties(x, torch.where(largest > 0, largest / LARGEST, 1.0)).view(size["M"], size["N"]), block


def reference(local_tensor: torch.Tensor, block_size: int = 128) -> Output:
    """All ranks' rows in fp8, [W*M, N], and their scales, [W*M, N / block_size]."""
    x = local_tensor.float().view(*local_tensor.shape[:-1], -1, block_size)
    scale = x.abs().amax(-1) / 448.0
    divisor = torch.where(scale == 0, 1.0, scale)
    codes = (x / divisor.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    return gathered(codes.view(torch.uint8)).view(torch.float8_e4m3fn), gathered(scale)


def exact(inputs: Sequence[Inputs]) -> list[Output]:
    """Both on the joined rows, from quotients in float32 as the statement wants, with a rounding to fp8 that casts nothing."""
    whole = torch.cat([x.float().double() for x, _ in inputs])
    blocks = whole.view(-1, inputs[0][1])
    high, low = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    largest = torch.maximum(high, -low)
    quotients = torch.nan_to_num_(blocks.float() / (largest / LARGEST).float())
    values = exact_e4m3(quotients.double())
    return [(values.view_as(whole), (largest / LARGEST).view(len(whole), -1))] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A byte per element and four per block of 128 to every other rank; three operations per element."""
    count = size["M"] * size["N"]
    sent = count * (1 + 4 / 128)
    return Cost(
        wire_bytes=(world_size - 1) * sent,
        memory_bytes=count * itemsize + world_size * sent,
        flops=3 * count,
    )


PROBLEM = Problem(
    number=19,
    slug="blocked_fp8_quantize",
    version=1,
    title="Round local rows to fp8 with a scale per block and gather values and scales on every rank.",
    family="quantisation",
    parallelism="TP",
    collectives=("all_gather_into_tensor",),
    origin="DeepSeek-V3 activation quantisation",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 13, "N": 256}),
        "default": Size("default", {"M": 512, "N": 512}),
        "odd": Size("odd", {"M": 509, "N": 640}),
        # 512 MiB in and 2 GiB out in bf16 at W = 8.
        "large": Size("large", {"M": 32768, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    # Four round-offs of float32 for the scales; no tie decides, so none for fp8, where any error is at least 2^-9.
    tolerance=Tolerance(norm_factor=0, element_factor=0, norm_ulps=0, element_ulps=0, inner_ulps=4),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
