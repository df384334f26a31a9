"""#031 fused_moe_fwd: a whole mixture-of-experts layer: router, dispatch, experts, combine.

Axes      T tokens (M and up, differs per rank), N columns, I inner columns, E experts (split: L = E / W on a rank, E rounded
          up), k experts of a token, W ranks; rank d holds experts d*L .. (d+1)*L - 1, which share one set of weights
In        hidden_states [T, N] or [1, T, N], differs per rank; gate_weight [E, N] and gate_bias [E] or None, equal on every
          rank (upstream: differ); gate_proj and up_proj, weight [I, N] and bias [I] each, and down_proj, weight [N, I] and
          bias [N], differ per rank; num_experts = E; top_k = k; group (None: all ranks)
Out       [T, N] in the dtype of hidden_states, differs per rank
Maths     p = softmax(x gate_weight^T + gate_bias) of a token x over all E; for its k largest p, not renormalised:
          out = sum of p_e * down(silu(gate(x)) * up(x)) with the layers of the rank that holds e
Wire      all_to_all of tokens to the ranks of their experts and back, or their weights to the tokens, whichever is less
Needs     any W
Profiles  `upstream` has logits of deviation sqrt(N): in 16 bits their rounding decides, and a right answer may be refused there
Not here  gradients, auxiliary losses, dropped tokens, layers as nn.Linear: each is a tuple (weight, bias)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.moe import moe_layer
from problems.moe_exact import doubled, outputs
from problems.moe_inputs import layer_cost, layer_inputs
from problems.routing import padded


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Skewed routing with clear decisions, an expert without tokens; options take turns."""
    experts = padded(size["E"], draw.world_size)
    tensors, top_k = layer_inputs(draw, size, experts)
    return *tensors, experts, top_k, None


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
    """The layer's output for this rank's tokens, [T, N]; num_experts says what gate_weight shows."""
    assert num_experts == len(gate_weight)
    layers, span = (gate_proj, up_proj, down_proj), (0, dist.get_world_size(group))
    return moe_layer(hidden_states, (gate_weight, gate_bias), layers, top_k, span, group)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Owner by owner in float64, with what a token's experts there share added up first."""
    return outputs(inputs, [doubled(args) for args in inputs], top_k=inputs[0][7], span=len(inputs))


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Tokens or weights travel over all ranks."""
    return layer_cost(size, padded(size["E"], world_size), world_size, itemsize)


PROBLEM = Problem(
    number=31,
    slug="fused_moe_fwd",
    version=1,
    title="A mixture-of-experts layer whose experts are spread over ranks: router, dispatch, experts, combine.",
    family="moe",
    parallelism="EP",
    collectives=("all_gather", "all_to_all"),
    origin="VeOmni (fused mixture of experts under expert parallelism)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"M": 29, "N": 64, "I": 56, "E": 8, "K": 2}),
        "default": Size("default", {"M": 128, "N": 128, "I": 256, "E": 8, "K": 2}),
        "odd": Size("odd", {"M": 127, "N": 123, "I": 251, "E": 15, "K": 4}),
        # 128 MiB of tokens, 192 MiB of weights and up to 640 MiB of dispatched rows on a rank in bf16.
        "large": Size("large", {"M": 16384, "N": 4096, "I": 8192, "E": 64, "K": 4}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "I": 128, "E": 8, "K": 2}),
    },
    # Products of products: the error of fp32 has 8 round-offs in the norm and now and then 64 in an element.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
