"""#028 moe_pre_all2all: tokens are copied in the order of their experts, sent to those, and sorted by local expert.

Axes      T tokens (M and up, differs per rank), N columns (not split), k experts of a token, E experts (split: L = E / W on
          a rank, E rounded up), W ranks; rank d holds experts d*L .. (d+1)*L - 1
In        hidden_states [T, N] or [1, T, N] and expert_mask [E, k, T] one-hot along E, differ per rank; num_experts = E;
          input_splits: list of the rows for every rank; output_splits: list of the rows from every rank;
          num_global_tokens_per_local_expert int64 [W, L], rows from rank s for local expert l; group (None: all ranks)
Out       rows [sum of output_splits, N]; routing map [E, T] in the mask's dtype; mapping int64 [P]; the size (T, N);
          all differ per rank
Maths     map = mask summed over k; mapping = tokens with a non-zero map[e], ascending, for e = 0, 1 ...; hidden[mapping] is
          sent by input_splits; what comes in, chunks (s, l), is put in the order (l, s); bit for bit
Wire      all_to_all: a rank sends the rows that are not for its own experts, (W-1)/W of P on average
Needs     any W; input_splits must add up to P (else an error)
Not here  splits as tensors; one expert twice for one token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import normal_rows, turn
from problems.moe import exchanged, transposed_chunks
from problems.routing import chosen, counted, even_table, one_hot, padded, tokens_of

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Skewed routing, one expert empty, and what follows from it; upstream's splits are even and have nothing to do with it."""
    experts, rank = padded(size["E"], draw.world_size), draw.rank
    others = [replace(draw, rank=s) for s in range(draw.world_size)]
    upstream = draw.profile == "upstream"
    tokens = [size["M"] if upstream else tokens_of(other, size["M"]) for other in others]
    selections = [chosen(other, t, experts, size["k"]) for other, t in zip(others, tokens, strict=True)]
    shape = (1, tokens[rank], size["N"]) if not upstream and turn(draw, 2) else (tokens[rank], size["N"])
    hidden = torch.randn(shape, generator=draw.own("hidden")) if upstream else normal_rows(shape, draw.own("hidden"))
    mask = one_hot(selections[rank], experts, draw.dtype)
    table = even_table(size["M"] * size["k"], draw.world_size, experts) if upstream else counted(selections, experts)
    send = table[rank].view(draw.world_size, -1).sum(1).tolist()
    here = table.view(draw.world_size, draw.world_size, -1)[:, rank].contiguous()
    return hidden.to(draw.dtype), mask, experts, send, here.sum(1).tolist(), here, None


def reference(
    hidden_states: torch.Tensor,
    expert_mask: torch.Tensor,
    num_experts: int,
    input_splits: list[int],
    output_splits: list[int],
    num_global_tokens_per_local_expert: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> Outputs:
    """Rows for this rank's experts, sorted by them; and routing map, mapping and size, to find the way back."""
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    routing_map = expert_mask.sum(1)
    mapping = routing_map.nonzero()[:, 1]
    if len(mapping) != sum(input_splits):
        raise ValueError(f"input_splits add up to {sum(input_splits)}; {num_experts} experts were chosen {len(mapping)} times")
    came = exchanged(hidden.index_select(0, mapping), input_splits, output_splits, group)
    return transposed_chunks(came, num_global_tokens_per_local_expert), routing_map, mapping, hidden.shape


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Outputs]:
    """Cuts what every rank sends into chunks and picks them one by one: nothing is computed."""
    ranks = len(inputs)
    hidden = [args[0].flatten(0, -2) for args in inputs]
    maps = [args[1].amax(1) for args in inputs]
    mappings = [torch.cat([torch.where(row > 0)[0] for row in routing]) for routing in maps]
    outputs = []
    for rank, args in enumerate(inputs):
        starts = [sum(sender[3][:rank]) for sender in inputs]
        wanted = [mapping[start : start + n] for mapping, start, n in zip(mappings, starts, args[4], strict=True)]
        came = torch.cat([rows[ids] for rows, ids in zip(hidden, wanted, strict=True)])
        chunks = torch.split(came, args[5].flatten().tolist())
        local = args[5].shape[1]
        rows = torch.cat([chunks[s * local + e] for e in range(local) for s in range(ranks)])
        outputs.append((rows, maps[rank], mappings[rank], hidden[rank].shape))
    return outputs


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """An average rank; a token crosses once to each rank that holds experts of it, which are at least k / L."""
    local = padded(size["E"], world_size) // world_size
    once = size["M"] * size["N"]
    return Cost(
        wire_bytes=(world_size - 1) / world_size * -(-size["k"] // local) * once * itemsize,
        memory_bytes=(1 + size["k"]) * once * itemsize,
        flops=0,
    )


PROBLEM = Problem(
    number=28,
    slug="moe_pre_all2all",
    version=1,
    title="Send every token to the ranks of its experts and sort what arrives by local expert.",
    family="moe",
    parallelism="EP",
    collectives=("all_to_all",),
    origin="VeOmni, Megatron-Core (token dispatch)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 37, "E": 8, "k": 2}),
        "default": Size("default", {"M": 512, "N": 256, "E": 16, "k": 2}),
        "odd": Size("odd", {"M": 509, "N": 251, "E": 15, "k": 3}),
        # 512 MiB of tokens and 1 GiB of rows on a rank in bf16.
        "large": Size("large", {"M": 65536, "N": 4096, "E": 64, "k": 2}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "E": 8, "k": 2}),
    },
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
