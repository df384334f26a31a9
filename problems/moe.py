"""Expert parallelism in a reference: rows to the ranks of their experts and back, chunks in another order, a router.

Rank d of a span of ranks holds experts d*L .. (d+1)*L - 1.
Not here: how inputs are drawn (`routing`, `moe_inputs`), the global view (`moe_exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.collectives import gathered


def exchanged(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The rows addressed to this rank, in the order of their senders; send[d] rows go to rank d, receive[s] come from s."""
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, list(receive), list(send), group=group)
    return out


def transposed_chunks(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Chunks (a, b) of sizes[a, b] rows, one a after the other, as the same chunks one b after the other."""
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).T.flatten()
    lengths = sizes.T.flatten()
    shift = starts - (lengths.cumsum(0) - lengths)
    place = torch.arange(len(rows), device=rows.device)
    return rows.index_select(0, place + torch.repeat_interleave(shift, lengths, output_size=len(rows)))


Layer = tuple[torch.Tensor, torch.Tensor]
"""Weight [out, in] and bias [out]."""


def swiglu(x: torch.Tensor, gate: Layer, up: Layer, down: Layer) -> torch.Tensor:
    """Two layers with a gate; each of the three is a weight and a bias."""
    return F.linear(F.silu(F.linear(x, *gate)) * F.linear(x, *up), *down)


def moe_layer(
    hidden_states: torch.Tensor,
    router: tuple[torch.Tensor, torch.Tensor | None],
    layers: tuple[Layer, Layer, Layer],
    top_k: int,
    span: tuple[int, int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A router's softmax over all experts, then what the most probable of them say of each token, [T, N].

    Args:
        hidden_states: [T, N] or [1, T, N].
        router: weight [E, N] and bias [E], if it has one.
        layers: gate, up and down of this rank's experts.
        top_k: experts of a token.
        span: first rank and number of ranks over which the E experts are spread.
        group: its ranks; all of them take part.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    probabilities = F.linear(tokens, *router).softmax(-1)
    return routed_through_experts(tokens, probabilities, top_k, lambda rows: swiglu(rows, *layers), span, group)


def routed_through_experts(
    tokens: torch.Tensor,
    probabilities: torch.Tensor,
    top_k: int,
    expert: Callable[[torch.Tensor], torch.Tensor],
    span: tuple[int, int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """What the most probable experts say of each token, weighted by their probabilities, [T, N].

    Args:
        tokens: [T, N].
        probabilities: of every expert, [T, E].
        top_k: experts of a token.
        expert: what this rank does with rows [any, N], whichever of its experts they are for.
        span: first rank and number of ranks over which the E experts are spread.
        group: its ranks; all of them take part.
    """
    weights, chosen = probabilities.topk(top_k, dim=-1)
    order = chosen.flatten().argsort(stable=True)
    token = order // top_k
    send, receive = counts_of_rows(chosen, probabilities.shape[1], span, group)
    came = exchanged(tokens.index_select(0, token), send, receive, group)
    back = exchanged(expert(came), receive, send, group)
    back *= weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add_(0, token, back)


def counts_of_rows(
    chosen: torch.Tensor, num_experts: int, span: tuple[int, int], group: dist.ProcessGroup | None = None
) -> tuple[list[int], list[int]]:
    """How many rows go to every rank of the group and come from it, when each token goes to its chosen experts [T, k]."""
    first, ranks = span
    mine = chosen.new_zeros(dist.get_world_size(group))
    mine[first : first + ranks] = torch.bincount(chosen.flatten(), minlength=num_experts).view(ranks, -1).sum(1)
    table = gathered(mine, group).view(len(mine), len(mine))
    send, receive = torch.stack((mine, table[:, dist.get_rank(group)])).tolist()
    return send, receive
