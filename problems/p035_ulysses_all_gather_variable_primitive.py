"""#035 ulysses_all_gather_variable_primitive: tensors of unequal extent along one axis, joined along it.

Axes      M extent of the joined axis (ragged: rank r holds M_r, about M on average, sometimes none), N all others, W ranks
In        x with M_r at gather_dim, [M_r, N], [N, M_r], [N/2, M_r, 2] in turns, differs per rank: a rank does not know the
          others' extents; gather_dim, equal on every rank; group (None: all ranks)
Out       x's shape with the sum of all M_r at gather_dim, equal on every rank, new memory
Maths     out = x_0, x_1, ... one after another along gather_dim, bit for bit
Wire      all_gather of the extents, then of the tensors: a rank sends x to every other one, without multicast
Needs     any W
Not here  ranks that differ in another extent, padding in the result
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import normal_rows, ragged, turn

Inputs = tuple[torch.Tensor, int, None]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values in slices of unlike exponents; every other trial leaves one rank without any."""
    m, n, world_size = size["M"], size["N"], draw.world_size
    if draw.profile == "upstream":
        return torch.randn(m, n, generator=draw.own("x")).to(draw.dtype), 0, None
    chance = draw.shared("extents")
    more, empty = torch.randint(m * world_size, (2,), generator=chance).tolist()
    extents = ragged(m * world_size + more % (m // 4 + 1), world_size, chance, least=1)
    if turn(draw, 2, "nothing") == 0 and world_size > 1:
        extents[(empty + 1) % world_size] += extents[empty % world_size]
        extents[empty % world_size] = 0
    mine = extents[draw.rank]
    shape, dim = (((mine, n), 0), ((n, mine), 1), ((n // 2, mine, 2), 1))[turn(draw, 3)]
    return normal_rows(shape, draw.own("x")).to(draw.dtype), dim, None


def reference(x: torch.Tensor, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All ranks' x in rank order, joined along `gather_dim`; padded to the largest extent on the wire."""
    rows = x.movedim(gather_dim, 0)
    extents = gathered(torch.tensor([len(rows)], device=x.device), group).tolist()
    longest = max(1, *extents)
    padded = F.pad(rows, (0, 0) * (x.dim() - 1) + (0, longest - len(rows)))
    blocks = gathered(padded, group).chunk(len(extents))
    return torch.cat([block[:extent].movedim(0, gather_dim) for block, extent in zip(blocks, extents, strict=True)], gather_dim)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """The tensors one after another, in their own dtype: nothing is computed."""
    return [torch.cat([x for x, _, _ in inputs], dim=inputs[0][1])] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The average rank's tensor, and its extent, to every other rank."""
    count = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) * (count * itemsize + 8),
        memory_bytes=(1 + world_size) * count * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=35,
    slug="ulysses_all_gather_variable_primitive",
    version=1,
    title="Join tensors whose extents along one axis differ from rank to rank, in rank order.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_gather",),
    origin="VeOmni (Ulysses all-gather of unequal shards)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 29, "N": 34}),
        "default": Size("default", {"M": 512, "N": 512}),
        "odd": Size("odd", {"M": 509, "N": 514}),
        # 256 MiB in on average and 2 GiB out in bf16 at W = 8.
        "large": Size("large", {"M": 16384, "N": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
