"""#009 layernorm_backward: gradients of a layer norm's gain and bias, over rows that are spread over ranks.

Axes      M rows on average (ragged: rank r holds M_r), N columns (not split), W ranks
In        X_hat [M_r, N], normalised rows, and dY [M_r, N], both differ per rank; upstream's M_r are equal, its rows of norm 1
Out       d_gamma [N] and d_beta [N], equal on every rank
Maths     d_gamma = sum over all rows of dY * X_hat; d_beta = sum over all rows of dY
Wire      all_reduce of 2*N elements: a rank sends at least 2*(W-1)/W of them
Needs     any W
Not here  the gradient of the input, means instead of sums
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.draws import ragged
from problems.gemm import rank_scale

Gradients = tuple[torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Gradients:
    """Rows of mean 0 and variance 1; dY has a scale and a mean of its own per rank.

    A mean is worth as much in a sum over rows as what is random: much more would average the errors of lazy kernels away.
    """
    rows, columns, ranks = size["M"], size["N"], draw.world_size
    public = draw.profile == "upstream"
    mine = rows if public else ragged(rows * ranks, ranks, draw.shared("rows"), least=1)[draw.rank]
    x_hat = torch.randn(mine, columns, generator=draw.own("X_hat"))
    grad = torch.randn(mine, columns, generator=draw.own("dY"))
    if public:
        return x_hat.div_(x_hat.norm(dim=1, keepdim=True).add_(1e-5)).to(draw.dtype), grad.to(draw.dtype)
    mean = 1 + float(torch.rand((), generator=draw.own("mean")))
    grad.add_(mean * (rows * ranks) ** -0.5).mul_(rank_scale(draw))
    return F.layer_norm(x_hat, (columns,)).to(draw.dtype), grad.to(draw.dtype)


def reference(X_hat: torch.Tensor, dY: torch.Tensor) -> Gradients:
    """d_gamma and d_beta, [N] each; products and the ranks' sums are rounded to the dtype."""
    d_beta = dY.sum(0)
    dist.all_reduce(d_beta)
    d_gamma = (dY * X_hat).sum(0)
    dist.all_reduce(d_gamma)
    return d_gamma, d_beta


def exact(inputs: Sequence[Gradients]) -> list[Gradients]:
    """Contractions over the rows of all ranks in float64."""
    x_hat, grad = (torch.cat([args[i] for args in inputs]).double() for i in range(2))
    ones = grad.new_ones(len(grad))
    return [(ones @ (x_hat * grad), ones @ grad)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Of the average rank: both tensors are read once; one sum of 2*N elements over ranks."""
    count, columns, others = size["M"] * size["N"], size["N"], world_size - 1
    return Cost(
        wire_bytes=2 * others / world_size * 2 * columns * itemsize,
        memory_bytes=2 * (count + columns) * itemsize,
        flops=3 * count + others / world_size * 2 * columns,
    )


PROBLEM = Problem(
    number=9,
    slug="layernorm_backward",
    version=1,
    title="Gradients of a layer norm's gain and bias, summed over rows that are unevenly spread over ranks.",
    family="normalisation",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="Megatron-LM (gradients of layer norm parameters under sequence parallelism)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 53, "N": 67}),
        "default": Size("default", {"M": 512, "N": 768}),
        "odd": Size("odd", {"M": 509, "N": 771}),
        # 2 GiB of both in bf16.
        "large": Size("large", {"M": 65536, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
