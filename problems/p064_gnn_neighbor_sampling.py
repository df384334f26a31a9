"""#064 gnn_neighbor_sampling: neighbourhoods of seed nodes, hop by hop, in a graph whose nodes belong to different ranks.

Axes      V nodes, E_r edges on rank r, S_r seeds on rank r (ragged, perhaps none), W ranks; all tensors int64
In        seed_nodes [S_r], all different, differ per rank; fanouts, one number per hop (negative: all neighbours), equal on
          every rank; local_adj_row_ptr [V + 1] and local_adj_col [E_r]: the neighbours of node v are
          col[row_ptr[v] : row_ptr[v + 1]] on the rank node_to_rank[v] (other ranks hold none, or outdated ones; `upstream`: all
          hold the whole graph); node_to_rank [V], equal on every rank; group (None: all ranks); replace has no effect
Out       node [n]: the seeds and every node reached, once, in order of first appearance; row, col, edge [m], hop by hop:
          places in `node` of the neighbour and of whom it was sampled for, and the edge's place in the latter's owner's columns
Maths     a hop takes the first min(fanout, degree) neighbours of every node that the hop before it reached for the first time
Wire      per hop: foreign nodes to their owners, their neighbours and edges back
Needs     any W
Not here  random choice, weights, several edge types, duplicate seeds
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import ragged, turn
from problems.moe import exchanged

CAP = 16
"""Largest degree, in degrees of the average node."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Degrees by a power law, an eighth of them 0, popular neighbours; a quarter of foreign rows hold something outdated.

    Fanouts take turns, one of them takes all neighbours.  In every third trial one rank has no seeds.
    """
    if draw.profile == "upstream":
        return _public(draw, size)
    nodes, ranks, chance = size["V"], draw.world_size, draw.own("graph")
    owner = torch.randint(ranks, (nodes,), generator=draw.shared("node_to_rank"))
    degrees = torch.rand(nodes, generator=chance).rsqrt_().mul_(size["D"] / 2).floor_().clamp_(max=CAP * size["D"]).long()
    none = torch.rand(nodes, generator=chance) < 1 / 8
    unknown = (owner != draw.rank) & (torch.rand(nodes, generator=chance) < 3 / 4)
    degrees.masked_fill_(none | unknown, 0)
    pointers = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    places = torch.rand(int(pointers[-1]), generator=chance, dtype=torch.float64).square_().mul_(nodes).long()
    columns = torch.randperm(nodes, generator=draw.shared("popularity"))[places]
    seeds = torch.randperm(nodes, generator=draw.own("seeds"))[: _seeds(draw, size)]
    first, second = size["first"], size["second"]
    fanouts = ([first, second], [second, first, 1], [first, -1], [1, second, first])[turn(draw, 4, "fanouts")]
    return seeds, fanouts, pointers, columns, owner, None, False


def _seeds(draw: Draw, size: Size) -> int:
    """How many this rank has."""
    counts = ragged(size["S"] * draw.world_size, draw.world_size, draw.shared("counts"), least=3)
    if draw.trial % 3 == 2 and draw.world_size > 1:
        frm, to = torch.randperm(draw.world_size, generator=draw.shared("idle")).tolist()[:2]
        counts[frm], counts[to] = 0, counts[frm] + counts[to]
    return min(size["V"], counts[draw.rank])


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """A ring in which every node knows the next D ones; consecutive seeds."""
    nodes, degree = -(-size["V"] // draw.world_size) * draw.world_size, size["D"]
    every = torch.arange(nodes)
    columns = (every[:, None] + torch.arange(1, degree + 1)) % nodes
    seeds = (draw.rank * size["S"] + torch.arange(min(size["S"], nodes))) % nodes
    pointers = torch.arange(nodes + 1) * degree
    return seeds, [size["first"], size["second"]], pointers, columns.flatten(), every % draw.world_size, None, False


def reference(
    seed_nodes: torch.Tensor,
    fanouts: list[int],
    local_adj_row_ptr: torch.Tensor,
    local_adj_col: torch.Tensor,
    node_to_rank: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    replace: bool = False,  # noqa: ARG001  the public problem ignores it as well
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nodes reached, [n], and of every edge places of both ends and number, [m]; every rank takes part in every hop."""
    place = torch.full_like(node_to_rank, -1)
    found, rows, columns, edges = [seed_nodes.clone()], [seed_nodes[:0]], [seed_nodes[:0]], [seed_nodes[:0]]
    number, frontier = 0, seed_nodes
    for fanout in fanouts:
        place[frontier] = number + torch.arange(len(frontier), device=place.device)
        number += len(frontier)
        counts, neighbours, ids = asked(frontier, node_to_rank[frontier], fanout, local_adj_row_ptr, local_adj_col, group)
        columns.append(place[frontier].repeat_interleave(counts))
        rows.append(neighbours)
        edges.append(ids)
        frontier = first_seen(neighbours[place[neighbours] < 0])
        found.append(frontier)
    place[frontier] = number + torch.arange(len(frontier), device=place.device)
    return torch.cat(found), place[torch.cat(rows)], torch.cat(columns), torch.cat(edges)


def first_seen(values: torch.Tensor) -> torch.Tensor:
    """Each value once, in order of first appearance."""
    distinct, which = torch.unique(values, return_inverse=True)
    at = torch.arange(len(values), device=values.device)
    first = torch.full_like(distinct, len(values)).scatter_reduce_(0, which, at, "amin")
    ordered: torch.Tensor = distinct[first.argsort()]
    return ordered


