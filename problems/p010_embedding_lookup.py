"""#010 embedding_lookup: rows of a table that is split over ranks, asked for by every rank, sorted by owner.

Axes      V rows of the table on one rank, N columns, L requests on average (ragged: rank r makes L_r, maybe none), W ranks
In        indices int64 [L_r] in 0 .. W*V - 1 and local_shard [V, N], both differ per rank; rank r owns rows r*V .. (r+1)*V - 1
Out       [L_r, N], differs per rank
Maths     out_r = table[indices_r[order]], bit for bit, where order sorts the requests stably by owner: rows come as the exchange
          delivers them, those of rank 0 first, and not as they were asked for
Wire      two all_to_all of counts and indices, one of rows: a rank sends each distinct foreign row at least once
Needs     any W
Not here  putting rows back in the order of the requests, pooling, shards of unequal height, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, ragged, turn


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests by Zipf's law, in an order of popularity of each trial's.

    In turns one rank (never the last) asks for nothing, asks its right neighbour for nothing, or asks as the others do.
    """
    rows, requests, ranks = size["V"], size["L"], draw.world_size
    shard, table = normal_rows((rows, size["N"]), draw.own("local_shard")).to(draw.dtype), rows * ranks
    if draw.profile == "upstream":
        return torch.randint(table, (requests,), generator=draw.own("indices")), shard
    lengths, gap = ragged(requests * ranks, ranks, draw.shared("lengths"), least=1), turn(draw, 3, "gap")
    quiet = int(torch.randint(max(1, ranks - 1), (), generator=draw.shared("quiet")))
    if gap == 0 and ranks > 1:
        lengths[-1] += lengths[quiet]
        lengths[quiet] = 0
    indices = _popular(draw, lengths[draw.rank], table)
    if gap == 1 and draw.rank == quiet:
        indices = torch.where(indices // rows == quiet + 1, (indices + rows) % table, indices)
    return indices, shard


def _popular(draw: Draw, count: int, table: int) -> torch.Tensor:
    """Rows of which the one in place k of an order shared by all ranks is chosen in proportion to log((k+1)/k)."""
    uniform = torch.rand(count, generator=draw.own("indices"), dtype=torch.float64)
    place = ((table + 1) ** uniform).long().clamp_(1, table) - 1
    return torch.randperm(table, generator=draw.shared("popularity"))[place]


def reference(indices: torch.Tensor, local_shard: torch.Tensor) -> torch.Tensor:
    """The rows asked for, sorted by owner, [L_r, N]; indices travel to the owners and rows back."""
    rows = len(local_shard)
    owner, order = (indices // rows).sort(stable=True)
    asked = owner.bincount(minlength=dist.get_world_size())
    to_answer = torch.empty_like(asked)
    dist.all_to_all_single(to_answer, asked)
    mine, theirs = asked.tolist(), to_answer.tolist()
    wanted = indices.new_empty(sum(theirs))
    dist.all_to_all_single(wanted, indices[order], theirs, mine)
    found = local_shard[(wanted - dist.get_rank() * rows).clamp_(0, rows - 1)]
    out = local_shard.new_empty((len(indices), *local_shard.shape[1:]))
    dist.all_to_all_single(out, found, mine, theirs)
    return out


def exact(inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Looks up one owner's rows after the other in the whole table, in its own dtype: nothing is computed."""
    table, rows = torch.cat([shard for _, shard in inputs]), len(inputs[0][1])
    starts = range(0, len(table), rows)
    return [torch.cat([table[i[(i >= start) & (i < start + rows)]] for start in starts]) for i, _ in inputs]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Of a rank that asks L times, as the busiest does at least: each distinct row comes in once, its index is free."""
    rows = distinct(size["V"] * world_size, size["L"])
    return Cost(
        wire_bytes=(world_size - 1) / world_size * rows * size["N"] * itemsize,
        memory_bytes=(rows + size["L"]) * size["N"] * itemsize + 8 * size["L"],
        flops=0,
    )


def distinct(table: int, requests: int) -> float:
    """Rows that are expected among so many requests."""
    chance = torch.arange(1, table + 1, dtype=torch.float64).reciprocal_().log1p_().div_(log(table + 1))
    return float(-chance.neg_().log1p_().mul_(requests).expm1_().sum())


PROBLEM = Problem(
    number=10,
    slug="embedding_lookup",
    version=1,
    title="Look up rows of a table that is split over ranks; they come back sorted by the rank that owns them.",
    family="recsys",
    parallelism="MP",
    collectives=("all_to_all_single",),
    origin="TorchRec, DLRM (row-wise sharded embedding table)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"V": 61, "N": 19, "L": 97}),
        "default": Size("default", {"V": 2048, "N": 128, "L": 2048}),
        "odd": Size("odd", {"V": 2039, "N": 129, "L": 1543}),
        # 512 MiB of table, 512 MiB of rows on average in bf16.
        "large": Size("large", {"V": 262144, "N": 1024, "L": 262144}),
        "upstream": Size("upstream", {"V": 1024, "N": 1024, "L": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
