"""#051 moe_ep_narrow: a mixture-of-experts layer whose experts are held once by every block of E consecutive ranks.

Axes      T tokens (M and up, differs per rank), N columns, I inner columns, E experts, k experts of a token, W ranks;
          E is the largest divisor of W from 2 to W / 2 and rank d holds expert d % E; where there is none, E = 2*W (upstream:
          1) and rank d holds 2*d and 2*d + 1, which share one set of weights
In        hidden_states [T, N] or [1, T, N], differs per rank; gate_weight [E, N] and gate_bias [E] or None, equal on every
          rank (upstream: differ); gate_proj and up_proj, weight [I, N] and bias [I] each, and down_proj, weight [N, I] and
          bias [N], equal where the expert is the same (upstream: differ); num_experts = E; top_k = k; group (None: all ranks)
Out       [T, N] in the dtype of hidden_states, differs per rank
Maths     p = softmax(x gate_weight^T + gate_bias) of a token x over all E; for its k largest p, not renormalised:
          out = sum of p_e * down_e(silu(gate_e(x)) * up_e(x)) with the layers in the token's own block of ranks
Wire      all_to_all of tokens, within a block, to their experts and back, or of weights to the tokens, whichever is less
Needs     any W; E < W must divide W (else an error)
Not here  gradients, auxiliary losses, dropped tokens, layers as nn.Linear: each is a tuple (weight, bias)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.moe import routed_through_experts, swiglu
from problems.moe_exact import doubled, outputs
from problems.moe_inputs import layer_cost, layer_inputs


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Skewed routing with clear decisions, an expert without tokens where there are four or more; options take turns."""
    experts = narrow(draw.world_size, 1 if draw.profile == "upstream" else 2 * draw.world_size)
    tensors, top_k = layer_inputs(draw, size, experts)
    return *tensors, experts, top_k, None


def narrow(world_size: int, otherwise: int) -> int:
    """The largest divisor of the world size from 2 to its half, if there is one."""
    return next((e for e in range(world_size // 2, 1, -1) if world_size % e == 0), otherwise)


def reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    gate_proj: tuple[torch.Tensor, torch.Tensor],
    up_proj: tuple[torch.Tensor, torch.Tensor],
    down_proj: tuple[torch.Tensor, torch.Tensor],
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The layer's output for this rank's tokens, [T, N]; nothing is sent to ranks of other blocks."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    block = min(num_experts, world_size) if group is None else world_size
    if world_size % block or num_experts % block:
        raise ValueError(f"{num_experts} experts cannot be spread over {world_size} ranks")
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    probabilities = F.linear(tokens, gate_weight, gate_bias).softmax(-1)
    span = rank // block * block, block
    return routed_through_experts(
        tokens, probabilities, top_k, lambda rows: swiglu(rows, gate_proj, up_proj, down_proj), span, group
    )


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Block by block and owner by owner in float64."""
    span = min(inputs[0][6], len(inputs))
    return outputs(inputs, [doubled(args) for args in inputs], top_k=inputs[0][7], span=span)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Tokens or weights travel within a block."""
    experts = narrow(world_size, 2 * world_size)
    return layer_cost(size, experts, min(experts, world_size), itemsize)


PROBLEM = Problem(
    number=51,
    slug="moe_ep_narrow",
    version=1,
    title="A mixture-of-experts layer of which every block of a few ranks holds all experts; tokens stay in their block.",
    family="moe",
    parallelism="EP+DP",
    collectives=("all_gather", "all_to_all"),
    origin="VeOmni (fused mixture of experts under expert parallelism)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"M": 29, "N": 64, "I": 56, "K": 2}),
        "default": Size("default", {"M": 128, "N": 128, "I": 256, "K": 2}),
        "odd": Size("odd", {"M": 127, "N": 123, "I": 251, "K": 4}),
        # 224 MiB of tokens, 84 MiB of weights and up to 560 MiB of dispatched rows on a rank in bf16.
        "large": Size("large", {"M": 16384, "N": 7168, "I": 2048, "K": 2}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "I": 128, "K": 2}),
    },
    # Products of products: the error of fp32 has 8 round-offs in the norm and now and then 64 in an element.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
