"""#024 load_balancing_loss_fn: how unevenly a mixture of experts is used, averaged over ranks.

Axes      B sequences of a rank (ragged: about B on average), S positions, E experts, L layers, W ranks
In        gate_logits, [B*S, E] of one layer or a tuple of L such, differ per rank; num_experts and top_k, equal on every rank;
          attention_mask [B, S] of 0 and 1 (int64, holds for every layer) or None, differs per rank
Out       a scalar in float32 (float64 if the logits are), equal on every rank
Maths     P = softmax of a row; f_e = share of rows whose top_k entries include e, p_e = mean of P_e, both over all
          layers' rows that the mask keeps; loss = mean over ranks of E * sum over e of f_e * p_e, in at least float32
Wire      all_reduce of one number
Needs     any W
Not here  shares that are averaged over ranks before they are multiplied, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import ragged, turn

GAP = 0.25
"""By how much at least the logits of a row's last chosen and first other expert differ before they are rounded."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal logits with a bias of up to 3 per rank, layer and expert; no choice is close.

    One layer and several, with and without a mask, two numbers of experts per row take turns.
    """
    experts = size["E"]
    if draw.profile == "upstream":
        public = torch.randn(size["B"] * size["S"], experts, generator=draw.own("gate_logits"))
        return public.to(draw.dtype), experts, 2, None
    kind = turn(draw, 4)
    top_k = min(2 + turn(draw, 3, "top_k") % 2, experts - 1)
    batch = ragged(size["B"] * draw.world_size, draw.world_size, draw.shared("batch"), least=1)[draw.rank]
    layers = [_layer(draw.own(f"layer {i}"), batch * size["S"], experts, top_k).to(draw.dtype) for i in range(size["L"])]
    logits = tuple(layers) if kind // 2 else layers[0]
    return logits, experts, top_k, _mask(draw, batch, size["S"]) if kind % 2 else None


def _layer(chance: torch.Generator, rows: int, experts: int, top_k: int) -> torch.Tensor:
    """Logits of one layer, [rows, E]."""
    logits = torch.randn(rows, experts, generator=chance)
    logits += torch.rand(experts, generator=chance).mul_(6).sub_(3)
    lower = torch.full_like(logits, -GAP)
    return logits + lower.scatter_(1, logits.topk(top_k).indices, 0)


def _mask(draw: Draw, batch: int, positions: int) -> torch.Tensor:
    """Sequences of random length, at least one position, padded on the right; [B, S]."""
    lengths = torch.randint(1, positions + 1, (batch, 1), generator=draw.own("attention_mask"))
    return (torch.arange(positions) < lengths).long()


def reference(
    gate_logits: torch.Tensor | tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean over ranks of the local loss, a scalar."""
    logits = gate_logits if isinstance(gate_logits, torch.Tensor) else torch.cat(gate_logits)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k).indices, 1)
    weight = logits.new_ones(len(logits))
    if attention_mask is not None:
        weight = attention_mask.flatten().to(logits.dtype).repeat(len(logits) // attention_mask.numel())
    weight = (weight / weight.sum()).unsqueeze(1)
    loss = num_experts * torch.dot((weight * chosen).sum(0), (weight * probabilities).sum(0))
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The mean of all ranks' losses in float64."""
    return [torch.stack([_local_loss(*args) for args in inputs]).mean()] * len(inputs)


def _local_loss(
    gate_logits: torch.Tensor | tuple[torch.Tensor, ...], experts: int, top_k: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Only the rows that count; choices counted one by one."""
    layers = [gate_logits] if isinstance(gate_logits, torch.Tensor) else gate_logits
    kept = [layer.double() if mask is None else layer.double()[mask.flatten() > 0] for layer in layers]
    rows = torch.cat(kept)
    order = rows.argsort(dim=-1, descending=True)[:, :top_k]
    share = F.one_hot(order, experts).sum((0, 1)).double() / len(rows)
    odds = rows.exp()
    return experts * (share * (odds / odds.sum(-1, keepdim=True)).mean(0)).sum()


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One float32 is summed over ranks; the logits of one layer are read once, some six operations each."""
    count = size["B"] * size["S"] * size["E"]
    return Cost(wire_bytes=2 * (world_size - 1) / world_size * 4, memory_bytes=count * itemsize, flops=6 * count)


PROBLEM = Problem(
    number=24,
    slug="load_balancing_loss_fn",
    version=1,
    title="Load-balancing loss of a router's logits, averaged over ranks.",
    family="loss",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="HF Transformers (Switch, Mixtral auxiliary loss), VeOmni",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"B": 3, "S": 23, "E": 8, "L": 3}),
        "default": Size("default", {"B": 4, "S": 512, "E": 32, "L": 3}),
        "odd": Size("odd", {"B": 3, "S": 509, "E": 31, "L": 2}),
        # 1 GiB of logits per layer and rank in bf16.
        "large": Size("large", {"B": 1024, "S": 4096, "E": 128, "L": 2}),
        "upstream": Size("upstream", {"B": 1, "S": 1024, "E": 8, "L": 1}),
    },
    # A product of vector and matrix that adds thousands of rows one after another is up to 65 round-offs of float32 off.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
