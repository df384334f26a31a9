"""#043 fused_adam_grad_unshard_allgather: Adam on the rank's shard of the parameters, then all shards to every rank.

Axes      P parameters on a rank (W*P in all), W ranks
In        grad_shard, master_shard, exp_avg, exp_avg_sq [P], differ per rank;
          lr, beta1, beta2, eps, step >= 1, equal on every rank
Out       [W*P], equal on every rank: rank r's new parameters are elements r*P .. (r+1)*P - 1
Maths     m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2;
          w = w - lr * m / (1-beta1^step) / ((v / (1-beta2^step))^1/2 + eps)
Wire      all_gather: a rank receives (W-1)*P elements, and sends as many without multicast
Needs     any W; P need not be a multiple of anything
Not here  summing gradients, moments as outputs, weight decay, parameters in another dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from problems.adam import adam
from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.training import draw_hyper, draw_moments, exact_adam


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Gradients over two decades and moments that fit them; an update is a considerable part of its parameter."""
    shape = torch.Size([size["P"]])
    grad, master = (torch.randn(shape, generator=draw.own(name)) for name in ("grad_shard", "master_shard"))
    if draw.profile == "upstream":
        moments = [torch.zeros(shape), torch.zeros(shape)]
    else:
        chance = draw.own("moments")
        scale = torch.pow(10, torch.rand(shape, generator=chance).mul_(2).sub_(1.3))
        first, second = draw_moments(shape, 1.0, chance)
        grad, moments = grad * scale, [first * scale, second * scale.square()]
    return (*(x.to(draw.dtype) for x in (grad, master, *moments)), *draw_hyper(draw, 0.2))


def reference(
    grad_shard: torch.Tensor,
    master_shard: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> torch.Tensor:
    """All ranks' parameters after the step, [W*P]."""
    updated, _, _ = adam(grad_shard, exp_avg, exp_avg_sq, master_shard, lr, beta1, beta2, eps, step)
    return gathered(updated)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """One step on the joined shards, in float64."""
    grad, master, first, second = (torch.cat([args[i] for args in inputs]) for i in range(4))
    return [exact_adam(grad, first, second, master, inputs[0][4:])[0]] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Every shard to every other rank; about a dozen operations per own parameter."""
    count = size["P"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=(4 + world_size) * count * itemsize,
        flops=12 * count,
    )


PROBLEM = Problem(
    number=43,
    slug="fused_adam_grad_unshard_allgather",
    version=1,
    title="Update this rank's shard of the parameters with Adam and gather all shards on every rank.",
    family="optimizer-sharding",
    parallelism="FSDP",
    collectives=("all_gather_into_tensor",),
    origin="DeepSpeed fused Adam, ZeRO and FSDP parameter all-gather",
    split="train",
    sizes={
        "tiny": Size("tiny", {"P": 1009}),
        "default": Size("default", {"P": 131072}),
        "odd": Size("odd", {"P": 131071}),
        # 256 MiB in and 512 MiB out in bf16 at W = 8.
        "large": Size("large", {"P": 2**25}),
        "upstream": Size("upstream", {"P": 4096}),
    },
    # A dozen operations per element, of which none cancels much; nothing is summed over elements or ranks.
    tolerance=Tolerance(inner_ulps=16),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
