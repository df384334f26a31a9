"""#059 physicsnemo_distributed_rfft: 2-D Fourier transform of a real field, split along one axis before it, the other after it.

Axes      B batch, C channels, Y and X extents of the field (both rounded up to multiples of W), W ranks
In        x [B, C, Y, X/W] or [B*C, Y, X/W], differs per rank; s, extents to crop or pad to, None for one that stays;
          dim, the two axes, perhaps counted from the end; norm ("ortho", "forward", "backward"), equal on every rank;
          group (None: all ranks)
Out       complex [.., s[0]/W, s[1]//2 + 1]: the rank's rows, complex64 (complex128 for float64)
Maths     the rank's rows of rfft2 of the field joined along dim[1]: fft along dim[0], then along dim[1], the first half kept
Wire      all_to_all of the half-transformed field
Needs     W divides Y, X and s[0]
Not here  ragged parts, more than two axes, half-precision transforms
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
    """Noise with an offset and slope per rank; norms, ways to name axes and s, and numbers of axes take turns.

    In one turn of four one axis is cropped and the other one padded.
    """
    batch, channels = size["B"], size["C"]
    rows, columns = (-(-size[axis] // draw.world_size) * draw.world_size for axis in "YX")
    x = torch.randn(batch, channels, rows, columns // draw.world_size, generator=draw.own("x"))
    if draw.profile == "upstream":
        return x.flatten(0, 1).to(draw.dtype), (rows, columns), (1, 2), "ortho", None
    x += torch.randn(batch, channels, 1, 1, generator=draw.own("offset"))
    x *= 0.5 + torch.rand(rows, 1, generator=draw.own("rows"))
    norm, naming = NORMS[turn(draw, 3, "norm")], turn(draw, 4, "axes")
    more = draw.world_size * (1 - 2 * int(rows > draw.world_size and torch.randint(2, (), generator=draw.shared("s")) == 0))
    s = ((rows, columns), (None, columns), (rows, None), (rows + more, columns - (3 if more > 0 else -3)))[naming]
    x = x if naming % 2 else x.flatten(0, 1)
    dim = (-2, -1) if naming > 1 else (x.dim() - 2, x.dim() - 1)
    return x.to(draw.dtype), s, dim, norm, None


def reference(
    x: torch.Tensor,
    s: Sequence[int | None],
    dim: Sequence[int],
    norm: str = "ortho",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's part along dim[0] of the transform; the real field's half along dim[1]."""
    first, second = (axis % x.dim() for axis in dim)
    half = torch.fft.fft(x.to(torch.promote_types(x.dtype, torch.float32)), n=s[0], dim=first, norm=norm)
    whole: torch.Tensor = torch.fft.fft(transposed(half, first, second, group), n=s[1], dim=second, norm=norm)
    return whole.narrow(second, 0, whole.shape[second] // 2 + 1).contiguous()


def transposed(x: torch.Tensor, cut: int, joined: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Complex x with one axis cut into a piece per rank and another one joined from all ranks."""
    world_size = dist.get_world_size(group)
    pieces = torch.view_as_real(torch.stack(x.chunk(world_size, cut)).contiguous())
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return torch.cat(list(torch.view_as_complex(came)), joined)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The transform for real fields, of the joined field in float64."""
    _, s, dim, norm, _ = inputs[0]
    field = torch.cat([args[0].double() for args in inputs], dim=dim[1])
    extents = [field.shape[axis] if n is None else n for n, axis in zip(s, dim, strict=True)]
    return list(torch.fft.rfft2(field, s=extents, dim=dim, norm=norm).chunk(len(inputs), dim=dim[0]))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Half of a complex field, which the symmetry of a real one allows, goes over the wire."""
    rows, columns = (-(-size[axis] // world_size) * world_size for axis in "YX")
    count = size["B"] * size["C"] * rows * columns / world_size
    return Cost(
        wire_bytes=(world_size - 1) / world_size * count * max(4, itemsize),
        memory_bytes=count * itemsize + count / columns * (columns // 2 + 1) * 8,
        flops=2.5 * count * (rows * columns).bit_length(),
    )


PROBLEM = Problem(
    number=59,
    slug="physicsnemo_distributed_rfft",
    version=1,
    title="Two-dimensional Fourier transform of a real field whose columns are split over ranks.",
    family="scientific",
    parallelism="spatial",
    collectives=("all_to_all_single",),
    origin="NVIDIA PhysicsNeMo distributed rfft2",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "C": 1, "Y": 14, "X": 22}),
        "default": Size("default", {"B": 2, "C": 3, "Y": 120, "X": 240}),
        "odd": Size("odd", {"B": 1, "C": 3, "Y": 97, "X": 131}),
        # 4 GiB of field in fp32 over all ranks.
        "large": Size("large", {"B": 16, "C": 4, "Y": 4096, "X": 4096}),
        "upstream": Size("upstream", {"B": 16, "C": 1, "Y": 1024, "X": 1024}),
    },
    # Round-offs add up once per level of a transform, some 12 to 24 of them, and partly cancel.
    tolerance=Tolerance(inner_ulps=16),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
