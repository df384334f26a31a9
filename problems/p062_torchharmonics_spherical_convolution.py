"""#062 torchharmonics_spherical_convolution: convolution on a sphere that a grid of ranks shares by latitudes and longitudes.

Axes      B batch, I and O channels in and out, g groups of them, K filter functions, Y x X latitudes and longitudes in and
          Y' x X' out, W ranks; rank = A * polar + azimuth on a grid of P x A, A = 2 if W is even, else 1.
          An axis is cut into pieces of ceil(extent / parts), the last one shorter; if nothing were left for it, of floor
In        x [B, I, Y_p, X_a], differs per rank; psi, what torch.sparse_coo_tensor takes of the sparse [K, Y', Y_p * X]: indices
          [3, m] sorted, values [m] and this size, equal on ranks of one polar index; weight [O, I / g, K], bias [O] or None,
          equal on every rank (`upstream`: psi, weight and bias differ per rank); groups = g, nlon_out = X', nlon_in = X;
          azimuth_group and polar_group (None: the row and column of the grid)
Out       [B, O, Y'_p, X'_a] in the dtype of x, differs per rank
Maths     y[b, c, k, t, s] = sum over latitudes i and longitudes j of psi[k, t, i, j] * x[b, c, i, (j + s * (X // X')) mod X];
          out = sum over the c of a group and k of weight * y, + bias; sums in at least float32
Wire      channels for longitudes along the azimuth, a sum over polar ranks, longitudes for channels
Needs     a row of latitudes for every polar index
Not here  the filters themselves, a rank's own part of the columns of psi, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.draws import turn
from problems.grids import cut, exchanged_along, grid_peers

Psi = tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Filters with many random entries in some rows, none in others; halving longitudes, groups and bias take turns."""
    azimuths = 2 - draw.world_size % 2
    polars, (polar, azimuth) = draw.world_size // azimuths, divmod(draw.rank, azimuths)
    height, width = cut(size["Y"], polars), cut(size["X"], azimuths)
    x = torch.randn(size["B"], size["I"], height[polar], width[azimuth], generator=draw.own("x"))
    upstream = draw.profile == "upstream"
    groups = 1 if upstream else 1 + turn(draw, 2, "groups")
    nlon_out = size["X"] // (1 if upstream else 1 + turn(draw, 3, "longitudes") % 2)
    source = draw.own if upstream else draw.shared
    shape = size["O"], size["I"] // groups, size["K"]
    weight = torch.randn(shape, generator=source("weight")).to(draw.dtype)
    bias: torch.Tensor | None = torch.randn(size["O"], generator=source("bias")).to(draw.dtype)
    if upstream:
        psi = _public_psi(draw, size, height[polar], polar)
        return x.to(draw.dtype), psi, weight, groups, nlon_out, size["X"], None, None, bias
    x += torch.randn(size["B"], size["I"], 1, 1, generator=draw.own("offset"))
    weight /= (shape[1] * shape[2]) ** 0.5
    psi = _psi(draw, size, sum(height[:polar]), height[polar])
    bias = bias if turn(draw, 5, "bias") > 1 else None
    return x.to(draw.dtype), psi, weight, groups, nlon_out, size["X"], None, None, bias


