"""#017 rope_allgather: rotate the local positions' queries and keys, then every rank gets the whole sequence.

Axes      B batch, T positions in all (split: S = T // W on a rank), H heads, D head size (even), W ranks
In        q_local, k_local [B, S, H, D] and cos_local, sin_local [B, S, D], differ per rank; rank r holds positions
          r*S .. (r+1)*S - 1
Out       (q, k), each [B, W*S, H, D], equal on every rank
Maths     y = x * cos + turned * sin, where turned = [-x2, x1] and x1, x2 are the lower and upper half of a head;
          cos and sin hold for all heads, and their two halves need not be equal
Wire      all_gather of q and k, joined along axis 1: a rank sends 2*B*S*H*D elements to every other one, without multicast
Needs     T >= W
Not here  interleaved pairs, unequal numbers of heads, gradients
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.draws import turn

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal heads at a scale of their own per rank and tensor, turned by angles that depend on the position.

    Every sequence of the batch starts elsewhere.  In half of the trials the halves of cos and sin are unlike.
    """
    batch, local = size["B"], max(1, size["T"] // draw.world_size)
    q, k = (torch.randn(batch, local, size["H"], size["D"], generator=draw.own(name)) for name in "qk")
    if draw.profile == "upstream":
        cos, sin = (torch.randn(batch, local, size["D"], generator=draw.own(name)) for name in ("cos", "sin"))
    else:
        scales = torch.rand(2, generator=draw.own("scale")).mul_(2).sub_(1).exp2_().tolist()
        q, k = q * scales[0], k * scales[1]
        cos, sin = _angles(draw, size, local)
    return q.to(draw.dtype), k.to(draw.dtype), cos.to(draw.dtype), sin.to(draw.dtype)


def _angles(draw: Draw, size: Size, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency, [B, S, D]."""
    chance, half = draw.shared("angles"), size["D"] // 2
    start = torch.randint(4096, (size["B"], 1, 1), generator=chance) + draw.rank * local
    position = start + torch.arange(local)[:, None]
    frequency = 10000.0 ** -(torch.arange(half) / half)
    factor = torch.rand(half, generator=chance).add_(0.5) if turn(draw, 2) else torch.ones(half)
    angle = position * torch.cat([frequency, frequency * factor])
    return angle.cos(), angle.sin()


def reference(
    q_local: torch.Tensor, k_local: torch.Tensor, cos_local: torch.Tensor, sin_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the whole sequence after rotation, each [B, W*S, H, D]."""
    cos, sin = cos_local.unsqueeze(2), sin_local.unsqueeze(2)
    return whole_sequence(rotated(q_local, cos, sin)), whole_sequence(rotated(k_local, cos, sin))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Lower and upper half of every head as the two coordinates of points that are turned."""
    lower, upper = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-upper, lower], dim=-1) * sin


def whole_sequence(x: torch.Tensor) -> torch.Tensor:
    """All ranks' x, [B, S, H, D], joined along the sequence."""
    return gathered(x).view(-1, *x.shape).transpose(0, 1).flatten(1, 2)


def exact(inputs: Sequence[Inputs]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each half on its own, on the joined sequence, in float64."""
    q, k, cos, sin = (torch.cat([args[i].double() for args in inputs], dim=1) for i in range(4))
    half = q.shape[-1] // 2
    for x in (q, k):
        a, b = x[..., :half].clone(), x[..., half:].clone()
        x[..., :half] = torch.einsum("bshd,bsd->bshd", a, cos[..., :half]) - torch.einsum("bshd,bsd->bshd", b, sin[..., :half])
        x[..., half:] = torch.einsum("bshd,bsd->bshd", b, cos[..., half:]) + torch.einsum("bshd,bsd->bshd", a, sin[..., half:])
    return [(q, k)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Both local blocks to every other rank; the angles are read once, three operations per element."""
    local = size["B"] * max(1, size["T"] // world_size) * size["D"]
    count = 2 * local * size["H"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=((1 + world_size) * count + 2 * local) * itemsize,
        flops=3 * count,
    )


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one position of the smallest size."""
    fewest = min(size["T"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one position each"


SIZES = {
    "tiny": Size("tiny", {"B": 2, "T": 52, "H": 3, "D": 14}),
    "default": Size("default", {"B": 2, "T": 512, "H": 4, "D": 64}),
    "odd": Size("odd", {"B": 3, "T": 515, "H": 5, "D": 74}),
    # 2 GiB out in bf16, of which a rank of eight sends 1.75 GiB.
    "large": Size("large", {"B": 1, "T": 131072, "H": 32, "D": 128}),
    "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
}

PROBLEM = Problem(
    number=17,
    slug="rope_allgather",
    version=1,
    title="Apply rotary position embedding to the local queries and keys and gather both along the sequence.",
    family="sequence-parallel-attention",
    parallelism="CP",
    collectives=("all_gather_into_tensor",),
    origin="Llama rotary embedding, Megatron-LM context parallelism",
    split="train",
    sizes=SIZES,
    # Two products and a sum: nothing accumulates.
    tolerance=Tolerance(inner_ulps=4),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
