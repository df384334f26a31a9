"""Options, weights and truth of the problems around ring attention: the joined sequence at once, in float64.

Not here: anything that a reference calls (`ring`).
"""

from __future__ import annotations

import torch

from problems.base import Draw
from problems.draws import turn


def options(draw: Draw, width: int) -> tuple[float | None, bool]:
    """softmax_scale and causal; default and explicit, causal and not take turns over the trials, from a secret start."""
    kind = turn(draw, 4)
    factor = 0.5 + float(torch.rand((), generator=draw.shared("scale")))
    return factor * width**-0.5 if kind // 2 else None, kind % 2 == 0


def layer_weights(draw: Draw, part: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w_qkv [3 * rows, width] and w_o [width, rows] of one part, equal on its ranks.

    Activations stay O(1) and scores have deviation 3; `upstream`: all weights have deviation 0.02.
    """
    w_qkv = torch.randn(3 * rows, width, generator=draw.shared(f"w_qkv {part}"))
    w_o = torch.randn(width, rows, generator=draw.shared(f"w_o {part}"))
    if draw.profile == "upstream":
        return w_qkv.mul_(0.02).to(draw.dtype), w_o.mul_(0.02).to(draw.dtype)
    w_qkv.mul_(width**-0.5)[: 2 * rows] *= 3**0.5
    return w_qkv.to(draw.dtype), w_o.mul_(1.5 * width**-0.5).to(draw.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *, causal: bool) -> torch.Tensor:
    """softmax(scale * q k^T) v of [B, T, H, D] in float64, some query rows at a time."""
    q, k, v = (x.double().movedim(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    positions = torch.arange(q.shape[2], device=q.device)
    parts = []
    for mine in torch.split(positions, max(1, 2**24 // (k.shape[0] * k.shape[1] * k.shape[2]))):
        scores = torch.einsum("bhid,bhjd->bhij", q[:, :, mine], k).mul_(scale)
        if causal:
            scores.masked_fill_(positions > mine[:, None], -torch.inf)
        parts.append(torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v))
    return torch.cat(parts, dim=1)


def attention_layer(
    x: torch.Tensor, w_qkv: torch.Tensor, w_o: torch.Tensor, scale: float | None, *, causal: bool
) -> torch.Tensor:
    """Take x [B, T, E] through w_qkv [3, H, D, E], attention and w_o [E, H, D], in float64."""
    q, k, v = (torch.einsum("bte,hde->bthd", x, w) for w in w_qkv)
    return torch.einsum("bthd,ehd->bte", attention(q, k, v, scale, causal=causal), w_o)
