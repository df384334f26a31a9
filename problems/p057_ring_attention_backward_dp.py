"""#057 ring_attention_backward_dp: gradients of attention over a sequence of which each rank holds one block.

Axes      B batch, T positions in all (split: S = T // W on a rank), H heads, D head size, W ranks
In        dout, q, k, v, out [B, S, H, D] and softmax_lse [B, H, S], differ per rank; rank r holds positions r*S .. (r+1)*S - 1;
          softmax_scale (None: D^-1/2) and causal, equal on every rank; cp_group (None: all ranks) shares the sequence,
          dp_group (None: no replicas) averages gradients
Out       dq, dk, dv [B, S, H, D] in the dtype of q, differ per rank
Maths     p = exp(scale * q k^T - lse), 0 for later positions if causal; ds = p * (dout v^T - row sums of dout * out);
          dq = scale * ds k, dk = scale * ds^T q, dv = p^T dout, sums over the whole sequence in at least float32
Wire      k and v of other ranks come in, parts of their dk and dv go out
Needs     T >= W
Not here  the forward pass, zigzag layouts, grouped key heads, dropout; replicas in the inputs (no group can be an argument)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered, reduce_scattered
from problems.ring_cases import options
from problems.worlds import one_each


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal q, k, v, dout, one key in sixteen three times as long; out and lse of the whole sequence (`upstream`: of the block).

    Causal and not, default and explicit scale take turns over the trials.
    """
    shape = size["B"], max(1, size["T"] // draw.world_size), size["H"], size["D"]
    q, dout = (torch.randn(shape, generator=draw.own(name)).to(draw.dtype) for name in ("q", "dout"))
    if draw.profile == "upstream":
        k, v = _keys(draw, shape)
        out, lse = _attended(q, k, v, size["D"] ** -0.5, None)
        return dout, q, k, v, out.to(draw.dtype), lse.to(draw.dtype), None, False, None, None
    scale, causal = options(draw, size["D"])
    ranks = range(draw.rank + 1 if causal else draw.world_size)
    blocks = [_keys(replace(draw, rank=rank), shape) for rank in ranks]
    keys, values = (torch.cat([block[i] for block in blocks], dim=1) for i in range(2))
    out, lse = _attended(q, keys, values, scale or size["D"] ** -0.5, draw.rank * shape[1] if causal else None)
    return dout, q, *blocks[draw.rank], out.to(draw.dtype), lse.to(draw.dtype), scale, causal, None, None


def _keys(draw: Draw, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's k and v."""
    k, v = (torch.randn(shape, generator=draw.own(name)) for name in "kv")
    if draw.profile != "upstream":
        k *= torch.where(torch.rand(*shape[:3], 1, generator=draw.own("long keys")) < 1 / 16, 3.0, 1.0)
    return k.to(draw.dtype), v.to(draw.dtype)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, start: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, S, H, D] and log-sum-exp [B, H, S], at least in float32; causal where q starts at `start`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    outs, lses = [], []
    for i in range(0, q.shape[1], 1024):
        scores = torch.einsum("bihd,bjhd->bhij", q[:, i : i + 1024] * scale, k)
        if start is not None:
            places = start + i + torch.arange(scores.shape[2], device=q.device)
            scores.masked_fill_(torch.arange(k.shape[1], device=q.device) > places[:, None], -torch.inf)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients dq, dk, dv of the local blocks, each [B, S, H, D]; one block of keys after another."""
    rank, world_size = dist.get_rank(cp_group), dist.get_world_size(cp_group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).unsqueeze(-1)
    rows = [x.to(wide).transpose(1, 2) for x in (q, dout)] + [softmax_lse.to(wide).unsqueeze(-1), delta]
    blocks = gathered(torch.stack([k, v]).unsqueeze(0), cp_group)
    dq, parts = torch.zeros_like(rows[0]), torch.zeros_like(blocks.transpose(3, 4), dtype=wide)
    for other in range(rank + 1 if causal else world_size):
        keys, values = blocks[other].to(wide).transpose(2, 3)
        grads = block_gradients(rows, keys, values, scale, causal=causal and other == rank)
        dq += grads[0]
        parts[other] = torch.stack(grads[1:])
    dk, dv = reduce_scattered(parts, cp_group)[0]
    found = [x.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format) for x in (dq, dk, dv)]
    if dp_group is not None:
        for grad in found:
            dist.all_reduce(grad, group=dp_group)
            grad.div_(dist.get_world_size(dp_group))
    return found[0], found[1], found[2]


def block_gradients(
    rows: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one block of keys and the local rows (q, dout, lse, delta) give to dq, dk, dv, all [B, H, S, D]."""
    q, dout, lse, delta = rows
    p = (q @ k.transpose(-2, -1)).mul_(scale).sub_(lse).exp_()
    if causal:
        p = p.tril_()
    ds = (dout @ v.transpose(-2, -1)).sub_(delta).mul_(p).mul_(scale)
    return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dout


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The whole sequence in float64, some query rows at a time."""
    dout, q, k, v, out = (torch.cat([args[i] for args in inputs], dim=1).double() for i in range(5))
    lse = torch.cat([args[5] for args in inputs], dim=2).double()
    scale, causal = q.shape[-1] ** -0.5 if inputs[0][6] is None else inputs[0][6], inputs[0][7]
    positions = torch.arange(q.shape[1], device=q.device)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for mine in torch.split(positions, max(1, 2**24 // (k.shape[0] * k.shape[1] * k.shape[2]))):
        exponent = torch.einsum("bihd,bjhd->bhij", q[:, mine], k) * scale - lse[:, :, mine, None]
        if causal:
            exponent.masked_fill_(positions > mine[:, None], -torch.inf)
        p = exponent.exp_()
        towards = torch.einsum("bihd,bjhd->bhij", dout[:, mine], v)
        towards -= torch.einsum("bihd,bihd->bhi", dout[:, mine], out[:, mine])[..., None]
        ds = towards.mul_(p).mul_(scale)
        dq[:, mine] = torch.einsum("bhij,bjhd->bihd", ds, k)
        dk += torch.einsum("bhij,bihd->bjhd", ds, q[:, mine])
        dv += torch.einsum("bhij,bihd->bjhd", p, dout[:, mine])
    return list(zip(*(x.chunk(len(inputs), dim=1) for x in (dq, dk, dv)), strict=True))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The causal case, evenly spread over ranks: half of all pairs of blocks; parts of dk and dv travel in fp32."""
    local = max(1, size["T"] // world_size)
    count = size["B"] * local * size["H"] * size["D"]
    return Cost(
        wire_bytes=(world_size - 1) * count * (itemsize + 4),
        memory_bytes=8 * count * itemsize,
        flops=10 * count * local * world_size / 2,
    )


SIZES = {
    "tiny": Size("tiny", {"B": 2, "T": 44, "H": 3, "D": 16}),
    "default": Size("default", {"B": 1, "T": 256, "H": 4, "D": 48}),
    "odd": Size("odd", {"B": 1, "T": 259, "H": 3, "D": 56}),
    # 64 MiB of bf16 per tensor and rank; a block of scores takes 8 GiB in fp32.
    "large": Size("large", {"B": 1, "T": 65536, "H": 32, "D": 128}),
    "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
}

PROBLEM = Problem(
    number=57,
    slug="ring_attention_backward_dp",
    version=1,
    title="Gradients of softmax attention over a sequence that is split over ranks, causal or not.",
    family="ring-attention",
    parallelism="CP+DP",
    collectives=("all_gather_into_tensor", "reduce_scatter", "all_reduce"),
    origin="ring-flash-attention backward, Megatron-LM context parallelism",
    split="test",
    sizes=SIZES,
    # A score of 20, rounded, moves its exponential by 20 round-offs; differences to row sums cancel.
    tolerance=Tolerance(inner_ulps=256),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=one_each(SIZES, "T", "position"),
)
