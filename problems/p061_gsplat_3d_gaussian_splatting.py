"""#061 gsplat_3d_gaussian_splatting: Gaussians of all ranks projected to all ranks' cameras; a camera's rank gets what it sees.

Axes      n_r Gaussians on rank r (ragged, perhaps none), C cameras on every rank, D colour channels, W ranks
In        means [n, 3], quats [n, 4] as (w, x, y, z) of any length, scales [n, 3], opacities [n], colors [n, D],
          viewmats [C, 4, 4] (world to camera) and Ks [C, 3, 3], differ per rank; the rest equal on every rank
Out       of the V pairs of own camera and visible Gaussian: camera_ids [V] (0 .. C - 1) and gaussian_ids [V] (counted through all
          ranks), int64, radii int32 [V, 2], means2d [V, 2], depths [V], conics [V, 3], opacities [V], colors [V, D]; by the
          Gaussian's rank, then camera, then Gaussian
Maths     B = R(q / |q|) diag(scales);  (x, y, z) = R_v mean + t;  J = [[fx/z, 0, -fx u/z], [0, fy/z, -fy v/z]] with
          u = x/z kept in -(cx + 0.15 width)/fx .. (1.15 width - cx)/fx, v = y/z likewise;  M = J R_v B, cov = M M^T + eps2d I;
          conic = (xx, xy, yy) of cov^-1;  depth = z;  mean2d = first two of K (x, y, z) / z;  radius = ceil(3.33 sqrt(cov_ii));
          visible: near_plane < z < far_plane, mean2d + radius > 0 and mean2d - radius < (width, height); in at least float32
Wire      cameras to all ranks; visible pairs to their cameras' ranks
Needs     any W; the same C on every rank
Not here  rasterisation, gradients, other cameras; the public problem adds the number of Gaussians before the receiver's to
          gaussian_ids, here it is those before the sender's, also in `upstream`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.draws import ragged
from problems.gaussian_scenes import doubtful, draw_cameras, draw_gaussians, exact_projection
from problems.moe import exchanged

VISIBLE = 0.55
"""Share of pairs that are visible, about."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """A cube of Gaussians, cameras around it that look inside; about half of all pairs are visible.

    Gaussians whose radius or visibility in any camera could go the other way are left out.  In every other trial one rank of
    more than two has none.
    """
    if draw.profile == "upstream":
        return _public(draw, size)
    counts = ragged(size["n"] * draw.world_size, draw.world_size, draw.shared("counts"), least=1)
    if draw.trial % 2 and draw.world_size > 2:
        frm, to = torch.randperm(draw.world_size, generator=draw.shared("idle")).tolist()[:2]
        counts[frm], counts[to] = 0, counts[frm] + counts[to]
    count = counts[draw.rank]
    cameras = [draw_cameras(replace(draw, rank=rank), size) for rank in range(draw.world_size)]
    eps2d, near, far = torch.rand(3, generator=draw.shared("planes")).mul_(torch.tensor([0.3, 1, 2])).tolist()
    rest = size["X"], size["Y"], 0.2 + eps2d, 0.5 + near, 5 + far
    gaussians = draw_gaussians(draw, 2 * count, size["D"])
    doubt = torch.zeros(2 * count, dtype=torch.bool)
    for view, k in ((view, k) for pair in cameras for view, k in zip(*pair, strict=True)):
        doubt |= doubtful(gaussians[:3], view, k, *rest)
    chosen = (~doubt).nonzero()[:count, 0]
    return (*(x[chosen] for x in gaussians), *cameras[draw.rank], *rest, "pinhole")


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """A slab of small Gaussians in front of one camera that all ranks share."""
    count, chance = size["n"], draw.own("gaussians")
    means = torch.rand(count, 3, generator=chance).sub_(0.5).mul_(1.5)
    means[:, 2] = 2 + 2 * torch.rand(count, generator=chance)
    quats = torch.randn(count, 4, generator=chance)
    scales = torch.rand(count, 3, generator=chance).mul_(0.02)
    opacities = torch.rand(count, generator=chance).mul_(0.8).add_(0.1)
    colors = torch.rand(count, size["D"], generator=chance)
    focus = 0.8 * min(size["X"], size["Y"])
    k = torch.tensor([[[focus, 0, size["X"] / 2], [0, focus, size["Y"] / 2], [0, 0, 1]]])
    tensors = (means, quats, scales, opacities, colors, torch.eye(4)[None], k)
    return (*(x.to(draw.dtype) for x in tensors), size["X"], size["Y"], 0.3, 0.01, 1e10, "pinhole")


def reference(
    means: torch.Tensor,
    quats: torch.Tensor,
    scales: torch.Tensor,
    opacities: torch.Tensor,
    colors: torch.Tensor,
    viewmats: torch.Tensor,
    Ks: torch.Tensor,
    image_width: int,
    image_height: int,
    eps2d: float = 0.3,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    camera_model: str = "pinhole",
) -> tuple[torch.Tensor, ...]:
    """camera_ids, gaussian_ids, radii, means2d, depths, conics, opacities and colors of what the rank's cameras see."""
    if camera_model != "pinhole":
        raise ValueError(f"camera model {camera_model!r}, wanted 'pinhole'")
    own, wide = len(viewmats), torch.promote_types(means.dtype, torch.float32)
    cameras = gathered(torch.cat([viewmats.flatten(1), Ks.flatten(1)], dim=1)).to(wide)
    before = gathered(torch.tensor([len(means)], device=means.device))[: dist.get_rank()].sum()
    views, ks = cameras[:, :16].view(-1, 4, 4), cameras[:, 16:].view(-1, 3, 3)
    axes = rotations(quats.to(wide)) * scales.to(wide)[:, None]
    extents = torch.tensor([image_width, image_height], dtype=wide, device=means.device)
    means2d, depths, (xx, xy, yy) = projected(means.to(wide), axes, views, ks, extents, eps2d)
    radii = torch.stack([xx, yy], dim=-1).sqrt().mul_(3.33).ceil_()
    on_image = ((means2d + radii > 0) & (means2d - radii < extents)).all(-1)
    seen = camera, gaussian = (on_image & (depths > near_plane) & (depths < far_plane)).nonzero(as_tuple=True)
    det = (xx[seen] * yy[seen] - xy[seen].square()).clamp(min=1e-10)
    conics = torch.stack([yy[seen], -xy[seen], xx[seen]], dim=1) / det[:, None]
    floats = [means2d[seen], depths[seen][:, None], conics, opacities[gaussian][:, None], colors[gaussian]]
    ids = torch.stack([camera % own, gaussian + before], dim=1)
    return sent_to_cameras(camera // own, [x.to(means.dtype) for x in floats], [ids, radii[seen].long()])


def sent_to_cameras(ranks: torch.Tensor, floats: list[torch.Tensor], numbers: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """All outputs, from what is known of the visible pairs in the order of the ranks that they go to."""
    to = ranks.bincount(minlength=dist.get_world_size())
    frm = torch.empty_like(to)
    dist.all_to_all_single(frm, to)
    counts = to.tolist(), frm.tolist()
    values = exchanged(torch.cat(floats, dim=1), *counts)
    means2d, depths, conics, opacities, colors = torch.split(values, [x.shape[1] for x in floats], dim=1)
    ids = exchanged(torch.cat(numbers, dim=1), *counts)
    out = ids[:, 0], ids[:, 1], ids[:, 2:].int(), means2d, depths[:, 0], conics, opacities[:, 0], colors
    return tuple(x.contiguous() for x in out)


def rotations(quats: torch.Tensor) -> torch.Tensor:
    """Rotation matrices [n, 3, 3] of quaternions [n, 4] of any length."""
    w, x, y, z = F.normalize(quats, dim=1).unbind(1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def projected(
    means: torch.Tensor, axes: torch.Tensor, views: torch.Tensor, ks: torch.Tensor, extents: torch.Tensor, eps2d: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Places [C, n, 2] and depths [C, n] in every camera, and covariances xx, xy and yy there, [C, n] each."""
    rotation = views[:, :3, :3]
    place = means @ rotation.transpose(1, 2) + views[:, None, :3, 3]
    depths = place[..., 2]
    focus, middle = ks.diagonal(dim1=1, dim2=2)[:, None, :2], ks[:, None, :2, 2]
    slack = 0.3 * 0.5 * extents / focus
    slope = (place[..., :2] / depths[..., None]).clamp((-middle / focus) - slack, (extents - middle) / focus + slack)
    turned = (rotation[:, None] @ axes) / depths[..., None, None]
    flat = (turned[..., :2, :] - slope[..., None] * turned[..., 2:, :]) * focus[..., None]
    xx, yy = flat.square().sum(-1).add_(eps2d).unbind(-1)
    means2d = (place @ ks[:, :2].transpose(1, 2)) / depths[..., None]
    return means2d, depths, (xx, flat.prod(-2).sum(-1), yy)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One camera and one rank's Gaussians at a time, in float64."""
    out = []
    for _, _, _, _, _, views, ks, *_ in inputs:
        parts, before = [], 0
        for args in inputs:
            parts += [_seen(args, view, k, number, before) for number, (view, k) in enumerate(zip(views, ks, strict=True))]
            before += len(args[0])
        out.append(tuple(map(torch.cat, zip(*parts, strict=True))))
    return out


def _seen(args: tuple[Any, ...], view: torch.Tensor, k: torch.Tensor, number: int, before: int) -> tuple[torch.Tensor, ...]:
    """All outputs for one camera, of its number, and the Gaussians of one rank."""
    width, height, eps2d, near, far, _ = args[7:]
    mean, depth, cov = exact_projection(args[:3], view, k, width, height, eps2d)
    radius = (3.33 * cov.diagonal(dim1=1, dim2=2).sqrt()).ceil()
    on_image = (mean + radius > 0) & (mean - radius < mean.new_tensor([width, height]))
    ids = ((depth > near) & (depth < far) & on_image.all(1)).nonzero()[:, 0]
    inverse = torch.linalg.inv(cov[ids])
    conics = torch.stack([inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]], dim=1)
    opacities, colors = (x.double()[ids] for x in args[3:5])
    return torch.full_like(ids, number), ids + before, radius[ids].long(), mean[ids], depth[ids], conics, opacities, colors


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Even counts; numbers of Gaussians and radii travel in 8 bytes a pair; 300 operations for a Gaussian in a camera."""
    pairs = size["n"] * size["C"] * world_size
    values = size["D"] + 7
    return Cost(
        wire_bytes=(world_size - 1) * size["C"] * (VISIBLE * size["n"] * (values * itemsize + 8) + 25 * itemsize),
        memory_bytes=size["n"] * (values + 4) * itemsize + VISIBLE * pairs * (values * itemsize + 24),
        flops=300 * pairs,
    )


PROBLEM = Problem(
    number=61,
    slug="gsplat_3d_gaussian_splatting",
    version=1,
    title="Project the Gaussians of all ranks to the cameras of all ranks; each rank gets what its cameras see.",
    family="vision",
    parallelism="Gaussians and cameras over ranks",
    collectives=("all_gather_into_tensor", "all_to_all_single"),
    origin="gsplat, Grendel-GS (distributed Gaussian splatting)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"n": 37, "C": 2, "D": 3, "X": 67, "Y": 53}),
        "default": Size("default", {"n": 2048, "C": 2, "D": 3, "X": 192, "Y": 128}),
        "odd": Size("odd", {"n": 1021, "C": 3, "D": 5, "X": 173, "Y": 131}),
        # 60 MB of Gaussians in fp32 per rank, about 400 MB of visible pairs sent at W = 8.
        "large": Size("large", {"n": 1_000_000, "C": 2, "D": 3, "X": 1920, "Y": 1080}),
        "upstream": Size("upstream", {"n": 1024, "C": 1, "D": 3, "X": 512, "Y": 512}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
