"""#072 hyena_forward_cp: a gated causal convolution with filters as long as the sequence, which is split over ranks.

Axes      B batch, C channels (rounded up to a multiple of 4*W) in groups of group_dim, L = 2 * W chunks of N positions, W ranks
In        x1_seq, x2_seq, v_seq [B, C, 2*N], differ per rank: with_zigzag_splitting, chunks r and 2*W - 1 - r of the sequence,
          else positions 2*N*r .. 2*N*(r+1) - 1; h [num_groups, K], conv_bias [C], num_groups, group_dim and
          with_zigzag_splitting, equal on every rank; group (None: all ranks)
Out       [B, 2*N, C], the rank's own positions
Maths     z = x2 * v; out = x1 * (causal convolution of z with the filter of the channel's group + conv_bias * z) over the
          whole sequence, in at least float32; z and the sum are rounded to the dtype
Wire      z to ranks that hold a part of the channels and the filtered z back: a rank sends 2*(W-1)/W of B*C*2*N elements
Needs     any W
Profiles  the filters of `upstream` have 4*N taps, which wrap around at W = 1, as in a circular convolution of length 2*L
Not here  the projections before and after, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn
from problems.ulysses import all_to_all


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal signals; filters that fade at a rate of their own, some within a chunk, some never.

    Group sizes, filter lengths up to the whole sequence, zigzag and plain order take turns.
    """
    channels, local = channels_of(size, draw.world_size), 2 * size["N"]
    x1, x2, v = (torch.randn(size["B"], channels, local, generator=draw.own(name)) for name in ("x1", "x2", "v"))
    if draw.profile == "upstream":
        taps = torch.arange(2 * channels * local, dtype=torch.bfloat16).view(channels, -1) / (2 * local)
        bias = torch.arange(channels, dtype=torch.bfloat16) / channels
        return *(x.to(draw.dtype) for x in (x1, x2, v, taps, bias)), channels, 1, None, True
    group_dim = 2 ** turn(draw, 3, "group_dim")
    length = max(2, draw.world_size * local * (1 + turn(draw, 5, "taps")) // 5)
    reach = 4 * (draw.world_size * local / 2) ** torch.rand(channels // group_dim, 1, generator=draw.shared("reach"))
    h = torch.randn(channels // group_dim, length, generator=draw.shared("h")).mul_(torch.exp(-torch.arange(length) / reach))
    h /= reach**0.5
    bias = torch.randn(channels, generator=draw.shared("conv_bias"))
    v += torch.randn(size["B"], channels, 1, generator=draw.own("offset"))
    zigzag = turn(draw, 2, "zigzag") == 0
    return *(x.to(draw.dtype) for x in (x1, x2, v, h, bias)), channels // group_dim, group_dim, None, zigzag


def channels_of(size: Size, world_size: int) -> int:
    """As many that every rank can hold the same number of groups of 4."""
    return -(-size["C"] // (4 * world_size)) * 4 * world_size


def reference(
    x1_seq: torch.Tensor,
    x2_seq: torch.Tensor,
    v_seq: torch.Tensor,
    h: torch.Tensor,
    conv_bias: torch.Tensor,
    num_groups: int,
    group_dim: int,
    group: dist.ProcessGroup | None = None,
    with_zigzag_splitting: bool = True,
) -> torch.Tensor:
    """The gated, filtered signal at the rank's positions, [B, 2*N, C]."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    wide = torch.promote_types(v_seq.dtype, torch.float32)
    z = all_to_all(x2_seq * v_seq, 1, 2, group)
    z = (in_order(z, world_size) if with_zigzag_splitting else z).to(wide)
    taps = torch.chunk(h.view(num_groups, -1), world_size)[rank].to(wide)
    bias = torch.chunk(conv_bias, world_size)[rank].to(wide)
    y = (long_convolution(z, taps, group_dim) + z * bias[:, None]).to(v_seq.dtype)
    back = all_to_all(in_zigzag(y, world_size) if with_zigzag_splitting else y, 2, 1, group)
    return (x1_seq * back).transpose(1, 2).contiguous()


def in_order(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """All ranks' pairs of chunks, rank by rank, as the sequence: the second ones run backwards after the first ones."""
    first, second = x.view(*x.shape[:2], world_size, 2, -1).unbind(3)
    return torch.cat([first, second.flip(2)], dim=2).flatten(2)


def in_zigzag(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """The reverse of `in_order`."""
    first, second = x.view(*x.shape[:2], 2, world_size, -1).unbind(2)
    return torch.stack([first, second.flip(2)], dim=3).flatten(2)


def long_convolution(z: torch.Tensor, taps: torch.Tensor, repeats: int) -> torch.Tensor:
    """Each filter over as many channels, by transforms of twice the length."""
    length = z.shape[-1]
    spectrum = torch.fft.rfft(taps, n=2 * length).repeat_interleave(repeats, dim=0)
    y: torch.Tensor = torch.fft.irfft(torch.fft.rfft(z, n=2 * length) * spectrum, n=2 * length)
    return y[..., :length]


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """One product of blocks of the whole sequence with a Toeplitz matrix for each distance between blocks, in float64."""
    *_, h, bias, groups, group_dim, _, zigzag = inputs[0]
    x1, x2, v = (_whole([args[i].double() for args in inputs], zigzag=zigzag) for i in range(3))
    taps = h.view(groups, -1).double().repeat_interleave(group_dim, 0)[:, : 2 * v.shape[-1]]
    z = x2 * v
    out = x1 * (_filtered(z, taps) + z * bias.double()[:, None])
    return [part.transpose(1, 2) for part in _parts(out, len(inputs), zigzag=zigzag)]


def _whole(parts: list[torch.Tensor], *, zigzag: bool) -> torch.Tensor:
    """The sequence from what its ranks hold."""
    if not zigzag:
        return torch.cat(parts, dim=2)
    halves = [part.chunk(2, dim=2) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim=2)


def _parts(whole: torch.Tensor, world_size: int, *, zigzag: bool) -> list[torch.Tensor]:
    """What its ranks hold of a sequence."""
    if not zigzag:
        return list(whole.chunk(world_size, dim=2))
    chunks = whole.chunk(2 * world_size, dim=2)
    return [torch.cat([chunks[rank], chunks[-1 - rank]], dim=2) for rank in range(world_size)]


def _filtered(z: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Causal convolution along the last axis, [B, C, L]; taps beyond L + 1 see what comes 2*L later."""
    length, count = z.shape[2], taps.shape[1]
    if count > length + 1:
        return _filtered(torch.cat([z, torch.zeros_like(z), z, torch.zeros_like(z)], dim=2), taps)[..., 2 * length : 3 * length]
    step = max(8, int(length**0.5))
    blocks = F.pad(z, (0, -length % step)).view(*z.shape[:2], -1, step).transpose(0, 1)
    apart = torch.arange(step, device=z.device)[:, None] - torch.arange(step, device=z.device)
    out = torch.zeros_like(blocks)
    for distance in range(min(blocks.shape[2], (count + step - 2) // step + 1)):
        tap = apart + distance * step
        matrix = taps[:, tap.clamp(0, count - 1)] * ((tap >= 0) & (tap < count))
        out[:, :, distance:] += blocks[:, :, : blocks.shape[2] - distance] @ matrix.transpose(1, 2)[:, None]
    return out.transpose(0, 1).flatten(2)[..., :length]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Two exchanges, and three transforms of twice the length for every channel; filters of whole length, each of one channel."""
    channels, local = channels_of(size, world_size), 2 * size["N"]
    count, length = size["B"] * channels * local, world_size * local
    return Cost(
        wire_bytes=2 * (world_size - 1) / world_size * count * itemsize,
        memory_bytes=(4 * count + channels * local) * itemsize,
        flops=15 * count * (2 * length).bit_length(),
    )


PROBLEM = Problem(
    number=72,
    slug="hyena_forward_cp",
    version=1,
    title="Gated causal convolution with filters as long as the sequence, which is split over ranks, in zigzag order or not.",
    family="linear-attention-cp",
    parallelism="CP",
    collectives=("all_to_all_single",),
    origin="NeMo / Savanna Hyena operator (StripedHyena)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "C": 12, "N": 7}),
        "default": Size("default", {"B": 1, "C": 128, "N": 128}),
        "odd": Size("odd", {"B": 2, "C": 60, "N": 127}),
        # Three signals of 128 MiB in bf16 in and one out on a rank, filters of 1 GiB.
        "large": Size("large", {"B": 1, "C": 4096, "N": 8192}),
        "upstream": Size("upstream", {"B": 1, "C": 1024, "N": 1024}),
    },
    # Round-offs of a transform add up once per level, some 10 to 20 of them, and partly cancel.
    tolerance=Tolerance(inner_ulps=32),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
