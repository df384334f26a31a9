"""#080 dinov2_distributed_sinkhorn_knopp: teacher scores become assignments whose mass is even over prototypes.

Axes      B_r samples on rank r (ragged), K prototypes (not split), W ranks
In        teacher_output [B_r, K] float32 at least, teacher_temp, n_masked_patches_tensor [1] int64, differ per rank but for the
          temperature; n_iterations, equal on every rank; group (None: all ranks)
Out       [B_r, K] in the dtype of teacher_output, every row adds up to 1
Maths     Q = exp(teacher_output / temp) / its sum over all ranks; n = sum over ranks of n_masked_patches_tensor;
          n_iterations times: divide by the sum over all ranks' samples and by K, then by the sum over prototypes and by n;
          the result is n * Q, on which neither n nor the first sum has an effect, because a common factor cancels
Wire      n_iterations sums over ranks of K elements
Needs     any W; a rank may have no sample, but not all of them
Not here  gradients, a stop at convergence
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import ragged, turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal scores about offsets of the prototypes that differ per rank; samples are ragged, temperature and iterations vary."""
    if draw.profile == "upstream":
        scores = torch.randn(size["B"], size["K"], generator=draw.own("scores")).mul_(0.01)
        return scores.to(draw.dtype), 0.07, torch.tensor([size["B"]]), 3, None
    samples = ragged(size["B"] * draw.world_size, draw.world_size, draw.shared("samples"))[draw.rank]
    scores = torch.randn(samples, size["K"], generator=draw.own("scores")).mul_(0.2)
    scores += torch.randn(size["K"], generator=draw.own("offset")).mul_(0.2)
    scores += torch.randn(size["K"], generator=draw.shared("offset")).mul_(0.2)
    temp = 0.06 + 0.04 * float(torch.rand((), generator=draw.shared("temperature")))
    return scores.to(draw.dtype), temp, torch.tensor([samples]), 1 + turn(draw, 3), None


def reference(
    teacher_output: torch.Tensor,
    teacher_temp: float,
    n_masked_patches_tensor: torch.Tensor,
    n_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Assignments of the rank's own samples, [B_r, K]; float32 inside unless the scores are wider."""
    scores = teacher_output.to(torch.promote_types(teacher_output.dtype, torch.float32))
    count = n_masked_patches_tensor.to(scores.dtype)
    dist.all_reduce(count, group=group)
    q = torch.exp(scores / teacher_temp)
    total = q.sum()
    dist.all_reduce(total, group=group)
    q /= total
    for _ in range(n_iterations):
        mass = q.sum(0)
        dist.all_reduce(mass, group=group)
        q /= mass * q.shape[1]
        q /= q.sum(1, keepdim=True) * count
    return q.mul_(count).to(teacher_output.dtype)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """In logarithms and float64: potentials of samples and prototypes in turn; a global factor cancels in the last step."""
    scores = torch.cat([args[0].double() for args in inputs]) / inputs[0][1]
    count = sum(int(args[2]) for args in inputs)
    rows, columns = scores.new_zeros(len(scores), 1), -scores.logsumexp((0, 1)).expand(1, scores.shape[1])
    for _ in range(inputs[0][3]):
        columns = -(scores + rows).logsumexp(0, keepdim=True)
        rows = -(scores + columns).logsumexp(1, keepdim=True)
    factor = 1 if inputs[0][3] else count
    return list(torch.split((scores + rows + columns).exp_() * factor, [len(args[0]) for args in inputs]))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Three iterations: sums of K elements in fp32; scores are read once per iteration, assignments written once."""
    count = size["B"] * size["K"]
    return Cost(
        wire_bytes=3 * 2 * (world_size - 1) / world_size * size["K"] * 4,
        memory_bytes=2 * count * itemsize,
        flops=3 * 4 * count + 2 * count,
    )


PROBLEM = Problem(
    number=80,
    slug="dinov2_distributed_sinkhorn_knopp",
    version=1,
    title="Balance the assignments of samples, spread over ranks, to prototypes by Sinkhorn-Knopp iterations.",
    family="vision",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="DINOv2 iBOT patch loss",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 13, "K": 61}),
        "default": Size("default", {"B": 128, "K": 2048}),
        "odd": Size("odd", {"B": 127, "K": 2053}),
        # Scores and assignments of 4.3 GB each on a rank.
        "large": Size("large", {"B": 16384, "K": 65536}),
        "upstream": Size("upstream", {"B": 1024, "K": 16384}),
    },
    # The exponent reaches 30 in size; rounded, it moves its exponential by as many round-offs.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