def _psi(draw: Draw, size: Size, first: int, height: int) -> Psi:
    """Columns of some latitudes, from `first` on, of a random filter for the whole sphere: E entries in a row on average."""
    chance = draw.shared("psi")
    rows, columns = size["K"] * size["Yout"], size["Y"] * size["X"]
    counts = (torch.rand(rows, generator=chance).sub_(0.1).clamp_(min=0) * (2.5 * size["E"])).long()
    row = torch.arange(rows).repeat_interleave(counts)
    keys: torch.Tensor = torch.unique(row * columns + torch.randint(columns, row.shape, generator=chance))
    values = torch.randn(keys.shape, generator=chance).div_(size["E"] ** 0.5)
    row, column = keys // columns, keys % columns
    mine = (column >= first * size["X"]) & (column < (first + height) * size["X"])
    indices = torch.stack([row // size["Yout"], row % size["Yout"], column - first * size["X"]])[:, mine]
    return indices.contiguous(), values[mine].to(draw.dtype), (size["K"], size["Yout"], height * size["X"])


def _public_psi(draw: Draw, size: Size, height: int, polar: int) -> Psi:
    """Four entries in every row, in places that follow from the row."""
    k, t, j = (x.flatten() for x in torch.meshgrid(*(torch.arange(n) for n in (size["K"], size["Yout"], 4)), indexing="ij"))
    column = (t - polar * height) % height * size["X"] + (t + j * (k + 1)) % size["X"]
    order = ((k * size["Yout"] + t) * height * size["X"] + column).argsort()
    values = torch.randn(len(order), generator=draw.own("psi")).mul_(0.05).to(draw.dtype)
    return torch.stack([k, t, column])[:, order], values, (size["K"], size["Yout"], height * size["X"])


def reference(
    x: torch.Tensor,
    psi: tuple[torch.Tensor, torch.Tensor, Sequence[int]],
    weight: torch.Tensor,
    groups: int,
    nlon_out: int,
    nlon_in: int,
    azimuth_group: dist.ProcessGroup | None = None,
    polar_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's latitudes and longitudes of the convolved signal, [B, O, Y'_p, X'_a]."""
    row, column = grid_peers(2 - dist.get_world_size() % 2)
    along = azimuth_group, row if azimuth_group is None else dist.get_process_group_ranks(azimuth_group)
    across = polar_group, column if polar_group is None else dist.get_process_group_ranks(polar_group)
    whole = exchanged_along(x, 1, 3, cut(nlon_in, len(along[1])), *along)
    partial = contracted(whole, psi, nlon_out, nlon_in // nlon_out)
    parts = exchanged_along(partial.unsqueeze(0), 4, 0, [1] * len(across[1]), *across)
    mine = parts.sum(0).to(x.dtype)
    y = exchanged_along(mine, 4, 1, cut(x.shape[1], len(along[1])), *along)
    grouped = y.view(y.shape[0], groups, -1, *y.shape[2:])
    out = torch.einsum("bgckyx,gock->bgoyx", grouped, weight.view(groups, -1, *weight.shape[1:])).flatten(1, 2)
    return out.contiguous() if bias is None else out + bias[:, None, None]


def contracted(x: torch.Tensor, psi: tuple[torch.Tensor, torch.Tensor, Sequence[int]], count: int, step: int) -> torch.Tensor:
    """Partial sums [B, C, K, Y', X'] over the columns of psi, in at least float32; some channels at a time."""
    indices, values, (functions, rows, _) = psi
    wide = torch.promote_types(x.dtype, torch.float32)
    batch, channels, _, width = x.shape
    padded = torch.cat([x, x[..., : (count - 1) * step]], dim=3).flatten(0, 1).to(wide)
    shifted = padded.unfold(2, (count - 1) * step + 1, 1)[..., ::step]
    row, latitude, longitude = indices[0] * rows + indices[1], indices[2] // width, indices[2] % width
    out = x.new_zeros((batch * channels, functions * rows, count), dtype=wide)
    some = max(1, 2**27 // max(1, len(values) * count))
    for part, sums in zip(torch.split(shifted, some), torch.split(out, some), strict=True):
        sums.index_add_(1, row, part[:, latitude, longitude] * values.to(wide)[:, None])
    return out.view(batch, channels, functions, rows, count)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Correlation along longitudes as a product of Fourier transforms of the whole sphere, in float64."""
    azimuths = 2 - len(inputs) % 2
    polars, rest = len(inputs) // azimuths, inputs[0]
    groups, nlon_out, nlon_in = rest[3:6]
    rows = [torch.cat([args[0].double() for args in inputs[p * azimuths :][:azimuths]], dim=3) for p in range(polars)]
    channels = _pieces(torch.cat(rows, dim=2), azimuths, 1)
    y = torch.cat([_correlated(x, [a[1] for a in inputs[i::azimuths]], nlon_in) for i, x in enumerate(channels)], dim=1)
    y = y[..., torch.arange(nlon_out, device=y.device) * (nlon_in // nlon_out)]
    tiles = [tile for strip in _pieces(y, polars, 3) for tile in _pieces(strip, azimuths, 4)]
    return [_mixed(tile, args[2].double(), groups, args[8]) for tile, args in zip(tiles, inputs, strict=True)]


def _pieces(x: torch.Tensor, parts: int, dim: int) -> Sequence[torch.Tensor]:
    """Cut along an axis: chunks, if there are enough of them."""
    chunks: Sequence[torch.Tensor] = x.chunk(parts, dim)
    step = x.shape[dim] // parts
    return chunks if len(chunks) == parts else torch.split(x, [step] * (parts - 1) + [x.shape[dim] - step * (parts - 1)], dim)


def _correlated(x: torch.Tensor, filters: list[Psi], width: int) -> torch.Tensor:
    """Sums y for every longitude, [B, C, K, Y', X], from the columns that each polar index has of the filter."""
    dense = []
    for indices, values, (functions, rows, columns) in filters:
        part = torch.zeros(functions, rows, columns, dtype=torch.float64, device=x.device)
        part[tuple(indices)] = values.double()
        dense.append(part.view(functions, rows, -1, width))
    spectrum = torch.fft.rfft(torch.cat(dense, dim=2)).conj()
    parts = [torch.einsum("ktim,cim->cktm", spectrum, torch.fft.rfft(one)) for one in x]
    y: torch.Tensor = torch.fft.irfft(torch.stack(parts), n=width)
    return y


def _mixed(y: torch.Tensor, weight: torch.Tensor, groups: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Channels out of channels and filter functions, group by group."""
    parts = zip(y.chunk(groups, dim=1), weight.chunk(groups), strict=True)
    out = torch.cat([torch.tensordot(w, part, dims=([1, 2], [1, 2])).transpose(0, 1) for part, w in parts], dim=1)
    return out if bias is None else out + bias.double()[:, None, None]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """All longitudes, one group; what travels is the smaller of x and of what is made of it, either way around the grid."""
    azimuths = 2 - world_size % 2
    polars = world_size // azimuths
    field, sphere = size["B"] * size["I"] * size["Y"] * size["X"] / world_size, size["B"] * size["Yout"] * size["X"]
    out = sphere * size["O"] / world_size
    made = sphere * size["I"] * size["K"] / world_size
    entries = size["K"] * size["Yout"] * size["E"]
    return Cost(
        wire_bytes=((azimuths - 1) / azimuths * (field + min(made, 2 * out)) + (polars - 1) * min(field, made)) * itemsize,
        memory_bytes=(field + out) * itemsize + entries / polars * (itemsize + 12),
        flops=2 * entries * sphere / size["Yout"] * size["I"] / world_size + 2 * made * size["O"],
    )


def valid_world(world_size: int) -> str | None:
    """Every polar index must have a latitude of the smallest size."""
    fewest = min(min(size["Y"], size["Yout"]) for size in SIZES.values())
    polars = world_size // (2 - world_size % 2)
    return None if 1 <= polars <= fewest else f"it needs 1 to {fewest} polar indices, a latitude each"


SIZES = {
    "tiny": Size("tiny", {"B": 2, "I": 6, "O": 4, "K": 3, "Y": 13, "X": 22, "Yout": 11, "E": 6}),
    "default": Size("default", {"B": 2, "I": 8, "O": 8, "K": 3, "Y": 32, "X": 64, "Yout": 32, "E": 8}),
    "odd": Size("odd", {"B": 1, "I": 10, "O": 6, "K": 3, "Y": 29, "X": 59, "Yout": 27, "E": 9}),
    # 2 GiB of field in fp32 over all ranks, three times as much in between.
    "large": Size("large", {"B": 32, "I": 64, "O": 64, "K": 3, "Y": 360, "X": 720, "Yout": 360, "E": 32}),
    "upstream": Size("upstream", {"B": 32, "I": 8, "O": 8, "K": 3, "Y": 128, "X": 256, "Yout": 128, "E": 4}),
}

PROBLEM = Problem(
    number=62,
    slug="torchharmonics_spherical_convolution",
    version=1,
    title="Convolve a signal on a sphere with sparse filters; latitudes and longitudes are split over a grid of ranks.",
    family="scientific",
    parallelism="spatial",
    collectives=("all_to_all_single",),
    origin="NVIDIA torch-harmonics DistributedDiscreteContinuousConvS2",
    split="validation",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
