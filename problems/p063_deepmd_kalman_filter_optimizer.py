"""#063 deepmd_kalman_filter_optimizer: one step of a Kalman filter whose covariance is split into blocks over ranks.

Axes      b blocks on a rank, n weights in a block (ragged), W ranks
In        lists of the rank's blocks, differ per rank: H [n, 1], weights [n, 1], P [n, n] symmetric positive definite;
          error, a scalar tensor, and kalman_lambda, kalman_nue, equal on every rank (`upstream`: error differs)
Out       all ranks' new weights, in the order of ranks and blocks, equal on every rank; the rank's new P; the next lambda,
          a scalar tensor; all in the dtype of error
Maths     a = 1 / (sum over all blocks of all ranks of lambda + H^T P H), in at least float32, as all else;
          K = P H;  w = w + a * error * K with the rank's own error;  P = (P - a K K^T) / lambda;  lambda = nue * lambda + 1 - nue
Wire      all_reduce of one number; all_gather of the blocks' lengths and weights
Needs     any W
Not here  changing the lists of the arguments, splitting a block, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.draws import ragged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Covariances with four large directions, that H looks into; an error that moves the weights by about their own size."""
    if draw.profile == "upstream":
        return _public(draw, size)
    count, chance = size["b"], draw.own("blocks")
    total = count * draw.world_size
    lengths = ragged(size["n"] * total, total, draw.shared("lengths"), least=1)
    parts = [_block(n, chance) for n in lengths[count * draw.rank :][:count]]
    h, weights, p = ([block[i].to(draw.dtype) for block in parts] for i in range(3))
    factor, decay, rate = torch.rand(3, generator=draw.shared("scalars")).tolist()
    error = torch.tensor((1 + factor) * 2 * total).to(draw.dtype)
    return h, error, weights, p, 0.9 + 0.09 * decay, 0.95 + 0.049 * rate


def _block(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """H, weights and P of one block; H^T P H is about 5, K about as long as the weights."""
    scale = torch.rand(n, 1, generator=generator).add_(0.5)
    large = torch.randn(n, 4, generator=generator).mul_(scale)
    p = large @ large.T + torch.diag(torch.rand(n, generator=generator).add_(0.1))
    h = large @ torch.randn(4, 1, generator=generator) + torch.randn(n, 1, generator=generator)
    return h.div_(n), torch.randn(n, 1, generator=generator), p


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Identities as covariances, blocks of equal length."""
    shapes = [(size["n"], 1)] * size["b"]
    h, weights = ([torch.randn(shape, generator=draw.own(n)).to(draw.dtype) for shape in shapes] for n in ("H", "weights"))
    error = torch.randn((), generator=draw.own("error")).to(draw.dtype)
    return [x * 0.01 for x in h], error, weights, [torch.eye(size["n"], dtype=draw.dtype) for _ in shapes], 0.98, 0.9987


def reference(
    H: list[torch.Tensor],
    error: torch.Tensor,
    weights: list[torch.Tensor],
    P: list[torch.Tensor],
    kalman_lambda: float,
    kalman_nue: float = 0.9987,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """All ranks' new weights, this rank's new covariances and the next lambda."""
    wide = torch.promote_types(error.dtype, torch.float32)
    wide_h, wide_p = ([x.to(wide) for x in blocks] for blocks in (H, P))
    gains = [p @ h for p, h in zip(wide_p, wide_h, strict=True)]
    total = error.new_zeros(1, dtype=wide)
    for h, gain in zip(wide_h, gains, strict=True):
        total += kalman_lambda + (h * gain).sum()
    dist.all_reduce(total)
    step = error.to(wide) / total
    moved = [(w.to(wide) + step * gain).to(error.dtype) for w, gain in zip(weights, gains, strict=True)]
    shrunk = [
        torch.addmm(p, gain / total, gain.T, alpha=-1).div_(kalman_lambda).to(error.dtype)
        for p, gain in zip(wide_p, gains, strict=True)
    ]
    next_lambda = torch.full_like(error, kalman_nue * kalman_lambda + 1 - kalman_nue)
    return gathered_blocks(moved), shrunk, next_lambda


def gathered_blocks(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """All ranks' columns, equally many of lengths that only their rank knows, in the order of ranks."""
    flat = torch.cat([block.flatten() for block in blocks])
    lengths = gathered(torch.tensor([len(block) for block in blocks], device=flat.device)).view(-1, len(blocks))
    most = int(lengths.sum(1).max())
    parts = gathered(F.pad(flat, (0, most - len(flat)))).view(-1, most)
    pieces = (torch.split(part[: sum(of)], of) for part, of in zip(parts, lengths.tolist(), strict=True))
    return [piece.view(-1, 1) for rank in pieces for piece in rank]


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All blocks one after another in float64, the denominator as a double sum over elements of P."""
    lam, nue = inputs[0][4:]
    total = torch.zeros((), dtype=torch.float64, device=inputs[0][1].device)
    for hs, _, _, ps, *_ in inputs:
        for h, p in zip(hs, ps, strict=True):
            total += lam + torch.einsum("ia,ij,jb->", h.double(), p.double(), h.double())
    weights, covariances = [], []
    for hs, error, ws, ps, *_ in inputs:
        gains = [torch.einsum("ij,ja->i", p.double(), h.double()) for h, p in zip(hs, ps, strict=True)]
        weights += [w.double() + (gain * error.double() / total)[:, None] for w, gain in zip(ws, gains, strict=True)]
        covariances.append([(p.double() - torch.outer(k, k) / total) / lam for p, k in zip(ps, gains, strict=True)])
    return [(weights, mine, torch.full_like(total, 1 - nue * (1 - lam))) for mine in covariances]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Even blocks: own new weights to all others; every P is read once, if a cache holds it, and written once."""
    count, others = size["b"] * size["n"], world_size - 1
    return Cost(
        wire_bytes=others * count * itemsize,
        memory_bytes=(2 * count * size["n"] + (world_size + 2) * count) * itemsize,
        flops=5 * count * size["n"],
    )


PROBLEM = Problem(
    number=63,
    slug="deepmd_kalman_filter_optimizer",
    version=1,
    title="A step of a Kalman filter with a block of the covariance per rank; all ranks get all weights.",
    family="optimizer-sharding",
    parallelism="blocks over ranks",
    collectives=("all_reduce", "all_gather_into_tensor"),
    origin="DeePMD-kit layer-wise Kalman filter optimiser",
    split="train",
    sizes={
        "tiny": Size("tiny", {"b": 3, "n": 23}),
        "default": Size("default", {"b": 4, "n": 256}),
        "odd": Size("odd", {"b": 3, "n": 251}),
        # 800 MiB of covariance in fp32 per rank.
        "large": Size("large", {"b": 8, "n": 5120}),
        "upstream": Size("upstream", {"b": 8, "n": 1024}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
