"""#029 moe_post_all2all: what the experts made of a rank's tokens comes back to it and is summed, weighted, per token.

Axes      T tokens (M and up, differs per rank), N columns (not split), k experts of a token, E experts (split: L = E / W on
          a rank, E rounded up), W ranks; rank d holds experts d*L .. (d+1)*L - 1
In        expert_outputs [sum of output_splits, N], sorted by local expert, then by source rank; routing_weights [T, k] and
          selected_experts int64 [T, k] (distinct, ascending); num_experts = E; input_splits: list of the rows that this rank
          had sent to every rank; output_splits: list of those it had received; num_global_tokens_per_local_expert int64
          [W, L], rows from rank s for local expert l; routing_map bool [E, T], true where a token was sent; mapping int64
          [P], the tokens of the true entries in their order; org_hidden_states_shape (T, N); group (None: all ranks).
          All tensors differ per rank
Out       [T, N] in the dtype of expert_outputs, differs per rank
Maths     chunks (l, s) are put in the order (s, l), sent by output_splits and received by input_splits; row i is expert e's
          word on token t, the i-th true entry (e, t) of the map; out[t] = sum of row_i * weight of e for t; zero without rows
Wire      all_to_all: a rank sends the rows that are not for its own tokens, (W-1)/W of P on average
Needs     any W
Not here  splits as tensors, an original shape of three axes, weights that sum to one over what was not dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.moe import exchanged, transposed_chunks
from problems.routing import chosen, counted, even_table, padded, tokens_of


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Skewed routing, an expert empty, a tenth of the pairs and a twentieth of the tokens dropped; upstream's splits are even."""
    experts, ranks, upstream = padded(size["E"], draw.world_size), draw.world_size, draw.profile == "upstream"
    others = [replace(draw, rank=s) for s in range(ranks)]
    tokens = [size["M"] if upstream else tokens_of(other, size["M"]) for other in others]
    selections = [chosen(other, t, experts, size["k"]) for other, t in zip(others, tokens, strict=True)]
    kept = [s if upstream else without_dropped(other, s) for other, s in zip(others, selections, strict=True)]
    mine = kept[draw.rank]
    routing_map = (mine[:, :, None] == torch.arange(experts)).any(1).T.contiguous()
    weights = torch.randn(mine.shape, generator=draw.own("routing_weights")).softmax(-1)
    table = even_table(size["M"] * size["k"], ranks, experts) if upstream else counted(kept, experts)
    receive = table[draw.rank].view(ranks, -1).sum(1).tolist()
    here = table.view(ranks, ranks, -1)[:, draw.rank].contiguous()
    rows = torch.randn(int(here.sum()), size["N"], generator=draw.own("expert_outputs")).to(draw.dtype)
    routes = here, routing_map, routing_map.nonzero()[:, 1], torch.Size((len(mine), size["N"])), None
    return rows, weights.to(draw.dtype), selections[draw.rank], experts, receive, here.sum(1).tolist(), *routes


def without_dropped(draw: Draw, selected: torch.Tensor) -> torch.Tensor:
    """The same with -1 for every pair that was dropped."""
    chance = draw.own("dropped")
    pair, token = torch.rand(selected.shape, generator=chance) < 0.1, torch.rand(len(selected), 1, generator=chance) < 0.05
    return selected.masked_fill(pair | token, -1)


def reference(
    expert_outputs: torch.Tensor,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    num_experts: int,
    input_splits: list[int],
    output_splits: list[int],
    num_global_tokens_per_local_expert: torch.Tensor,
    routing_map: torch.Tensor,
    local_input_permutation_mapping: torch.Tensor,
    org_hidden_states_shape: torch.Size,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Weighted sums of what the experts said, [T, N]."""
    rows = transposed_chunks(expert_outputs, num_global_tokens_per_local_expert.T)
    back = exchanged(rows, output_splits, input_splits, group)
    weights = routing_weights.new_zeros((len(routing_weights), num_experts)).scatter_(1, selected_experts, routing_weights)
    back *= weights.T[routing_map].unsqueeze(1)
    return back.new_zeros(tuple(org_hidden_states_shape)).index_add_(0, local_input_permutation_mapping, back)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Expert by expert in float64: its rows for a rank stand together, in the order of that rank's tokens."""
    outputs = []
    for rank, args in enumerate(inputs):
        weights, selected, routing_map, shape = args[1].double(), args[2], args[7], args[9]
        out = torch.zeros(tuple(shape), dtype=torch.float64, device=weights.device)
        words = torch.cat([said(owner, rank) for owner in inputs])
        at = 0
        for expert, sent in enumerate(routing_map):
            ids = torch.where(sent)[0]
            weight = torch.where(selected[ids] == expert, weights[ids], 0).sum(1)
            out[ids] += words[at : at + len(ids)].double() * weight[:, None]
            at += len(ids)
        outputs.append(out)
    return outputs


def said(owner: tuple[Any, ...], rank: int) -> torch.Tensor:
    """Rows of an owner of experts for tokens of a rank, by local expert."""
    table = owner[6]
    chunks = torch.split(owner[0], table.T.flatten().tolist())
    return torch.cat(chunks[rank :: len(table)])


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank; each of a token's ranks, at least k / L if nothing was dropped, may send one sum."""
    local = padded(size["E"], world_size) // world_size
    once = KEPT * size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) / world_size * -(-size["k"] // local) * once * itemsize,
        memory_bytes=(1 + size["k"]) * once * itemsize,
        flops=2 * size["k"] * once,
    )


KEPT = 0.85
"""Share of pairs and of tokens that are not dropped, at least."""

PROBLEM = Problem(
    number=29,
    slug="moe_post_all2all",
    version=1,
    title="Send what experts computed back to the tokens' ranks and sum it there, weighted.",
    family="moe",
    parallelism="EP",
    collectives=("all_to_all",),
    origin="VeOmni, Megatron-Core (token combine)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 37, "E": 8, "k": 3}),
        "default": Size("default", {"M": 512, "N": 256, "E": 16, "k": 2}),
        "odd": Size("odd", {"M": 509, "N": 251, "E": 15, "k": 4}),
        # 1 GiB of rows and 512 MiB of sums on a rank in bf16.
        "large": Size("large", {"M": 65536, "N": 4096, "E": 64, "k": 2}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "E": 8, "k": 2}),
    },
    # Sums of at most four products.
    tolerance=Tolerance(inner_ulps=8),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
