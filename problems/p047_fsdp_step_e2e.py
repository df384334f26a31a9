"""#047 fsdp_step_e2e: one training step of a small network whose parameters, gradients and moments are all split over ranks.

Axes      R rows in all (ragged: rank r holds R_r), I inputs, H hidden units and O outputs (both rounded up to multiples of W);
          P = H*(I + O + 1) + O parameters in all, W ranks
In        X_local [R_r, I] and y_local [R_r, O], differ per rank; flat_param_shard [P/W], the rank's slice of W1 [H, I], b1 [H],
          W2 [O, H], b2 [O] one after another, of shapes param_shapes; exp_avg_shard, exp_avg_sq_shard [P/W], the rank's own;
          lr, beta1, beta2, eps, weight_decay, step >= 1, equal on every rank
Out       parameters and both moments of the rank's slice, each [P/W]
Maths     gradients and moments as #040; parameter - lr * (Adam's update + weight_decay * the parameter before the step)
Wire      all_gather of P parameters; reduce_scatter of P gradients
Needs     W divides P; R >= W
Not here  weighting ranks by their rows, moments in another dtype, gathering layer by layer; `upstream`: slices of unlike vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from problems.adam import adam
from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered, reduce_scattered
from problems.mlp import mlp_gradients
from problems.training import draw_hyper, draw_moments, draw_training, exact_adam, exact_mlp_gradients


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Moments as after many steps; update and decay are considerable parts of a parameter."""
    rows, i, h, o = _extents(size, draw.world_size)
    x, y, parameters = draw_training(draw, (rows, i, h, o))
    upstream = draw.profile == "upstream"
    if not upstream:
        parameters = draw_training(replace(draw, rank=0), (rows, i, h, o))[2]
    shapes = tuple(tuple(p.shape) for p in parameters)
    shard = torch.cat([p.flatten() for p in parameters]).chunk(draw.world_size)[draw.rank].clone()
    *hyper, step = draw_hyper(draw, 0.5 * i**-0.5)
    if upstream:
        return x, y, shard, shapes, torch.zeros_like(shard), torch.zeros_like(shard), *hyper, 0.01, step
    moments = draw_moments(shard.shape, 0.3 * h**-0.5, draw.own("moments"))
    decay = 0.5 + float(torch.rand((), generator=draw.shared("decay")))
    return x, y, shard, shapes, *(m.to(draw.dtype) for m in moments), *hyper, decay, step


def reference(
    X_local: torch.Tensor,
    y_local: torch.Tensor,
    flat_param_shard: torch.Tensor,
    param_shapes: Sequence[tuple[int, ...]],
    exp_avg_shard: torch.Tensor,
    exp_avg_sq_shard: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters and both moments of this rank's slice after the step, [P/W] each."""
    cuts = torch.split(gathered(flat_param_shard), [prod(shape) for shape in param_shapes])
    parameters = [cut.view(shape) for cut, shape in zip(cuts, param_shapes, strict=True)]
    grad = reduce_scattered(torch.cat([g.flatten() for g in mlp_gradients(X_local, y_local, parameters)]))
    grad /= dist.get_world_size()
    shard, exp_avg, exp_avg_sq = adam(
        grad, exp_avg_shard, exp_avg_sq_shard, flat_param_shard, lr, beta1, beta2, eps, step
    )
    return shard.sub_(flat_param_shard, alpha=lr * weight_decay), exp_avg, exp_avg_sq


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One batch of all ranks' rows and the slices of all ranks joined, in float64; decay before the update."""
    *_, lr, beta1, beta2, eps, decay, step = inputs[0]
    flat, first, second = (torch.cat([args[i].double() for args in inputs]) for i in (2, 4, 5))
    parameters, start = [], 0
    for shape in inputs[0][3]:
        parameters.append(flat[start : start + prod(shape)].view(shape))
        start += prod(shape)
    grad = torch.cat([g.flatten() for g in exact_mlp_gradients([args[:2] for args in inputs], parameters)])
    decayed = flat * (1 - lr * decay)
    after = exact_adam(grad, first, second, decayed, (lr, beta1, beta2, eps, step))
    return list(zip(*(x.chunk(len(inputs)) for x in after), strict=True))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """All parameters come in, and the slice's gradients or all rows; the slice and its moments are read and written."""
    rows, i, h, o = _extents(size, world_size)
    count, local, others = h * i + h + o * h + o, rows / world_size, world_size - 1
    return Cost(
        wire_bytes=others / world_size * (count + min(count, rows * (i + o))) * itemsize,
        memory_bytes=(count + 6 * count / world_size + local * (i + o)) * itemsize,
        flops=local * h * (4 * i + 6 * o) + 14 * count / world_size,
    )


def _extents(size: Size, world_size: int) -> tuple[int, int, int, int]:
    """Rows in all, I, H, O, such that the number of parameters is a multiple of the world size."""
    h, o = (-(-size[axis] // world_size) * world_size for axis in "HO")
    return size["R"], size["I"], h, o


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one row of the smallest size."""
    fewest = min(size["R"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one row each"


SIZES = {
    "tiny": Size("tiny", {"R": 59, "I": 19, "H": 23, "O": 13}),
    "default": Size("default", {"R": 160, "I": 160, "H": 192, "O": 96}),
    "odd": Size("odd", {"R": 157, "I": 161, "H": 191, "O": 97}),
    # 256 MiB of parameters in bf16, 512 MiB of rows in all.
    "large": Size("large", {"R": 16384, "I": 8192, "H": 8192, "O": 8192}),
    "upstream": Size("upstream", {"R": 1024, "I": 256, "H": 512, "O": 256}),
}

PROBLEM = Problem(
    number=47,
    slug="fsdp_step_e2e",
    version=1,
    title="One training step of a small network with Adam and weight decay; all of its state is split over ranks.",
    family="optimizer-sharding",
    parallelism="FSDP",
    collectives=("all_gather_into_tensor", "reduce_scatter"),
    origin="PyTorch FSDP, ZeRO stage 3",
    split="train",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
