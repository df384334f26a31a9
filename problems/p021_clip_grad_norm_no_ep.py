"""#021 clip_grad_norm_no_ep: the norm of gradients that are sharded over all ranks, and clipping to a limit.

Axes      R rows, C columns: a rank holds about R of W*R rows of a matrix, W ranks
In        grad_tensors, a list of tensors of any shape or None, differ per rank (also their extents; some are empty);
          max_norm and norm_type p (finite), equal on every rank; fsdp_group (None: all ranks)
Out       the norm before clipping, a scalar in float32 (float64 if the gradients are), equal on every rank
Maths     norm = (sum over ranks, tensors and elements of |g|^p)^1/p, in at least float32
Mutates   grad_tensors: if norm > max_norm, every gradient is multiplied by max_norm / norm in place
Wire      all_reduce of one number
Needs     any W
Not here  p = infinity, an epsilon in the quotient, experts (022)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.clipping import clip, power_sum
from problems.clipping_cases import NORM_TYPES, Grads, draw_grads, draw_limit, elements, exact_power_sum
from problems.draws import turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal gradients in ragged shards; the norms 2, 1 and 3 take turns, and so do limits that clip and that do not."""
    if draw.profile == "upstream":
        chance = draw.own("grad_tensors")
        return [torch.randn(size["R"], size["C"], generator=chance).to(draw.dtype) for _ in range(3)], 1.0, 2.0, None
    norm_type = NORM_TYPES[turn(draw, len(NORM_TYPES), "norm_type")]
    grads, expected = draw_grads(draw, size, "grad_tensors", norm_type)
    return grads, draw_limit(draw, expected ** (1 / norm_type)), norm_type, None


def reference(
    grad_tensors: list[torch.Tensor | None], max_norm: float, norm_type: float = 2.0, fsdp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The norm before clipping, a scalar; clips the gradients in place."""
    total = power_sum(grad_tensors, norm_type)
    dist.all_reduce(total, group=fsdp_group)
    total = total.pow(1 / norm_type)
    clip(grad_tensors, total, max_norm)
    return total


def exact(inputs: Sequence[tuple[Grads, float, float, None]]) -> list[torch.Tensor]:
    """The norm of all ranks' elements together, in float64."""
    norm_type = inputs[0][2]
    return [exact_power_sum([args[0] for args in inputs], norm_type) ** (1 / norm_type)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One float32 is summed over ranks; gradients are read once and written once, three operations each."""
    count = elements(size)
    return Cost(wire_bytes=2 * (world_size - 1) / world_size * 4, memory_bytes=2 * count * itemsize, flops=3 * count)


PROBLEM = Problem(
    number=21,
    slug="clip_grad_norm_no_ep",
    version=1,
    title="Compute the norm of sharded gradients over all ranks and clip them in place.",
    family="optimizer-sharding",
    parallelism="FSDP",
    collectives=("all_reduce",),
    origin="VeOmni, xorl (FSDP2 gradient clipping)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"R": 61, "C": 67}),
        "default": Size("default", {"R": 509, "C": 512}),
        "odd": Size("odd", {"R": 503, "C": 515}),
        # 1.5 GiB of gradients per rank in bf16.
        "large": Size("large", {"R": 32768, "C": 16384}),
        "upstream": Size("upstream", {"R": 1024, "C": 1024}),
    },
    # torch's own vector_norm adds in float32 one after another on a CPU: 850 round-offs off at p = 3.  A norm hardly shows how
    # precisely its terms were read; clipped gradients do.
    tolerance=Tolerance(inner_ulps=2048),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    mutates=("grad_tensors",),
)
