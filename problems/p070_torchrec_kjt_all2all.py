"""#070 torchrec_kjt_all2all: ragged lists of ids, of several keys for every sample, go to the ranks that own the keys.

Axes      F keys, L_d of them on rank d (ragged, perhaps none), B_r samples of rank r (B on average), W ranks; a key has a list
          (length N on average, an eighth of them 0) for every sample
In        lengths int64 [F * B_r] by key, then sample; values int64 [sum of lengths]; batch_size = B_r; weights [sum of lengths]
          or None: all differ per rank.  key_splits = [L_0, L_1, ...] and stagger, a divisor of W, equal on every rank.
          stride_per_key: None, or F numbers of samples, one for each key, differ per rank; batch_size then has no effect.
          pg (None: all ranks)
Out       dict, differs per rank: lengths, values (and weights, if given) of the keys of this rank, by key, then rank of origin,
          then sample; ranks in the order 0, W/stagger, 2*W/stagger, ..., 1, 1 + W/stagger, ...; bit for bit.  And int64
          stride [] and stride_per_rank [W]: sum and list of the B_r, the latter in plain order;
          or, with stride_per_key, stride_per_key_per_rank [L_r, W]: numbers of samples, columns in the order of above
Wire      all_to_all of counts, lengths, values and weights
Needs     any W
Not here  pooling, lookups, keys on several ranks, the way back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import ragged
from problems.moe import exchanged

FORMS = ((True, False), (True, False), (False, True), (True, True), (False, False))
"""Whether there are weights and a stride per key, trial after trial; the first two give the same keys in the result."""
LONGEST = 16
"""List of a key, in means of that key."""
DENSE = 7 / 8
"""Share of lists that may hold something."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Skewed lengths, ids of 62 bits.

    Weights, strides per key and staggers take turns; in every third trial one of several ranks owns no key.
    """
    if draw.profile == "upstream":
        return _public(draw, size)
    ranks, splits = draw.world_size, _splits(draw, size["F"])
    batch, keys = ragged(size["B"] * ranks, ranks, draw.shared("batch_size"), least=1)[draw.rank], sum(splits)
    weighted, variable = FORMS[draw.trial % len(FORMS)]
    strides = torch.randint(2 * size["B"], (keys,), generator=draw.own("strides")) if variable else torch.full((keys,), batch)
    lengths = _lengths(draw, size["N"], strides)
    count = int(lengths.sum())
    values = torch.randint(2**62, (count,), generator=draw.own("values"))
    weights = torch.randn(count, generator=draw.own("weights")).to(draw.dtype) if weighted else None
    return lengths, values, splits, batch, None, weights, strides.tolist() if variable else None, _stagger(draw)


def _splits(draw: Draw, mean: int) -> list[int]:
    """Keys of every rank."""
    splits = ragged(mean * draw.world_size, draw.world_size, draw.shared("key_splits"), least=1)
    if draw.trial % 3 == 2 and draw.world_size > 1:
        frm, to = torch.randperm(draw.world_size, generator=draw.shared("idle")).tolist()[:2]
        splits[frm], splits[to] = 0, splits[frm] + splits[to]
    return splits


def _stagger(draw: Draw) -> int:
    """Divisors of W in turns; 1 and W change nothing, the first and third turn have others if there are any."""
    others = [n for n in range(2, draw.world_size) if draw.world_size % n == 0] or [draw.world_size]
    turns = [others[0], 1, *others[1:]]
    return turns[draw.trial % len(turns)]


def _lengths(draw: Draw, mean: int, strides: torch.Tensor) -> torch.Tensor:
    """By a power law with a mean of its own, half to three halves of `mean`, for every key; an eighth of them 0."""
    keys, chance = len(strides), draw.own("lengths")
    means = torch.linspace(mean / 2, 3 * mean / 2, keys)[torch.randperm(keys, generator=draw.shared("means"))]
    half = means.repeat_interleave(strides) / 2
    lengths = torch.rand(len(half), generator=chance).rsqrt_().clamp_(max=2 * LONGEST).mul_(half).floor_().long()
    return lengths.masked_fill_(torch.rand(len(half), generator=chance) >= DENSE, 0)


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """One, two or three keys on a rank, as many samples on all ranks, lengths 5 to 20."""
    splits = [1 + rank % 3 for rank in range(draw.world_size)]
    lengths = torch.randint(5, 21, (sum(splits) * size["B"],), generator=draw.own("lengths"))
    values = torch.randint(1_000_000, (int(lengths.sum()),), generator=draw.own("values"))
    return lengths, values, splits, size["B"], None, None, None, 1


def reference(
    lengths: torch.Tensor,
    values: torch.Tensor,
    key_splits: list[int],
    batch_size: int,
    pg: dist.ProcessGroup | None = None,
    weights: torch.Tensor | None = None,
    stride_per_key: list[int] | None = None,
    stagger: int = 1,
) -> dict[str, torch.Tensor]:
    """Lists of this rank's keys for the samples of all ranks; a table of counts travels first."""
    ranks, mine = len(key_splits), key_splits[dist.get_rank(pg)]
    strides = lengths.new_tensor([batch_size] * sum(key_splits) if stride_per_key is None else stride_per_key)
    counts = torch.stack([strides, sums_of_runs(lengths, strides)], dim=1)
    came = exchanged(counts, key_splits, [mine] * ranks, pg).view(ranks, mine, 2)
    per_rank = torch.stack([part.sum(0) for part in torch.split(counts, key_splits)])
    send, receive = torch.stack([per_rank, came.sum(1)]).permute(0, 2, 1).tolist()
    sources = torch.arange(ranks, device=lengths.device).view(stagger, -1).T.flatten()

    out = {}
    for name, rows, unit in (("lengths", lengths, 0), ("values", values, 1), ("weights", weights, 1)):
        if rows is not None:
            out[name] = by_key(exchanged(rows, send[unit], receive[unit], pg), came[..., unit], sources)
    if stride_per_key is None:
        batches = gathered(lengths.new_tensor([batch_size]), pg)
        return {**out, "stride": batches.sum(), "stride_per_rank": batches}
    return {**out, "stride_per_key_per_rank": came[sources, :, 0].T.contiguous()}


