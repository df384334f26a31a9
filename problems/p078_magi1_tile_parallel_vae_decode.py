"""#078 magi1_tile_parallel_vae_decode: a latent video is decoded tile by tile; ranks share the tiles, which are blended.

Axes      B batch, C channels, T Y X extents of the latent video, W ranks; per axis tile extent t, overlap f, upsampling u
In        z [B, C, T, Y, X], differs per rank; tile extents (length: one more if first_frame_as_image), overlaps as shares of a
          tile, upsampling (spatial: spatial_upsample * sr_ratio), equal on every rank; group (None: all ranks)
Out       [B, 3, T*u, Y*u, X*u] in the dtype of z, equal on every rank
Maths     1. per axis tiles begin at multiples of int(t * (1 - f)) and end t later or at the border
          2. sorted by size, largest first, else in order of T, Y, X, the i-th tile is rank i % W's, which decodes it from its
             own z: trilinear upsampling, half-pixel centres, of the first 3 channels (of fewer, again from the first)
          3. along T, then Y, then X the first e positions of a tile become last[j] * (1 - j / e) + tile[j] * j / e, where last
             is the end of the tile before it as decoded, not as blended; e = int(t * u * f), at most either tile's length
          4. the first t * u - int(t * u * f) positions of every tile per axis, side by side, are the video
          All of it in at least float32; what travels may be rounded to the dtype
Wire      three channels of the ranks' own latent tiles; as written, decoded and blended tiles
Needs     int(t * (1 - f)) > 0
Profiles  every rank has a z of its own in both: were they equal, there would be nothing to send
Not here  a learned decoder; overlaps that are no whole positions, for which the video is longer (the inputs have none)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.draws import turn

Place = tuple[int, ...]
"""Which tile it is along every axis."""
Span = list[tuple[int, int]]
"""Begin and end along every axis."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal values at an offset of its own per rank and channel; overlaps from one position to half a tile.

    Longer tiles, and half of the spatial upsampling as sr_ratio, take turns.
    """
    shape, tile = [size[axis] for axis in "BCTYX"], (size["t"], size["y"], size["x"])
    z = torch.randn(shape, generator=draw.own("z"))
    if draw.profile == "upstream":
        return z.to(draw.dtype), *tile, 0.25, 0.0, size["us"], size["ut"], 1, False, None
    z += torch.randn(*shape[:2], 1, 1, 1, generator=draw.own("offset"))
    first, ratio = turn(draw, 3, "first") == 0, 1 if size["us"] % 2 else 1 + turn(draw, 2, "ratio")
    spatial = _overlap(draw, "spatial", [(extent, size["us"]) for extent in tile[1:]])
    temporal = _overlap(draw, "temporal", [(tile[0] + first, size["ut"])])
    return z.to(draw.dtype), *tile, spatial, temporal, size["us"] // ratio, size["ut"], ratio, first, None


def _overlap(draw: Draw, name: str, axes: list[tuple[int, int]]) -> float:
    """A share of tiles (extent, upsampling) which is whole positions of all of them, also after rounding."""
    fits = []
    for positions in range(1, axes[0][0] // 2 + 1):
        share = positions / axes[0][0]
        strides = [int(extent * (1 - share)) for extent, _ in axes]
        if all(int(t * u * share) == (t - s) * u and s + t * share == t for (t, u), s in zip(axes, strides, strict=True)):
            fits.append(share)
    return fits[int(torch.randint(len(fits), (), generator=draw.shared(name)))]


def reference(
    z: torch.Tensor,
    tile_latent_min_length: int, tile_latent_min_height: int, tile_latent_min_width: int,
    spatial_tile_overlap_factor: float, temporal_tile_overlap_factor: float,
    spatial_upsample: int, temporal_upsample: int,
    sr_ratio: int = 1, first_frame_as_image: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The decoded video; each rank decodes and blends its own tiles."""
    tile = tile_latent_min_length + first_frame_as_image, tile_latent_min_height, tile_latent_min_width
    overlaps = temporal_tile_overlap_factor, spatial_tile_overlap_factor, spatial_tile_overlap_factor
    ups = [temporal_upsample, spatial_upsample * sr_ratio, spatial_upsample * sr_ratio]
    extents = [int(t * u * f) for t, u, f in zip(tile, ups, overlaps, strict=True)]
    spans = latent_tiles(z.shape[2:], tile, overlaps)
    large = {at: [(end - begin) * u for (begin, end), u in zip(span, ups, strict=True)] for at, span in spans.items()}
    kept = {at: [min(n, t * u - e) for n, t, u, e in zip(large[at], tile, ups, extents, strict=True)] for at in spans}
    owned = dealt(spans, dist.get_world_size(group))
    mine = owned[dist.get_rank(group)]
    decoded = exchanged([decode(z, spans[at], ups) for at in mine], large, owned, z, group)
    blended = [blend(decoded, at, extents)[:, :, : kept[at][0], : kept[at][1], : kept[at][2]] for at in mine]
    return assembled(exchanged(blended, kept, owned, z, group))


