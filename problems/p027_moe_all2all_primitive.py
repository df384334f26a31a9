"""#027 moe_all2all_primitive: blocks of rows go from every rank to every other one, in sizes that every pair has for itself.

Axes      M rows of a rank on average, N columns (not split), W ranks; S[s, d] rows go from rank s to rank d
In        local_tensor [sum of S[r, :], N], differs per rank; input_split_sizes: list S[r, :], or None: W equal blocks;
          output_split_sizes: list S[:, r], or None: W equal blocks; group (None: all ranks)
Out       [sum of S[:, r], N], differs per rank, new memory
Maths     the blocks addressed to this rank one after another in the order of their senders, bit for bit
Wire      all_to_all: a rank sends the rows that are not its own, (W-1)/W of M on average
Needs     any W
Not here  splits as tensors, other dims than the first
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, ragged, turn

Inputs = tuple[torch.Tensor, list[int] | None, list[int] | None, None]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values; every row has a binary exponent of its own.  In one trial of three the splits are None."""
    even = max(1, size["M"] // draw.world_size)
    if draw.profile == "upstream":
        values = torch.randn(even * draw.world_size, size["N"], generator=draw.own("local_tensor"))
        return values.to(draw.dtype), [even] * draw.world_size, [even] * draw.world_size, None
    if turn(draw, 3) == 2:
        return normal_rows((even * draw.world_size, size["N"]), draw.own("local_tensor")).to(draw.dtype), None, None, None
    table = split_table(draw, size["M"])
    values = normal_rows((sum(table[draw.rank]), size["N"]), draw.own("local_tensor"))
    return values.to(draw.dtype), table[draw.rank], [row[draw.rank] for row in table], None


def split_table(draw: Draw, rows: int) -> list[list[int]]:
    """S, equal on every rank: one receiver is hot, about a quarter of the other pairs have no rows."""
    chance, ranks = draw.shared("splits"), draw.world_size
    weights = torch.rand(ranks, ranks, generator=chance).add_(1 / 3)
    weights[torch.rand(ranks, ranks, generator=chance) < 1 / 4] = 0
    weights[:, int(torch.randint(ranks, (), generator=chance))] = 0.2 * ranks + 0.8
    totals = torch.tensor(ragged(rows * ranks, ranks, chance, least=1), device=weights.device)
    ends = (weights.double().cumsum(1) / weights.double().sum(1, keepdim=True) * totals[:, None]).round().long()
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])).tolist()


def reference(
    local_tensor: torch.Tensor,
    input_split_sizes: list[int] | None = None,
    output_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The rows addressed to this rank, [sum of output_split_sizes, N]."""
    rows = len(local_tensor) if output_split_sizes is None else sum(output_split_sizes)
    out = local_tensor.new_empty((rows, *local_tensor.shape[1:]))
    dist.all_to_all_single(out, local_tensor.contiguous(), output_split_sizes, input_split_sizes, group=group)
    return out


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """Every sender's rows, cut at its prefix sums: nothing is computed."""
    ranks = len(inputs)
    blocks = [torch.split(x, send if send is not None else len(x) // ranks) for x, send, _, _ in inputs]
    return [torch.cat([sent[rank] for sent in blocks]) for rank in range(ranks)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank: every rank's rows are spread over all ranks alike, whoever is hot."""
    count = size["M"] // world_size * world_size * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * itemsize,
        memory_bytes=2 * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=27,
    slug="moe_all2all_primitive",
    version=1,
    title="Send blocks of rows of any size, also none, from every rank to every other one.",
    family="moe",
    parallelism="EP",
    collectives=("all_to_all",),
    origin="VeOmni, Megatron-LM (all-to-all of mixture-of-experts dispatch)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 37}),
        "default": Size("default", {"M": 1024, "N": 512}),
        "odd": Size("odd", {"M": 1021, "N": 509}),
        # 1 GiB on a rank in bf16.
        "large": Size("large", {"M": 131072, "N": 4096}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
