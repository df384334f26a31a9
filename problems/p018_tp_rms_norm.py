"""#018 tp_rms_norm: RMS norm of rows whose columns are spread over ranks.

Axes      M rows, N columns on one rank (the whole row has W*N), W ranks
In        local_hidden_states [M, N] and local_weight [N], differ per rank; variance_epsilon, equal on every rank
Out       [M, N] in the dtype of the hidden states, differs per rank
Maths     out = weight * (x / (v + eps)^1/2, rounded to the dtype), where v = sum over ranks and columns of x^2, over W*N,
          in at least float32
Wire      all_reduce of M sums in float32: a rank sends at least 2*(W-1)/W of them
Needs     any W
Not here  unequal numbers of columns, bias, a mean that is subtracted, gradients
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance

Inputs = tuple[torch.Tensor, torch.Tensor, float]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Rows between 2^-6 and 2^6, of which every rank holds more or less (2^-2 to 2^2); one row in 32 is zero.

    Some rows are small enough for eps to count.
    """
    x = torch.randn(size["M"], size["N"], generator=draw.own("local_hidden_states"))
    weight = torch.randn(size["N"], generator=draw.own("local_weight"))
    if draw.profile == "upstream":
        return x.to(draw.dtype), weight.to(draw.dtype), 1e-5
    chance = draw.shared("rows")
    exponent = torch.rand(size["M"], 1, generator=chance).mul_(12).sub_(6)
    exponent += torch.rand(size["M"], 1, generator=draw.own("share")).mul_(4).sub_(2)
    nothing = torch.rand(size["M"], 1, generator=chance) < 1 / 32
    x *= exponent.exp2_().masked_fill_(nothing, 0)
    epsilon = 10 ** (-6 + 3 * float(torch.rand((), generator=draw.shared("variance_epsilon"))))
    return x.to(draw.dtype), weight.to(draw.dtype), epsilon


def reference(local_hidden_states: torch.Tensor, local_weight: torch.Tensor, variance_epsilon: float) -> torch.Tensor:
    """This rank's columns of the normalised and weighted rows, [M, N]."""
    x = local_hidden_states.to(torch.promote_types(local_hidden_states.dtype, torch.float32))
    squares = x.square().sum(-1, keepdim=True)
    dist.all_reduce(squares)
    variance = squares / (x.shape[-1] * dist.get_world_size())
    return local_weight * (x * torch.rsqrt(variance + variance_epsilon)).to(local_hidden_states.dtype)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """Norms of the joined rows in float64."""
    whole = torch.cat([x.double() for x, _, _ in inputs], dim=1)
    epsilon = inputs[0][2]
    length = torch.hypot(torch.linalg.vector_norm(whole, dim=1), whole.new_tensor(epsilon * whole.shape[1]).sqrt())
    normal = whole * (whole.shape[1] ** 0.5 / length)[:, None]
    return [part * weight.double() for part, (_, weight, _) in zip(normal.chunk(len(inputs), dim=1), inputs, strict=True)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One float32 per row is summed over ranks; rows are read once and written once."""
    rows, count = size["M"], size["M"] * size["N"]
    return Cost(
        wire_bytes=2 * (world_size - 1) / world_size * 4 * rows,
        memory_bytes=(2 * count + size["N"]) * itemsize,
        flops=4 * count,
    )


PROBLEM = Problem(
    number=18,
    slug="tp_rms_norm",
    version=1,
    title="RMS norm of rows whose columns are spread over ranks.",
    family="normalisation",
    parallelism="TP",
    collectives=("all_reduce",),
    origin="Llama RMSNorm with a sharded hidden axis",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67}),
        "default": Size("default", {"M": 1024, "N": 1024}),
        "odd": Size("odd", {"M": 1021, "N": 1027}),
        # 512 MiB in and as much out in bf16.
        "large": Size("large", {"M": 32768, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    # The terms of a sum are squares, so that its error is a few round-offs however it is ordered.
    tolerance=Tolerance(inner_ulps=16),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
