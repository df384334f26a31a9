"""#075 fla_gated_deltanet_cp: the gated delta rule over a sequence split over ranks, whose heads are split while it runs.

Axes      B batch, S positions on a rank (T = W*S in all), H value heads (rounded up to a multiple of 2*W; `upstream`: of W),
          G query heads (H or H / 2), K and V key and value size, W ranks
In        q, k [B, S, G, K], v [B, S, H, V], gate and beta [B, S, H], differ per rank; rank r holds positions r*S .. (r+1)*S - 1;
          a_log and dt_bias [H / W], differ per rank: those of value heads r*H/W .. (r+1)*H/W - 1; group (None: all ranks)
Out       [B, S, H, V], the rank's own positions, all heads
Maths     q and k are divided by max(length, 1e-6), q also by K^1/2; query head j serves value heads j*H/G .. (j+1)*H/G - 1.
          Per value head, in at least float32, from S = 0 [K, V]: S *= exp(-exp(a_log) * softplus(gate + dt_bias));
          S += k (beta * (v - k^T S))^T; out = q^T S
Wire      all_to_all of all inputs, then of the outputs
Needs     any W
Not here  the projections before and after, a state at the start or returned, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.delta_rule import delta_rule, unit_rows
from problems.delta_rule_cases import draw_keys, draw_queries, draw_values, normalised, recurrence
from problems.draws import turn
from problems.ulysses import all_to_all

EPS = 1e-6
"""Shorter rows than this are not made as long as 1."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Queries that look for keys of earlier ranks; heads forget in 5 to 2000 steps; one and two per query take turns."""
    upstream = draw.profile == "upstream"
    shape, heads = (size["B"], size["S"]), heads_of(size, draw.world_size, 1 if upstream else 2)
    gate, beta = (torch.randn(*shape, heads, generator=draw.own(name)) for name in ("gate", "beta"))
    beta.sigmoid_()
    if upstream:
        q, k, v = (torch.randn(*shape, heads, size[d], generator=draw.own(n)) for n, d in zip("qkv", "KKV", strict=True))
        spread = torch.linspace(0, 0.2, heads), torch.linspace(-0.1, 0.1, heads)
        a_log, dt_bias = (x.bfloat16().chunk(draw.world_size)[draw.rank] for x in spread)
    else:
        narrow = *shape, heads // (1 + turn(draw, 2)), size["K"]
        q, k = draw_queries(draw, narrow, EPS, range(draw.rank)), draw_keys(draw, narrow, EPS)
        v = draw_values(draw, (*shape, heads, size["V"]))
        chance = torch.rand(2, heads // draw.world_size, generator=draw.own("decay"))
        a_log, dt_bias = (0.5 + 3.5 * chance[0]).log(), (1e-3 * 50 ** chance[1]).expm1().log()
    return *(x.to(draw.dtype) for x in (q, k, v, gate, beta, a_log, dt_bias)), None


def heads_of(size: Size, world_size: int, grouped: int) -> int:
    """Value heads that every rank can have the same number of, a multiple of `grouped`."""
    return -(-size["H"] // (grouped * world_size)) * grouped * world_size


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Outputs at this rank's positions, [B, S, H, V]."""
    wide = torch.promote_types(v.dtype, torch.float32)
    queries, keys = all_to_all(torch.cat([q, k], dim=-1), 2, 1, group).chunk(2, dim=-1)
    rest = all_to_all(torch.cat([v, gate.unsqueeze(-1), beta.unsqueeze(-1)], dim=-1), 2, 1, group).to(wide)
    values, gates, betas = torch.split(rest, [v.shape[-1], 1, 1], dim=-1)
    repeats = values.shape[2] // queries.shape[2]
    qn, kn = (unit_rows(x, EPS).repeat_interleave(repeats, dim=2) for x in (queries, keys))
    log_decay = -a_log.to(wide).exp().unsqueeze(-1) * F.softplus(gates + dt_bias.to(wide).unsqueeze(-1))
    state = values.new_zeros(len(values), values.shape[2], q.shape[-1], v.shape[-1])
    out, _ = delta_rule(qn * q.shape[-1] ** -0.5, kn, values, log_decay, betas, state, chunk=64)
    heads = out.transpose(1, 2).to(v.dtype)
    return all_to_all(heads, 1, 2, group)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """All heads of the joined sequence, one step after another, in float64."""
    q, k, v, gate, beta = (torch.cat([args[i].double() for args in inputs], dim=1).movedim(1, 0) for i in range(5))
    a_log, dt_bias = (torch.cat([args[i].double() for args in inputs]) for i in (5, 6))
    repeats = v.shape[2] // q.shape[2]
    qn, kn = (normalised(x, EPS)[:, :, torch.arange(v.shape[2], device=x.device) // repeats] for x in (q, k))
    # log(1 + e^x) is the softplus.
    decay = torch.exp(-a_log.exp() * torch.logaddexp(gate + dt_bias, torch.zeros_like(gate)))
    args = (x.flatten(1, 2) for x in (qn / q.shape[-1] ** 0.5, kn, v, decay.unsqueeze(-1), beta.unsqueeze(-1)))
    out = recurrence(*args).view(v.shape).movedim(0, 1)
    return list(out.chunk(len(inputs), dim=1))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Two value heads per query; the cheaper of exchanging heads and of handing states on from rank to rank."""
    heads, rows, keys, values = heads_of(size, world_size, 2), size["B"] * size["S"], size["K"], size["V"]
    count = rows * heads * (keys + values + 2)
    others = (world_size - 1) / world_size
    return Cost(
        wire_bytes=others * min((count + rows * heads * values) * itemsize, size["B"] * heads * keys * values * 4),
        memory_bytes=(count + rows * heads * values) * itemsize,
        flops=6 * rows * heads * keys * values,
    )


PROBLEM = Problem(
    number=75,
    slug="fla_gated_deltanet_cp",
    version=1,
    title="Gated delta rule over a sequence that is split over ranks; heads are exchanged for positions and back.",
    family="linear-attention-cp",
    parallelism="CP",
    collectives=("all_to_all_single",),
    origin="flash-linear-attention / Megatron-Core Gated DeltaNet (Qwen3-Next)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 2, "S": 13, "H": 4, "K": 12, "V": 20}),
        "default": Size("default", {"B": 1, "S": 64, "H": 8, "K": 32, "V": 64}),
        "odd": Size("odd", {"B": 1, "S": 61, "H": 6, "K": 36, "V": 52}),
        # 256 MiB of values and as much of outputs in bf16 on a rank.
        "large": Size("large", {"B": 1, "S": 8192, "H": 32, "K": 256, "V": 512}),
        "upstream": Size("upstream", {"B": 1, "S": 64, "H": 6, "K": 256, "V": 512}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