def latent_tiles(extents: Sequence[int], tile: Sequence[int], overlaps: Sequence[float]) -> dict[Place, Span]:
    """Of every tile, begin and end along every axis."""
    axes = []
    for extent, length, overlap in zip(extents, tile, overlaps, strict=True):
        stride = int(length * (1 - overlap))
        if stride <= 0:
            raise ValueError(f"tiles of {length} that overlap by {overlap} do not advance")
        axes.append([(begin, min(begin + length, extent)) for begin in range(0, extent, stride)])
    return {at: [axis[i] for axis, i in zip(axes, at, strict=True)] for at in product(*(range(len(axis)) for axis in axes))}


def dealt(spans: dict[Place, Span], world_size: int) -> list[list[Place]]:
    """Every rank's tiles; the largest are dealt first."""
    order = sorted(spans, key=lambda at: -math.prod(end - begin for begin, end in spans[at]))
    return [order[rank::world_size] for rank in range(world_size)]


def decode(z: torch.Tensor, span: Span, ups: list[int]) -> torch.Tensor:
    """Three upsampled channels of one tile in the dtype of z."""
    (t0, t1), (y0, y1), (x0, x1) = span
    channels = z[:, :3, t0:t1, y0:y1, x0:x1].to(torch.promote_types(z.dtype, torch.float32))
    large = F.interpolate(channels, scale_factor=[float(u) for u in ups], mode="trilinear", align_corners=False)
    return large[:, [i % large.shape[1] for i in range(3)]].to(z.dtype)


