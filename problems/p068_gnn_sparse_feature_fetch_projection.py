"""#068 gnn_sparse_feature_fetch_projection: rows of a table that is split over ranks are fetched and multiplied by a matrix.

Axes      n rows of the table (V or a few less), in shards of S = n / W rows, rounded up (the last one: what is left); D columns;
          Q queries on average (ragged: rank r makes Q_r, maybe none), W ranks
In        local_embedding_shard [S, D], input_node_ids int64 [Q_r] in 0 .. n - 1 and proj_matrix [D, D] differ per rank;
          num_total_nodes = n; group (None: all ranks); rank r owns rows r*S .. (r+1)*S - 1
Out       [Q_r, D], differs per rank
Maths     out_r = table[input_node_ids_r] @ proj_matrix_r, in the order of the queries
Wire      all_to_all of counts, ids and rows: each distinct foreign row comes in at least once; its owner has another matrix
Needs     W <= number of rows
Not here  caches, equal matrices, bias, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.graph import sent_to_owners
from problems.graph_cases import distinct, drawn_counts, drawn_quiet, popular_ids
from problems.moe import exchanged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Queries by Zipf's law, the same popular rows on all ranks; the matrix keeps a row's magnitude.

    In turns all are busy, one rank asks for nothing, one rank is asked for nothing.
    """
    if draw.profile == "upstream":
        return _public(draw, size)
    ranks, width = draw.world_size, size["D"]
    shard = size["V"] // ranks
    nodes = shard * ranks - int(torch.randint(1, max(2, ranks), (), generator=draw.shared("nodes")))
    height = max(0, min(shard, nodes - draw.rank * shard))
    rows = torch.randn(height, width, generator=draw.own("local_embedding_shard"))
    matrix = torch.randn(width, width, generator=draw.own("proj_matrix")).mul_(width**-0.5)
    ids = popular_ids(drawn_counts(draw, size["Q"])[draw.rank], nodes, draw.own("ids"), draw.shared("popularity"))
    if (quiet := drawn_quiet(draw)) is not None:
        neighbours = ids - shard if quiet == ranks - 1 else (ids + shard).clamp_(max=nodes - 1)
        ids = torch.where(ids // shard == quiet, neighbours, ids)
    return rows.to(draw.dtype), ids, matrix.to(draw.dtype), nodes, None


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Even shards; ids that rank and place give away; a matrix that magnifies."""
    ranks, width = draw.world_size, size["D"]
    shard = -(-size["V"] // ranks)
    place = torch.arange(size["Q"])
    ids = (place + draw.rank) % ranks * shard + (7 * place + draw.rank) % shard
    rows = torch.randn(shard, width, generator=draw.own("local_embedding_shard"))
    matrix = torch.randn(width, width, generator=draw.own("proj_matrix"))
    return rows.to(draw.dtype), ids, matrix.to(draw.dtype), shard * ranks, None


def reference(
    local_embedding_shard: torch.Tensor,
    input_node_ids: torch.Tensor,
    proj_matrix: torch.Tensor,
    num_total_nodes: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Projected rows in the order of the queries, [Q_r, D]; ids travel to the owners and rows back."""
    shard = -(-num_total_nodes // dist.get_world_size(group))
    order, send, receive, asked = sent_to_owners(input_node_ids, input_node_ids // shard, group)
    place = (asked - dist.get_rank(group) * shard).clamp_(0, len(local_embedding_shard) - 1)
    came = exchanged(local_embedding_shard.index_select(0, place), receive, send, group)
    rows = torch.empty_like(came)
    rows[order] = came
    return rows @ proj_matrix


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Looks rows up in the whole table and multiplies in float64."""
    table = torch.cat([args[0] for args in inputs])
    return [table[ids].double() @ matrix.double() for _, ids, matrix, _, _ in inputs]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank: each distinct row is asked for with four bytes, comes in once and is multiplied once."""
    rows, width = distinct(size["V"], size["Q"]), size["D"]
    return Cost(
        wire_bytes=(world_size - 1) / world_size * rows * (width * itemsize + 4),
        memory_bytes=(rows + size["Q"] + width) * width * itemsize + 8 * size["Q"],
        flops=2 * rows * width**2,
    )


def valid_world(world_size: int) -> str | None:
    """There must be as many rows as ranks in the smallest table."""
    fewest = min(size["V"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, as many as the smallest table has rows"


SIZES = {
    "tiny": Size("tiny", {"V": 211, "D": 24, "Q": 61}),
    "default": Size("default", {"V": 16381, "D": 128, "Q": 2048}),
    "odd": Size("odd", {"V": 9973, "D": 129, "Q": 1999}),
    # 540 MB of table per rank in bf16 at W = 8, 130 MB of output.
    "large": Size("large", {"V": 8388593, "D": 256, "Q": 262144}),
    # 57 GB of table in bf16 over all ranks.
    "upstream": Size("upstream", {"V": 111_000_000, "D": 256, "Q": 20000}),
}


PROBLEM = Problem(
    number=68,
    slug="gnn_sparse_feature_fetch_projection",
    version=1,
    title="Fetch rows of a table that is split over ranks and multiply them by a matrix of this rank.",
    family="gnn",
    parallelism="MP",
    collectives=("all_to_all_single",),
    origin="DGL, GraphStorm (distributed embedding pull and input projection)",
    split="test",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
