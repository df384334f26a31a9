"""#077 magi1_cso_async_attention: attention of several ranges of a video, each spread over ranks, to ranges of keys.

Axes      R = cp_shuffle_num ranges, S positions of a range on a rank (T = R*S rows), Hq query heads, Hkv key heads, D head size,
          C = clip_token_nums (None or 0: W*S), W ranks
In        query [T, Hq, D] and key_value [T, Hkv, 2*D] (key, then value), differ per rank; rows i*S .. (i+1)*S - 1 are the rank's
          part of range i; k_ranges [R, 2] int64, R, C, equal on every rank; group (None: all ranks)
Out       [T, Hq, D], differs per rank
Maths     range i is all ranks' parts of it, joined in rank order; keys and values of a range are cut to its first C positions,
          then those of all ranges are joined; the queries of range i, all W*S of them, see positions start .. end - 1 of these,
          (start, end) = k_ranges[i]: out = softmax(q k^T / D^1/2) v, 0 if there are none; query head h uses key head
          h * Hkv // Hq
Wire      all_to_all of keys and values, then of every range's queries and outputs, while the range before is computed
Needs     W divides Hq and either Hkv or is a multiple of it; C <= W*S
Not here  masks inside a range, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal values, queries four times as large; each range sees random parts of the ranges before it and of itself.

    Cut ranges and whole ones, four numbers of key heads, an empty range of keys, everything in one range take turns.
    """
    world_size, ranges = draw.world_size, size["R"]
    heads, local = max(1, size["H"] // world_size) * world_size, -(-size["C"] // world_size)
    if draw.profile == "upstream":
        fits = size["K"] % world_size == 0 or world_size % size["K"] == 0
        query, key_value = _tensors(draw, ranges * local, heads, size["K"] if fits else world_size, size["D"])
        bounds = torch.arange(ranges + 1) * size["C"]
        return query, key_value, torch.stack([bounds[:-1], bounds[1:]], 1), ranges, size["C"], None
    query, key_value = _tensors(draw, ranges * local, heads, _key_heads(draw, heads), size["D"])
    kind, cut = turn(draw, 5), turn(draw, 6, "clip")
    if kind == 4:
        ranges, local = 1, ranges * local
    spare = int(torch.randint(1, 2 + local // 3, (), generator=draw.shared("clip")))
    clip = world_size * local - (spare if cut % 3 else 0)
    given = clip if cut % 3 else None if cut else 0
    return query.mul_(4), key_value, _key_ranges(draw, ranges, clip, empty=kind == 3), ranges, given, None


def _tensors(draw: Draw, rows: int, heads: int, key_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.randn(rows, heads, width, generator=draw.own("query"))
    return query.to(draw.dtype), torch.randn(rows, key_heads, 2 * width, generator=draw.own("key_value")).to(draw.dtype)


def _key_heads(draw: Draw, heads: int) -> int:
    """One, one per two ranks, and one or two per rank: what divides the world size or is a multiple of it."""
    world_size = draw.world_size
    fewer = world_size // 2 if world_size % 2 == 0 else 1
    more = world_size if heads // world_size % 2 else 2 * world_size
    return (1, fewer, world_size, more)[turn(draw, 4, "key heads")]


def _key_ranges(draw: Draw, ranges: int, clip: int, *, empty: bool) -> torch.Tensor:
    """From somewhere in the ranges before to somewhere in the latter half of the own one; one may be empty."""
    chance = draw.shared("k_ranges")
    begin = torch.arange(ranges) * clip
    start = (torch.rand(ranges, generator=chance) * (begin + 1)).long().minimum(begin)
    end = begin + torch.randint(max(1, clip // 2), clip + 1, (ranges,), generator=chance)
    if empty:
        nothing = int(torch.randint(ranges, (), generator=chance))
        end[nothing] = start[nothing]
    return torch.stack([start, end], 1)


def reference(
    query: torch.Tensor,
    key_value: torch.Tensor,
    k_ranges: torch.Tensor,
    cp_shuffle_num: int,
    clip_token_nums: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The attended values of this rank's rows, [T, Hq, D]; the next range's queries travel while one is computed."""
    world_size = dist.get_world_size(group)
    key_value = key_value.repeat_interleave(max(1, world_size // key_value.shape[1]), 1)
    check(query, key_value, cp_shuffle_num, clip_token_nums or 0, world_size)
    parts = torch.chunk(query, cp_shuffle_num)
    coming, arriving = start_to_heads(key_value, group), start_to_heads(parts[0], group)
    keys, values = joined(coming, cp_shuffle_num, clip_token_nums or None)
    outs = []
    for i, (start, end) in enumerate(k_ranges.tolist()):
        ready = arriving
        if i + 1 < cp_shuffle_num:
            arriving = start_to_heads(parts[i + 1], group)
        out = attend(waited(ready).flatten(0, 1), keys[start:end], values[start:end])
        outs.append(start_exchange(out.view(world_size, -1, *out.shape[1:]), group))
    return torch.cat([waited(out).transpose(0, 1).flatten(1, 2) for out in outs])


def check(query: torch.Tensor, key_value: torch.Tensor, ranges: int, clip: int, world_size: int) -> None:
    """Refuse what cannot be shared by the ranks."""
    if len(query) % ranges or clip > world_size * len(query) // ranges:
        raise ValueError(f"{len(query)} rows are not {ranges} ranges, of which {clip} positions stay")
    if query.shape[1] % world_size or key_value.shape[1] % world_size:
        raise ValueError(f"{query.shape[1]} and {key_value.shape[1]} heads cannot be shared by {world_size} ranks")


def start_to_heads(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    """Begin to turn rows of all heads, [S, H, D], into all ranks' rows of some heads, [W, S, H / W, D]."""
    return start_exchange(x.view(len(x), dist.get_world_size(group), -1, x.shape[2]).transpose(0, 1), group)


def start_exchange(pieces: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    """Begin to send piece j, along the first axis, to rank j; the result is there when the work is done."""
    pieces = pieces.contiguous()
    came = torch.empty_like(pieces)
    return came, dist.all_to_all_single(came, pieces, group=group, async_op=True)


def waited(exchange: tuple[torch.Tensor, dist.Work]) -> torch.Tensor:
    """What came, when it has come."""
    exchange[1].wait()
    return exchange[0]


def joined(exchange: tuple[torch.Tensor, dist.Work], ranges: int, clip: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all ranges, cut to `clip` positions each, [R * C, H / W, D]."""
    came = waited(exchange)
    whole = came.view(len(came), ranges, -1, *came.shape[2:]).transpose(0, 1).flatten(1, 2)
    keys, values = whole[:, :clip].flatten(0, 1).chunk(2, dim=-1)
    return keys, values


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of rows [any, Hq, D] to rows [any, Hkv, D]; zeros where there are no keys."""
    if not len(keys):
        return torch.zeros_like(query)
    copies = query.shape[1] // keys.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, *(x.repeat_interleave(copies, 1) for x in (keys, values))))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).contiguous()


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """One range and one query head at a time over the joined video in float64, some queries at a time."""
    ranges, clip = inputs[0][3], inputs[0][4]
    query, key_value = (
        torch.cat([args[i].view(ranges, -1, *args[i].shape[1:]) for args in inputs], dim=1).double() for i in range(2)
    )
    key_value = key_value[:, : clip or key_value.shape[1]].flatten(0, 1)
    out = torch.zeros_like(query)
    for i, (start, end) in enumerate(inputs[0][2].tolist()):
        for head in range(query.shape[2]):
            seen = key_value[start:end, head * key_value.shape[1] // query.shape[2]]
            out[i, :, head] = _attention(query[i, :, head], *seen.chunk(2, dim=1))
    return [part.flatten(0, 1) for part in out.chunk(len(inputs), dim=1)]


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of one head, [rows, D]; a sum over no keys is 0."""
    parts = []
    for rows in torch.split(query, max(1, 2**24 // max(1, len(keys)))):
        scores = rows @ keys.T / query.shape[1] ** 0.5
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """One key head, nothing cut: keys and values travel to all ranks, which is less than queries; ranges see about half."""
    ranges, local, width = size["R"], -(-size["C"] // world_size), size["D"]
    heads, rows = max(1, size["H"] // world_size) * world_size, ranges * local
    seen = local * world_size * (ranges * (ranges - 1) / 4 + 0.75 * ranges)
    return Cost(
        wire_bytes=(world_size - 1) * rows * 2 * width * itemsize,
        memory_bytes=rows * (2 * heads + 2) * width * itemsize,
        flops=4 * seen * local * heads * width,
    )


PROBLEM = Problem(
    number=77,
    slug="magi1_cso_async_attention",
    version=1,
    title="Attention of several ranges of queries, each spread over ranks, to ranges of keys; heads are split while it computes.",
    family="sequence-parallel-attention",
    parallelism="CP",
    collectives=("all_to_all_single",),
    origin="SandAI MAGI-1 context-shuffle-overlap attention",
    split="test",
    sizes={
        "tiny": Size("tiny", {"R": 3, "C": 41, "H": 12, "K": 4, "D": 16}),
        "default": Size("default", {"R": 4, "C": 150, "H": 8, "K": 4, "D": 32}),
        "odd": Size("odd", {"R": 3, "C": 131, "H": 6, "K": 2, "D": 40}),
        # Queries of 127 MiB in bf16 on each of 8 ranks; 9 TFLOP there.
        "large": Size("large", {"R": 4, "C": 21600, "H": 48, "K": 8, "D": 128}),
        # Up to 4 ranks; on more there are 48 heads and ranges of 21600.
        "upstream": Size("upstream", {"R": 4, "C": 12150, "H": 24, "K": 8, "D": 128}),
    },
    # A score of 20, rounded, moves its exponential by 20 round-offs.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
