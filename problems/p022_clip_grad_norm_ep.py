"""#022 clip_grad_norm_ep: the norm of sharded gradients, some of them of experts that are spread over ranks, and clipping.

Axes      R rows, C columns: a rank holds about R of W*R rows of a matrix, W ranks
In        non_ep_grad_tensors and ep_grad_tensors, lists of tensors of any shape or None, differ per rank (also their extents;
          some are empty); max_norm, norm_type p (finite) and ep_size, equal on every rank;
          fsdp_group and ep_fsdp_group (None: all ranks), ep_group (None: ep_fsdp_group holds all ranks already)
Out       the norm before clipping, a scalar in float32 (float64 if the gradients are), equal on every rank
Maths     h = g / ep_size for the gradients of experts if ep_size > 1, else g;
          norm = (sum over ranks and elements of |g|^p, others, + |h|^p, experts)^1/p, in at least float32.
          The sum of the others goes over fsdp_group, that of the experts over ep_fsdp_group and then over ep_group
Mutates   ep_grad_tensors: become h, also where nothing is clipped; both, if norm > max_norm: multiplied by max_norm / norm
Wire      all_reduce of two numbers
Needs     any W
Not here  p = infinity, an epsilon in the quotient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.clipping import clip, power_sum
from problems.clipping_cases import NORM_TYPES, draw_grads, draw_limit, elements, exact_power_sum
from problems.draws import turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal gradients in ragged shards; norms, and limits that clip and that do not, take turns; ep_size divides W."""
    if draw.profile == "upstream":
        shape, names = (size["R"], size["C"]), ("non_ep", "ep")
        lists = [[torch.randn(shape, generator=draw.own(name)).to(draw.dtype)] for name in names]
        return (*lists, 1.0, 2.0, max(1, draw.world_size // 2), None, None, None)
    norm_type = NORM_TYPES[turn(draw, len(NORM_TYPES), "norm_type")]
    divisors = [n for n in range(2, draw.world_size + 1) if draw.world_size % n == 0] or [1]
    ep_size = divisors[int(torch.randint(len(divisors), (), generator=draw.shared("ep_size")))]
    others, some = draw_grads(draw, size, "non_ep_grad_tensors", norm_type)
    experts, more = draw_grads(draw, size, "ep_grad_tensors", norm_type)
    experts = [None if grad is None else grad * ep_size for grad in experts]
    return others, experts, draw_limit(draw, (some + more) ** (1 / norm_type)), norm_type, ep_size, None, None, None


def reference(
    non_ep_grad_tensors: list[torch.Tensor | None],
    ep_grad_tensors: list[torch.Tensor | None],
    max_norm: float,
    norm_type: float = 2.0,
    ep_size: int = 1,
    fsdp_group: dist.ProcessGroup | None = None,
    ep_fsdp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The norm before clipping, a scalar; scales the experts' gradients and clips all in place."""
    for grad in ep_grad_tensors:
        if grad is not None and ep_size > 1:
            grad.mul_(1 / ep_size)
    others, experts = power_sum(non_ep_grad_tensors, norm_type), power_sum(ep_grad_tensors, norm_type)
    dist.all_reduce(others, group=fsdp_group)
    dist.all_reduce(experts, group=ep_fsdp_group)
    if ep_group is not None:
        dist.all_reduce(experts, group=ep_group)
    total = (others + experts).pow(1 / norm_type)
    clip([*non_ep_grad_tensors, *ep_grad_tensors], total, max_norm)
    return total


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The norm of all ranks' elements together, in float64."""
    norm_type, ep_size = inputs[0][3:5]
    others, experts = (exact_power_sum([args[i] for args in inputs], norm_type) for i in range(2))
    return [(others + experts / ep_size**norm_type) ** (1 / norm_type)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One float32 is summed over ranks, for both lists at once; gradients are read once and written once."""
    count = 2 * (size["R"] * size["C"] if size.name == "upstream" else elements(size))
    return Cost(wire_bytes=2 * (world_size - 1) / world_size * 4, memory_bytes=2 * count * itemsize, flops=3 * count)


PROBLEM = Problem(
    number=22,
    slug="clip_grad_norm_ep",
    version=1,
    title="Compute the norm of sharded gradients, those of experts scaled, over all ranks and clip them in place.",
    family="optimizer-sharding",
    parallelism="EP+FSDP",
    collectives=("all_reduce",),
    origin="VeOmni (gradient clipping with expert parallelism)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"R": 61, "C": 67}),
        "default": Size("default", {"R": 251, "C": 512}),
        "odd": Size("odd", {"R": 257, "C": 515}),
        # 1.5 GiB of gradients per rank in bf16.
        "large": Size("large", {"R": 16384, "C": 16384}),
        "upstream": Size("upstream", {"R": 1024, "C": 1024}),
    },
    # torch's own vector_norm adds in float32 one after another on a CPU: 850 round-offs off at p = 3.  A norm hardly shows how
    # precisely its terms were read; clipped gradients do.
    tolerance=Tolerance(inner_ulps=2048),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    mutates=("non_ep_grad_tensors", "ep_grad_tensors"),
)
