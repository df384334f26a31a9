"""#032 fused_moe_fwd_lora: a mixture-of-experts layer whose experts have LoRA adapters: router, dispatch, experts, combine.

Axes      T tokens (M and up, differs per rank), N columns, I inner columns, E experts (split: L = E / W on a rank, E rounded
          up), k experts of a token, R LoRA rank, W ranks; rank d holds experts d*L .. (d+1)*L - 1, which share one set of weights
In        hidden_states [T, N] or [1, T, N], differs per rank; gate_weight [E, N] and gate_bias [E] or None, equal on every
          rank (upstream: differ); gate_proj and up_proj, weight [I, N] and bias [I] each, and down_proj, weight [N, I] and
          bias [N], differ per rank; so do the adapters, A [R, N] and B [I, R] of gate and up, A [R, I] and B [N, R] of down;
          num_experts = E; top_k = k; group (None: all ranks)
Out       [T, N] in the dtype of hidden_states, differs per rank
Maths     p = softmax(x gate_weight^T + gate_bias) of a token x over all E; for its k largest p, not renormalised:
          out = sum of p_e * down(silu(gate(x)) * up(x)) with the layers of the rank that holds e, each of which gives
          x weight^T + bias + (x A^T) B^T; no further factor on the adapter
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
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.moe import routed_through_experts
from problems.moe_exact import doubled, outputs
from problems.moe_inputs import layer_cost, layer_inputs
from problems.routing import padded

Adapted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Weight [out, in], bias [out], A [R, in] and B [out, R]."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Skewed routing with clear decisions, an expert without tokens; options take turns."""
    experts = padded(size["E"], draw.world_size)
    tensors, top_k = layer_inputs(draw, size, experts)
    return *tensors, *adapters(draw, size), experts, top_k, None


def adapters(draw: Draw, size: Size) -> list[torch.Tensor]:
    """A and B of gate, up and down, about as strong as the layers themselves; upstream: far stronger."""
    found, inner = [], size["R"]
    for name, inputs, outputs_ in (("gate", "N", "I"), ("up", "N", "I"), ("down", "I", "N")):
        a = torch.randn(inner, size[inputs], generator=draw.own(f"{name} A"))
        b = torch.randn(size[outputs_], inner, generator=draw.own(f"{name} B"))
        if draw.profile != "upstream":
            a, b = a * size[inputs] ** -0.5, b * inner**-0.5
        found += [a.to(draw.dtype), b.to(draw.dtype)]
    return found


def reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    gate_proj: tuple[torch.Tensor, torch.Tensor],
    up_proj: tuple[torch.Tensor, torch.Tensor],
    down_proj: tuple[torch.Tensor, torch.Tensor],
    lora_gate_A: torch.Tensor,
    lora_gate_B: torch.Tensor,
    lora_up_A: torch.Tensor,
    lora_up_B: torch.Tensor,
    lora_down_A: torch.Tensor,
    lora_down_B: torch.Tensor,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The layer's output for this rank's tokens, [T, N]; num_experts says what gate_weight shows."""
    assert num_experts == len(gate_weight)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    probabilities = F.linear(tokens, gate_weight, gate_bias).softmax(-1)
    layers = (*gate_proj, lora_gate_A, lora_gate_B), (*up_proj, lora_up_A, lora_up_B), (*down_proj, lora_down_A, lora_down_B)
    span = 0, dist.get_world_size(group)
    return routed_through_experts(tokens, probabilities, top_k, lambda rows: adapted_swiglu(rows, *layers), span, group)


def adapted_swiglu(x: torch.Tensor, gate: Adapted, up: Adapted, down: Adapted) -> torch.Tensor:
    """What the rank's experts say of rows [any, N]."""
    return adapted(F.silu(adapted(x, *gate)) * adapted(x, *up), *down)


def adapted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A layer and its adapter."""
    return F.linear(x, weight, bias).add_(F.linear(F.linear(x, a), b))


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Owner by owner in float64, with adapters merged into the weights."""
    return outputs(inputs, [merged(args) for args in inputs], top_k=inputs[0][13], span=len(inputs))


def merged(args: tuple[Any, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The three layers of a rank, in float64."""
    pairs = zip(args[6:12:2], args[7:12:2], strict=True)
    return [(weight + b.double() @ a.double(), bias) for (weight, bias), (a, b) in zip(doubled(args), pairs, strict=True)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Tokens or weights travel over all ranks."""
    more = 3 * size["R"] * (size["N"] + size["I"])
    return layer_cost(size, padded(size["E"], world_size), world_size, itemsize, more)


PROBLEM = Problem(
    number=32,
    slug="fused_moe_fwd_lora",
    version=1,
    title="A mixture-of-experts layer with LoRA adapters on its experts, spread over ranks: router, dispatch, experts, combine.",
    family="moe",
    parallelism="EP",
    collectives=("all_gather", "all_to_all"),
    origin="VeOmni (fused mixture of experts with LoRA)",
    split="test",
    sizes={
        "tiny": Size("tiny", {"M": 29, "N": 64, "I": 56, "E": 8, "K": 2, "R": 3}),
        "default": Size("default", {"M": 128, "N": 128, "I": 256, "E": 8, "K": 2, "R": 8}),
        "odd": Size("odd", {"M": 127, "N": 123, "I": 251, "E": 15, "K": 4, "R": 7}),
        # 128 MiB of tokens, 192 MiB of weights and up to 640 MiB of dispatched rows on a rank in bf16.
        "large": Size("large", {"M": 16384, "N": 4096, "I": 8192, "E": 64, "K": 4, "R": 32}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "I": 128, "E": 8, "K": 2, "R": 8}),
    },
    # Products of products: the error of fp32 has 8 round-offs in the norm and now and then 64 in an element.
    tolerance=Tolerance(inner_ulps=128),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
