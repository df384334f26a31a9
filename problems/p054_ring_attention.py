"""#054 ring_attention: exact softmax attention over a sequence of which each rank holds one block.

Axes      B batch, T positions in all (split: S = T // W on a rank), H heads, D head size, W ranks
In        q, k, v [B, S, H, D], differ per rank; rank r holds positions r*S .. (r+1)*S - 1
          softmax_scale (None: D^-1/2) and causal, equal on every rank; group (None: all ranks)
Out       [B, S, H, D] in the dtype of q, differs per rank
Maths     out = softmax(scale * q k^T) v over the whole sequence; causal: position i sees positions <= i
Wire      k and v of other ranks: 2*(W-1) blocks of B*S*H*D elements come in, half of that on average when causal
Needs     T >= W
Not here  load-balanced (zigzag) layouts, grouped key heads, dropout, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal q, k, v; one key in sixteen is six times as long, so that running maxima jump.

    Causal and not, default and explicit scale take turns over the trials, from a secret start.
    """
    shape = size["B"], max(1, size["T"] // draw.world_size), size["H"], size["D"]
    q, k, v = (torch.randn(shape, generator=draw.own(name)) for name in "qkv")
    if draw.profile == "upstream":
        return q.to(draw.dtype), k.to(draw.dtype), v.to(draw.dtype), None, True, None
    long = torch.rand(*shape[:3], 1, generator=draw.own("long keys")) < 1 / 16
    k *= torch.where(long, 6.0, 1.0)
    turn = int(torch.randint(4, (), generator=replace(draw, trial=0).shared("turn"))) + draw.trial
    factor = 0.5 + float(torch.rand((), generator=draw.shared("scale")))
    scale = factor * size["D"] ** -0.5 if turn // 2 % 2 else None
    return q.to(draw.dtype), k.to(draw.dtype), v.to(draw.dtype), scale, turn % 2 == 0, None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of the local queries to all ranks' keys, [B, S, H, D]; blocks travel around a ring."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block = [k.contiguous(), v.contiguous()]
    arriving, pending = start_exchange(block, rank, world_size, group) if world_size > 1 else ([], [])
    out, lse = attend(q, block[0], block[1], scale, causal=causal)
    for step in range(1, world_size):
        for work in pending:
            work.wait()
        block = arriving
        if step + 1 < world_size:
            arriving, pending = start_exchange(block, rank, world_size, group)
        if not causal or step <= rank:
            out, lse = merge(out, lse, *attend(q, block[0], block[1], scale, causal=False))
    return out.transpose(1, 2).to(q.dtype)


def start_exchange(
    block: list[torch.Tensor], rank: int, world_size: int, group: dist.ProcessGroup | None
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Send k and v to the next rank and receive those of the previous one; the buffers fill when all work is done."""
    to, frm = (rank + 1) % world_size, (rank - 1) % world_size
    if group is not None:
        to, frm = dist.get_global_rank(group, to), dist.get_global_rank(group, frm)
    following = [torch.empty_like(x) for x in block]
    ops = [dist.P2POp(dist.isend, x, to, group) for x in block]
    ops += [dist.P2POp(dist.irecv, x, frm, group) for x in following]
    return following, dist.batch_isend_irecv(ops)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block in float32: output [B, H, S, D] and log-sum-exp of the scores [B, H, S, 1]."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp_() @ v, lse


def merge(
    out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two blocks of keys from the attention to each."""
    out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - F.logsigmoid(lse - block_lse)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Softmax over the joined sequence in float64, some query rows at a time."""
    q, k, v = (torch.cat([args[i] for args in inputs], dim=1).double().movedim(1, 2) for i in range(3))
    causal, scale = inputs[0][4], q.shape[-1] ** -0.5 if inputs[0][3] is None else inputs[0][3]
    positions = torch.arange(q.shape[2], device=q.device)
    rows = max(1, 2**24 // (k.shape[0] * k.shape[1] * k.shape[2]))
    parts = []
    for mine in torch.split(positions, rows):
        scores = torch.einsum("bhid,bhjd->bhij", q[:, :, mine], k).mul_(scale)
        if causal:
            scores.masked_fill_(positions > mine[:, None], -torch.inf)
        parts.append(torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v))
    return list(torch.cat(parts, dim=1).chunk(len(inputs), dim=1))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The causal case, evenly spread over ranks: half of all pairs of blocks."""
    local = max(1, size["T"] // world_size)
    count = size["B"] * local * size["H"] * size["D"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=4 * count * itemsize,
        flops=4 * count * local * world_size / 2,
    )


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one position of the smallest size."""
    fewest = min(size["T"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one position each"


SIZES = {
    "tiny": Size("tiny", {"B": 2, "T": 52, "H": 3, "D": 16}),
    "default": Size("default", {"B": 1, "T": 512, "H": 4, "D": 64}),
    "odd": Size("odd", {"B": 1, "T": 515, "H": 3, "D": 72}),
    "large": Size("large", {"B": 1, "T": 131072, "H": 32, "D": 128}),
    "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
}

PROBLEM = Problem(
    number=54,
    slug="ring_attention",
    version=1,
    title="Softmax attention over a sequence that is split over ranks, causal or not.",
    family="ring-attention",
    parallelism="CP",
    collectives=("isend", "irecv"),
    origin="ring-flash-attention, Megatron-LM context parallelism",
    split="test",
    sizes=SIZES,
    # A score of 40, rounded, moves its exponential by 40 round-offs.
    tolerance=Tolerance(inner_ulps=256),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
