"""#026 moe_token_preprocess: from a rank's routing mask, how many tokens go to and come from every rank and local expert.

Axes      E experts (split: L = E / W on a rank, E rounded up), k choices per token, T tokens (M and up, differs
          per rank), W ranks
In        expert_mask [E, k, T], one-hot along E, strides of a permuted tensor, differs per rank; num_experts = E;
          group (None: all ranks)
Out       input_splits int64 [W] and output_splits int64 [W]; tokens per (source, local expert) [W, L] and per local expert
          [L] in the mask's dtype; all differ per rank and lie on the mask's device
Maths     c_s[e] = sum of rank s's mask over k and T, exactly; rank r holds experts r*L .. (r+1)*L - 1.
          input_splits[d] = c_r over the experts of d; per_local[s] = c_s over those of r; output_splits = its row sums,
          the last output its column sums; an integer that the mask's dtype does not hold is rounded once
Wire      all_gather of E counts (4 bytes each would do)
Needs     any W
Not here  dropped tokens; outputs in another memory than the mask's
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.routing import chosen, one_hot, padded, tokens_of

Inputs = tuple[torch.Tensor, int, None]
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Popular and unpopular experts, in an order of each trial's; upstream's may choose one expert twice."""
    experts = padded(size["E"], draw.world_size)
    if draw.profile == "upstream":
        selected = torch.randint(experts, (size["M"], size["k"]), generator=draw.own("routing"))
    else:
        selected = chosen(draw, tokens_of(draw, size["M"]), experts, size["k"])
    return one_hot(selected, experts, draw.dtype), experts, None


def reference(expert_mask: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None = None) -> Outputs:
    """Splits of the dispatch for this rank, and what its own experts will receive."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    counts = expert_mask.sum((1, 2), dtype=torch.float32).long()
    local = num_experts // world_size
    table = gathered(counts, group).view(world_size, world_size, local)
    here = table[:, rank]
    kind = expert_mask.dtype
    return counts.view(world_size, local).sum(1), here.sum(1), here.to(kind), here.sum(0).to(kind)


def exact(inputs: Sequence[Inputs]) -> list[Outputs]:
    """Counts the places of all ones, in integers."""
    experts, ranks = inputs[0][1], len(inputs)
    table = torch.stack([torch.bincount(mask.nonzero()[:, 0], minlength=experts) for mask, _, _ in inputs])
    splits = torch.stack([block.sum(1) for block in table.chunk(ranks, dim=1)], dim=1)
    locals_ = [block.contiguous() for block in table.chunk(ranks, dim=1)]
    return [(splits[r].clone(), splits[:, r].clone(), locals_[r], locals_[r].sum(0)) for r in range(ranks)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The mask is read once; every other rank learns the counts of its own experts."""
    experts = padded(size["E"], world_size)
    count = experts * size["k"] * size["M"]
    return Cost(
        wire_bytes=4 * experts * (world_size - 1) / world_size,
        memory_bytes=count * itemsize,
        flops=count,
    )


PROBLEM = Problem(
    number=26,
    slug="moe_token_preprocess",
    version=1,
    title="Count the tokens that every rank sends to every expert, and learn what this rank's experts receive.",
    family="moe",
    parallelism="EP",
    collectives=("all_gather",),
    origin="VeOmni, Megatron-Core (token dispatcher)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"E": 8, "k": 2, "M": 61}),
        "default": Size("default", {"E": 32, "k": 4, "M": 2048}),
        "odd": Size("odd", {"E": 29, "k": 3, "M": 2039}),
        # 1 GiB on a rank in fp32.
        "large": Size("large", {"E": 128, "k": 2, "M": 1048576}),
        "upstream": Size("upstream", {"E": 8, "k": 2, "M": 1024}),
    },
    # Counts.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
