"""#041 zero1_optimizer_shard: #040 with both moments split over ranks, and so the work of Adam.

Axes      R rows in all (ragged: rank r holds R_r), I inputs, H hidden units and O outputs (both rounded up to multiples of W);
          P = H*(I + O + 1) + O parameters in all, W ranks
In        X_local [R_r, I] and y_local [R_r, O], differ per rank; W1 [H, I], b1 [H], W2 [O, H], b2 [O], of which rank 0's count;
          exp_avg_part, exp_avg_sq_part [P/W], the rank's own; lr, beta1, beta2, eps, step >= 1, equal on every rank
Out       W1, b1, W2, b2 (equal on every rank), then both moments [P/W] of the rank's slice
Maths     as #040; all parameters one after another are one flat vector, rank r owns its elements r*P/W .. (r+1)*P/W - 1
Wire      broadcast of P parameters from rank 0; all_reduce of P gradients, of which a slice suffices; all_gather of P parameters
Needs     W divides P; R >= W
Not here  weighting ranks by their rows, weight decay, moments in another dtype, slices of unequal length
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from problems.adam import adam
from problems.base import Problem, Size
from problems.collectives import gathered
from problems.mlp import flattened, mlp_gradients, unflattened
from problems.worlds import one_each
from problems.zero import cost, exact, make_inputs


def reference(
    X_local: torch.Tensor,
    y_local: torch.Tensor,
    W1: torch.Tensor,
    b1: torch.Tensor,
    W2: torch.Tensor,
    b2: torch.Tensor,
    exp_avg_part: torch.Tensor,
    exp_avg_sq_part: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> tuple[torch.Tensor, ...]:
    """All parameters after the step, shaped like the arguments, and both moments of this rank's slice, [P/W]."""
    like = [W1, b1, W2, b2]
    parameter = flattened(like)
    dist.broadcast(parameter, src=0)
    grad = flattened(mlp_gradients(X_local, y_local, unflattened(parameter, like)))
    dist.all_reduce(grad)
    grad /= dist.get_world_size()
    mine, owned = (flat.chunk(dist.get_world_size())[dist.get_rank()] for flat in (grad, parameter))
    mine, exp_avg, exp_avg_sq = adam(mine, exp_avg_part, exp_avg_sq_part, owned, lr, beta1, beta2, eps, step)
    return (*unflattened(gathered(mine), like), exp_avg, exp_avg_sq)


SIZES = {
    "tiny": Size("tiny", {"R": 53, "I": 17, "H": 23, "O": 11}),
    "default": Size("default", {"R": 256, "I": 128, "H": 192, "O": 64}),
    "odd": Size("odd", {"R": 251, "I": 127, "H": 191, "O": 63}),
    # 256 MiB of parameters in bf16, 2 GiB of rows in all.
    "large": Size("large", {"R": 65536, "I": 8192, "H": 8192, "O": 8192}),
    "upstream": Size("upstream", {"R": 1024, "I": 256, "H": 512, "O": 256}),
}

PROBLEM = Problem(
    number=41,
    slug="zero1_optimizer_shard",
    version=1,
    title="One data-parallel training step of a small network with Adam, whose moments are split over ranks.",
    family="optimizer-sharding",
    parallelism="DP",
    collectives=("broadcast", "all_reduce", "all_gather_into_tensor"),
    origin="DeepSpeed ZeRO stage 1",
    split="train",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=one_each(SIZES, "R", "row"),
)
