"""#065 gnn_feature_exchange_all2all: every rank sends rows of its features to the ranks that asked for them.

Axes      V_r features on rank r, T_r rows that it sends, D columns, W ranks, C_ij rows from rank i to rank j (R on average,
          some 0)
In        local_features [V_r, D] and seed_inverse_ids int64 [T_r] in 0 .. V_r - 1; counts_sent, counts_received: W numbers each.
          All differ per rank; group (None: all ranks)
          On rank r, counts_sent[k] = C_(r+k)r and counts_received[k] = C_r(r+k), ranks modulo W: they count the requests, which
          went the other way
Out       [sum of counts_sent, D], differs per rank
Maths     rank r cuts local_features[seed_inverse_ids] by counts_received, chunk k is for rank r+k; chunk k of its output, of
          counts_sent[k] rows, comes from rank r+k; bit for bit
Wire      one all_to_all of rows
Needs     any W
Not here  the requests, features of several types, gradients (66)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows
from problems.graph import from_first_rank
from problems.graph_cases import counts_from, drawn_table
from problems.moe import exchanged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """A table of counts of its own per trial; a rank asks for a feature once, all ranks like the same features of a rank."""
    if draw.profile == "upstream":
        return _public(draw, size)
    sent, received = counts_from(drawn_table(draw, size["R"]), draw.rank)
    rows, chance = max(1, *received, 3 * sum(received) // 4), draw.own("seed_inverse_ids")
    features = normal_rows((rows, size["D"]), draw.own("local_features")).to(draw.dtype)
    fame = torch.rand(rows, generator=chance)
    wishes = [(fame + torch.rand(rows, generator=chance)).argsort()[:n] for n in received]
    return features, torch.cat(wishes), sent, received, None


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Even counts, ids drawn evenly."""
    total = size["R"] * draw.world_size
    rows, counts = 3 * total // 4, [size["R"]] * draw.world_size
    features = torch.randn(rows, size["D"], generator=draw.own("local_features")).to(draw.dtype)
    return features, torch.randint(rows, (total,), generator=draw.own("seed_inverse_ids")), counts, list(counts), None


def reference(
    local_features: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The features that this rank asked for, those of its own first, then those of the ranks after it."""
    rank = dist.get_rank(group)
    send, receive = from_first_rank(counts_received, rank), from_first_rank(counts_sent, rank)
    wanted = seed_inverse_ids.roll(sum(send[:rank]))
    came = exchanged(local_features.index_select(0, wanted), send, receive, group)
    return came.roll(-sum(receive[:rank]), 0)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Picks the chunks of every output one by one, in their own dtype: nothing is computed."""
    ranks, outputs = len(inputs), []
    for rank in range(ranks):
        chunks = []
        for step in range(ranks):
            features, ids, _, sizes, _ = inputs[(rank + step) % ranks]
            start = sum(sizes[: -step % ranks])
            chunks.append(features[ids[start : start + sizes[-step % ranks]]])
        outputs.append(torch.cat(chunks))
    return outputs


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank: foreign rows leave once, each feature is read once, the output is written once."""
    row, total = size["D"] * itemsize, size["R"] * world_size
    return Cost(
        wire_bytes=(world_size - 1) * size["R"] * row,
        memory_bytes=(total + 3 * total // 4) * row + 8 * total,
        flops=0,
    )


PROBLEM = Problem(
    number=65,
    slug="gnn_feature_exchange_all2all",
    version=1,
    title="Send rows of features to the ranks that asked for them; counts start at the own rank.",
    family="gnn",
    parallelism="DP",
    collectives=("all_to_all",),
    origin="DGL GraphBolt (feature exchange of cooperative minibatching)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"R": 11, "D": 7}),
        "default": Size("default", {"R": 1024, "D": 128}),
        "odd": Size("odd", {"R": 997, "D": 129}),
        # 200 MB of features and 270 MB of output in bf16 per rank at W = 8.
        "large": Size("large", {"R": 65536, "D": 256}),
        # The public shape on 4 ranks; there R = 1024 / W, at least 64.
        "upstream": Size("upstream", {"R": 256, "D": 128}),
    },
    # Rows are copied.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
