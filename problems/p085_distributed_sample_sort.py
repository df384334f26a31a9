"""#085 distributed_sample_sort: sort keys that are spread unevenly over ranks; every rank gets an equal share in order.

Axes      n_r keys on rank r, possibly none; N in all, W ranks
In        local_shard [n_r], differs per rank; group (None: all ranks)
Out       [N // W], and one more on each of the first N % W ranks; rank r's keys come before those of rank r + 1
Maths     all keys in ascending order, equal ones as often as they come
Wire      every key travels at most once to the rank where it belongs
Needs     any W
Not here  NaN, integers, payloads, descending order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import ragged, turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Mixtures, many duplicates, presorted and reversed ranges, one rank with most of the keys; some ranks may hold none.

    Shares are uneven in most trials.
    """
    if draw.profile == "upstream":
        count = 0 if draw.trial % 4 == 3 and draw.rank % 2 else size["N"]
        keys = torch.randint(-50, 50, (count,), generator=draw.own("keys")).to(draw.dtype)
        return keys - draw.rank * max(1, count), None
    kind, missing = turn(draw, 5), int(torch.randint(draw.world_size, (), generator=draw.shared("missing")))
    total = size["N"] * draw.world_size - missing
    counts = ragged(total, draw.world_size, draw.shared("counts"))
    order = torch.randperm(draw.world_size, generator=draw.shared("order")).tolist()
    if kind == 4:
        counts = ragged(total // 8, draw.world_size, draw.shared("counts"))
        counts[order[0]] += total - total // 8
    if draw.trial % 2 and draw.world_size > 2:
        counts[order[1]], counts[order[0]] = 0, counts[order[0]] + counts[order[1]]
    keys = _keys(draw, kind, counts[draw.rank], order)
    # Adding zero turns -0 into 0: the order of the two is nobody's.
    return keys.to(draw.dtype) + 0.0, None


def _keys(draw: Draw, kind: int, count: int, order: list[int]) -> torch.Tensor:
    """Normal with jumps; powers of 2 with few values; sorted; in reverse over ranks; normal again."""
    chance = draw.own("keys")
    keys = torch.randn(count, generator=chance) * torch.rand(count, generator=chance).mul_(10).sub_(6).exp2_()
    if kind == 1:
        some = torch.randn(16, generator=draw.shared("values"))
        picked = (torch.rand(count, generator=chance).pow_(3) * 16).long().clamp_(max=15)
        return some[picked]
    if kind == 2:
        return keys.sort().values + order[draw.rank]
    return keys - 8 * draw.rank if kind == 3 else keys


def reference(local_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's share of all keys in ascending order."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    keys = local_shard.sort().values
    ends = bounds(keys, splitters(keys, group), rank)
    bucket = exchange(keys, torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_tensor([len(keys)])), group).sort().values

    sizes = gathered(ends.new_tensor([len(bucket)]), group)
    total, held = int(sizes.sum()), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    share = torch.arange(world_size + 1, device=keys.device)
    wanted = share * (total // world_size) + share.clamp(max=total % world_size)
    overlap = torch.minimum(held[1:, None], wanted[None, 1:]) - torch.maximum(held[:-1, None], wanted[None, :-1])
    return exchange(bucket, overlap.clamp_(min=0)[rank], group)


def splitters(keys: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W - 1 keys that cut all keys into about equal buckets, with the rank and place where each lies, all [W - 1]."""
    world_size, count = dist.get_world_size(group), len(keys)
    samples = 4 * world_size
    place = torch.arange(samples, device=keys.device) * count // samples
    sample = keys[place] if count else keys.new_full((samples,), float("inf"))
    values, places = gathered(sample, group), gathered(place, group)
    counts = gathered(place.new_tensor([count]), group)
    order = values.argsort(stable=True)
    weight = counts.repeat_interleave(samples)[order].cumsum(0)
    cuts = torch.arange(1, world_size, device=keys.device) * weight[-1] // world_size
    chosen = order[torch.searchsorted(weight, cuts, right=True).clamp_(max=len(order) - 1)]
    return values[chosen], chosen // samples, places[chosen]


def bounds(keys: torch.Tensor, cuts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rank: int) -> torch.Tensor:
    """How many of the sorted keys lie before every splitter; equal keys are ordered by rank and place, [W - 1]."""
    values, ranks, places = cuts
    left, right = torch.searchsorted(keys, values), torch.searchsorted(keys, values, right=True)
    return torch.where(ranks == rank, places, torch.where(rank < ranks, right, left)).clamp_(max=len(keys))


def exchange(keys: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send `counts` keys to every rank, in order; what comes is joined in the order of its senders."""
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts.contiguous(), group=group)
    to, frm = counts.tolist(), incoming.tolist()
    out = keys.new_empty(sum(frm))
    dist.all_to_all_single(out, keys, frm, to, group=group)
    return out


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """One sort of all keys, cut into shares."""
    keys = torch.cat([args[0] for args in inputs]).sort().values
    return list(torch.tensor_split(keys, len(inputs)))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Keys in random places move once; a comparison per key and binary digit of the number of keys."""
    count = size["N"]
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * itemsize,
        memory_bytes=2 * count * itemsize,
        flops=count * (count * world_size).bit_length(),
    )


PROBLEM = Problem(
    number=85,
    slug="distributed_sample_sort",
    version=1,
    title="Sort keys that are spread unevenly over ranks into equal shares.",
    family="sorting",
    parallelism="DP",
    collectives=("all_gather_into_tensor", "all_to_all_single"),
    origin="parallel sorting by regular sampling",
    split="test",
    sizes={
        "tiny": Size("tiny", {"N": 61}),
        "default": Size("default", {"N": 20000}),
        "odd": Size("odd", {"N": 19997}),
        # 256 MiB of fp32 keys per rank.
        "large": Size("large", {"N": 67108864}),
        "upstream": Size("upstream", {"N": 256}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