def asked(
    nodes: torch.Tensor,
    owners: torch.Tensor,
    fanout: int,
    pointers: torch.Tensor,
    columns: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many neighbours every node has for us, and these and their edges, as the nodes' owners know them."""
    order = owners.argsort(stable=True)
    to = owners.bincount(minlength=dist.get_world_size(group))
    frm = torch.empty_like(to)
    dist.all_to_all_single(frm, to, group=group)
    out, back = to.tolist(), frm.tolist()
    queries = exchanged(nodes[order], out, back, group)

    starts, counts = pointers[queries], pointers[queries + 1] - pointers[queries]
    counts = counts if fanout < 0 else counts.clamp(max=fanout)
    edges = segments(starts, counts)
    answers = torch.stack([columns[edges], edges], dim=1)
    came = exchanged(counts, back, out, group)
    sent, due = ([int(part.sum()) for part in torch.split(c, by)] for c, by in ((counts, back), (came, out)))
    answers = exchanged(answers, sent, due, group)

    mine = torch.empty_like(order)
    mine[order] = torch.arange(len(order), device=order.device)
    neighbours, ids = answers[segments((came.cumsum(0) - came)[mine], came[mine])].unbind(1)
    return came[mine], neighbours, ids


def segments(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """start, start + 1, .. of every segment, one segment after the other."""
    shift = starts - (counts.cumsum(0) - counts)
    repeated = shift.repeat_interleave(counts)
    return repeated + torch.arange(len(repeated), device=repeated.device)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One edge after the other, from a table of the rows of a hop's nodes in their owners' graphs."""
    pointers, columns = torch.stack([args[2] for args in inputs]), torch.cat([args[3] for args in inputs])
    ends = torch.tensor([len(args[3]) for args in inputs], device=columns.device).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends[:-1]])
    results = (_sampled(args[0].tolist(), args[1], pointers, columns, offsets, args[4]) for args in inputs)
    return [tuple(columns.new_tensor(values) for values in result) for result in results]


def _sampled(
    seeds: list[int],
    fanouts: list[int],
    pointers: torch.Tensor,
    columns: torch.Tensor,
    offsets: torch.Tensor,
    owners: torch.Tensor,
) -> tuple[list[int], ...]:
    """Nodes, and places of neighbour and sampling node and number of every edge; rank r's columns start at offsets[r]."""
    places = {node: place for place, node in enumerate(seeds)}
    out: tuple[list[int], ...] = ([], [], [])
    hop = seeds
    for fanout in fanouts:
        reached, nodes = len(places), columns.new_tensor(hop)
        home = owners[nodes]
        start, end = pointers[home, nodes], pointers[home, nodes + 1]
        end = end if fanout < 0 else torch.minimum(end, start + fanout)
        longest = int((end - start).max()) if hop else 0
        table = start[:, None] + torch.arange(longest, device=start.device)
        which, _ = (table < end[:, None]).nonzero(as_tuple=True)
        edges = table[table < end[:, None]]
        neighbours = columns[offsets[home[which]] + edges]
        for node, neighbour, edge in zip(nodes[which].tolist(), neighbours.tolist(), edges.tolist(), strict=True):
            out[0].append(places.setdefault(neighbour, len(places)))
            out[1].append(places[node])
            out[2].append(edge)
        hop = list(places)[reached:]
    return list(places), *out


def cost(size: Size, world_size: int, _itemsize: int) -> Cost:
    """Two hops of evenly spread seeds over a graph of random edges; ids of four bytes travel, edges as a start per node."""
    others, frontier, reached, ids, answers = (world_size - 1) / world_size, float(size["S"]), float(size["S"]), 0.0, 0.0
    for fanout in (size["first"], size["second"]):
        sampled = frontier * sum(7 / 8 * min(1, (size["D"] / 2 / t) ** 2) for t in range(1, fanout + 1))
        ids, answers = ids + frontier, answers + sampled
        frontier = (size["V"] - reached) * -(exp(-sampled / size["V"]) - 1)
        reached += frontier
    return Cost(
        wire_bytes=others * (12 * ids + 4 * answers),
        memory_bytes=8 * (2 * ids + 4 * answers + reached),
        flops=0,
    )


PROBLEM = Problem(
    number=64,
    slug="gnn_neighbor_sampling",
    version=1,
    title="Sample the neighbourhoods of seed nodes, hop by hop, in a graph whose nodes are spread over ranks.",
    family="gnn",
    parallelism="graph partition",
    collectives=("all_to_all_single",),
    origin="PyTorch Geometric, pyg-lib distributed neighbour sampler",
    split="train",
    sizes={
        "tiny": Size("tiny", {"V": 211, "D": 5, "S": 13, "first": 3, "second": 2}),
        "default": Size("default", {"V": 10000, "D": 16, "S": 128, "first": 10, "second": 5}),
        "odd": Size("odd", {"V": 9973, "D": 11, "S": 97, "first": 7, "second": 4}),
        # 700 MB of edges and 160 MB of pointers and owners per rank at W = 8; about a million edges are sampled.
        "large": Size("large", {"V": 10_000_000, "D": 30, "S": 16384, "first": 15, "second": 5}),
        "upstream": Size("upstream", {"V": 10000, "D": 16, "S": 512, "first": 10, "second": 5}),
    },
    # Ids are whole numbers.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
