"""#014 gemm_allgather: columns of a product, computed on every rank, are gathered into one matrix.

Axes      M rows, N columns in all (split: L = N // W on a rank), K inner extent, W ranks
In        A [M, K], in one trial equal on every rank, in the next not; B [K, L], differs per rank
Out       [M, W*L], equal on every rank
Maths     columns s*L .. (s+1)*L - 1 of out = A_s @ B_s, rounded to the dtype once
Wire      all_gather of M*L elements: a rank sends W-1 times as many, without multicast
Needs     any W; of N what W divides is used
Not here  an A that may be taken for shared, bias, activation
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.draws import turn
from problems.gemm import rank_scale


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values scaled by K^-1/4, and B's by a factor of its own per rank too; upstream's A always differs."""
    rows, inner, local = size["M"], size["K"], max(1, size["N"] // draw.world_size)
    public = draw.profile == "upstream"
    replicated = not public and turn(draw, 2) == 0
    a = torch.randn(rows, inner, generator=draw.shared("A") if replicated else draw.own("A"))
    b = torch.randn(inner, local, generator=draw.own("B"))
    if not public:
        a, b = a.mul_(inner**-0.25), b.mul_(inner**-0.25 * rank_scale(draw))
    return a.to(draw.dtype), b.to(draw.dtype)


def reference(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """All ranks' products side by side, [M, W*L]."""
    local = A @ B
    blocks = gathered(local).view(-1, *local.shape)
    return blocks.transpose(0, 1).reshape(len(local), -1)


def exact(inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """One contraction of stacked matrices in float64."""
    a, b = (torch.stack([args[i] for args in inputs]).double() for i in range(2))
    return [torch.einsum("smk,skl->msl", a, b).flatten(1)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The local product, and what costs less to send to every other rank: the product or what it is made of."""
    rows, inner, local = size["M"], size["K"], max(1, size["N"] // world_size)
    made_of, product = (rows + local) * inner, rows * local
    return Cost(
        wire_bytes=(world_size - 1) * min(made_of, product) * itemsize,
        memory_bytes=(made_of + world_size * product) * itemsize,
        flops=2 * product * inner,
    )


PROBLEM = Problem(
    number=14,
    slug="gemm_allgather",
    version=1,
    title="Multiply two local matrices and join the products of all ranks side by side.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("all_gather",),
    origin="Megatron-LM ColumnParallelLinear (gathered output)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 68, "K": 48}),
        "default": Size("default", {"M": 256, "N": 512, "K": 320}),
        "odd": Size("odd", {"M": 253, "N": 515, "K": 319}),
        # 128 MiB of A, 32 MiB of B and 256 MiB of products in bf16 at W = 8.
        "large": Size("large", {"M": 8192, "N": 16384, "K": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "K": 512}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
