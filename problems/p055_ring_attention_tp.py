"""#055 ring_attention_tp: an attention layer over a sequence that is split over ranks, its heads split over others.

Axes      B batch, T positions in all (split: S = max(1, T // cp) on a rank), H heads (rounded up to a multiple of W;
          h = H / tp on a rank), D head size, E = H*D, W ranks; rank = c * tp + t on a grid of cp rows and tp columns
In        hidden_states [B, S, E], equal on ranks of one c, which holds positions c*S .. (c+1)*S - 1; w_qkv [3*h*D, E], rows
          ordered (q k v, head, D), and w_o [E, h*D], equal on ranks of one t, which holds heads t*h .. (t+1)*h - 1;
          num_heads = H, softmax_scale (None: D^-1/2) and causal, equal on every rank; tp_group and cp_group (None: the row and
          the column of the grid with tp = 3*E / rows of w_qkv, which is all ranks where the other side is 1)
Out       [B, S, E], equal on ranks of one c
Maths     q, k, v = hidden w_qkv^T; per head softmax(scale * q k^T) v over the whole sequence, causal: position i sees
          positions <= i; the heads side by side, times w_o^T; each rank's part is rounded to the dtype, then summed over t
Wire      k and v around each column, the sum over each row
Needs     tp divides W; cp <= T
Not here  zigzag layouts, grouped key heads, biases, dropout, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import turn
from problems.grids import cut, exchanged_along, grid_peers
from problems.ring import ring_layer
from problems.ring_cases import attention_layer, layer_weights, options
from problems.worlds import one_each


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Scores of deviation 3; masks and scales take turns over the trials, grids of up to four columns in another rhythm."""
    upstream, world_size = draw.profile == "upstream", draw.world_size
    grids = [n for n in range(1, min(world_size, 4) + 1) if world_size % n == 0]
    grids += [1] * (len(grids) % 2 == 0)
    tp = _public_tp(world_size) if upstream else grids[turn(draw, len(grids), "grid")]
    place, part = divmod(draw.rank, tp)
    multiple = tp if upstream else world_size
    heads = -(-size["H"] // multiple) * multiple
    width, positions = heads * size["D"], max(1, size["T"] * tp // world_size)
    hidden = torch.randn(size["B"], positions, width, generator=draw.shared(f"hidden_states {place}")).to(draw.dtype)
    scale, causal = (None, True) if upstream else options(draw, size["D"])
    return hidden, *layer_weights(draw, part, width // tp, width), heads, scale, causal, None, None


def _public_tp(world_size: int) -> int:
    return 2 - world_size % 2


def reference(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The layer's output at this rank's positions, [B, S, E]."""
    tp = 3 * hidden_states.shape[-1] // len(w_qkv) if tp_group is None else dist.get_world_size(tp_group)
    row, column = grid_peers(tp)
    row = row if tp_group is None else dist.get_process_group_ranks(tp_group)
    column = column if cp_group is None else dist.get_process_group_ranks(cp_group)
    weights = w_qkv, w_o
    part = ring_layer(hidden_states, weights, num_heads // tp, softmax_scale, causal=causal, peers=column, group=cp_group)
    return summed_along(part, tp_group, row)


def summed_along(tensor: torch.Tensor, group: dist.ProcessGroup | None, peers: Sequence[int]) -> torch.Tensor:
    """Sum over peers of [B, S, E] in at least float32: everyone sums some columns of all tensors, then they are joined."""
    if len(peers) == 1:
        return tensor
    parts = exchanged_along(tensor.unsqueeze(0), 3, 0, [1] * len(peers), group, peers)
    mine = parts.sum(0, keepdim=True, dtype=torch.promote_types(tensor.dtype, torch.float32)).to(tensor.dtype)
    extents = cut(tensor.shape[-1], len(peers))
    return exchanged_along(mine.expand(len(peers), -1, -1, -1), 0, 3, extents, group, peers)[0]


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The whole sequence and the heads of all ranks at once, in float64."""
    heads, scale, causal = inputs[0][3:6]
    width = inputs[0][0].shape[-1]
    tp = width // inputs[0][2].shape[1]
    w_qkv = torch.cat([args[1].double().view(3, heads // tp, -1, width) for args in inputs[:tp]], dim=1)
    w_o = torch.cat([args[2].double().view(width, heads // tp, -1) for args in inputs[:tp]], dim=1)
    hidden = torch.cat([args[0].double() for args in inputs[::tp]], dim=1)
    out = attention_layer(hidden, w_qkv, w_o, scale, causal=causal)
    return [part for part in out.chunk(len(inputs) // tp, dim=1) for _ in range(tp)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The public grid, causal, evenly spread over ranks: half of all pairs of blocks."""
    tp = _public_tp(world_size)
    cp = world_size // tp
    width = -(-size["H"] // world_size) * world_size * size["D"]
    rows = size["B"] * max(1, size["T"] // cp)
    return Cost(
        wire_bytes=(cp - 1 + 2 * (tp - 1)) * rows * width / tp * itemsize,
        memory_bytes=(2 * rows * width + 4 * width**2 / tp) * itemsize,
        flops=(8 * width + 2 * size["T"]) * rows * width / tp,
    )


SIZES = {
    "tiny": Size("tiny", {"B": 2, "T": 23, "H": 3, "D": 8}),
    "default": Size("default", {"B": 1, "T": 256, "H": 8, "D": 32}),
    "odd": Size("odd", {"B": 1, "T": 259, "H": 5, "D": 40}),
    # 512 MiB of hidden states and of weights in bf16 over all ranks; with four columns a block of scores takes 16 GiB in fp32.
    "large": Size("large", {"B": 1, "T": 32768, "H": 64, "D": 128}),
    "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
}

PROBLEM = Problem(
    number=55,
    slug="ring_attention_tp",
    version=1,
    title="An attention layer over a grid of ranks: the sequence is split along one side, the heads along the other.",
    family="ring-attention",
    parallelism="TP+CP",
    collectives=("isend", "irecv", "all_to_all_single"),
    origin="Megatron-LM, tensor and context parallelism, with ring attention",
    split="test",
    sizes=SIZES,
    # A score of 20, rounded, moves its exponential by 20 round-offs; products before and after.
    tolerance=Tolerance(inner_ulps=256),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=one_each(SIZES, "T", "position"),
)
