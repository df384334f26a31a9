"""#074 fla_kimi_delta_attention_cp_tp: the delta rule with a gate per channel over a split sequence; pairs of ranks add outputs.

Axes      B batch, S positions on a rank, H heads on a rank, K key and value size, W ranks; rank = A * cp + tp on a grid,
          A = 2 if W is even and at least 4, else 1; the sequence has T = W / A * S positions
In        q, k, v, g [B, S, H, K] and beta [B, S, H], differ per rank; rank (cp, tp) holds positions cp*S .. (cp+1)*S - 1 of its
          own H heads; a_log [H] and dt_bias [H * K], equal on ranks of one tp (`upstream`: constant);
          cp_group and tp_group (None: the column and the row of the grid)
Out       [B, S, H, K], equal on ranks of one cp
Maths     q and k are divided by max(length, 1e-12), q also by K^1/2; beta = sigmoid(beta).  Per head, in at least float32,
          from S = 0 [K, K]: row d of S *= exp(-5 * sigmoid(exp(a_log) * (g + dt_bias)))[d]; S += k (beta * (v - k^T S))^T;
          o = q^T S.  out = sum over tp of o, each rounded to the dtype before the sum
Wire      states of earlier ranks along the sequence, outputs of the peers of one cp
Needs     any W
Not here  the projections before and after, a state at the start or returned, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.delta_rule import delta_rule, unit_rows
from problems.delta_rule_cases import draw_keys, draw_queries, draw_values, normalised, recurrence
from problems.grids import among_all, grid_peers

EPS = 1e-12
"""Shorter rows than this are not made as long as 1."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Queries that look for keys of earlier ranks, channels that forget in 4 to 1600 steps."""
    columns = columns_of(draw.world_size)
    shape, tp = tuple(size[axis] for axis in "BSHK"), draw.rank % columns
    g, beta = torch.randn(shape, generator=draw.own("g")), torch.randn(shape[:3], generator=draw.own("beta"))
    if draw.profile == "upstream":
        q, k, v = (torch.randn(shape, generator=draw.own(name)) for name in "qkv")
        a_log, dt_bias = (torch.linspace(-0.1, 0.1, count).bfloat16() for count in (shape[2], shape[2] * shape[3]))
    else:
        q, k = draw_queries(draw, shape, EPS, range(tp, draw.rank, columns)), draw_keys(draw, shape, EPS)
        v = draw_values(draw, shape)
        a_log = torch.rand(shape[2], generator=draw.shared(f"a_log {tp}")) - 0.5
        dt_bias = torch.rand(shape[2] * shape[3], generator=draw.shared(f"dt_bias {tp}")).mul_(6).sub_(9)
    return *(x.to(draw.dtype) for x in (q, k, v, g, beta, a_log, dt_bias)), None, None


def columns_of(world_size: int) -> int:
    """How many ranks add their outputs."""
    return 2 if world_size >= 4 and world_size % 2 == 0 else 1


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Outputs at this rank's positions, summed over tp, [B, S, H, K]."""
    wide, width = torch.promote_types(v.dtype, torch.float32), q.shape[-1]
    row, column = grid_peers(columns_of(dist.get_world_size()))
    logits = a_log.to(wide).exp().unsqueeze(-1) * (g.to(wide) + dt_bias.to(wide).view(-1, width))
    qn, kn = unit_rows(q, EPS) * width**-0.5, unit_rows(k, EPS)
    # The last state is an affine map of the first one: what it is for the first state 0, and for the columns of 1.
    start = torch.eye(width, 2 * width, dtype=wide, device=q.device).roll(width, 1).expand(q.shape[0], q.shape[2], -1, -1)
    args = qn, kn, v.to(wide), -5 * logits.sigmoid(), beta.to(wide).sigmoid().unsqueeze(-1)
    outs, ends = delta_rule(*args, start, chunk=16)
    state = state_before(from_peers(ends, column, cp_group), place(column, cp_group))
    mine = (outs[..., :width] + outs[..., width:] @ state).transpose(1, 2).to(v.dtype)
    return from_peers(mine.contiguous(), row, tp_group).sum(0)


