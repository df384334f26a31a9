"""#056 ring_attention_pp: attention layers one after another on stages of ranks; within a stage the sequence is split.

Axes      B batch, T positions in all (split: S = max(1, T // cp) on a rank), H heads, D head size, E = H*D, W ranks;
          rank = p * cp + c on a grid of pp stages (2 if W is even, else 1) and cp = W / pp columns
In        hidden_states [B, S, E], differs per rank, stage 0 holds positions c*S .. (c+1)*S - 1, later stages use its shape and
          dtype alone (`upstream`: equal on ranks of one c); w_qkv [3*E, E], rows ordered (q k v, head, D), and w_o [E, E], equal
          on ranks of one stage; num_heads = H, softmax_scale (None: D^-1/2) and causal, equal on every rank;
          cp_group and pp_group (None: the row and the column of the grid)
Out       [B, S, E], the output of the rank's own stage
Maths     x = hidden_states on stage 0, else the output of the stage before in the dtype; q, k, v = x w_qkv^T; per head
          softmax(scale * q k^T) v over the whole sequence, causal: position i sees positions <= i; the heads side by side,
          times w_o^T
Wire      k and v around each row, outputs down each column
Needs     cp <= T
Not here  microbatches, residuals, norms, biases, zigzag layouts, gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.grids import grid_peers
from problems.ring import ring_layer
from problems.ring_cases import attention_layer, layer_weights, options
from problems.worlds import one_each


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Scores of deviation 3 on stage 0; masks and scales take turns over the trials."""
    upstream, cp = draw.profile == "upstream", columns_of(draw.world_size)
    stage, place = divmod(draw.rank, cp)
    width = size["H"] * size["D"]
    source = draw.shared(f"hidden_states {place}") if upstream else draw.own("hidden_states")
    hidden = torch.randn(size["B"], max(1, size["T"] // cp), width, generator=source).to(draw.dtype)
    scale, causal = (None, True) if upstream else options(draw, size["D"])
    return hidden, *layer_weights(draw, stage, width, width), size["H"], scale, causal, None, None


def columns_of(world_size: int) -> int:
    """Ranks of a stage: half of an even number of ranks, else all."""
    return world_size // (2 - world_size % 2)


def reference(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The output of this rank's stage at its positions, [B, S, E]."""
    row, column = grid_peers(columns_of(dist.get_world_size()))
    row = row if cp_group is None else dist.get_process_group_ranks(cp_group)
    column = column if pp_group is None else dist.get_process_group_ranks(pp_group)
    stage, x = column.index(dist.get_rank()), hidden_states
    if stage:
        x = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        transfer(dist.irecv, x, column[stage - 1], pp_group)
    weights = w_qkv, w_o
    out = ring_layer(x, weights, num_heads, softmax_scale, causal=causal, peers=row, group=cp_group)
    if stage + 1 < len(column):
        transfer(dist.isend, out, column[stage + 1], pp_group)
    return out


def transfer(op: Callable[..., Any], tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send or receive one tensor; as a batch, so that the first message of every rank opens the same communicator."""
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group)]):
        work.wait()


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """One stage after another over the whole sequence, in float64."""
    cp = len(inputs) if len(inputs) % 2 else len(inputs) // 2
    heads, scale, causal = inputs[0][3:6]
    x, outs = torch.cat([args[0].double() for args in inputs[:cp]], dim=1), list[torch.Tensor]()
    for _, w_qkv, w_o, *_ in inputs[::cp]:
        width = len(w_o)
        split = w_qkv.double().view(3, heads, -1, width), w_o.double().view(width, heads, -1)
        x = attention_layer(x, *split, scale, causal=causal)
        outs += x.chunk(cp, dim=1)
    return outs


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """The causal case, evenly spread over ranks: half of all pairs of blocks; every stage but the last sends its output."""
    cp = columns_of(world_size)
    width, rows = size["H"] * size["D"], size["B"] * max(1, size["T"] // cp)
    return Cost(
        wire_bytes=(cp - cp / world_size) * rows * width * itemsize,
        memory_bytes=(2 * rows * width + 4 * width**2) * itemsize,
        flops=(8 * width + 2 * size["T"]) * rows * width,
    )


SIZES = {
    "tiny": Size("tiny", {"B": 2, "T": 23, "H": 3, "D": 8}),
    "default": Size("default", {"B": 1, "T": 192, "H": 4, "D": 48}),
    "odd": Size("odd", {"B": 1, "T": 195, "H": 5, "D": 40}),
    # 512 MiB of hidden states in bf16 over a stage, 512 MiB of weights on a rank; a block of scores takes 16 GiB in fp32.
    "large": Size("large", {"B": 1, "T": 32768, "H": 64, "D": 128}),
    "upstream": Size("upstream", {"B": 16, "T": 16, "H": 8, "D": 64}),
}

PROBLEM = Problem(
    number=56,
    slug="ring_attention_pp",
    version=1,
    title="Attention layers on stages of a pipeline; within a stage the sequence is split over ranks.",
    family="ring-attention",
    parallelism="PP+CP",
    collectives=("isend", "irecv"),
    origin="Megatron-LM, pipeline and context parallelism, with ring attention",
    split="test",
    sizes=SIZES,
    # A score of 20, rounded, moves its exponential by 20 round-offs; the second stage starts from the errors of the first.
    tolerance=Tolerance(inner_ulps=256),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=one_each(SIZES, "T", "position"),
)
