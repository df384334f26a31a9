"""#030 moe_epgroupgemm_lora_backward: the gradients of three replicated LoRA factors are summed over ranks, in place.

Axes      R LoRA rank, N hidden size (neither is split), W ranks
In        grad_fc1_1_lora_A [R, N], grad_fc1_2_lora_A [R, N], grad_fc2_lora_B [N, R], all differ per rank;
          group (None: all ranks)
Out       three new tensors with the sums, equal on every rank
Maths     out_i = sum over ranks s of gradient i of s
Mutates   all three gradients: they hold the sums afterwards
Wire      all_reduce of 3*R*N elements: a rank sends at least 2*(W-1)/W of them
Needs     any W; no extent need divide by W
Not here  the products of the backward pass; means; outputs that are the arguments themselves
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]
NAMES = "grad_fc1_1_lora_A", "grad_fc1_2_lora_A", "grad_fc2_lora_B"


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values at a scale of its own per tensor and rank, plus a part that cancels between neighbouring ranks."""
    first, second, third = (gradient(draw, name, size) for name in NAMES)
    return first, second, third.T.contiguous(), None


def gradient(draw: Draw, name: str, size: Size) -> torch.Tensor:
    """One gradient, [R, N]."""
    values = torch.randn(size["R"], size["N"], generator=draw.own(name))
    if draw.profile == "hardened":
        order = torch.randperm(draw.world_size, generator=draw.shared(f"scale of {name}"))
        unpaired = draw.world_size % 2 and draw.rank == draw.world_size - 1
        sign = 0.0 if unpaired else (-1.0) ** draw.rank
        values *= 2.0 ** (int(order[draw.rank]) % 4)
        values += torch.randn(values.shape, generator=draw.shared(f"cancelling of {name}")).mul_(2 * sign)
    return values.to(draw.dtype)


def reference(
    grad_fc1_1_lora_A: torch.Tensor,
    grad_fc1_2_lora_A: torch.Tensor,
    grad_fc2_lora_B: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> Three:
    """Sums of the three gradients, which hold them too afterwards."""
    for tensor in (grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B):
        dist.all_reduce(tensor, group=group)
    return grad_fc1_1_lora_A.clone(), grad_fc1_2_lora_A.clone(), grad_fc2_lora_B.clone()


def exact(inputs: Sequence[Inputs]) -> list[Three]:
    """The sums in float64, once, for every rank."""
    first, second, third = (torch.stack(all_ranks).double().sum(0) for all_ranks in zip(*(a[:3] for a in inputs), strict=True))
    return [(first, second, third)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Reduce-scatter and all-gather of all elements; each is read once and written twice: in place and as an output."""
    count, others = 3 * size["R"] * size["N"], world_size - 1
    return Cost(
        wire_bytes=2 * others / world_size * count * itemsize,
        memory_bytes=3 * count * itemsize,
        flops=others / world_size * count,
    )


PROBLEM = Problem(
    number=30,
    slug="moe_epgroupgemm_lora_backward",
    version=1,
    title="Sum three small gradients over all ranks, in place.",
    family="moe",
    parallelism="EP",
    collectives=("all_reduce",),
    origin="VeOmni (grouped LoRA matrices under expert parallelism, gradient synchronisation)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"R": 5, "N": 67}),
        "default": Size("default", {"R": 16, "N": 4096}),
        "odd": Size("odd", {"R": 13, "N": 4093}),
        # 6 MiB in bf16: bound by latency by nature.
        "large": Size("large", {"R": 64, "N": 16384}),
        "upstream": Size("upstream", {"R": 8, "N": 1024}),
    },
    # A sum of W terms.
    tolerance=Tolerance(inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    mutates=NAMES,
)