def state_before(ends: torch.Tensor, count: int) -> torch.Tensor:
    """The state after `count` pieces of the sequence, from the affine maps [pieces, B, H, K, K + K]."""
    width = ends.shape[3]
    state = torch.zeros_like(ends[0, ..., :width])
    for end in ends[:count]:
        state = end[..., :width] + end[..., width:] @ state
    return state


def place(peers: Sequence[int], group: dist.ProcessGroup | None) -> int:
    """This rank's place among the peers."""
    return peers.index(dist.get_rank()) if group is None else dist.get_rank(group)


def from_peers(tensor: torch.Tensor, peers: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """The tensors of the group, or else of the peers, stacked in the order of their ranks."""
    if group is not None:
        return gathered(tensor.unsqueeze(0), group)
    sent = tensor.expand(len(peers), *tensor.shape).contiguous()
    counts, out = among_all([tensor.numel()] * len(peers), peers), torch.empty_like(sent)
    dist.all_to_all_single(out.view(-1), sent.view(-1), counts, counts)
    return out


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """All heads of the joined sequences, one step after another, in float64."""
    columns, width = columns_of(len(inputs)), inputs[0][0].shape[-1]
    q, k, v, g, beta = (_joined([args[i].double() for args in inputs], columns) for i in range(5))
    a_log, dt_bias = (torch.cat([args[i].double() for args in inputs[:columns]]) for i in (5, 6))
    decay = torch.exp(-5 / (1 + torch.exp(-a_log.exp()[:, None] * (g + dt_bias.view(-1, width)))))
    parts = normalised(q, EPS) / width**0.5, normalised(k, EPS), v, decay, 1 / (1 + torch.exp(-beta.unsqueeze(-1)))
    out = recurrence(*(x.flatten(1, 2) for x in parts)).view(*v.shape[:2], columns, -1, width).sum(2).movedim(0, 1)
    return [part for part in out.chunk(len(inputs) // columns, dim=1) for _ in range(columns)]


def _joined(tensors: list[torch.Tensor], columns: int) -> torch.Tensor:
    """One tensor of all positions and heads, [T, B, heads, ..], from those of all ranks."""
    sequences = [torch.cat(tensors[tp::columns], dim=1) for tp in range(columns)]
    return torch.cat(sequences, dim=2).movedim(1, 0)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """States handed on from rank to rank, or all inputs gathered, where that is less; outputs summed over tp."""
    columns, rows, width = columns_of(world_size), size["B"] * size["S"] * size["H"], size["K"]
    ranks, count = world_size // columns, rows * (4 * width + 1)
    hop = size["B"] * size["H"] * width**2 * 4
    return Cost(
        wire_bytes=(ranks - 1) * min(hop / ranks, count * itemsize) + 2 * (columns - 1) / columns * rows * width * itemsize,
        memory_bytes=(count + rows * width) * itemsize,
        flops=6 * rows * width**2,
    )


PROBLEM = Problem(
    number=74,
    slug="fla_kimi_delta_attention_cp_tp",
    version=1,
    title="Delta rule with a gate per channel over a sequence that is split over ranks; pairs of ranks add their outputs.",
    family="linear-attention-cp",
    parallelism="CP+TP",
    collectives=("all_to_all_single",),
    origin="flash-linear-attention Kimi Delta Attention (Kimi Linear)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "S": 13, "H": 3, "K": 12}),
        "default": Size("default", {"B": 1, "S": 64, "H": 4, "K": 64}),
        "odd": Size("odd", {"B": 1, "S": 61, "H": 3, "K": 52}),
        # Four tensors of 128 MiB in bf16 in and one out on a rank.
        "large": Size("large", {"B": 2, "S": 8192, "H": 32, "K": 128}),
        "upstream": Size("upstream", {"B": 1, "S": 64, "H": 16, "K": 128}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