def exchanged(
    tiles: list[torch.Tensor], shapes: dict[Place, list[int]], owned: list[list[Place]], like: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> dict[Place, torch.Tensor]:
    """All ranks' tiles, [B, 3, *shape], from each rank's own."""
    counts = [[3 * len(like) * math.prod(shapes[at]) for at in places] for places in owned]
    flat = torch.cat([*(tile.flatten() for tile in tiles), like.new_empty(0)])
    parts = gathered(F.pad(flat, (0, max(map(sum, counts)) - len(flat))), group).chunk(len(owned))
    found = {}
    for places, sizes, part in zip(owned, counts, parts, strict=True):
        for at, piece in zip(places, torch.split(part[: sum(sizes)], sizes), strict=False):
            found[at] = piece.view(len(like), 3, *shapes[at])
    return found


def blend(tiles: dict[Place, torch.Tensor], at: Place, extents: list[int]) -> torch.Tensor:
    """One tile, blended along every axis with the one before it."""
    out = tiles[at].to(torch.promote_types(tiles[at].dtype, torch.float32), copy=True)
    for axis, extent in enumerate(extents):
        before = tiles.get((*at[:axis], at[axis] - 1, *at[axis + 1 :]))
        if before is None or not extent:
            continue
        count = min(extent, before.shape[axis + 2], out.shape[axis + 2])
        weight = torch.arange(count, 0, -1, device=out.device, dtype=out.dtype).div_(count).view(-1, *[1] * (2 - axis))
        last = before.narrow(axis + 2, before.shape[axis + 2] - count, count)
        out.narrow(axis + 2, 0, count).lerp_(last.to(out.dtype), weight)
    return out.to(tiles[at].dtype)


def assembled(tiles: dict[Place, torch.Tensor]) -> torch.Tensor:
    """All tiles side by side."""
    frames, rows, columns = (1 + max(at[axis] for at in tiles) for axis in range(3))
    strips = [[torch.cat([tiles[t, y, x] for x in range(columns)], -1) for y in range(rows)] for t in range(frames)]
    return torch.cat([torch.cat(strip, -2) for strip in strips], -3)


class _Cut(NamedTuple):
    """One tile along one axis: begin and end in latent positions, where it goes, how much, and how much of it is blended."""

    begin: int
    end: int
    to: int
    kept: int
    blended: int


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """In float64: every tile, upsampled by matrices, adds its part to its own place and to the next one along each axis."""
    (z, t, y, x, spatial, temporal, up, time_up, ratio, first, _), world_size = inputs[0], len(inputs)
    ups = time_up, up * ratio, up * ratio
    axes = [_cuts(*axis) for axis in zip(z.shape[2:], (t + first, y, x), ups, (temporal, spatial, spatial), strict=True)]
    video = z.new_zeros(len(z), 3, *(axis[-1].to + axis[-1].kept for axis in axes), dtype=torch.float64)
    places = list(product(*(range(len(axis)) for axis in axes)))
    cuts = [[axis[i] for axis, i in zip(axes, at, strict=True)] for at in places]
    volumes = [math.prod(cut.end - cut.begin for cut in here) for here in cuts]
    for turn_, i in enumerate(sorted(range(len(places)), key=lambda i: (-volumes[i], i))):
        tile, at, here = _upsampled(inputs[turn_ % world_size][0], cuts[i], ups), places[i], cuts[i]
        _add(video, tile, here, None)
        for axis in range(3):
            if at[axis] + 1 < len(axes[axis]):
                _add(video, tile, [*here[:axis], axes[axis][at[axis] + 1], *here[axis + 1 :]], axis)
    return [video] * world_size


def _cuts(extent: int, tile: int, up: int, overlap: float) -> list[_Cut]:
    """All tiles along one axis."""
    cuts, most, to, before = list[_Cut](), int(tile * up * overlap), 0, 0
    for begin in range(0, extent, int(tile * (1 - overlap))):
        end = min(begin + tile, extent)
        length = (end - begin) * up
        cuts.append(_Cut(begin, end, to, min(length, tile * up - most), min(most, length, before)))
        to, before = to + cuts[-1].kept, length
    return cuts


def _upsampled(z: torch.Tensor, cuts: list[_Cut], ups: Sequence[int]) -> torch.Tensor:
    """One tile of three channels; each position is the mean of its two neighbours, weighted by closeness."""
    tile = z[:, [i % min(3, z.shape[1]) for i in range(3)]].double()
    for axis, (cut, up) in enumerate(zip(cuts, ups, strict=True), start=2):
        length = cut.end - cut.begin
        source = torch.arange(length, device=z.device, dtype=torch.float64)
        centre = ((torch.arange(length * up, device=z.device) + 0.5).double() / up - 0.5).clamp_(0, length - 1)
        hat = (1 - (centre[:, None] - source).abs()).clamp_(min=0)
        tile = torch.tensordot(tile.narrow(axis, cut.begin, length), hat, ([axis], [1])).movedim(-1, axis)
    return tile


def _add(video: torch.Tensor, tile: torch.Tensor, region: list[_Cut], fading: int | None) -> None:
    """Add what is seen of a tile in its own region, or in the next one along an axis, where its end fades."""
    for axis, cut in enumerate(region):
        count = min(cut.blended, cut.kept) if axis == fading else cut.kept
        begin = tile.shape[axis + 2] - cut.blended if axis == fading else 0
        video, tile = video.narrow(axis + 2, cut.to, count), tile.narrow(axis + 2, begin, count)
        weight = torch.ones(count, dtype=torch.float64, device=tile.device)
        if cut.blended and (fading is None or axis >= fading):
            weight = (torch.arange(count, device=tile.device).double() / cut.blended).clamp_(max=1)
        tile = tile * (1 - weight if axis == fading else weight).view(-1, *[1] * (2 - axis))
    video += tile


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """No position twice: three channels of the ranks' shares go to all others; 7 mixtures of two values per output."""
    latent = size["B"] * size["T"] * size["Y"] * size["X"]
    out = 3 * latent * size["ut"] * size["us"] ** 2
    used = latent * min(3, size["C"])
    return Cost(
        wire_bytes=(world_size - 1) / world_size * used * itemsize,
        memory_bytes=(used / world_size + out) * itemsize,
        flops=14 * out,
    )


PROBLEM = Problem(
    number=78,
    slug="magi1_tile_parallel_vae_decode",
    version=1,
    title="Decode a latent video by upsampling in overlapping tiles that ranks share, and blend them.",
    family="vision",
    parallelism="spatial tiles",
    collectives=("all_gather",),
    origin="SandAI MAGI-1 tile-parallel VAE decoder",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "C": 4, "T": 5, "Y": 7, "X": 13, "t": 4, "y": 4, "x": 8, "us": 2, "ut": 2}),
        "default": Size("default", {"B": 1, "C": 8, "T": 5, "Y": 18, "X": 22, "t": 4, "y": 12, "x": 12, "us": 4, "ut": 2}),
        "odd": Size("odd", {"B": 1, "C": 2, "T": 7, "Y": 11, "X": 17, "t": 5, "y": 6, "x": 9, "us": 3, "ut": 3}),
        # A video of 570 MiB in bf16; decoded tiles take up to eight times that.
        "large": Size("large", {"B": 1, "C": 16, "T": 12, "Y": 180, "X": 180, "t": 4, "y": 32, "x": 32, "us": 8, "ut": 4}),
        "upstream": Size("upstream", {"B": 1, "C": 16, "T": 6, "Y": 90, "X": 90, "t": 3, "y": 32, "x": 32, "us": 8, "ut": 4}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
