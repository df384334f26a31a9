"""#086 tp_muon_orthogonalization: Newton-Schulz steps towards the nearest orthogonal matrix, of a matrix split over ranks.

Axes      R extent that every rank holds whole, C extent that is split (ragged: rank r holds C_r >= 1), W ranks
In        x [R, C_r] (partition_dim 1) or [C_r, R] (partition_dim 0), differs per rank; steps, coefficient_type and partition_dim,
          equal on every rank; group (None: all ranks)
Out       shape and dtype of x, differs per rank
Maths     X = x (transposed for partition_dim 0) / max(norm of the whole, 1e-7); step i with (a, b, c) = table[i mod length]:
          G = X X^T over all ranks, X = a X + (b G + c G G) X
Wire      all_reduce of one number, then of the symmetric G [R, R] once a step
Needs     any W; steps a multiple of the table's length
Not here  momentum, scaling by shape, several matrices, half-precision steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import ragged, turn

KINDS = (("simple", 5), ("quintic", 5), ("polar_express", 8), ("aol", 4))
"""Tables that take turns, with numbers of steps."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """A spectrum over one to two decades in turned rows, columns cut raggedly; tables and both partition axes take turns."""
    rows = size["R"]
    if draw.profile == "upstream":
        columns = -(-size["C"] // draw.world_size)
        x = torch.randn(rows, columns, generator=draw.own("x")).add_(0.01 * draw.rank)
        return x.to(draw.dtype), 5, "quintic", 1, None
    columns = ragged(max(size["C"], draw.world_size), draw.world_size, draw.shared("columns"), least=1)[draw.rank]
    turned = torch.linalg.qr(torch.randn(rows, rows, generator=draw.shared("mixing"))).Q
    x = turned * torch.logspace(0, -1, rows) @ torch.randn(rows, columns, generator=draw.own("x"))
    kind, steps = KINDS[turn(draw, len(KINDS))]
    axis = turn(draw, 3, "axis") % 2
    x = x if axis else x.T.contiguous()
    return x.to(draw.dtype), steps, kind, axis, None


TABLES = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4647, 0.5074),
        (2.2779, -1.6447, 0.4162),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": ((4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)),
}
"""Coefficients (a, b, c) of every step."""


def reference(
    x: torch.Tensor,
    steps: int = 5,
    coefficient_type: str = "quintic",
    partition_dim: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's part of the orthogonalised matrix, shaped like `x`."""
    table = TABLES[coefficient_type]
    assert x.dim() == 2
    assert partition_dim in (0, 1)
    assert steps % len(table) == 0
    whole = x if partition_dim else x.T
    whole = whole.to(torch.promote_types(x.dtype, torch.float32))
    norm = whole.square().sum()
    dist.all_reduce(norm, group=group)
    whole = whole / norm.sqrt_().clamp_(min=1e-7)
    for i in range(steps):
        a, b, c = table[i % len(table)]
        gram = whole @ whole.T
        dist.all_reduce(gram, group=group)
        whole = torch.addmm(whole, torch.addmm(gram, gram, gram, beta=b, alpha=c), whole, beta=a)
    return (whole if partition_dim else whole.T).to(x.dtype, memory_format=torch.contiguous_format)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """All steps as one polynomial of the Gram matrix's eigenvalues, in float64."""
    _, steps, kind, axis, _ = inputs[0]
    parts = [args[0].double() if axis else args[0].double().T for args in inputs]
    whole = torch.cat(parts, dim=1)
    whole = whole / torch.linalg.matrix_norm(whole).clamp(min=1e-7)
    value, vector = torch.linalg.eigh(whole @ whole.T)
    factor = torch.ones_like(value)
    for a, b, c in TABLES[kind] * (steps // len(TABLES[kind])):
        square = value * factor.square()
        factor = factor * (a + b * square + c * square.square())
    out = (vector * factor) @ (vector.T @ whole)
    cut = torch.split(out, [part.shape[1] for part in parts], dim=1)
    return [part if axis else part.T.contiguous() for part in cut]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Five steps: half of a Gram matrix in fp32 is summed over ranks, its square is shared out among them."""
    rows, columns, others = size["R"], max(1, size["C"] / world_size), world_size - 1
    return Cost(
        wire_bytes=5 * 2 * others / world_size * rows * (rows + 1) / 2 * 4,
        memory_bytes=2 * rows * columns * itemsize,
        flops=5 * (3 * rows**2 * columns + rows**3 / world_size),
    )


PROBLEM = Problem(
    number=86,
    slug="tp_muon_orthogonalization",
    version=1,
    title="Newton-Schulz orthogonalisation of a matrix whose rows or columns are split over ranks.",
    family="optimizer-sharding",
    parallelism="TP",
    collectives=("all_reduce",),
    origin="Megatron-LM tensor-parallel Muon",
    split="train",
    sizes={
        "tiny": Size("tiny", {"R": 23, "C": 61}),
        "default": Size("default", {"R": 128, "C": 512}),
        "odd": Size("odd", {"R": 127, "C": 509}),
        # 128 MiB of bf16 in all; a Gram matrix of 64 MiB in fp32 a step.
        "large": Size("large", {"R": 4096, "C": 16384}),
        "upstream": Size("upstream", {"R": 512, "C": 512}),
    },
    # Round-offs in the direction of a small singular value grow with it, some hundred times over the steps.
    tolerance=Tolerance(inner_ulps=1024),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
