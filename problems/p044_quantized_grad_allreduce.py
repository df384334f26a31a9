"""#044 quantized_grad_allreduce: the mean of gradients that every rank has rounded to int8 block by block.

Axes      P elements, b elements of a block (the last one may be shorter), W ranks
In        flat_grad [P], differs per rank; block_size, equal on every rank
Out       [P] in the dtype of the gradient, equal on every rank
Maths     scale = max(largest |x| of a block, 1e-8) / 127; d = scale * round(x / scale), to nearest even, within -127 .. 127;
          out = sum over ranks of d, over W, all in float32; the end is rounded to the dtype
Wire      reduce_scatter of int8 values and scales, all_gather of the mean: a rank sends (W-1)/W * P * (1 + 4/b + element)
Needs     any W
Not here  scales that ranks share, rounding of the sum to int8, stochastic rounding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn

BLOCKS = (64, 100, 256, 17)
Inputs = tuple[torch.Tensor, int]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values whose scale varies by block and by rank; one in b is far out, and one block in 16 is zero.

    Block sizes take turns.  No quotient is close to halfway between two integers.
    """
    grad, chance = torch.randn(size["P"], generator=draw.own("flat_grad")), draw.own("blocks")
    if draw.profile == "upstream":
        return grad.to(draw.dtype), 128
    block = BLOCKS[turn(draw, len(BLOCKS))]
    count = -(-size["P"] // block)
    scale = torch.rand(count, generator=draw.shared("blocks")).mul_(3).sub_(1.5) + torch.rand(count, generator=chance).sub_(0.5)
    scale = torch.pow(10, scale).masked_fill_(torch.rand(count, generator=chance) < 1 / 16, 0)
    grad *= torch.where(torch.rand(grad.shape, generator=chance) < 1 / block, 1.4 * block**0.5, 1.0)
    values = (grad * scale.repeat_interleave(block)[: size["P"]]).to(draw.dtype)
    steps = _steps(values.float(), block)
    return values.masked_fill_((steps.frac().abs() - 0.5).abs() < 2**-11, 0), block


def _steps(values: torch.Tensor, block: int) -> torch.Tensor:
    """Every element in units of its block's scale."""
    rows = F.pad(values, (0, -len(values) % block)).view(-1, block)
    return (rows / rows.abs().amax(1, keepdim=True).clamp(min=1e-8).div(127)).flatten()[: len(values)]


def reference(flat_grad: torch.Tensor, block_size: int) -> torch.Tensor:
    """The mean of all ranks' rounded gradients, like `flat_grad`."""
    x = flat_grad.flatten().float()
    blocks = F.pad(x, (0, -len(x) % block_size)).view(-1, block_size)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    codes = (blocks / scale).round_().clamp_(-127, 127).to(torch.int8)
    total = (codes.float() * scale).flatten()[: len(x)]
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(flat_grad.dtype).view_as(flat_grad)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """The mean in float64; every block by its number, without padding."""
    count, block = inputs[0][0].numel(), inputs[0][1]
    number = torch.arange(count, device=inputs[0][0].device).div(block, rounding_mode="floor")
    total = torch.zeros(count, dtype=torch.float64, device=number.device)
    for grad, _ in inputs:
        x = grad.flatten().float().double()
        largest = x.new_full((int(number[-1]) + 1,), 1e-8).scatter_reduce_(0, number, x.abs(), "amax")[number]
        total += torch.round(x * 127 / largest) * largest
    return [(total / (127 * len(inputs))).view_as(inputs[0][0])] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """int8 values and float32 scales of blocks of 256 to their owners, and the mean from them, or those of all to all others.

    Six operations per element.
    """
    count, coded = size["P"], 1 + 4 / 256
    return Cost(
        wire_bytes=(world_size - 1) * count * min((coded + itemsize) / world_size, coded),
        memory_bytes=2 * count * itemsize,
        flops=6 * count,
    )


PROBLEM = Problem(
    number=44,
    slug="quantized_grad_allreduce",
    version=1,
    title="Round the local gradient to int8 in blocks and take the mean over ranks.",
    family="quantisation",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="ZeRO++ block-wise quantised gradients",
    split="train",
    sizes={
        "tiny": Size("tiny", {"P": 4133}),
        "default": Size("default", {"P": 524288}),
        "odd": Size("odd", {"P": 524287}),
        # 512 MiB in and as much out in bf16.
        "large": Size("large", {"P": 2**28}),
        "upstream": Size("upstream", {"P": 2**20}),
    },
    # One rounding to the dtype at the end, 0.3 round-offs in the norm; leaving int8 out is 0.7 % (b = 17) to 3 % (256) off.
    tolerance=Tolerance(norm_ulps=1, inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
