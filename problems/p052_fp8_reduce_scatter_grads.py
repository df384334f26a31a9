"""#052 fp8_reduce_scatter_grads: gradients are rounded to fp8 at each rank's delayed scale; a rank gets its slice of the mean.

Axes      P elements of a slice (W*P in all), W ranks, 16 former maxima
In        flat_grads [W*P] and amax_history [16], differ per rank
Out       (slice r of the mean, [P] in the dtype of the gradient; the new history, [16] in its own dtype), both differ per rank
Maths     history: all entries move one place to the left, the last becomes max |x| over the rank's whole gradient;
          scale = max(largest entry of the new history, 1e-12) / 448; d = scale * e4m3(x / scale), to nearest even, in float32;
          mean = sum over ranks of d, over W
Wire      reduce_scatter; as fp8 a rank sends (W-1)*P bytes and W-1 scales
Needs     any W
Not here  one scale for all ranks, other formats, gradients in parts
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import reduce_scattered
from problems.fp8 import fp8_round_trip
from problems.fp8_cases import draw_delayed, exact_delayed

Inputs = tuple[torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Gradients with outliers and histories that decide the scale or do not; no quotient is close to a tie."""
    return draw_delayed(draw, "flat_grads", (draw.world_size * size["P"],))


def reference(flat_grads: torch.Tensor, amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's slice of the mean, [P], and its history, [16]."""
    rounded, history = fp8_round_trip(flat_grads, amax_history)
    return reduce_scattered(rounded).div_(dist.get_world_size()), history


def exact(inputs: Sequence[Inputs]) -> list[Inputs]:
    """The mean of all ranks' rounded gradients in float64."""
    rounded, histories = zip(*(exact_delayed(*args) for args in inputs), strict=True)
    mean = torch.stack(rounded).mean(0)
    return list(zip(mean.chunk(len(inputs)), histories, strict=True))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A byte per element of the other ranks' slices, and the scale; the gradient is read once."""
    count = size["P"]
    return Cost(
        wire_bytes=(world_size - 1) * (count + 4),
        memory_bytes=(world_size + 1) * count * itemsize,
        flops=4 * world_size * count,
    )


PROBLEM = Problem(
    number=52,
    slug="fp8_reduce_scatter_grads",
    version=1,
    title="Round the local gradient to fp8 with delayed scaling and reduce-scatter the mean over ranks.",
    family="quantisation",
    parallelism="DP",
    collectives=("reduce_scatter_tensor",),
    origin="Transformer Engine delayed scaling, MS-AMP fp8 gradient collectives",
    split="train",
    sizes={
        "tiny": Size("tiny", {"P": 1009}),
        "default": Size("default", {"P": 131072}),
        "odd": Size("odd", {"P": 131071}),
        # 512 MiB in and 64 MiB out in bf16 at W = 8.
        "large": Size("large", {"P": 2**25}),
        "upstream": Size("upstream", {"P": 4096}),
    },
    # No tie decides, so nothing but a handful of roundings remains; leaving fp8 out is 2.6 % off.
    tolerance=Tolerance(inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
