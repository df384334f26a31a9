"""#040 ddp: one step of data-parallel training with Adam, from parameters and moments that rank 0 alone has right.

Axes      R rows in all (ragged: rank r holds R_r), I inputs, H hidden units, O outputs, W ranks
In        X_local [R_r, I] and y_local [R_r, O], differ per rank; W1 [H, I], b1 [H], W2 [O, H], b2 [O], and their first and second
          moments, of which rank 0's count; lr, beta1, beta2, eps, step >= 1, equal on every rank
Out       12 tensors, equal on every rank: parameters, first moments, second moments
Maths     g_r = gradient of the mean of (relu(X W1^T + b1) W2^T + b2 - y)^2 over the elements of rank r; g = (sum of g_r) / W;
          m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2;
          w = w - lr * m / (1-beta1^step) / ((v / (1-beta2^step))^1/2 + eps)
Wire      broadcasts of parameters and moments from rank 0; all_reduce of the gradients
Needs     any W; R >= W
Not here  weighting ranks by their rows, weight decay, moments in another dtype, buckets
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.adam import adam
from problems.base import Cost, Draw, Problem, Size
from problems.mlp import flattened, mlp_gradients, unflattened
from problems.training import draw_hyper, draw_parameter_moments, draw_training, exact_adam, exact_mlp_gradients


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Moments as after many steps; an update is a considerable part of its parameter."""
    rows, i, h, o = (size[axis] for axis in "RIHO")
    x, y, parameters = draw_training(draw, (rows, i, h, o))
    first, second = draw_parameter_moments(draw, parameters)
    return (x, y, *parameters, *first, *second, *draw_hyper(draw, 0.5 * i**-0.5))


def reference(
    X_local: torch.Tensor,
    y_local: torch.Tensor,
    W1: torch.Tensor,
    b1: torch.Tensor,
    W2: torch.Tensor,
    b2: torch.Tensor,
    exp_avg_W1: torch.Tensor,
    exp_avg_b1: torch.Tensor,
    exp_avg_W2: torch.Tensor,
    exp_avg_b2: torch.Tensor,
    exp_avg_sq_W1: torch.Tensor,
    exp_avg_sq_b1: torch.Tensor,
    exp_avg_sq_W2: torch.Tensor,
    exp_avg_sq_b2: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> tuple[torch.Tensor, ...]:
    """Parameters, first and second moments after the step, shaped like the arguments."""
    like = [W1, b1, W2, b2]
    state = (
        flattened(like),
        flattened([exp_avg_W1, exp_avg_b1, exp_avg_W2, exp_avg_b2]),
        flattened([exp_avg_sq_W1, exp_avg_sq_b1, exp_avg_sq_W2, exp_avg_sq_b2]),
    )
    for flat in state:
        dist.broadcast(flat, src=0)
    parameter, exp_avg, exp_avg_sq = state
    grad = flattened(mlp_gradients(X_local, y_local, unflattened(parameter, like)))
    dist.all_reduce(grad)
    grad /= dist.get_world_size()
    state = adam(grad, exp_avg, exp_avg_sq, parameter, lr, beta1, beta2, eps, step)
    return tuple(part for flat in state for part in unflattened(flat, like))


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One batch of all ranks' rows, from rank 0's state, in float64, parameter by parameter."""
    root = inputs[0]
    grads = exact_mlp_gradients([args[:2] for args in inputs], root[2:6])
    after = [exact_adam(*tensors, root[14:]) for tensors in zip(grads, root[6:10], root[10:14], root[2:6], strict=True)]
    parameters, first, second = zip(*after, strict=True)
    return [(*parameters, *first, *second)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The mean rank gets parameters before, gradients of its part, and both moments after, from which parameters follow."""
    rows, i, h, o = (size[axis] for axis in "RIHO")
    count, local, others = h * i + h + o * h + o, rows / world_size, world_size - 1
    return Cost(
        wire_bytes=4 * others / world_size * count * itemsize,
        memory_bytes=(6 * count + local * (i + o)) * itemsize,
        flops=local * h * (4 * i + 6 * o) + 12 * count / world_size,
    )


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one row of the smallest size."""
    fewest = min(size["R"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one row each"


SIZES = {
    "tiny": Size("tiny", {"R": 53, "I": 17, "H": 23, "O": 11}),
    "default": Size("default", {"R": 256, "I": 128, "H": 192, "O": 64}),
    "odd": Size("odd", {"R": 251, "I": 127, "H": 191, "O": 63}),
    # 256 MiB of parameters in bf16, as much for either moment, 2 GiB of rows in all.
    "large": Size("large", {"R": 65536, "I": 8192, "H": 8192, "O": 8192}),
    "upstream": Size("upstream", {"R": 1024, "I": 256, "H": 512, "O": 256}),
}

PROBLEM = Problem(
    number=40,
    slug="ddp",
    version=1,
    title="One data-parallel training step of a small network with Adam, from rank 0's parameters and moments.",
    family="optimizer-sharding",
    parallelism="DP",
    collectives=("broadcast", "all_reduce"),
    origin="PyTorch DistributedDataParallel (one flat bucket), Adam",
    split="train",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
