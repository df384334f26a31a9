"""#060 physicsnemo_distributed_irfft: a real field from its half spectrum, which is split by rows; the field is split by columns.

Axes      B batch, C channels, Y and X extents of the field (both rounded up to multiples of W), W ranks
In        x complex [B, C, Y/W, X//2 + 1], differs per rank; s = (Y, X), or None under which Y is that of all ranks together and
          X = 2*(columns - 1); dim, the last two axes, perhaps counted from the end; norm ("ortho", "forward", "backward"), equal
          on every rank; group (None: all ranks)
Out       real [B, C, Y, X/W]: the rank's columns
Maths     the rank's columns of irfft2 of all rows joined; the spectrum need not be that of a real field in columns 0 and X/2
Wire      all_to_all of the half-transformed field
Needs     W divides Y and X
Not here  cropping and padding, ragged parts, more than two axes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn

NORMS = ("ortho", "forward", "backward")


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Complex noise at a scale of its own per row; norms, explicit s or None and ways to name axes take turns."""
    world_size, lead = draw.world_size, (size["B"], size["C"])
    rows, columns = (-(-size[axis] // world_size) * world_size for axis in "YX")
    shape = *lead, rows // world_size, columns // 2 + 1
    kind = torch.complex128 if draw.dtype == torch.float64 else torch.complex64
    x = torch.randn(*shape, 2, generator=draw.own("x"))
    x *= torch.rand(*shape[:-1], 1, 1, generator=draw.own("rows")).mul_(3).exp2_()
    spectrum = torch.view_as_complex(x).to(kind)
    if draw.profile == "upstream":
        return spectrum, (rows, columns), (-2, -1), "ortho", None
    norm, naming = NORMS[turn(draw, 3, "norm")], turn(draw, 4, "axes")
    s = None if naming % 2 and columns % 2 == 0 else (rows, columns)
    return spectrum, s, (-2, -1) if naming > 1 else (2, 3), norm, None


def reference(
    x: torch.Tensor,
    s: Sequence[int] | None,
    dim: Sequence[int],
    norm: str = "ortho",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's columns of the real field."""
    first, second = (axis % x.dim() for axis in dim)
    columns = 2 * (x.shape[second] - 1) if s is None else s[1]
    # The real part of the whole needs each pair of mirrored columns but once, with twice the weight.
    pairs = (columns - 1) // 2
    weight = x.real.new_ones(x.shape[second])
    weight[1 : pairs + 1] = 2
    half: torch.Tensor = torch.fft.ifft(x * weight, n=columns, dim=second, norm=norm)
    whole = transposed(half, second, first, group)
    field: torch.Tensor = torch.fft.ifft(whole, dim=first, norm=norm)
    return field.real.contiguous()


def transposed(x: torch.Tensor, cut: int, joined: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Complex x with one axis cut into a piece per rank and another one joined from all ranks."""
    world_size = dist.get_world_size(group)
    pieces = torch.view_as_real(torch.stack(x.chunk(world_size, cut)).contiguous())
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return torch.cat(list(torch.view_as_complex(came)), joined)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The mirrored half put in place, then a complex transform of the whole in float64."""
    _, s, dim, norm, _ = inputs[0]
    x = torch.cat([args[0].to(torch.complex128) for args in inputs], dim=dim[0])
    columns = 2 * (x.shape[-1] - 1) if s is None else s[1]
    mirrored = x[..., 1 : columns - x.shape[-1] + 1].conj()
    mirrored = mirrored.flip(-2).roll(1, -2).flip(-1)
    field = torch.fft.ifft2(torch.cat([x, mirrored], dim=-1), norm=norm).real
    return list(field.chunk(len(inputs), dim=dim[1]))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Half of a complex field, which is all that the input tells, goes over the wire."""
    rows, columns = (-(-size[axis] // world_size) * world_size for axis in "YX")
    count = size["B"] * size["C"] * rows * columns / world_size
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * max(4, itemsize),
        memory_bytes=2 * count * max(4, itemsize),
        flops=2.5 * count * (rows * columns).bit_length(),
    )


PROBLEM = Problem(
    number=60,
    slug="physicsnemo_distributed_irfft",
    version=1,
    title="A real field, split by columns, from the half of its two-dimensional spectrum, split by rows.",
    family="scientific",
    parallelism="spatial",
    collectives=("all_to_all_single",),
    origin="NVIDIA PhysicsNeMo distributed irfft2",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 1, "C": 2, "Y": 14, "X": 21}),
        "default": Size("default", {"B": 2, "C": 3, "Y": 120, "X": 240}),
        "odd": Size("odd", {"B": 1, "C": 3, "Y": 97, "X": 131}),
        # 660 MB of fp32 field over all ranks, the extents of ERA5.
        "large": Size("large", {"B": 8, "C": 20, "Y": 720, "X": 1440}),
        "upstream": Size("upstream", {"B": 2, "C": 10, "Y": 720, "X": 1440}),
    },
    # Round-offs add up once per level of a transform, some 12 to 24 of them, and partly cancel.
    tolerance=Tolerance(inner_ulps=16),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
