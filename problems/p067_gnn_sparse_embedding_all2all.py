"""#067 gnn_sparse_embedding_all2all: pairs of id and row are pushed to the ranks that own the ids.

Axes      L pairs on average (ragged: rank r has L_r, maybe none), D columns, V ids, W ranks; id i belongs to rank i mod W
In        idx int64 [L_r] in 0 .. V - 1 and value [L_r, D], differ per rank; num_nodes = V (the answer does not depend on it);
          group (None: all ranks)
Out       ids int64 [P_r] and rows [P_r, D], differ per rank, new memory: of every pair whose id this rank owns, by rank of
          origin, in the order they have there; ids stay what they are, equal ones are not merged; bit for bit
Wire      all_to_all of counts, ids and rows
Needs     any W
Not here  ranges of ids, sums of rows with equal ids, the optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows
from problems.graph import sent_to_owners
from problems.graph_cases import drawn_counts, drawn_quiet, popular_ids
from problems.moe import exchanged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Ids by Zipf's law, the same popular ones on all ranks; in turns all is busy, a rank has no pairs, a rank owns none."""
    ids, chance, ranks = size["V"], draw.own("idx"), draw.world_size
    if draw.profile == "upstream":
        ids, shape = -(-ids // ranks) * ranks, (size["L"], size["D"])
        value = torch.randn(shape, generator=draw.own("value"))
        return torch.randint(ids, shape[:1], generator=chance), value.to(draw.dtype), ids, None
    pairs = drawn_counts(draw, size["L"])[draw.rank]
    idx = popular_ids(pairs, ids, chance, draw.shared("popularity"))
    if (quiet := drawn_quiet(draw)) is not None:
        # The node after it or, of the last one, before it.
        idx = torch.where(idx % ranks == quiet, torch.where(idx + 1 < ids, idx + 1, idx - 1), idx)
    return idx, normal_rows((pairs, size["D"]), draw.own("value")).to(draw.dtype), ids, None


def reference(
    idx: torch.Tensor,
    value: torch.Tensor,
    num_nodes: int,  # noqa: ARG001  what is owned by the remainder needs no range
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and rows for this rank, sorted by the rank they come from."""
    order, send, receive, ids = sent_to_owners(idx, idx % dist.get_world_size(group), group)
    return ids, exchanged(value.index_select(0, order), send, receive, group)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Picks one owner's pairs after the other from those of all ranks, in their own dtype: nothing is computed."""
    idx, value = torch.cat([args[0] for args in inputs]), torch.cat([args[1] for args in inputs])
    mine = [(idx - rank).remainder(len(inputs)) == 0 for rank in range(len(inputs))]
    return [(idx[mask], value[mask]) for mask in mine]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank; ids of four bytes travel, those of eight are read and written."""
    pairs, row = size["L"], size["D"] * itemsize
    return Cost(
        wire_bytes=(world_size - 1) / world_size * pairs * (row + 4),
        memory_bytes=2 * pairs * (row + 8),
        flops=0,
    )


PROBLEM = Problem(
    number=67,
    slug="gnn_sparse_embedding_all2all",
    version=1,
    title="Push ids and their rows to the ranks that own the ids.",
    family="gnn",
    parallelism="MP",
    collectives=("all_to_all_single",),
    origin="DGL NodeEmbedding (sparse optimizer, NCCL push)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"L": 53, "D": 7, "V": 211}),
        "default": Size("default", {"L": 4096, "D": 128, "V": 100003}),
        "odd": Size("odd", {"L": 3001, "D": 129, "V": 99991}),
        # 270 MB of pairs in bf16 per rank.
        "large": Size("large", {"L": 1_000_000, "D": 128, "V": 111_000_000}),
        "upstream": Size("upstream", {"L": 1024, "D": 128, "V": 100000}),
    },
    # Rows are copied.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
