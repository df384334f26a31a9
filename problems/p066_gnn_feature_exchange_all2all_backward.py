"""#066 gnn_feature_exchange_all2all_backward: gradients go back to the ranks whose features they are of, and are summed there.

Axes      S_r features on rank r, T_r gradients that it gets, D columns, C_ij rows of rank i's features that rank j had
          (R on average, some 0), W ranks
In        grad_output [sum of counts_sent, D]; seed_inverse_ids int64 [T_r] in 0 .. S_r - 1; seed_size = S_r; counts_sent,
          counts_received: W numbers each.  All differ per rank; group (None: all ranks)
          On rank r, counts_sent[k] = C_(r+k)r and counts_received[k] = C_r(r+k), ranks modulo W
Out       [S_r, D] in the dtype of grad_output, differs per rank
Maths     rank r cuts grad_output by counts_sent, chunk k is for rank r+k; what it gets, chunk k of counts_received[k] rows from
          rank r+k, is a row g_t per id: out[s] = sum of g_t over all t with seed_inverse_ids[t] = s, in at least float32
Wire      one all_to_all of rows; a sender does not know which of its rows will be summed
Needs     any W
Not here  the forward exchange (65), gradients of several types
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.graph import from_first_rank
from problems.graph_cases import counts_from, drawn_table, popular_ids
from problems.moe import exchanged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """A table of counts of its own per trial; ids by Zipf's law, so that some rows sum many gradients and others none."""
    table = torch.full((draw.world_size, draw.world_size), size["R"])
    upstream = draw.profile == "upstream"
    sent, received = counts_from(table if upstream else drawn_table(draw, size["R"]), draw.rank)
    gradients = torch.randn(sum(sent), size["D"], generator=draw.own("grad_output"))
    chance, total = draw.own("seed_inverse_ids"), sum(received)
    seeds = max(1, total // 2)
    ids = torch.randint(seeds, (total,), generator=chance) if upstream else popular_ids(total, seeds, chance, chance)
    return gradients.to(draw.dtype), ids, seeds, sent, received, None


def reference(
    grad_output: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    seed_size: int,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Gradients of this rank's features, [seed_size, D]."""
    rank = dist.get_rank(group)
    send, receive = from_first_rank(counts_sent, rank), from_first_rank(counts_received, rank)
    came = exchanged(grad_output.roll(sum(send[:rank]), 0), send, receive, group)
    ids = seed_inverse_ids.roll(sum(receive[:rank]))
    wide = torch.promote_types(came.dtype, torch.float32)
    total = torch.zeros(seed_size, came.shape[1], dtype=wide, device=came.device)
    return total.index_add_(0, ids, came.to(wide)).to(came.dtype)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Sums of the runs of equal ids in float64, after chunks were picked one by one and sorted."""
    ranks, outputs = len(inputs), []
    for rank, (_, ids, seeds, _, _, _) in enumerate(inputs):
        chunks = []
        for step in range(ranks):
            gradients, _, _, sizes, _, _ = inputs[(rank + step) % ranks]
            start = sum(sizes[: -step % ranks])
            chunks.append(gradients[start : start + sizes[-step % ranks]])
        rows = torch.cat(chunks)[ids.argsort()].double()
        outputs.append(torch.segment_reduce(rows, "sum", lengths=ids.bincount(minlength=seeds), axis=0))
    return outputs


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank: foreign rows leave once; gradients are read once and added, sums are written once."""
    row, total = size["D"] * itemsize, size["R"] * world_size
    return Cost(
        wire_bytes=(world_size - 1) * size["R"] * row,
        memory_bytes=(total + total // 2) * row + 8 * total,
        flops=total * size["D"],
    )


PROBLEM = Problem(
    number=66,
    slug="gnn_feature_exchange_all2all_backward",
    version=1,
    title="Send gradients of rows back to the ranks that own the rows and sum them there.",
    family="gnn",
    parallelism="DP",
    collectives=("all_to_all",),
    origin="DGL GraphBolt (gradients of cooperative minibatching)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"R": 11, "D": 7}),
        "default": Size("default", {"R": 1024, "D": 128}),
        "odd": Size("odd", {"R": 997, "D": 129}),
        # 270 MB of gradients and 130 MB of sums in bf16 per rank at W = 8.
        "large": Size("large", {"R": 65536, "D": 256}),
        # The public shape on 4 ranks; there R = 1024 / W, at least 64.
        "upstream": Size("upstream", {"R": 256, "D": 128}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
