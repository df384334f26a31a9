"""Scenes of Gaussians with cameras around them for `make_inputs`, and their projection in float64 for it and for `exact`.

Not here: anything that a reference calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from problems.base import Draw, Size

MARGIN = 2.0**-14
"""How far, relatively, sizes and places are away from where another decision would be taken."""


def draw_gaussians(draw: Draw, count: int, channels: int) -> list[torch.Tensor]:
    """means, quats, scales, opacities and colors of so many."""
    chance = draw.own("gaussians")
    means = torch.rand(count, 3, generator=chance).mul_(6).sub_(3)
    quats = torch.randn(count, 4, generator=chance)
    scales = torch.rand(count, 3, generator=chance).mul_(3).exp2_().mul_(0.02)
    opacities = torch.rand(count, generator=chance).mul_(0.8).add_(0.1)
    colors = torch.rand(count, channels, generator=chance)
    return [x.to(draw.dtype) for x in (means, quats, scales, opacities, colors)]


def draw_cameras(draw: Draw, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Views from around the cube to somewhere near its middle, [C, 4, 4], and matrices of unequal cameras, [C, 3, 3]."""
    count, chance = size["C"], draw.own("cameras")
    place = F.normalize(torch.randn(count, 3, generator=chance), dim=1) * (4 + torch.rand(count, 1, generator=chance))
    forward = F.normalize(torch.randn(count, 3, generator=chance).mul_(0.3) - place, dim=1)
    right = F.normalize(torch.linalg.cross(torch.randn(count, 3, generator=chance), forward), dim=1)
    rotation = torch.stack([right, torch.linalg.cross(forward, right), forward], dim=1)
    views, ks = torch.eye(4).repeat(count, 1, 1), torch.eye(3).repeat(count, 1, 1)
    views[:, :3, :3] = rotation
    views[:, :3, 3:] = -rotation @ place[:, :, None]
    extents = torch.tensor([size["X"], size["Y"]], dtype=torch.float32)
    ks.diagonal(dim1=1, dim2=2)[:, :2] = extents.min() * torch.rand(count, 2, generator=chance).mul_(0.5).add_(0.7)
    ks[:, :2, 2] = extents * torch.rand(count, 2, generator=chance).mul_(0.2).add_(0.4)
    return views.to(draw.dtype), ks.to(draw.dtype)


def doubtful(
    shape: Sequence[torch.Tensor],
    view: torch.Tensor,
    k: torch.Tensor,
    width: int,
    height: int,
    eps2d: float,
    near: float,
    far: float,
) -> torch.Tensor:
    """Which of the Gaussians come too close to a decision in one camera, [n]."""
    mean, depth, cov = exact_projection(shape, view, k, width, height, eps2d)
    spread = 3.33 * cov.diagonal(dim1=1, dim2=2).sqrt()
    radius, image = spread.ceil(), mean.new_tensor([width, height])
    edge = torch.minimum((mean + radius).abs(), (mean - radius - image).abs()) < MARGIN * max(width, height)
    unsure = ((spread - spread.round()).abs() < MARGIN * spread.clamp(min=1)) | edge
    close = ((depth - near).abs() < MARGIN * near) | ((depth - far).abs() < MARGIN * far)
    return close | ((depth > near) & (depth < far) & unsure.any(1))


def exact_projection(
    shape: Sequence[torch.Tensor], view: torch.Tensor, k: torch.Tensor, width: int, height: int, eps2d: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places [n, 2], depths [n] and covariances [n, 2, 2] in one camera, by way of whole covariances, in float64."""
    means, quats, scales, view, k = (x.double() for x in (*shape, view, k))
    w, (x, y, z) = quats[:, :1, None], quats[:, 1:].unbind(1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=1).view(-1, 3, 3)
    halves = (w * cross + cross @ cross) / quats.square().sum(1)[:, None, None]
    rotation = torch.eye(3, dtype=w.dtype, device=w.device) + 2 * halves
    cov = rotation @ torch.diag_embed(scales.square()) @ rotation.transpose(1, 2)
    place = torch.einsum("ij,nj->ni", view[:3, :3], means) + view[:3, 3]
    x, y, depth = place.unbind(1)
    u = depth * (x / depth).clamp(-(k[0, 2] + 0.15 * width) / k[0, 0], (width - k[0, 2] + 0.15 * width) / k[0, 0])
    v = depth * (y / depth).clamp(-(k[1, 2] + 0.15 * height) / k[1, 1], (height - k[1, 2] + 0.15 * height) / k[1, 1])
    zero = torch.zeros_like(depth)
    entries = [k[0, 0] / depth, zero, -k[0, 0] * u / depth**2, zero, k[1, 1] / depth, -k[1, 1] * v / depth**2]
    jacobian = torch.stack(entries, dim=1).view(-1, 2, 3) @ view[:3, :3]
    spread = jacobian @ cov @ jacobian.transpose(1, 2) + eps2d * torch.eye(2, dtype=w.dtype, device=w.device)
    return (place @ k[:2].T) / depth[:, None], depth, spread