def sums_of_runs(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sums of the first counts[0] values, of the counts[1] after them, and so on."""
    sums, ends = torch.cat([values.new_zeros(1), values.cumsum(0)]), counts.cumsum(0)
    return sums[ends] - sums[ends - counts]


def by_key(rows: torch.Tensor, sizes: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Chunks (rank, key) of sizes[rank, key] rows as one key after the other, each from `sources` in their order."""
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)[sources].T.flatten()
    lengths = sizes[sources].T.flatten()
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths, output_size=len(rows))
    return rows.index_select(0, shift + torch.arange(len(rows), device=rows.device))


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[dict[str, torch.Tensor]]:
    """Cuts what every rank has into its keys and picks these one by one: nothing is computed."""
    splits, stagger, ranks = inputs[0][2], inputs[0][7], len(inputs)
    sources = [x + ranks // stagger * y for x in range(ranks // stagger) for y in range(stagger)]
    strides = [[args[3]] * sum(splits) if args[6] is None else args[6] for args in inputs]
    cut = [_cut(args, numbers) for args, numbers in zip(inputs, strides, strict=True)]
    batches = inputs[0][0].new_tensor([args[3] for args in inputs])
    outputs, first = [], 0
    for count in splits:
        keys = range(first, first + count)
        first += count
        out = {name: _joined(args, [cut[s][name][key] for key in keys for s in sources]) for name, args in _given(inputs[0])}
        if inputs[0][6] is None:
            out |= {"stride": batches.sum(), "stride_per_rank": batches}
        else:
            numbers = batches.new_tensor([[strides[s][key] for s in sources] for key in keys])
            out["stride_per_key_per_rank"] = numbers.view(count, ranks)
        outputs.append(out)
    return outputs


def _given(args: tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
    """What is cut by keys."""
    named = (("lengths", args[0]), ("values", args[1]), ("weights", args[5]))
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _cut(args: tuple[Any, ...], strides: list[int]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Pieces of one rank's tensors, one for every key."""
    lists = [int(part.sum()) for part in torch.split(args[0], strides)]
    return {name: torch.split(tensor, strides if name == "lengths" else lists) for name, tensor in _given(args)}


def _joined(like: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Perhaps of none."""
    return torch.cat([like[:0], *pieces])


def cost(size: Size, world_size: int, itemsize: int) -> Cost:  # noqa: ARG001  whole numbers are always int64
    """An average rank, without weights: lengths of two bytes travel, ids of eight."""
    lists = size["B"] * size["F"] * world_size
    entries = lists * DENSE * max(0, size["N"] * (1 - 1 / (4 * LONGEST)) - 1 / 2)
    return Cost(
        wire_bytes=(world_size - 1) / world_size * (2 * lists + 8 * entries),
        memory_bytes=2 * 8 * (lists + entries),
        flops=0,
    )


PROBLEM = Problem(
    number=70,
    slug="torchrec_kjt_all2all",
    version=1,
    title="Send ragged lists of ids to the ranks that own their keys and sort them by key.",
    family="recsys",
    parallelism="MP",
    collectives=("all_to_all_single",),
    origin="TorchRec KJTAllToAll (sparse data distribution)",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"B": 7, "F": 2, "N": 5}),
        "default": Size("default", {"B": 512, "F": 4, "N": 16}),
        "odd": Size("odd", {"B": 509, "F": 3, "N": 13}),
        # 55 MB of lengths and 370 MB of ids per rank at W = 8.
        "large": Size("large", {"B": 32768, "F": 26, "N": 8}),
        # The public F is that of 3, 6, .. ranks; its lengths are 12.5 on average.
        "upstream": Size("upstream", {"B": 512, "F": 2, "N": 13}),
    },
    # Whole numbers, and weights that are copied.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
