"""#048 fsdp_and_tp: a SwiGLU layer whose weights are cut both ways, by tensor parallelism and, once more, for storage.

Axes      R rows in all (ragged over the n_fsdp parts), D features, F hidden units (both rounded up to multiples of W), W ranks;
          rank = n_tp * fs + tp
In        x_local [R_fs, D], equal on ranks of one fs; W1_shard, W2_shard [D / n_fsdp, F / n_tp], block (fs, tp) of W1, W2 [D, F];
          W3_shard [F / n_tp, D / n_fsdp], block (tp, fs) of W3 [F, D]; n_tp, n_fsdp, equal on every rank
Out       [R_fs, D], equal on ranks of one fs
Maths     (silu(x W1) * (x W2)) W3
Wire      weights are gathered over ranks of one tp, partial outputs summed over ranks of one fs
Needs     n_tp * n_fsdp = W
Not here  gradients, overlap of gather and product, process groups: everything goes through the group of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.draws import ragged, turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Weights that keep the size of what they multiply; all shapes of the grid take turns, from a secret start."""
    upstream, world_size = draw.profile == "upstream", draw.world_size
    rows, d, f = size["R"], *(-(-size[axis] // world_size) * world_size for axis in "DF")
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    n_tp = _public_tp(world_size) if upstream else divisors[turn(draw, len(divisors))]
    n_fsdp = world_size // n_tp
    fs = draw.rank // n_tp
    mine = -(-rows // n_fsdp) if upstream else ragged(max(rows, n_fsdp), n_fsdp, draw.shared("rows"), least=1)[fs]
    x = torch.randn(mine, d, generator=draw.shared(f"x {fs}"))
    shapes = {"W1": (d // n_fsdp, f // n_tp), "W2": (d // n_fsdp, f // n_tp), "W3": (f // n_tp, d // n_fsdp)}
    w1, w2, w3 = (torch.randn(shape, generator=draw.own(name)) for name, shape in shapes.items())
    if not upstream:
        w1, w2, w3 = w1.mul_(d**-0.5), w2.mul_(d**-0.5), w3.mul_(2 * f**-0.5)
    return *(t.to(draw.dtype) for t in (x, w1, w2, w3)), n_tp, n_fsdp


def _public_tp(world_size: int) -> int:
    """The smallest divisor between 1 and W, 1 if there is none."""
    return next((n for n in range(2, world_size) if world_size % n == 0), 1)


def reference(
    x_local: torch.Tensor, W1_shard: torch.Tensor, W2_shard: torch.Tensor, W3_shard: torch.Tensor, n_tp: int, n_fsdp: int
) -> torch.Tensor:
    """Output of the local rows, [R_fs, D]."""
    rank = dist.get_rank()
    tp, fs = rank % n_tp, rank // n_tp
    same_tp = [tp + n_tp * other for other in range(n_fsdp)]
    same_fs = [fs * n_tp + other for other in range(n_tp)]
    w1, w2 = (from_peers(w, same_tp).flatten(0, 1) for w in (W1_shard, W2_shard))
    w3 = from_peers(W3_shard, same_tp).transpose(0, 1).flatten(1)
    hidden = F.silu(x_local @ w1) * (x_local @ w2)
    return summed(hidden @ w3, same_fs)


def from_peers(tensor: torch.Tensor, peers: list[int]) -> torch.Tensor:
    """The peers' tensors of one shape, stacked in the order of their ranks."""
    counts = [tensor.numel() if rank in peers else 0 for rank in range(dist.get_world_size())]
    out = tensor.new_empty((len(peers), *tensor.shape))
    sent = tensor.expand_as(out).contiguous()
    dist.all_to_all_single(out.view(-1), sent.view(-1), counts, counts)
    return out


def summed(tensor: torch.Tensor, peers: list[int]) -> torch.Tensor:
    """Sum over peers in at least float32: everyone sums a part of all tensors, then the parts are gathered."""
    if len(peers) == 1:
        return tensor
    part = -(-tensor.numel() // len(peers))
    padded = F.pad(tensor.flatten(), (0, part * len(peers) - tensor.numel()))
    counts = [part if rank in peers else 0 for rank in range(dist.get_world_size())]
    came = torch.empty_like(padded)
    dist.all_to_all_single(came, padded, counts, counts)
    mine = came.view(len(peers), part).sum(0, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return from_peers(mine.to(tensor.dtype), peers).flatten()[: tensor.numel()].view(tensor.shape)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Whole matrices put together from their blocks, all different rows at once, in float64."""
    n_tp, n_fsdp = inputs[0][4:]
    grid = [inputs[fs * n_tp : (fs + 1) * n_tp] for fs in range(n_fsdp)]
    w1, w2 = (torch.cat([torch.cat([args[i].double() for args in row], dim=1) for row in grid]) for i in (1, 2))
    w3 = torch.cat([torch.cat([args[3].double() for args in row]) for row in grid], dim=1)
    x = torch.cat([row[0][0].double() for row in grid])
    gate = x @ w1
    out = (gate * torch.sigmoid(gate) * (x @ w2)) @ w3
    parts = torch.split(out, [len(row[0][0]) for row in grid])
    return [part for part in parts for _ in range(n_tp)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The least of a turn: weights come in from n_fsdp - 1 ranks, outputs are summed over n_tp ranks."""
    rows, d, f = size["R"], *(-(-size[axis] // world_size) * world_size for axis in "DF")
    turns = [_turn_cost(rows, d, f, n_tp, world_size // n_tp) for n_tp in range(1, world_size + 1) if world_size % n_tp == 0]
    wire, memory = (min(column) * itemsize for column in zip(*turns, strict=True))
    return Cost(wire_bytes=wire, memory_bytes=memory, flops=6 * rows / world_size * d * f)


def _turn_cost(rows: int, d: int, f: int, n_tp: int, n_fsdp: int) -> tuple[float, float]:
    """Elements on the wire and in memory with so many ranks along either side of the grid."""
    outputs, weights = rows / n_fsdp * d, (n_fsdp - 1) * 3 * d * f / (n_tp * n_fsdp)
    return weights + 2 * (n_tp - 1) / n_tp * outputs, 2 * outputs + 3 * d * f / n_tp


PROBLEM = Problem(
    number=48,
    slug="fsdp_and_tp",
    version=1,
    title="A SwiGLU layer with weights that are split over a grid of ranks; gather along one side, sum along the other.",
    family="gemm-collective",
    parallelism="FSDP+TP",
    collectives=("all_to_all_single",),
    origin="torchtitan, two-dimensional FSDP and tensor parallelism",
    split="train",
    sizes={
        "tiny": Size("tiny", {"R": 37, "D": 24, "F": 48}),
        "default": Size("default", {"R": 192, "D": 144, "F": 512}),
        "odd": Size("odd", {"R": 131, "D": 93, "F": 261}),
        # 1.3 GiB of weights in bf16 over all ranks, 128 MiB of rows.
        "large": Size("large", {"R": 8192, "D": 8192, "F": 28672}),
        "upstream": Size("upstream", {"R": 2048, "D": 256, "F": 1024}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
