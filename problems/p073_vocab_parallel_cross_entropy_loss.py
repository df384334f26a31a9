"""#073 vocab_parallel_cross_entropy_loss: cross entropy of logits whose vocabulary is split over ranks.

Axes      B batch, S positions, V vocabulary (split: U = V // W on a rank), W ranks
In        vocab_parallel_logits [B, S, U], differs per rank; rank r holds ids r*U .. (r+1)*U - 1
          target [B, S] int64, equal on every rank; group (None: all ranks)
Out       loss [B, S] in the dtype of the logits, equal on every rank
Maths     m = max of a row over all ranks; loss = log(sum of exp(logits - m)) - p, where p = logits[target] - m,
          or 0 if no rank holds the target
Mutates   vocab_parallel_logits: m is subtracted in place
Wire      max, sum of exponentials and target logit of B*S rows, over all ranks
Needs     V >= W
Not here  gradients, label smoothing, ignored ids
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Logits at a scale (3 to 5) and offset of its own per rank; a quarter of the targets at the edges of ranks' ranges."""
    local, shape = max(1, size["V"] // draw.world_size), (size["B"], size["S"])
    logits = torch.randn(*shape, local, generator=draw.own("logits"))
    if draw.profile == "upstream":
        target = (13 * torch.arange(shape[0] * shape[1]) + 7 + draw.trial) % size["V"]
        return logits.to(draw.dtype), target.view(shape), None
    scale, offset = torch.rand(2, generator=draw.own("scale")).tolist()
    logits.mul_(3 + 2 * scale).add_(2 * offset).sub_(1)
    chance = draw.shared("target")
    edges = torch.arange(draw.world_size)[:, None] * local + torch.tensor([0, local - 1])
    edge = edges.flatten()[torch.randint(edges.numel(), shape, generator=chance)]
    target = torch.randint(local * draw.world_size, shape, generator=chance)
    return logits.to(draw.dtype), torch.where(torch.rand(shape, generator=chance) < 1 / 4, edge, target), None


def reference(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Loss of every position, [B, S]; subtracts the row maxima from the logits in place."""
    logits, local = vocab_parallel_logits, vocab_parallel_logits.shape[-1]
    largest = logits.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits -= largest.unsqueeze(-1)

    column = target - dist.get_rank(group) * local
    elsewhere = (column < 0) | (column >= local)
    picked = logits.gather(-1, column.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    picked.masked_fill_(elsewhere, 0)
    dist.all_reduce(picked, group=group)

    total = logits.exp().sum(-1)
    dist.all_reduce(total, group=group)
    return total.log_() - picked


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Log-softmax over the joined vocabulary in float64, as many rows at a time as a cache holds."""
    target, vocabulary = inputs[0][1], sum(args[0].shape[-1] for args in inputs)
    rows = max(1, 2**17 // vocabulary)
    parts = zip(target.flatten().split(rows), *(args[0].flatten(0, 1).split(rows) for args in inputs), strict=True)
    loss = torch.cat([_losses(torch.cat([part.double() for part in logits], -1), ids) for ids, *logits in parts])
    return [loss.view(target.shape)] * len(inputs)


def _losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of some rows, [rows], with all their logits, [rows, V]."""
    nowhere = (target < 0) | (target >= logits.shape[-1])
    picked = logits.take_along_dim(target.clamp(0, logits.shape[-1] - 1)[:, None], dim=-1)[:, 0]
    return logits.logsumexp(-1) - torch.where(nowhere, logits.amax(-1), picked)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One exchange of (max, sum, target logit) per row, the first two in fp32; logits are read and written once."""
    rows = size["B"] * size["S"]
    count = rows * max(1, size["V"] // world_size)
    return Cost(
        wire_bytes=2 * (world_size - 1) / world_size * rows * (8 + itemsize),
        memory_bytes=2 * count * itemsize + rows * (8 + itemsize),
        flops=4 * count,
    )


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one id of the smallest size."""
    fewest = min(size["V"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one id each"


SIZES = {
    "tiny": Size("tiny", {"B": 3, "S": 7, "V": 72}),
    "default": Size("default", {"B": 2, "S": 64, "V": 16384}),
    "odd": Size("odd", {"B": 3, "S": 43, "V": 16376}),
    "large": Size("large", {"B": 8, "S": 4096, "V": 131072}),
    "upstream": Size("upstream", {"B": 8, "S": 1024, "V": 512}),
}

PROBLEM = Problem(
    number=73,
    slug="vocab_parallel_cross_entropy_loss",
    version=1,
    title="Cross entropy of logits whose vocabulary is split over ranks; shifts the logits in place.",
    family="loss",
    parallelism="TP",
    collectives=("all_reduce",),
    origin="Megatron-LM vocab_parallel_cross_entropy",
    split="test",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
    mutates=("vocab_parallel_logits",),
)
