"""#039 ulysses_attention_e2e: an attention layer over a sequence split over ranks, whose heads are split while it attends.

Axes      B batch, S positions on a rank (W*S in all), H heads (rounded up to a multiple of W), D head size, W ranks; E = H*D
In        hidden_states [B, S, E], differs per rank; rank r holds positions r*S .. (r+1)*S - 1; w_qkv [3*E, E], w_o [E, E],
          equal on every rank; group (None: all ranks); num_heads H and causal, equal on every rank
Out       [B, S, E], differs per rank
Maths     q, k, v = thirds of hidden w_qkv^T; per head softmax(q k^T / D^1/2) v over the whole sequence, causal: position i sees
          positions <= i; the heads side by side, times w_o^T
Wire      all_to_all of q, k, v, then of the heads' outputs: a rank sends 4*(W-1)/W of B*S*E elements
Needs     any W
Profiles  the public formula lets the heads of one position attend to each other, which needs no communication; both
          profiles, `upstream` with the public inputs, mean attention between positions
Not here  heads that W does not divide, fewer key heads, biases, dropout, gradients
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn
from problems.ulysses import all_to_all

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, int, bool]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values; weights scaled so that activations are O(1) and scores have deviation 3.  Causal every other trial."""
    b, s, h, e = extents(size, draw.world_size)
    source = draw.own if draw.profile == "upstream" else draw.shared
    hidden = torch.randn(b, s, e, generator=draw.own("hidden_states"))
    w_qkv, w_o = (torch.randn(rows, e, generator=source(name)) for rows, name in ((3 * e, "w_qkv"), (e, "w_o")))
    causal = False
    if draw.profile == "hardened":
        causal = turn(draw, 2) == 0
        w_qkv, w_o = w_qkv.mul_(e**-0.5), w_o.mul_(e**-0.5)
        w_qkv[: 2 * e] *= 3**0.5
    return hidden.to(draw.dtype), w_qkv.to(draw.dtype), w_o.to(draw.dtype), None, h, causal


def extents(size: Size, world_size: int) -> tuple[int, int, int, int]:
    """Batch, positions on a rank, heads, and all heads' sizes together."""
    heads = -(-size["H"] // world_size) * world_size
    return size["B"], size["S"], heads, heads * size["D"]


def reference(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    num_heads: int = 8,
    causal: bool = False,
) -> torch.Tensor:
    """The layer's output at this rank's positions, [B, S, E]."""
    qkv = F.linear(hidden_states, w_qkv)
    qkv = qkv.view(*qkv.shape[:2], 3, num_heads, -1)
    q, k, v = all_to_all(qkv, 3, 1, group).transpose(1, 3).unbind(2)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    return F.linear(all_to_all(heads, 1, 2, group).flatten(2), w_o)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """One head at a time over the joined sequence in float64; each head adds its share of the output."""
    hidden, w_qkv, w_o = zip(*((x.double(), w.double(), o.double()) for x, w, o, *_ in inputs), strict=True)
    heads, causal = inputs[0][4:]
    outs = [torch.zeros_like(x) for x in hidden]
    for head in torch.arange(hidden[0].shape[-1], device=hidden[0].device).chunk(heads):
        q, k, v = (
            torch.cat([x @ w.view(3, -1, w.shape[-1])[side, head].T for x, w in zip(hidden, w_qkv, strict=True)], dim=1)
            for side in range(3)
        )
        attended = _attention(q, k, v, causal=causal).chunk(len(inputs), dim=1)
        for out, mine, w in zip(outs, attended, w_o, strict=True):
            out.add_(mine @ w[:, head].T)
    return outs


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Of one head over whole sequences, [B, T, D], some query rows at a time."""
    positions = torch.arange(q.shape[1], device=q.device)
    parts = []
    for mine in torch.split(positions, max(1, 2**24 // (q.shape[0] * q.shape[1]))):
        scores = torch.einsum("bid,bjd->bij", q[:, mine], k).div_(q.shape[-1] ** 0.5)
        if causal:
            scores.masked_fill_(positions > mine[:, None], -torch.inf)
        parts.append(torch.einsum("bij,bjd->bid", scores.softmax(-1), v))
    return torch.cat(parts, dim=1)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The causal case.  Ulysses, or, where it is less, hidden states to the ranks after one's own; q, k, v need not be stored."""
    b, s, _, e = extents(size, world_size)
    count = b * s * e
    return Cost(
        wire_bytes=(world_size - 1) * min(1 / 2, 4 / world_size) * count * itemsize,
        memory_bytes=(2 * count + 4 * e * e) * itemsize,
        flops=2 * count * 4 * e + 4 * count * s * world_size / 2,
    )


PROBLEM = Problem(
    number=39,
    slug="ulysses_attention_e2e",
    version=1,
    title="An attention layer over a sequence split over ranks: projections, softmax attention by heads, output projection.",
    family="sequence-parallel-attention",
    parallelism="SP",
    collectives=("all_to_all",),
    origin="VeOmni, DeepSpeed-Ulysses attention layer",
    split="test",
    sizes={
        "tiny": Size("tiny", {"B": 2, "S": 7, "H": 4, "D": 12}),
        "default": Size("default", {"B": 1, "S": 96, "H": 8, "D": 32}),
        "odd": Size("odd", {"B": 1, "S": 67, "H": 6, "D": 46}),
        # Weights of 512 MiB and q, k, v of 384 MiB on a rank in bf16.
        "large": Size("large", {"B": 1, "S": 8192, "H": 64, "D": 128}),
        # The public number of positions on a rank, 16 // W, at W = 4.
        "upstream": Size("upstream", {"B": 16, "S": 4, "H": 8, "D": 64}),
    },
    # A score of 15, rounded, moves its exponential by 15 round-offs.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
